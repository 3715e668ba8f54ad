"""PCB against its definition, with full sorts over flat vectors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from confide.merging import vectors as module
from confide.merging.stream import merge_arrays

from .helpers import flat_merge

Array = npt.NDArray[np.float64]


def clamp(values: Array, low: float, high: float) -> Array:
    order = np.sort(values)
    return np.clip(values, order[int(values.size * low)], order[max(int(values.size * (1 - high)) - 1, 0)])


def norm(values: Array) -> Array:
    return (values - values.min()) / (values.max() - values.min())


def naive_pcb(vectors: Array, density: float, scale: float, p: float) -> Array:
    """The formula line by line: Dc, intra, inter, b, its clamp at the 1 − r quantile, the weighted mean."""
    total = vectors.sum(axis=0)
    numerator, denominator = np.zeros(vectors.shape[1]), np.zeros(vectors.shape[1])
    for vector in vectors:
        magnitude = clamp(np.abs(vector), p, p)
        b = np.exp(len(vectors) * norm(magnitude) ** 2) * np.tanh(vector * total)
        share = norm(clamp(b, 1 - density, 0))
        numerator += scale * np.sign(vector) * magnitude * share
        denominator += share
    return numerator / np.maximum(denominator, 1e-12)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**32),
    st.integers(2, 5),
    st.integers(100, 400),
    st.sampled_from([0.1, 0.05, 0.5]),
    st.sampled_from([1e-4, 0.01, 0.03]),
    st.sampled_from([1e-3, 0.03, 0.3]),
)
def test_is_the_definition(seed: int, count: int, size: int, density: float, p: float, spread: float) -> None:
    vectors = np.random.default_rng(seed).normal(size=(count, size)) * spread
    expected = naive_pcb(vectors, density, 1.2, p)
    merged = flat_merge(np.zeros(size), list(vectors), "pcb", density=density, scale=1.2, clamp=p)
    # Quantiles are order statistics in float32; in a share that is nearly 0, their rounding shows.
    np.testing.assert_allclose(merged, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())
    assert np.linalg.norm(merged - expected) <= 1e-5 * np.linalg.norm(expected)


def test_quantiles_are_global_and_chunks_dont_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    flat = rng.normal(size=(3, 300)) * rng.exponential(size=300)
    whole = flat_merge(np.zeros(300), list(flat), "pcb")
    names, cuts = ["a", "b", "c"], [10, 170]
    parts = [dict(zip(names, np.split(vector, cuts), strict=True)) for vector in flat]
    base = {name: np.zeros_like(part) for name, part in parts[0].items()}
    merged = merge_arrays(base, parts, "pcb")
    np.testing.assert_allclose(np.concatenate(list(merged.values())), whole, rtol=1e-12)
    monkeypatch.setattr(module, "CHUNK", 7)
    merged = merge_arrays(base, parts, "pcb")
    np.testing.assert_allclose(np.concatenate(list(merged.values())), whole, rtol=1e-12)


def test_a_zero_task_vector_contributes_nothing() -> None:
    """In the reference 0/0 makes every output NaN."""
    rng = np.random.default_rng(2)
    one, zero = rng.normal(size=100), np.zeros(100)
    merged = flat_merge(zero, [one, zero], "pcb")
    assert np.isfinite(merged).all()
    kept = merged != 0
    # What has a weight is the other model's own entry.
    order = np.sort(np.abs(one))
    np.testing.assert_allclose(merged[kept], np.clip(one, -order[98], order[98])[kept])
    # Its weight starts at the 1 − r quantile, where the share is 0: one less than a tenth.
    assert 8 <= kept.sum() <= 10


def test_densities_at_the_ends() -> None:
    rng = np.random.default_rng(3)
    base, model = np.zeros(50), rng.normal(size=50)
    assert not flat_merge(base, [model], "pcb", density=0).any()
    merged = flat_merge(base, [model, model], "pcb", density=1, clamp=0)
    # Only the least competitive coordinate has no weight; the others are the model's own.
    assert (merged == 0).sum() == 1
    np.testing.assert_allclose(merged[merged != 0], model[merged != 0], rtol=1e-7)


def test_equal_magnitudes() -> None:
    """Every range is a point; the signs that agree with the sum are kept."""
    merged = flat_merge(np.zeros(4), [np.array([1.0, -1, 1, -1]), np.array([1.0, -1, 1, -1])], "pcb")
    assert merged.tolist() == [1, -1, 1, -1]


def test_many_models_dont_overflow() -> None:
    vectors = np.random.default_rng(4).normal(size=(60, 50)) * 1e-3
    merged = flat_merge(np.zeros(50), list(vectors), "pcb")
    assert np.isfinite(merged).all()
    assert np.linalg.norm(merged - naive_pcb(vectors, 0.1, 1, 1e-4)) <= 1e-4 * np.linalg.norm(merged)
