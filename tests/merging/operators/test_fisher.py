"""Fisher-weighted averaging by hand and against its formula."""

from __future__ import annotations

import numpy as np
import pytest

from confide.errors import MergeError
from confide.merging import vectors as module
from confide.merging.statistics import ArrayStatistics
from confide.merging.stream import merge_arrays

from .helpers import merge_vectors


def test_by_hand() -> None:
    models = [np.array([[1.0, 2.0]]), np.array([[3.0, 6.0]])]
    fishers = [np.array([[3.0, 4.0]]), np.array([[0.0, 1.0]])]
    # Not normalised, no floor: the first model's alone, then (4·2 + 1·6)/5.
    merged = merge_vectors(models, "fisher", fishers, normalise=False, floor=0)
    np.testing.assert_allclose(merged, [[1.0, 2.8]])
    # Lengths 5 and 1: (.8·2 + 1·6)/1.8.
    merged = merge_vectors(models, "fisher", fishers, floor=0)
    np.testing.assert_allclose(merged, [[1.0, (0.8 * 2 + 6) / 1.8]])
    # A floor of 1 raises the 0 alone.
    merged = merge_vectors(models, "fisher", fishers, normalise=False, floor=1)
    np.testing.assert_allclose(merged, [[1.5, 2.8]])
    merged = merge_vectors(models, "fisher", fishers, normalise=False, floor=0, weights=[1, 4])
    np.testing.assert_allclose(merged, [[1.0, 4.0]])


def test_nobody_knows_a_coordinate() -> None:
    models = [np.array([[1.0, 2.0]]), np.array([[3.0, 6.0]])]
    fishers = [np.array([[0.0, 4.0]]), np.array([[0.0, 1.0]])]
    np.testing.assert_allclose(merge_vectors(models, "fisher", fishers, floor=0)[0, 0], 2)


def test_lengths_are_over_all_tensors_and_chunks_dont_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    names = {"a": (3, 4), "b": (5,), "c": (2,)}
    base, *models = ({name: rng.normal(size=shape) for name, shape in names.items()} for _ in range(3))
    own = [{name: rng.exponential(size=names[name]) for name in ("a", "b")} for _ in models]
    statistics = [ArrayStatistics(str(i), "fisher", each) for i, each in enumerate(own)]
    monkeypatch.setattr(module, "CHUNK", 5)
    merged = merge_arrays(base, models, "fisher", statistics=statistics)
    lengths = [np.linalg.norm(np.concatenate([values.ravel() for values in each.values()])) for each in own]
    for name in ("a", "b"):
        weights = [each[name] / length for each, length in zip(own, lengths, strict=True)]
        top = sum(w * model[name] for w, model in zip(weights, models, strict=True))
        np.testing.assert_allclose(merged[name], top / sum(weights), rtol=1e-9)
    np.testing.assert_allclose(merged["c"], (models[0]["c"] + models[1]["c"]) / 2)


def test_nothing_to_normalise() -> None:
    models = [np.ones((1, 2)), np.zeros((1, 2))]
    with pytest.raises(MergeError, match="statistics 1: the Fisher diagonal is 0 everywhere"):
        merge_vectors(models, "fisher", [np.ones((1, 2)), np.zeros((1, 2))])
    with pytest.raises(MergeError, match="weights of operator fisher are all 0"):
        merge_vectors(models, "fisher", [np.ones((1, 2))] * 2, weights=0)
