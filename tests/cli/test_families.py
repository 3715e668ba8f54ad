"""`confide train --method raptor` on every family of mixtures: from a base to a release and an adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.models.moe.bases import save_base
from tests.models.moe.families import EXPERTS, FAMILIES

from confide.models.backbones import load_classifier, load_trained
from confide.models.moe.layers import sparse_layers
from confide.release.tensors import Checkpoint
from confide.tasks.text import encode

from .conftest import QUICK, Answer

Confide = Callable[..., Answer]
Sentences = Callable[[int, int], list[tuple[str, str]]]

UNLIKE = ("Switch", "OLMoE", "DeepSeek-V2", "DeepSeek-VL2-Tiny", "Llama-4")
"""No two of these hold routers, experts or always-active experts alike, or are read alike."""
THROUGH_CONFIDE = {
    **dict.fromkeys(("Switch", "OLMoE", "Granite-MoE", "Llama-4"), "confide.models.moe.classifiers"),
    "DeepSeek-VL2-Tiny": "confide.models.moe.deepseek_vl2",
}
_LATENT = {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
PROJECTIONS = {
    "Switch": set("qkvo"),
    "DeepSeek-V2": {"q_a_proj", "q_b_proj", *_LATENT},
    "DeepSeek-V3": {"q_a_proj", "q_b_proj", *_LATENT},
    "DeepSeek-VL2-Small": {"q_proj", *_LATENT},
    "DeepSeek-VL2": {"q_proj", *_LATENT},
}
ALWAYS_ACTIVE = ("Qwen2-MoE", "Llama-4", *(family for family in FAMILIES if family.startswith("DeepSeek")))


@pytest.fixture
def raptor(confide: Confide, reviews: Path, corpus: Path, tmp_path: Path) -> Confide:
    """`confide train --method raptor` with quick settings; arguments given come later, so they win."""

    def run(base: Path, *arguments: object) -> Answer:
        given = ("--base", base, "--data", reviews, "--out", tmp_path / "run", "--dataset", "reviews-2026")
        return confide("train", "--method", "raptor", *given, *QUICK, *arguments)

    return run


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f in UNLIKE else [pytest.mark.slow]) for f in FAMILIES]
)
def test_from_a_base_to_a_release_and_an_adapter(
    confide: Confide, raptor: Confide, corpus: Path, sentences: Sentences, tmp_path: Path, family: str
) -> None:
    from peft import PeftModel

    texts = [text for text, _ in sentences(60, 9)]
    base = save_base(family, texts, tmp_path / "base")
    answer = raptor(base, "--public", corpus)
    assert answer.code == 0, answer.err
    assert "differentially private" in answer.out
    module = THROUGH_CONFIDE.get(family)
    through = "after `import confide.models." in answer.out
    assert through == bool(module)
    assert not module or f"after `import {module}`" in answer.out
    release = tmp_path / "run" / "release"
    assert confide("verify", release).code == 0
    assert ("import confide.models." in (release / "README.md").read_text()) == through

    plain, made = load_classifier(base, ("neg", "pos"), seed=5), load_trained(release, ("neg", "pos"))
    names = {name.removeprefix(made.prefix) for name in Checkpoint.open(release).names}
    held = Checkpoint.open(base).names
    inside = "language.model." if family.startswith("DeepSeek-VL2") else ""
    assert names - set(made.head) == {n.removeprefix(inside) for n in held if n.startswith(inside)}
    assert type(made.model).__module__.startswith("transformers.") != through
    owners = json.loads((tmp_path / "run" / "private" / "owners.json").read_text(encoding="utf-8"))
    for old, new in zip(sparse_layers(plain.model), sparse_layers(made.model), strict=True):
        pairs = zip(old.base.named_parameters(), new.base.parameters(), strict=True)
        moved = [not torch.equal(x, y) for (name, x), y in pairs if "bias" not in name]
        assert moved == [new.name == owners["layer"]] * len(moved)
        assert all(map(torch.equal, old.router.parameters(), new.router.parameters()))
    before = dict(plain.model.named_parameters())
    changed = {name for name, value in made.model.named_parameters() if not torch.equal(value, before[name])}
    assert any("shared_expert" in name for name in changed) == (family in ALWAYS_ACTIVE)
    assert {name.rsplit(".", 1)[0].rsplit(".", 1)[-1] for name in changed} >= PROJECTIONS.get(
        family, {"q_proj", "k_proj", "v_proj", "o_proj"}
    )

    found = confide("export", release, "--peft", "--out", tmp_path / "adapter")
    assert found.code == 0, found.err
    encoded = encode(made.tokenizer, texts[:9], 20)
    batch = encoded.batch(torch.arange(9).numpy())
    with torch.no_grad():
        want = made.model(**batch).logits
        assert not torch.equal(plain.model(**batch).logits, want)
        adapted: Any = PeftModel.from_pretrained(plain.model, str(tmp_path / "adapter")).eval()
        assert torch.equal(adapted(**batch).logits, want)
        merged = adapted.merge_and_unload()
        assert torch.equal(merged(**batch).logits, want)


def test_an_upcycled_bert_says_how_it_loads_and_exports(
    confide: Confide, raptor: Confide, sparse_base: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    answer = raptor(sparse_base, "--layer", "last")
    assert "loads with transformers, after `import confide.models.moe.bert`" in answer.out
    release, out = tmp_path / "run" / "release", tmp_path / "adapter"
    assert confide("export", release, "--peft", "--out", out).code == 0
    plain, made = load_classifier(sparse_base, ("neg", "pos"), seed=5), load_trained(release, ("neg", "pos"))
    batch = encode(made.tokenizer, ["a fine play", "dull"], 20).batch(torch.arange(2).numpy())
    with torch.no_grad():
        adapted: Any = PeftModel.from_pretrained(plain.model, str(out)).eval()
        assert torch.equal(adapted(**batch).logits, made.model(**batch).logits)
    assert "exists already" in confide("export", release, "--peft", "--out", out).message()
    again = ("export", release, "--peft", "--out", tmp_path / "other")
    assert "--task has no effect" in confide(*again, "--task", "reviews").message()
    weights = release / "adapter" / "adapter_model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert "adapter_model.safetensors was changed" in confide(*again).message()


def test_a_release_of_experts_alone_adapts_nothing_else(
    confide: Confide, reviews: Path, sparse_base: Path, tmp_path: Path
) -> None:
    few = ("--steps", 2, "--expected-batch", 16, "--max-length", 20)
    given = ("--base", sparse_base, "--data", reviews, "--out", tmp_path / "run", *few)
    asked = ("--dataset", "reviews-2026", "--variant", "experts-only", "--layer", "last")
    answer = confide("train", "--method", "raptor", *given, *asked)
    assert answer.code == 0, answer.err
    folder = tmp_path / "run" / "release" / "adapter"
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["target_parameters"]
    assert all(".mlp.experts." in name for name in config["target_parameters"])
    names = set(Checkpoint.open(folder / "adapter_model.safetensors").names)
    assert all(".mlp.experts." in name or ".classifier." in name for name in names)
    base, release = Checkpoint.open(sparse_base), Checkpoint.open(tmp_path / "run" / "release")
    same = {n for n in base.names if (base.numpy(n) == release.numpy(f"bert.{n}")).all()}
    assert {".mlp.experts." in name for name in set(base.names) - same} == {True}


def test_what_has_no_adapter_says_so(confide: Confide, train: Confide, reviews: Path, tmp_path: Path) -> None:
    assert train(reviews, "--method", "dp-adamw").code == 0
    asked = ("export", tmp_path / "run" / "release", "--peft", "--out", tmp_path / "adapter")
    assert "holds no LoRA" in confide(*asked).message()


def test_refusals(
    raptor: Confide, reviews: Path, corpus: Path, tiny_base: Path, sparse_base: Path, tmp_path: Path
) -> None:
    assert "it is a dense model" in raptor(tiny_base, "--layer", "last").message()
    assert "the sparse layers are 0, 2" in raptor(sparse_base, "--layer", 1).message()
    assert "is none of: entropy" in raptor(sparse_base, "--layer", "best").message()
    assert "name a corpus" in raptor(sparse_base).message()
    few = raptor(sparse_base, "--layer", "last", "--expected-batch", 3).message()
    assert f"the layer has {EXPERTS} experts, but only 3 records are expected in a draw" in few
    shared = reviews.read_text(encoding="utf-8").splitlines()[5].rsplit(",", 1)[0]
    corpus.write_text(corpus.read_text(encoding="utf-8") + f"\n{shared.upper()}!", encoding="utf-8")
    assert "must be public" in raptor(sparse_base, "--public", corpus).message()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "nllb-moe"}, "'nllb-moe' model can't be trained privately: its experts' capacity"),
        ({"model_type": "deepseek_vl_v2"}, "says nothing of a language model (language_config)"),
        ({"model_type": "llama4"}, "save its language model alone"),
        ({"model_type": "dbrx"}, "model_type 'dbrx' isn't one whose encoder can be told from its head"),
    ],
)
def test_a_family_that_cannot_be_trained_is_refused_by_name(
    raptor: Confide, tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({"shared.weight": torch.ones(2)}, base / "model.safetensors")
    assert reason in raptor(base, "--layer", "last").message()


def test_weights_in_half_precision_are_read_in_single_and_quantised_ones_refused(
    raptor: Confide, sentences: Sentences, tmp_path: Path
) -> None:
    """Single precision, and padding on the right whatever the tokenizer says: what else breaks routing."""
    from transformers import AutoModel

    base = save_base("OLMoE", [text for text, _ in sentences(20, 9)], tmp_path / "base")
    AutoModel.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    classifier = load_classifier(base, ("a", "b"), seed=0)
    assert {value.dtype for value in classifier.model.parameters()} == {torch.float32}
    classifier.tokenizer.padding_side = "left"
    batch = encode(classifier.tokenizer, ["a play", "a very dull play"], 20).batch(torch.arange(2).numpy())
    assert batch["attention_mask"][0, 0] == 1
    assert batch["attention_mask"][0, -1] == 0
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "fp8"}
    (base / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert "holds quantised weights" in raptor(base, "--layer", "last").message()


def test_a_decoder_takes_texts_with_one_class_each(
    confide: Confide, reviews: Path, sentences: Sentences, tmp_path: Path
) -> None:
    base = save_base("OLMoE", [text for text, _ in sentences(20, 9)], tmp_path / "base")
    given = ("--base", base, "--data", reviews, "--out", tmp_path / "run", "--dataset", "reviews-2026")
    numbers = tmp_path / "numbers.csv"
    numbers.write_text("text,label\n" + "".join(f"a play {n},{n % 3}\n" for n in range(40)), encoding="utf-8")
    answer = confide("train", *given, "--data", numbers, "--label-range", "0,2", *QUICK)
    assert "'olmoe' model is trained here for single texts with one class each" in answer.message()
