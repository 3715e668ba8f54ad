"""Where statistics may come from, and that they are of the models that are merged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from confide.errors import MergeError, PrivacyError
from confide.merging.merge import merge
from confide.merging.statistics import (
    ArrayStatistics,
    StatisticsFile,
    match_statistics,
    whole,
    write_statistics,
)
from confide.merging.stream import merge_arrays
from confide.release.hashes import encoder_hash, file_hash
from confide.release.tensors import Checkpoint

from .conftest import FROZEN

ARRAYS = {"layer.0.weight": np.eye(3)}


def test_a_file_says_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "statistics.safetensors"
    write_statistics(path, "grams", "public", "sha256:1", ARRAYS, "a novel")
    found = StatisticsFile(path)
    assert (found.kind, found.origin, found.model, tuple(found.names)) == (
        "grams",
        "public",
        "sha256:1",
        ("layer.0.weight",),
    )
    np.testing.assert_array_equal(whole(found, "layer.0.weight"), np.eye(3))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_folder_that_isnt_there(tmp_path: Path) -> None:
    with pytest.raises(MergeError, match=r"can't write .*No such file"):
        write_statistics(tmp_path / "no" / "s.safetensors", "grams", "public", "sha256:1", ARRAYS, "")


def test_origins(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    write_statistics(path, "fisher", "records", "sha256:1", ARRAYS, "")  # type: ignore[arg-type]
    with pytest.raises(PrivacyError, match="has origin 'records'; statistics are computed from public text"):
        StatisticsFile(path)
    write_statistics(path, "fisher", "released", "sha256:1", ARRAYS, "tweets-2026")
    with pytest.raises(PrivacyError, match="no statement of the models to merge covers this file"):
        StatisticsFile(path, ["sha256:other"])
    assert StatisticsFile(path, [file_hash(path)]).origin == "released"
    save_file(ARRAYS, path)
    with pytest.raises(MergeError, match="holds no statistics in the format"):
        StatisticsFile(path)
    save_file(ARRAYS, path, metadata={"format": "confide.statistics/1", "kind": "grams"})
    with pytest.raises(PrivacyError, match="has origin 'None'"):
        StatisticsFile(path)


def test_which_model_they_are_of(tmp_path: Path) -> None:
    files = []
    for number in "123":
        write_statistics(tmp_path / number, "grams", "public", f"sha256:{number}", ARRAYS, "")
        (tmp_path / number).rename(tmp_path / f"{number}.safetensors")
        files.append(StatisticsFile(tmp_path / f"{number}.safetensors"))
    models = {"sha256:2": "two", "sha256:1": "one"}
    assert [each.model for each in match_statistics(files[:2], models)] == ["sha256:2", "sha256:1"]
    assert match_statistics([], models) == []
    with pytest.raises(MergeError, match="computed on none of the models"):
        match_statistics(files, models)
    with pytest.raises(MergeError, match="are of one model"):
        match_statistics([files[0], files[0]], models)
    with pytest.raises(MergeError, match="no statistics were given for two"):
        match_statistics(files[:1], models)


BASE = {"layer.0.weight": np.zeros((2, 3)), "layer.0.bias": np.zeros(2)}
MODELS = [{name: values + i for name, values in BASE.items()} for i in (1, 2)]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([ARRAYS], "grams of each of the 2 models, from public text or released"),
        ([ARRAYS, {}], r"tensor layer\.0\.weight is in only one of one and two"),
        ([{"other": np.eye(3)}] * 2, "one: grams of tensor other were given, a tensor that the models"),
        (
            [ARRAYS, {"layer.0.weight": np.eye(2)}],
            r"two: grams of tensor layer\.0\.weight have shape \[2, 2\], but the tensor \[2, 3\]",
        ),
        ([{"layer.0.bias": np.eye(2)}] * 2, r"have shape \[2, 2\], but the tensor \[2\]"),
        ([ARRAYS, {"layer.0.weight": np.eye(3) * np.nan}], "hold values that aren't finite"),
        ([ARRAYS, {"layer.0.weight": -np.eye(3)}], "are negative where a mean of squares stands"),
        ([ARRAYS, {"layer.0.weight": np.tri(3)}], "aren't symmetric"),
    ],
)
def test_what_doesnt_fit(arrays: list[dict[str, np.ndarray]], message: str) -> None:
    given = [
        ArrayStatistics(label, "grams", each) for label, each in zip(("one", "two"), arrays, strict=False)
    ]
    with pytest.raises(MergeError, match=message):
        merge_arrays(BASE, MODELS, "regmean", statistics=given)


def test_the_wrong_kind_and_none_needed() -> None:
    given = [ArrayStatistics(label, "grams", ARRAYS) for label in ("one", "two")]
    with pytest.raises(MergeError, match="operator fisher needs fisher, but one holds grams"):
        merge_arrays(BASE, MODELS, "fisher", statistics=given)
    with pytest.raises(MergeError, match="operator average needs no statistics"):
        merge_arrays(BASE, MODELS, "average", statistics=given)


def test_releases_merge_with_their_statistics(
    base: Path, releases: tuple[Path, Path], tmp_path: Path
) -> None:
    """Files in any order; each finds its model, and the folders merge as arrays do."""
    rng = np.random.default_rng(0)
    weights = load_file(base / "model.safetensors")
    name = "encoder.layer.0.output.dense.weight"
    width = weights[name].shape[1]
    files, grams = [], []
    for number, folder in enumerate(releases):
        drawn = rng.normal(size=(40, width))
        grams.append(drawn.T @ drawn / 40)
        heads = ["classifier.weight", "classifier.bias"]
        model = encoder_hash(Checkpoint.open(folder), "bert.", heads)
        files.append(tmp_path / f"{number}.safetensors")
        write_statistics(files[-1], "grams", "public", model, {name: grams[-1]}, "made up")
    report = merge(releases, base=base, operator="regmean", statistics=files[::-1], out=tmp_path / "merged")
    stored = [load_file(folder / "model.safetensors") for folder in releases]
    plain = [
        {key.removeprefix("bert."): values for key, values in tensors.items() if key.startswith("bert.")}
        for tensors in stored
    ]
    given = [ArrayStatistics(str(i), "grams", {name: gram}) for i, gram in enumerate(grams)]
    expected = merge_arrays(weights, plain, "regmean", statistics=given)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for key, values in expected.items():
        np.testing.assert_array_equal(merged[key], values)
    rules = {line.name: line.rule for line in report.tensors}
    assert rules[name] == "regmean"
    assert report.facts[name] == {"rank": [width]}
    assert rules["encoder.layer.1.output.dense.weight"] == "mean: no statistics of it were given"
    assert rules["pooler.dense.weight"] == "mean: regmean merges weights of attention and MLP"
    assert all(rule.startswith("base:") for key, rule in rules.items() if key.startswith(FROZEN))
    with pytest.raises(MergeError, match="needs no statistics"):
        merge(releases, base=base, operator="ties", statistics=files, out=tmp_path / "other")
    with pytest.raises(MergeError, match="no statistics were given for tweets"):
        merge(releases, base=base, operator="regmean", statistics=files[:1], out=tmp_path / "other")
