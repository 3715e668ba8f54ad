"""TIES: golden values worked out by hand, and the paper's algorithm with a full sort."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from confide.errors import MergeError
from confide.merging.operators.ties import disjoint_merge
from confide.merging.stream import merge_arrays

from .helpers import flat_merge

Array = npt.NDArray[np.float64]


def naive_ties(base: Array, models: list[Array], density: float, scale: float) -> Array:
    """TIES over one flat vector as the paper writes it, with a full sort."""
    vectors = [model - base for model in models]
    kept = []
    for vector in vectors:
        k = vector.size - int(vector.size * density)
        threshold = np.sort(np.abs(vector))[k - 1] if k else 0.0
        kept.append(np.where((np.abs(vector) >= threshold) & (density > 0), vector, 0.0))
    total = np.sum(kept, axis=0)
    majority = np.sign(np.sum(np.sign(total)))
    out = base.copy()
    for i in range(base.size):
        sign = np.sign(total[i]) or majority
        agreeing = [vector[i] for vector in kept if np.sign(vector[i]) == sign and vector[i]]
        if agreeing:
            out[i] += scale * math.fsum(agreeing) / len(agreeing)
    return out


def test_ties_by_hand() -> None:
    # density 0.5 of 4 coordinates: k = 2, so the threshold is the second smallest magnitude, and it is kept.
    base = np.zeros(4, np.float32)
    first = np.array([4, -1, 3, 2], np.float32)  # threshold 2: keeps 4, 3, 2
    second = np.array([-2, 5, 1, 4], np.float32)  # threshold 2: keeps -2, 5, 4
    merged = flat_merge(base, [first, second], "ties", density=0.5)
    # sums 2, 5, 3, 6, all positive; the means of what agrees: 4, 5, 3, (2 + 4) / 2.
    assert merged.tolist() == [4, 5, 3, 3]
    assert flat_merge(base, [first, second], "ties", density=0.5, scale=2).tolist() == [8, 10, 6, 6]


def test_an_exact_cancellation_takes_the_majority() -> None:
    base = np.zeros(3, np.float32)
    first, second = np.array([2, -3, -1], np.float32), np.array([-2, -5, -1], np.float32)
    # The first sums to 0; the others elect −, so the first keeps what is negative.
    assert flat_merge(base, [first, second], "ties", density=1).tolist() == [-2, -4, -1]
    # One + and one −: the majority is 0 too, and the entry stays at the base.
    first, second = np.array([2, -3, 1], np.float32), np.array([-2, -5, 1], np.float32)
    assert flat_merge(base, [first, second], "ties", density=1).tolist() == [0, -4, 1]


def test_ties_at_the_threshold_are_all_kept() -> None:
    base = np.zeros(4, np.float32)
    model = np.array([1, -1, 1, 1], np.float32)
    assert flat_merge(base, [model], "ties", density=0.25).tolist() == model.tolist()


def test_the_trim_is_global_over_what_was_trained() -> None:
    frozen = np.ones((20, 20), np.float32)
    base = {"a": np.zeros(4, np.float32), "b": np.zeros(4, np.float32), "frozen": frozen}
    model = {
        "a": np.array([1, 2, 3, 4], np.float32),
        "b": np.array([5, 6, 7, 8], np.float32),
        "frozen": frozen,
    }
    merged = merge_arrays(base, [model], "ties", {"density": 0.25})
    # 8 trained coordinates: k = 6, so 6, 7 and 8 stay. By tensor it would be 3, 4, 7 and 8.
    assert merged["a"].tolist() == [0, 0, 0, 0]
    assert merged["b"].tolist() == [0, 6, 7, 8]
    np.testing.assert_array_equal(merged["frozen"], frozen)


def test_the_kernel_alone() -> None:
    vectors = np.array([[1.0, -4.0, 0.5], [-1.0, -2.0, 3.0]])
    np.testing.assert_array_equal(disjoint_merge(vectors, [1.0, 1.0], -1, 1.0), [-1.0, -3.0, 3.0])
    np.testing.assert_array_equal(disjoint_merge(vectors, [math.inf] * 2, 1, 1.0), [0, 0, 0])


values = st.integers(-64, 64).map(lambda n: n / 16)
shapes = st.integers(1, 40)


@st.composite
def models_of(draw: st.DrawFn) -> tuple[Array, list[Array]]:
    size, count = draw(shapes), draw(st.integers(1, 4))
    vectors = [draw(arrays(np.float32, size, elements=values)) for _ in range(count + 1)]
    return vectors[0], vectors[1:]


@settings(deadline=None, max_examples=150)
@given(models_of(), st.sampled_from([0, 0.05, 0.2, 0.5, 0.9, 1]), st.sampled_from([0.3, 1.0]))
def test_ties_is_the_papers(case: tuple[Array, list[Array]], density: float, scale: float) -> None:
    base, models = case
    if all(np.array_equal(base, model) for model in models):
        return
    expected = naive_ties(base.astype(float), [m.astype(float) for m in models], density, scale)
    merged = flat_merge(base, models, "ties", density=density, scale=scale)
    np.testing.assert_allclose(merged, expected, rtol=1e-6, atol=1e-7)


def test_density_0_keeps_nothing_and_1_everything() -> None:
    rng = np.random.default_rng(1)
    base, model = (rng.normal(size=50).astype(np.float32) for _ in range(2))
    np.testing.assert_array_equal(flat_merge(base, [model], "ties", density=0), base)
    np.testing.assert_array_equal(flat_merge(base, [model], "ties", density=1), model)


def test_trimmed_by_tensor() -> None:
    base = {"a": np.zeros(4, np.float32), "b": np.zeros(4, np.float32)}
    model = {"a": np.array([1, 2, 3, 4], np.float32), "b": np.array([5, -8, 7, 6], np.float32)}
    merged = merge_arrays(base, [model], "ties", {"density": 0.5, "trim": "per-tensor"})
    assert merged["a"].tolist() == [0, 0, 3, 4]
    assert merged["b"].tolist() == [0, -8, 7, 0]


def naive_mergekit(vectors: list[Array], weights: list[float], density: float, normalise: bool) -> Array:
    """What mergekit documents: keep the largest, weigh, elect (a sum of zero is +), divide by the weights."""
    kept = []
    for vector in vectors:
        order = np.argsort(-np.abs(vector), kind="stable")[: int(vector.size * density)]
        mask = np.zeros(vector.size)
        mask[order] = 1
        kept.append(vector * mask)
    weighted = np.array([weight * vector for weight, vector in zip(weights, kept, strict=True)])
    sign = np.where(weighted.sum(axis=0) >= 0, 1, -1)
    agree = np.sign(weighted) == sign
    total = (weighted * agree).sum(axis=0)
    if normalise:
        mass = (np.array(weights)[:, None] * agree).sum(axis=0)
        total = total / np.where(np.abs(mass) < 1e-8, 1, mass)
    return total


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_mergekits_variant(normalise: bool, density: float) -> None:
    rng = np.random.default_rng(5)
    base = np.zeros(200)
    models = [rng.normal(size=200) for _ in range(3)]
    models[1][:20] = -models[0][:20]  # with equal weights some sums are exactly zero
    for weights in ([1.0, 1.0, 1.0], [0.5, 2.0, 0.3], [1.0, -0.5, 0.7]):
        merged = flat_merge(
            base,
            models,
            "ties",
            density=density,
            trim="per-tensor",
            weights=weights,
            zero_sum="plus",
            merge="mean" if normalise else "sum",
        )
        np.testing.assert_allclose(merged, naive_mergekit(models, weights, density, normalise), atol=1e-14)


def test_the_sum_of_what_agrees() -> None:
    base = np.zeros(3, np.float32)
    models = [np.array([1, 2, -1], np.float32), np.array([3, -1, -2], np.float32)]
    assert flat_merge(base, models, "ties", density=1, merge="sum", scale=0.5).tolist() == [2, 1, -1.5]


def test_a_density_for_each_model() -> None:
    base = np.zeros(4, np.float32)
    models = [np.array([1, 2, 3, 4], np.float32), np.array([4, 3, 2, 1], np.float32)]
    merged = flat_merge(base, models, "ties", density=[1, 0])
    assert merged.tolist() == [1, 2, 3, 4]
    merged = flat_merge(base, models, "ties", density="0.25,1")
    # The first keeps 3 and 4: the threshold is the 3rd smallest of 4, and it is kept.
    assert merged.tolist() == [4, 3, 2.5, 2.5]
    with pytest.raises(MergeError, match="density of operator ties has 3 values for 2 models"):
        flat_merge(base, models, "ties", density=[1, 1, 1])
