"""Adapters that PEFT saved, against the model that PEFT itself merges them into."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from confide.errors import MergeError, ModelError
from confide.merging.inputs import read_inputs
from confide.merging.merge import merge
from confide.merging.vectors import CHUNK

from .conftest import make_base

Make = Callable[..., tuple[Path, dict[str, np.ndarray]]]


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Make:
    """An adapter folder, and the tensors of the classifier that PEFT merges it into."""

    def make(name: str = "films", model: str = "bert", **options: Any) -> tuple[Path, dict[str, np.ndarray]]:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2ForSequenceClassification

        torch.manual_seed(0)
        if model == "gpt2":
            config = GPT2Config(
                vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2, num_labels=3, pad_token_id=0
            )
            plain = GPT2ForSequenceClassification(config)
            plain.save_pretrained(tmp_path / "gpt2")
        else:
            plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
        options = {
            "task_type": "SEQ_CLS",
            "r": 2,
            "lora_alpha": 3,
            "target_modules": ["query", "value"],
        } | options
        wrapped = get_peft_model(plain, LoraConfig(**options))
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.1)
        wrapped.save_pretrained(tmp_path / name)
        whole = wrapped.merge_and_unload().double()
        return tmp_path / name, {key: value.numpy() for key, value in whole.state_dict().items()}

    return make


def body(folder: Path, prefix: str = "bert.") -> dict[str, np.ndarray]:
    return {
        name.removeprefix(prefix): value for name, value in load_file(folder / "model.safetensors").items()
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"query": 4}, "alpha_pattern": {"layer.1.attention.self.value": 7}},
        {"rank_pattern": {"query": 4}, "use_rslora": True, "init_lora_weights": "gaussian"},
        {"target_modules": ["query", "dense", "word_embeddings"]},
        {"modules_to_save": ["LayerNorm"], "bias": "lora_only"},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_an_adapter_is_the_model_that_peft_makes_of_it(
    base: Path, adapter: Make, tmp_path: Path, options: dict[str, Any]
) -> None:
    folder, whole = adapter(**options)
    report = merge([folder], base=base, operator="average", out=tmp_path / "merged")
    ours = body(tmp_path / "merged")
    start = load_file(base / "model.safetensors")
    moved = [name for name in ours if not np.array_equal(ours[name], start[name])]
    assert len(moved) >= 4
    for name, values in ours.items():
        if f"bert.{name}" in whole:
            np.testing.assert_allclose(values, whole[f"bert.{name}"], rtol=3e-7, atol=1e-8, err_msg=name)
    head = load_file(tmp_path / "merged" / "heads" / "films" / "model.safetensors")
    assert set(head) == {"classifier.weight", "classifier.bias"}
    np.testing.assert_allclose(head["classifier.weight"], whole["classifier.weight"])
    assert report.info.heads[0].labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert report.statement.claim is None
    assert "came without a statement" in (report.statement.no_claim or "")
    assert report.merged == len(moved)


def test_conv1d_is_turned(adapter: Make, tmp_path: Path) -> None:
    """GPT-2 keeps its weights as (in, out), also the square ones."""
    folder, whole = adapter(model="gpt2", target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    merge([folder], base=tmp_path / "gpt2", operator="average", out=tmp_path / "merged")
    ours = load_file(tmp_path / "merged" / "model.safetensors")
    start = load_file(tmp_path / "gpt2" / "model.safetensors")
    public, _ = read_inputs([folder], tmp_path / "gpt2")
    assert public.turned == {name for name in ours if ".h." in name and start[name].ndim == 2}
    assert "score.weight" not in ours
    assert sum(not np.array_equal(ours[name], start[name]) for name in ours) == 6
    for name, values in ours.items():
        np.testing.assert_allclose(values, whole[name], rtol=3e-7, atol=1e-8, err_msg=name)


def test_two_adapters_add_up_without_cross_terms(base: Path, adapter: Make, tmp_path: Path) -> None:
    one, first = adapter("films")
    two, second = adapter("tweets", r=4, use_rslora=True)
    merge(
        [one, two], base=base, operator="task-arithmetic", parameters={"scale": 0.5}, out=tmp_path / "merged"
    )
    name = "encoder.layer.0.attention.self.query.weight"
    start = load_file(base / "model.safetensors")[name].astype(float)
    expected = start + 0.5 * (first[f"bert.{name}"] - start) + 0.5 * (second[f"bert.{name}"] - start)
    np.testing.assert_allclose(body(tmp_path / "merged")[name], expected, rtol=3e-7, atol=1e-8)


def test_pieces_of_any_place_are_rows_of_the_product(
    base: Path, adapter: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, whole = adapter()
    _, (item,) = read_inputs([folder], base)
    name = "encoder.layer.1.attention.self.value.weight"
    flat = whole[f"bert.{name}"].ravel()
    for start, stop in [(0, 64), (0, 3), (5, 8), (7, 9), (13, 41), (60, 64), (60, 60 + CHUNK)]:
        piece = item.weights.read(name, start, stop)
        np.testing.assert_allclose(piece, flat[start:stop], rtol=3e-7, atol=1e-8)


def edited(folder: Path, **keys: Any) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    return folder


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"use_dora": True}, "use_dora is set"),
        ({"peft_type": "IA3"}, "is a IA3 adapter; only LORA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the base's own"),
        ({"alora_invocation_tokens": [0]}, "alora_invocation_tokens is set"),
        ({"something_new": 3}, "something_new is set"),
        ({"r": 5}, "has rank 2, but adapter_config.json says 5"),
        ({"rank_pattern": {"query": 3}}, "has rank 2, but adapter_config.json says 3"),
    ],
)
def test_what_isnt_sba_is_refused(
    base: Path, adapter: Make, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    folder, _ = adapter()
    with pytest.raises(ModelError, match=message):
        merge([edited(folder, **keys)], base=base, operator="average", out=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_dora_is_refused_by_its_tensor_too(base: Path, adapter: Make, tmp_path: Path) -> None:
    folder, _ = adapter(use_dora=True)
    with pytest.raises(ModelError, match=r"lora_magnitude_vector.* makes ΔW more than s·B·A"):
        merge([edited(folder, use_dora=False)], base=base, operator="average", out=tmp_path / "merged")


def test_an_adapter_of_another_base(base: Path, adapter: Make, tmp_path: Path) -> None:
    folder, _ = adapter()
    other = make_base(tmp_path / "other", seed=1)
    with pytest.raises(MergeError, match="models of different bases can't be merged"):
        merge([folder], base=other, operator="average", out=tmp_path / "merged")


def test_layers_and_files_that_dont_fit(base: Path, adapter: Make, tmp_path: Path) -> None:
    folder, _ = adapter()
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    a = next(name for name in tensors if "lora_A" in name)

    def attempt(change: dict[str, np.ndarray], message: str) -> None:
        save_file(change, file)
        with pytest.raises(ModelError, match=message):
            merge([folder], base=base, operator="average", out=tmp_path / "merged")

    attempt({n: v for n, v in tensors.items() if n != a}, "needs lora_A and lora_B, but has")
    attempt(tensors | {a: np.zeros((2, 5), np.float32)}, r"A \[2, 5\] and B \[8, 2\], which don't fit")
    moved = {n.replace("self.query", "self.quarry"): v for n, v in tensors.items()}
    attempt(moved, "is adapted, but base .* has no such tensor")
    file.unlink()
    with pytest.raises(ModelError, match="doesn't exist"):
        merge([folder], base=base, operator="average", out=tmp_path / "merged")
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="can't be read as the configuration"):
        merge([folder], base=base, operator="average", out=tmp_path / "merged")
