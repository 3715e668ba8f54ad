"""The language model of a DeepSeek-VL2 folder, against the published equations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.moe import vl2
from tests.models.moe.bases import tokenizer

from confide.errors import ModelError
from confide.models.backbones import load_classifier, load_encoder, stored_names
from confide.release.format import Problem
from confide.release.hashes import base_hash

GROUPED = {
    **vl2.SIZES["DeepSeek-VL2-Small"],
    "n_group": 2,
    "q_lora_rank": 7,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 1.5,
}
SHARED_HEADS = {**vl2.SIZES["DeepSeek-VL2-Tiny"], "num_key_value_heads": 1}
KINDS: dict[str, dict[str, Any]] = {**vl2.SIZES, "grouped": GROUPED, "shared heads": SHARED_HEADS}


@pytest.fixture(params=KINDS)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    words = tokenizer(["a fine play", "a dull film"])
    language = {**KINDS[request.param], "vocab_size": len(words), "num_hidden_layers": 3}
    return vl2.write(tmp_path / "vl2", language, words)


def test_it_computes_what_the_published_equations_say(base: Path) -> None:
    reference = vl2.Reference(base)
    classifier = load_classifier(base, ("a", "b", "c"), seed=0)
    model: Any = classifier.model.double()
    model.set_experts_implementation("eager")
    # DeepSeek-V2's class in transformers rotates positions in single precision, and all routers are in it, so
    # that padding rounds otherwise.
    alone = 5e-6 if type(model).__name__.startswith("DeepseekV2") else 1e-9
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(2, reference.c["vocab_size"], (2, 13), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    ids[1, 9:] = classifier.tokenizer.pad_token_id
    with torch.no_grad():
        together = model(input_ids=ids, attention_mask=mask).logits
    for row, length in ((0, 13), (1, 9)):
        own = ids[row : row + 1, :length]
        with torch.no_grad():
            hidden, logits = model.model(input_ids=own).last_hidden_state[0], model(input_ids=own).logits[0]
        truth = reference.hidden(own[0])
        assert float(truth.abs().max()) > 0.5
        assert _off(hidden, truth) <= alone
        words = hidden @ reference.w["language.lm_head.weight"].T
        assert _off(words, reference.logits(own[0])) <= alone
        assert _off(logits, truth[-1] @ model.score.weight.T) <= alone
        assert _off(together[row], logits) <= 5e-6


def _off(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float(((found - truth).abs().max() / truth.abs().max()).detach())


def test_its_tensors_go_back_under_their_published_names(base: Path) -> None:
    """With `language.` before them a release's names are the whole's, shapes and values included."""
    published = vl2.Reference(base).w
    classifier = load_classifier(base, ("a", "b"), seed=0)
    stored = stored_names(classifier, classifier.model.state_dict())
    mine = {name: value for name, value in stored.items() if name not in classifier.head}
    assert {f"language.{name}" for name in mine} == {
        name for name in published if name.startswith("language.model.")
    }
    for name, value in mine.items():
        assert torch.equal(value.double(), published[f"language.{name}"])


def test_an_encoder_and_a_hash_are_those_of_its_language_model(base: Path, tmp_path: Path) -> None:
    classifier = load_classifier(base, ("a", "b"), seed=0)
    encoder, _ = load_encoder(base)
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, classifier.model.state_dict()[f"model.{name}"])
    alone = tmp_path / "alone"
    encoder.to(torch.bfloat16).save_pretrained(alone)
    assert base_hash(alone) == base_hash(base)


def test_it_reads_no_images(tmp_path: Path) -> None:
    words = tokenizer(["a fine play"])
    base = vl2.write(tmp_path / "vl2", vl2.SIZES["DeepSeek-VL2-Tiny"], words)
    images = Problem(inputs="image", target="class", image_size=28)
    with pytest.raises(ModelError, match="only the language model is used here, for texts"):
        load_classifier(base, ("a", "b"), seed=0, problem=images)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "holds quantised weights"),
        ({"hidden_size": "wide"}, "describes no language model that can be built"),
        ({"num_hidden_layers": 4}, "lacks .* tensors of the encoder"),
    ],
)
def test_a_folder_that_is_not_as_it_says_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    base = vl2.write(tmp_path / "vl2", vl2.SIZES["DeepSeek-VL2-Small"], tokenizer(["a fine play"]))
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config["language_config"] |= changes
    (base / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        load_classifier(base, ("a", "b"), seed=0)


def test_weights_under_other_names_are_refused(tmp_path: Path) -> None:
    base = vl2.write(tmp_path / "vl2", vl2.SIZES["DeepSeek-VL2-Small"], tokenizer(["a fine play"]))
    held = {name: value for file in base.glob("*.safetensors") for name, value in load_file(file).items()}
    for file in (*base.glob("*.safetensors"), base / "model.safetensors.index.json"):
        file.unlink()
    renamed = {name.replace("language.", "text."): value for name, value in held.items()}
    save_file(renamed, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks .* tensors of the encoder"):
        load_classifier(base, ("a", "b"), seed=0)
