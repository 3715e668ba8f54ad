"""Golden values worked out by hand, and invariants that each operator declares."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from confide.errors import MergeError
from confide.merging.operators import OPERATORS, find
from confide.merging.operators.ties import merge as ties_merge
from confide.merging.stream import merge_arrays

Array = npt.NDArray[np.float64]
NAMES = sorted(OPERATORS)


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


def flat_merge(base: Array, models: list[Array], operator: str, **parameters: float) -> Array:
    return merge_arrays({"w": base}, [{"w": model} for model in models], operator, parameters)["w"]


def test_average_by_hand() -> None:
    base = np.array([[1.0, 1.0], [1.0, 1.0]], np.float32)
    models = [np.array([[0, 2], [4, 6]], np.float32), np.array([[2, 4], [0, -6]], np.float32)]
    assert flat_merge(base, models, "average").tolist() == [[1, 3], [2, 0]]


def test_task_arithmetic_by_hand() -> None:
    base = np.array([1.0, 2.0], np.float32)
    models = [np.array([2.0, 0.0], np.float32), np.array([3.0, 2.0], np.float32)]
    assert flat_merge(base, models, "task-arithmetic", scale=0.5).tolist() == [2.5, 1.0]
    np.testing.assert_allclose(flat_merge(base, models, "task-arithmetic"), [1.9, 1.4], rtol=1e-7)


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
    np.testing.assert_array_equal(ties_merge(vectors, [1.0, 1.0], -1, 1.0), [-1.0, -3.0, 3.0])
    np.testing.assert_array_equal(ties_merge(vectors, [math.inf] * 2, 1, 1.0), [0, 0, 0])


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


@settings(deadline=None, max_examples=60)
@given(models_of(), st.sampled_from(NAMES), st.randoms())
def test_the_order_of_models_doesnt_matter(
    case: tuple[Array, list[Array]], name: str, random: object
) -> None:
    base, models = case
    shuffled = list(models)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(flat_merge(base, models, name), flat_merge(base, shuffled, name))


@pytest.mark.parametrize(
    ("name", "parameters"), [("average", {}), ("task-arithmetic", {"scale": 1}), ("ties", {"density": 1})]
)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_one_model_is_itself(name: str, parameters: dict[str, float], data: st.DataObject) -> None:
    floats = st.floats(-1e4, 1e4, width=16)
    base, model = (data.draw(arrays(np.float32, 9, elements=floats)) for _ in range(2))
    np.testing.assert_array_equal(flat_merge(base, [model], name, **parameters), model)
    if name != "task-arithmetic":
        np.testing.assert_array_equal(flat_merge(base, [model] * 3, name, **parameters), model)


@pytest.mark.parametrize("name", NAMES)
def test_zero_task_vectors(name: str) -> None:
    base = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    np.testing.assert_array_equal(flat_merge(base, [base, base], name), base)
    other = base + np.float32(0.5)
    merged = flat_merge(base, [base, other], name)
    assert np.isfinite(merged).all()
    # A model that changed nothing has no say in TIES: what the other changed is kept whole.
    if name == "ties":
        np.testing.assert_array_equal(flat_merge(base, [base, other], name, density=1), other)


def test_density_0_keeps_nothing_and_1_everything() -> None:
    rng = np.random.default_rng(1)
    base, model = (rng.normal(size=50).astype(np.float32) for _ in range(2))
    np.testing.assert_array_equal(flat_merge(base, [model], "ties", density=0), base)
    np.testing.assert_array_equal(flat_merge(base, [model], "ties", density=1), model)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_dtypes(name: str, dtype: type) -> None:
    rng = np.random.default_rng(2)
    base, *models = (rng.normal(size=(40, 5)).astype(dtype) for _ in range(4))
    merged = flat_merge(base, models, name)
    assert merged.dtype == dtype
    wide = flat_merge(base.astype(np.float64), [m.astype(np.float64) for m in models], name)
    np.testing.assert_array_equal(merged, wide.astype(dtype))


def test_inputs_are_left_alone() -> None:
    rng = np.random.default_rng(3)
    base, model = (rng.normal(size=50).astype(np.float32) for _ in range(2))
    copies = base.copy(), model.copy()
    for name in NAMES:
        merged = flat_merge(base, [model, base], name)
        assert not np.shares_memory(merged, base)
    np.testing.assert_array_equal(base, copies[0])
    np.testing.assert_array_equal(model, copies[1])


@pytest.mark.parametrize(
    ("operator", "parameters", "message"),
    [
        ("tie", {}, "unknown operator 'tie'; did you mean 'ties'"),
        ("task_arithmetic", {}, "did you mean 'task-arithmetic'"),
        ("zzz", {}, "known are average, task-arithmetic, ties"),
        ("ties", {"densitty": 0.2}, "no parameter 'densitty'; did you mean 'density'"),
        ("average", {"scale": 1.0}, "no parameter 'scale'; it takes none"),
        ("ties", {"density": 1.5}, "between 0 and 1, not 1.5"),
        ("ties", {"density": math.nan}, "between 0 and 1, not nan"),
        ("task-arithmetic", {"scale": math.inf}, "a finite number, not inf"),
    ],
)
def test_what_an_operator_doesnt_take(operator: str, parameters: dict[str, float], message: str) -> None:
    with pytest.raises(MergeError, match=message):
        flat_merge(np.zeros(2, np.float32), [np.ones(2, np.float32)], operator, **parameters)


def test_every_operator_is_specified() -> None:
    for name, operator in OPERATORS.items():
        assert find(name) is operator
        assert operator.paper
        assert operator.about
        defaults = operator.settings({})
        assert operator.settings(defaults) == defaults
    assert OPERATORS["ties"].settings({}) == {"density": 0.2, "scale": 1.0}
    assert OPERATORS["task-arithmetic"].settings({}) == {"scale": 0.3}
