"""Releases opened again, task models and merges."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from confide.errors import ModelError, ReleaseError
from confide.finetune.base import PublicBase
from confide.finetune.run import finetune, prepare
from confide.finetune.settings import Settings
from confide.finetune.tuned import FineTuned
from confide.merging.merge import merge
from confide.models.releases import load_release
from confide.release.hashes import file_hash
from confide.tasks.records import TaskData

IDS = torch.tensor([[2, 5, 9, 14, 3], [2, 7, 7, 8, 3]])


@pytest.fixture(scope="module")
def tuned(tiny_base: Path, make_task: Callable[..., TaskData]) -> dict[str, FineTuned]:
    base = PublicBase.of(str(tiny_base))
    settings = Settings(method="dp-adamw", steps=1, expected_batch=10, max_length=20, head_learning_rate=0.2)
    return {
        name: finetune(prepare(make_task(name, seed=seed), base, 20), base, settings, simulate=seed)
        for seed, name in enumerate(("films", "plays"), start=1)
    }


@pytest.fixture
def folders(tuned: dict[str, FineTuned], tmp_path: Path) -> dict[str, Path]:
    for name, one in tuned.items():
        one.release(tmp_path / name)
    return {name: tmp_path / name for name in tuned}


@pytest.fixture
def merged(folders: dict[str, Path], tiny_base: Path, tmp_path: Path) -> Path:
    merge(list(folders.values()), base=tiny_base, operator="average", out=tmp_path / "merged", parameters={})
    return tmp_path / "merged"


def test_task_model(tuned: dict[str, FineTuned], folders: dict[str, Path]) -> None:
    for name, one in tuned.items():
        classifier, head = load_release(folders[name])
        assert (head.task, head.labels, head.max_length) == (name, ("neg", "pos"), 20)
        torch.testing.assert_close(
            classifier.model(input_ids=IDS).logits,
            one.adapted.classifier.model(input_ids=IDS).logits,
            rtol=1e-5,
            atol=1e-5,
        )


def test_merge(folders: dict[str, Path], merged: Path, tiny_base: Path) -> None:
    """The merged encoder under each task's own head, put together by hand."""
    from transformers import BertForSequenceClassification

    states = {name: load_file(folder / "model.safetensors") for name, folder in folders.items()}
    for name, own in states.items():
        by_hand = BertForSequenceClassification.from_pretrained(tiny_base, num_labels=2)
        average = {key: (states["films"][key] + states["plays"][key]) / 2 for key in own}
        by_hand.load_state_dict({**average, **{key: own[key] for key in own if not key.startswith("bert.")}})
        classifier, head = load_release(merged, name)
        assert head.task == name
        torch.testing.assert_close(
            classifier.model(input_ids=IDS).logits,
            by_hand.eval()(input_ids=IDS).logits,
            rtol=1e-5,
            atol=1e-5,
        )


def test_the_task_must_be_named_and_there(merged: Path, folders: dict[str, Path]) -> None:
    with pytest.raises(ReleaseError, match="several heads"):
        load_release(merged)
    with pytest.raises(ReleaseError, match="no head for task 'songs'"):
        load_release(merged, "songs")
    with pytest.raises(ReleaseError, match="no head for task 'plays'"):
        load_release(folders["films"], "plays")


def test_what_is_no_release(tiny_base: Path, tmp_path: Path) -> None:
    for folder in (tiny_base, tmp_path / "nothing"):
        with pytest.raises(ReleaseError, match="not a confide release"):
            load_release(folder)


def test_altered_weights(folders: dict[str, Path]) -> None:
    weights = folders["films"] / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ReleaseError, match="changed after its statement"):
        load_release(folders["films"])


def resign(folder: Path, name: str) -> None:
    """Make the statement fit altered weights, as whoever made the release could."""
    statement = json.loads((folder / "statement.json").read_text())
    statement["weights"][name] = file_hash(folder / name)
    (folder / "statement.json").write_text(json.dumps(statement))


def test_a_head_of_another_shape_never_loads_at_random(folders: dict[str, Path], merged: Path) -> None:
    for folder, name in ((folders["films"], "model.safetensors"), (merged, "heads/films/model.safetensors")):
        tensors = load_file(folder / name)
        tensors["classifier.weight"] = torch.zeros(3, 32)
        save_file(tensors, folder / name, {"format": "pt"})
        resign(folder, name)
        with pytest.raises((ReleaseError, ModelError), match=r"classifier\.weight"):
            load_release(folder, "films")
