from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from confide.errors import MergeError
from confide.merging.merge import merge, write
from confide.merging.plan import plan_recipe
from confide.merging.recipe import Model, Recipe
from confide.merging.verify import rederive

from .conftest import make_base


@pytest.fixture(params=["ties", "linear", "actmat"])
def merged(request: pytest.FixtureRequest, base: Path, releases: tuple[Path, Path], tmp_path: Path) -> Path:
    merge(releases, base=base, operator=request.param, out=tmp_path / "merged")
    return tmp_path / "merged"


def test_an_honest_merge(merged: Path, base: Path, releases: tuple[Path, Path]) -> None:
    found = rederive(merged, releases[::-1], base, sample=1000)
    assert found.differing == ()
    assert len(found.checked) == found.of == len(load_file(base / "model.safetensors"))
    some = rederive(merged, releases, base, sample=3, seed=1)
    assert len(some.checked) == 3
    assert some == rederive(merged, releases, base, sample=3, seed=1)
    assert some.checked != rederive(merged, releases, base, sample=3, seed=2).checked


def test_one_changed_value_is_found(merged: Path, base: Path, releases: tuple[Path, Path]) -> None:
    file = merged / "model.safetensors"
    tensors = load_file(file)
    for name in ("encoder.layer.0.attention.self.query.weight", "embeddings.word_embeddings.weight"):
        changed = {key: values.copy() for key, values in tensors.items()}
        changed[name].flat[-1] += np.float32(0.01)
        save_file(changed, file, metadata={"format": "pt"})
        found = rederive(merged, releases, base, sample=1000)
        assert found.differing == (name,)
        assert len(found.checked) == found.of - 1


def test_a_report_that_tells_another_story(merged: Path, base: Path, releases: tuple[Path, Path]) -> None:
    file = merged / "merge-report.json"
    report = json.loads(file.read_text())
    report["tensors"][-1]["norm"] *= 1.01
    file.write_text(json.dumps(report))
    assert rederive(merged, releases, base, sample=1000).differing == (report["tensors"][-1]["name"],)


def test_tasks_that_a_recipe_renamed(base: Path, releases: tuple[Path, Path], tmp_path: Path) -> None:
    recipe = Recipe(
        "ties", str(base), (Model(releases[0], task="tweets"), Model(releases[1], task="films"))
    )  # each has the other one's name
    write(plan_recipe(recipe, base), tmp_path / "renamed")
    found = rederive(tmp_path / "renamed", releases[::-1], base, sample=1000)
    assert found.differing == ()
    with pytest.raises(MergeError, match="the merge is of tweets, films, but the inputs are films; name"):
        rederive(tmp_path / "renamed", releases[:1], base)


def test_other_inputs(merged: Path, base: Path, releases: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(MergeError, match="the merge is of films, tweets, but the inputs are films; name"):
        rederive(merged, releases[:1], base)
    other = make_base(tmp_path / "other", seed=3)
    with pytest.raises(MergeError, match="different bases"):
        rederive(merged, releases, other)
    (merged / "merge-report.json").write_text("{}")
    with pytest.raises(MergeError, match="can't be read as the report of a merge"):
        rederive(merged, releases, base)
    with pytest.raises(MergeError, match="is no merge"):
        rederive(releases[0], releases, base)
