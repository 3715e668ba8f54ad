"""RegMean against its formula, and against the regression that it solves."""

from __future__ import annotations

import numpy as np
import pytest

from confide.errors import MergeError
from confide.merging.stream import merge_arrays

from .helpers import merge_vectors


def inputs(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    return rng.normal(size=(count, width)) @ rng.normal(size=(width, width))


def test_is_the_regression() -> None:
    """α = 1: the least squares of W x against W_t x over all models' inputs."""
    rng = np.random.default_rng(0)
    models = [rng.normal(size=(4, 5)) for _ in range(3)]
    data = [inputs(rng, 20, 5) for _ in models]
    outputs = np.concatenate([x @ w.T for x, w in zip(data, models, strict=True)])
    expected = np.linalg.lstsq(np.concatenate(data), outputs, rcond=None)[0].T
    grams = [x.T @ x / len(x) for x in data]
    np.testing.assert_allclose(merge_vectors(models, "regmean", grams, alpha=1), expected, rtol=1e-9)


@pytest.mark.parametrize("alpha", [0.0, 0.9])
def test_is_the_formula_on_weights(alpha: float) -> None:
    """On θ_t itself, as published; the base falls out of it."""
    rng = np.random.default_rng(1)
    base, *models = (rng.normal(size=(4, 5)) for _ in range(4))
    grams = [x.T @ x / len(x) for x in (inputs(rng, 9, 5) for _ in models)]
    reduced = [alpha * g + (1 - alpha) * np.diag(np.diag(g)) for g in grams]
    expected = sum(w @ g for w, g in zip(models, reduced, strict=True)) @ np.linalg.inv(sum(reduced))
    merged = merge_vectors([model - base for model in models], "regmean", grams, alpha=alpha)
    np.testing.assert_allclose(base + merged, expected, rtol=1e-9)


def test_by_hand() -> None:
    models = [np.array([[1.0, 2.0]]), np.array([[3.0, 6.0]])]
    grams = [np.diag([3.0, 0.0]), np.diag([1.0, 0.0])]
    # First input: (3·1 + 1·3)/4. The second never was anything but 0: the mean stays, not NaN.
    np.testing.assert_allclose(merge_vectors(models, "regmean", grams), [[1.5, 4.0]])
    # The ridge adds to each Gram its mean diagonal: (3+1.5, 1.5) and (1+.5, .5).
    merged = merge_vectors(models, "regmean", grams, ridge=1)
    np.testing.assert_allclose(merged, [[(4.5 * 1 + 1.5 * 3) / 6, (1.5 * 2 + 0.5 * 6) / 2]])


def test_a_large_ridge_goes_to_the_weighted_mean() -> None:
    rng = np.random.default_rng(2)
    models = [rng.normal(size=(3, 4)) for _ in range(2)]
    grams = [x.T @ x / len(x) for x in (inputs(rng, 9, 4) for _ in models)]
    scales = [np.trace(gram) for gram in grams]
    expected = sum(s * w for s, w in zip(scales, models, strict=True)) / sum(scales)
    np.testing.assert_allclose(merge_vectors(models, "regmean", grams, ridge=1e6), expected, rtol=1e-4)


def test_singular_grams() -> None:
    rng = np.random.default_rng(3)
    models = [rng.normal(size=(3, 6)) for _ in range(2)]
    data = [rng.normal(size=(2, 6)) for _ in models]
    merged = merge_vectors(models, "regmean", [x.T @ x for x in data], alpha=1)
    # With as few inputs, each model's outputs on its own are met exactly.
    for x, model in zip(data, models, strict=True):
        np.testing.assert_allclose(x @ merged.T, x @ model.T, rtol=1e-6)


def test_a_tensor_without_grams_gets_the_mean() -> None:
    from confide.merging.statistics import ArrayStatistics

    rng = np.random.default_rng(4)
    names = {"layer.0.a.weight": (2, 2), "layer.0.b.weight": (2, 2), "layer.0.b.bias": (2,)}
    base, *models = ({name: rng.normal(size=shape) for name, shape in names.items()} for _ in range(3))
    statistics = [ArrayStatistics(str(i), "grams", {"layer.0.a.weight": np.diag([1.0, i])}) for i in (1, 2)]
    merged = merge_arrays(base, models, "regmean", statistics=statistics)
    for name in ("layer.0.b.weight", "layer.0.b.bias"):
        np.testing.assert_allclose(merged[name], (models[0][name] + models[1][name]) / 2)
    first, second = (model["layer.0.a.weight"] for model in models)
    expected = np.stack([(first + second)[:, 0] / 2, (first + 2 * second)[:, 1] / 3], axis=1)
    np.testing.assert_allclose(merged["layer.0.a.weight"], expected)


def test_without_grams() -> None:
    with pytest.raises(MergeError, match=r"regmean needs the grams of each of the 2 models.*0 were given"):
        merge_vectors([np.ones((2, 2))] * 2, "regmean")
