"""A base gets a head that the seed alone decides, or is refused with one message."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5ForSequenceClassification,
)

from confide.errors import ModelError
from confide.models.backbones import load_classifier, load_trained, positions_of

LABELS = ("neg", "pos")


@pytest.fixture
def copy(tiny_base: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_base, tmp_path / "copy")
    return tmp_path / "copy"


def test_encoder_is_the_bases_own_and_dropout_is_off(tiny_base: Path) -> None:
    classifier = load_classifier(tiny_base, LABELS, seed=0)
    stored = load_file(tiny_base / "model.safetensors")
    state = classifier.model.state_dict()
    assert {classifier.prefix + name for name in stored} == set(state) - set(classifier.head)
    for name, value in stored.items():
        assert torch.equal(state[classifier.prefix + name], value)
    assert not any(module.training for module in classifier.model.modules())
    assert set(classifier.head) == {"classifier.weight", "classifier.bias"}
    assert classifier.model.config.id2label == {0: "neg", 1: "pos"}


def test_head_depends_on_the_seed_only(
    tiny_base: Path, make_base: Callable[..., Path], tmp_path: Path
) -> None:
    def head(base: Path, seed: int, labels: tuple[str, ...] = LABELS) -> torch.Tensor:
        return load_classifier(base, labels, seed).model.get_parameter("classifier.weight").detach()

    first = head(tiny_base, 3)
    torch.randn(7)  # the global generator's state plays no part
    assert torch.equal(first, head(tiny_base, 3))
    assert not torch.equal(first, head(tiny_base, 4))
    assert torch.equal(first, head(make_base(seed=9), 3))

    # A base that brings a head of its own (or one of another shape) trains from a new one all the same.
    for count in (2, 5):
        model = BertForSequenceClassification.from_pretrained(tiny_base, num_labels=count)
        model.save_pretrained(tmp_path / str(count))
        for file in tiny_base.glob("token*"):
            shutil.copy(file, tmp_path / str(count))
        assert torch.equal(first, head(tmp_path / str(count), 3))


def test_loading_leaves_the_generator_alone(tiny_base: Path) -> None:
    before = torch.random.get_rng_state()
    load_classifier(tiny_base, LABELS, seed=0)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_base_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=1, n_positions=8)
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_classifier(tmp_path, LABELS, seed=0)


def test_classifiers_of_two_parts_and_encoders_turned_decoders_are_refused(tmp_path: Path) -> None:
    t5 = T5ForSequenceClassification(
        T5Config(
            vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=1, decoder_start_token_id=0
        )
    )
    t5.save_pretrained(tmp_path / "t5")
    with pytest.raises(ModelError, match=r"'t5' model, which is not an encoder"):
        load_classifier(tmp_path / "t5", LABELS, seed=0)
    BertConfig(is_decoder=True).save_pretrained(tmp_path / "bert")
    with pytest.raises(ModelError, match="not an encoder"):
        load_classifier(tmp_path / "bert", LABELS, seed=0)


def test_a_missing_or_misshapen_encoder_tensor_is_refused(copy: Path) -> None:
    weights = copy / "model.safetensors"
    whole = load_file(weights)
    name = "encoder.layer.1.output.dense.weight"
    save_file({key: value for key, value in whole.items() if key != name}, weights, {"format": "pt"})
    with pytest.raises(ModelError, match=f"starting with bert.{name}"):
        load_classifier(copy, LABELS, seed=0)
    save_file({**whole, name: torch.zeros(32, 8)}, weights, {"format": "pt"})
    with pytest.raises(ModelError, match=f"starting with bert.{name}"):
        load_classifier(copy, LABELS, seed=0)


def test_pickle_is_never_opened(copy: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
            return (open, (str(copy / "opened"), "w"))  # type: ignore[return-value]

    torch.save({"bomb": Bomb()}, copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="can't be loaded"):
        load_classifier(copy, LABELS, seed=0)
    assert not (copy / "opened").exists()


def test_code_in_a_base_is_never_run(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["model_type"] = "bert-with-code"
    config["auto_map"] = {"AutoConfig": "code.Config"}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "code.py").write_text(f"open({str(copy / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match="can't be loaded"):
        load_classifier(copy, LABELS, seed=0)
    assert not (copy / "ran").exists()


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_truncated_file_is_one_clear_error(copy: Path, file: str) -> None:
    content = (copy / file).read_bytes()
    (copy / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match=r"can't be (loaded|read)") as caught:
        load_classifier(copy, LABELS, seed=0)
    assert "\n" not in str(caught.value)


def test_a_base_in_half_precision_is_trained_and_released_in_float32(tiny_base: Path, tmp_path: Path) -> None:
    half = BertForSequenceClassification.from_pretrained(tiny_base, dtype=torch.bfloat16)
    half.bert.save_pretrained(tmp_path)
    for file in tiny_base.glob("token*"):
        shutil.copy(file, tmp_path)
    classifier = load_classifier(tmp_path, LABELS, seed=0)
    assert {parameter.dtype for parameter in classifier.model.parameters()} == {torch.float32}
    assert classifier.model.config.dtype == torch.float32


def test_trained_head_must_be_there(tiny_base: Path, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(tiny_base, num_labels=2)
    model.save_pretrained(tmp_path)
    for file in tiny_base.glob("token*"):
        shutil.copy(file, tmp_path)
    loaded = load_trained(tmp_path, LABELS).model.get_parameter("classifier.weight")
    assert torch.equal(loaded, model.classifier.weight)
    with pytest.raises(ModelError, match="no head for 3 labels"):
        load_trained(tmp_path, ("a", "b", "c"))
    with pytest.raises(ModelError, match="no head for 2 labels"):
        load_trained(tiny_base, LABELS)


def test_positions_that_are_kept_for_padding_hold_no_token() -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    roberta = RobertaModel(RobertaConfig(**sizes, vocab_size=20, max_position_embeddings=14, pad_token_id=1))
    assert positions_of(roberta, 99) == 12
    ids = torch.full((1, 12), 5)
    roberta(input_ids=ids)  # so many fit, and one more doesn't
    with pytest.raises((IndexError, RuntimeError)):
        roberta(input_ids=torch.full((1, 13), 5))
    bert = BertModel(BertConfig(**sizes, vocab_size=20, max_position_embeddings=14))
    assert positions_of(bert, 99) == 14
