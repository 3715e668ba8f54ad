"""`confide personal` from trained models to a model of one task, and to one of a task that has no file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from .conftest import Answer, WriteCsv, listing

Confide = Callable[..., Answer]
FAST = ("--method", "non-private", "--head-learning-rate", 0.5, "--labels", "neg,pos")
FAST += ("--trainable", "all", "--rank", 8)


@pytest.fixture
def merged(
    confide: Confide,
    train: Confide,
    write_csv: WriteCsv,
    sentences: Callable[[int, int], list[tuple[str, str]]],
    tiny_base: Path,
    tmp_path: Path,
) -> Path:
    for seed, task in enumerate(("stars", "moods", "songs"), start=1):
        data = write_csv(f"{task}.csv", sentences(80, seed))
        answer = train(data, *FAST, "--dataset", f"{task}-2026", "--task", task, out=task)
        assert answer.code == 0, answer.err
    models = (tmp_path / "stars" / "release", tmp_path / "moods" / "release")
    assert confide("merge", *models, "--base", tiny_base, "--out", tmp_path / "merged").code == 0
    return tmp_path / "merged"


def test_the_whole_way(confide: Confide, merged: Path, tiny_base: Path, tmp_path: Path) -> None:
    models = [tmp_path / task / "release" for task in ("stars", "moods", "songs")]
    both = confide(
        "personal", "pack", merged, *models[:2], "--budget", "12%", "--out", tmp_path / "p", "--json"
    )
    assert listing(tmp_path / "p") == {"stars.personal", "moods.personal"}
    for facts in both.json():
        assert facts["bytes"] == Path(facts["out"]).stat().st_size <= facts["budget_bytes"]
        assert 0 < facts["residual_lost"] < 1
        assert facts["claim"] is None
        assert "added no noise" in facts["no_claim"]
    file = tmp_path / "p" / "stars.personal"

    shown = confide("personal", "unpack", file, "--out", tmp_path / "residual.safetensors")
    assert "encoder.layer.0" in shown.out
    assert "No claim" in shown.out
    assert "classifier.weight" in load_file(tmp_path / "residual.safetensors")

    assert confide("keys", "new", "--out", tmp_path / "key").code == 0
    given = ("personal", "apply", merged, file, "--key", tmp_path / "key")
    answer = confide(*given, "--out", tmp_path / "personal")
    assert answer.code == 0, answer.err
    assert "Signed by" in answer.out
    public = confide("keys", "show", tmp_path / "key", "--json").json()["public"]
    signed_by = confide("verify", tmp_path / "personal", "--json").json()["signed_by"]
    assert signed_by == public
    scored = confide("evaluate", tmp_path / "personal", "--data", tmp_path / "stars.csv", "--json").json()
    assert scored["task"] == "stars"
    assert "added no noise" in confide("privacy", "show", tmp_path / "personal").out

    described = []
    for model, words in zip(models[:2], ("a film was lovely", "a book was grim"), strict=True):
        described.append(tmp_path / f"{model.parent.name}.personal")
        packed = ("personal", "pack", merged, model, "--out", described[-1], "--budget", "12%")
        answer = confide(*packed, "--description", words)
        assert answer.code == 0, answer.err
        assert described[-1].name in answer.out.replace("\n", "")
    new = ("--head", models[2], "--description", "a film was lovely", "--base", tiny_base, "--disjoint")
    fused = confide("personal", "fuse", merged, *described, *new, "--out", tmp_path / "new", "--json").json()
    weights = list(fused["weights"].values())
    assert fused["task"] == "songs"
    assert sum(weights) == pytest.approx(1)
    assert weights[0] > weights[1]  # its description is the same
    table = confide("personal", "fuse", merged, *described, *new, "--out", tmp_path / "again").out
    assert "weight" in table


def test_refusals(confide: Confide, merged: Path, tiny_base: Path, tmp_path: Path) -> None:
    model = tmp_path / "stars" / "release"
    file = tmp_path / "stars.personal"
    before = listing(tmp_path)
    pack = ("personal", "pack", merged, model, "--out", file)
    for budget in ("0.01", "one%", "1%%", "%"):
        assert "percentage such as 1%" in confide(*pack, "--budget", budget).message()
    assert "between 0 and 100 %" in confide(*pack, "--budget", "0%").message()
    assert "allow more" in confide(*pack, "--budget", "0.01%").message()
    twice = ("personal", "pack", merged, model, model, "--out", tmp_path / "p")
    assert "for one task" in confide(*twice).message()
    assert "one by one" in confide(*twice, "--description", "x").message()
    assert listing(tmp_path) == before

    assert confide(*pack, "--budget", "12%").code == 0
    fuse = ("personal", "fuse", merged, file, "--head", model, "--out", tmp_path / "out")
    assert "linear" in confide(*fuse).message()
    assert "go together" in confide(*fuse, "--description", "x").message()
    described = (*fuse, "--description", "x", "--base", tiny_base)
    assert "has no description" in confide(*described).message()
    assert "exists already" in confide(*pack, "--budget", "12%").message()
    file.write_bytes(file.read_bytes()[:-1])
    assert "truncated" in confide("personal", "apply", merged, file, "--out", tmp_path / "out").message()
    assert not (tmp_path / "out").exists()
