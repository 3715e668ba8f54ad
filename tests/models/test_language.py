"""Which language models are known, which of their tensors are a head, and what is trained of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.language import KINDS, save_base
from torch import Tensor

from confide.errors import ConfigError, ModelError
from confide.models.adapters import Trainable, adapt, lora_delta, lora_factors, plain_state
from confide.models.backbones import Classifier, load_classifier
from confide.release.format import Problem
from confide.release.hashes import base_hash

TEXTS = ["a very dull plot here", "the film was fine"]
PROBLEM = Problem(inputs="pair", target="text")
Load = Callable[[str], Classifier]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("language")
    return {kind: save_base(kind, TEXTS, place / kind) for kind in KINDS}


@pytest.fixture
def load(folders: dict[str, Path]) -> Load:
    def make(kind: str) -> Classifier:
        problem = Problem(target="text") if kind == "bert" else PROBLEM
        return load_classifier(folders[kind], (), 0, problem)

    return make


@pytest.mark.parametrize(
    ("kind", "objective", "prefix", "head"),
    [
        ("gpt2", "causal", "transformer.", set()),
        ("llama", "causal", "model.", {"lm_head.weight"}),
        ("qwen2", "causal", "model.", set()),
        ("t5", "seq2seq", "", set()),
        ("bart", "seq2seq", "model.", {"final_logits_bias"}),
        (
            "bert",
            "masked",
            "bert.",
            {
                "cls.predictions.bias",
                *(f"cls.predictions.transform.{part}" for part in ("dense.weight", "dense.bias")),
                *(f"cls.predictions.transform.LayerNorm.{part}" for part in ("weight", "bias")),
            },
        ),
    ],
)
def test_heads_and_objectives(load: Load, kind: str, objective: str, prefix: str, head: set[str]) -> None:
    model = load(kind)
    assert model.problem.objective == objective
    assert (model.prefix, set(model.head)) == (prefix, head)
    assert model.tokenizer.pad_token_id is not None


def test_a_decoder_without_a_pad_ends_with_its_end(load: Load) -> None:
    model = load("gpt2")
    assert model.tokenizer.pad_token_id == model.tokenizer.eos_token_id
    assert model.model.config.pad_token_id == model.tokenizer.eos_token_id  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["llama", "bart", "t5"])
def test_a_base_has_one_hash_with_and_without_its_output_layer(
    folders: dict[str, Path], load: Load, tmp_path: Path, kind: str
) -> None:
    body = load(kind).model.base_model if kind != "t5" else load(kind).model
    body.save_pretrained(tmp_path)  # type: ignore[union-attr,operator]
    assert base_hash(tmp_path) == base_hash(folders[kind])


def trained(model: Classifier, **choice: object) -> set[str]:
    adapted = adapt(model, Trainable.model_validate(choice), 0)
    assert adapted.head == ()
    return set(adapted.encoder)


def test_all_of_a_language_model_is_its_output_layer_too(load: Load) -> None:
    assert "lm_head.weight" in trained(load("llama"), kind="all")
    tied = trained(load("gpt2"), kind="all")
    assert "transformer.wte.weight" in tied
    assert "lm_head.weight" not in tied


def test_blocks_of_each_stack(load: Load) -> None:
    """BART has two blocks in its encoder here and one in its decoder; the top one of each is trained."""
    names = trained(load("bart"), kind="blocks", blocks=1)
    assert {name.split(".self_attn")[0] for name in names if ".self_attn.q_proj.weight" in name} == {
        "model.encoder.layers.1",
        "model.decoder.layers.0",
    }
    assert all(".layers." in name for name in names)
    inside = trained(load("t5"), kind="blocks", blocks=1)
    assert {name.split(".layer.")[0] for name in inside} == {"encoder.block.1", "decoder.block.1"}
    with pytest.raises(ConfigError, match="the base has 2 blocks"):
        trained(load("bart"), kind="blocks", blocks=3)


def test_gpt2_has_lora_in_its_own_kind_of_layer(load: Load) -> None:
    model = load("gpt2")
    before = {name: value.clone() for name, value in model.model.state_dict().items()}
    adapted = adapt(model, Trainable(kind="lora", blocks=1, rank=2), 0)
    (name,) = adapted.lora
    assert name == "transformer.h.1.attn.c_attn.weight"
    a, b = lora_factors(adapted.lora[name])
    with torch.no_grad():
        b.normal_()
    delta: Tensor = 8.0 * (b @ a).T  # alpha 16 over rank 2
    torch.testing.assert_close(lora_delta(adapted.lora[name]), delta)
    state = plain_state(adapted)
    torch.testing.assert_close(state[name], before[name] + delta)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]])}
    ours = model.model(**inputs).logits
    model_again = load("gpt2").model
    model_again.load_state_dict({**before, **state})
    torch.testing.assert_close(model_again(**inputs).logits, ours, rtol=1e-4, atol=1e-5)


def test_refusals(folders: dict[str, Path], load: Load) -> None:
    with pytest.raises(ConfigError, match="no head of its own"):
        adapt(load("llama"), Trainable(kind="head"), 0)
    with pytest.raises(ModelError, match="should write"):
        load_classifier(folders["t5"], (), 0, Problem(target="text"))
    with pytest.raises(ModelError, match="fills masks"):
        load_classifier(folders["bert"], (), 0, PROBLEM)
    with pytest.raises(ModelError, match="not an encoder"):
        load_classifier(folders["t5"], ("a", "b"), 0)
