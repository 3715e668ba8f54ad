"""Average, linear and task arithmetic by hand."""

from __future__ import annotations

import numpy as np
import pytest

from confide.errors import MergeError

from .helpers import flat_merge


def test_average_by_hand() -> None:
    base = np.array([[1.0, 1.0], [1.0, 1.0]], np.float32)
    models = [np.array([[0, 2], [4, 6]], np.float32), np.array([[2, 4], [0, -6]], np.float32)]
    assert flat_merge(base, models, "average").tolist() == [[1, 3], [2, 0]]


def test_task_arithmetic_by_hand() -> None:
    base = np.array([1.0, 2.0], np.float32)
    models = [np.array([2.0, 0.0], np.float32), np.array([3.0, 2.0], np.float32)]
    assert flat_merge(base, models, "task-arithmetic", scale=0.5).tolist() == [2.5, 1.0]
    np.testing.assert_allclose(flat_merge(base, models, "task-arithmetic"), [1.9, 1.4], rtol=1e-7)


def test_linear_by_hand() -> None:
    base = np.array([1.0, 2.0])
    models = [np.array([2.0, 0.0]), np.array([3.0, 2.0])]
    np.testing.assert_allclose(flat_merge(base, models, "linear"), [2.5, 1.0])
    # (3·2 + 1·3)/4 and (3·0 + 1·2)/4
    np.testing.assert_allclose(flat_merge(base, models, "linear", weights=[3, 1]), [2.25, 0.5])
    # 1 + 3·1 + 1·2 and 2 − 3·2 + 0
    merged = flat_merge(base, models, "linear", weights=[3, 1], normalise=False)
    np.testing.assert_allclose(merged, [6.0, -4.0])


def test_one_model_and_its_weight() -> None:
    """What surprises users elsewhere: normalised, the weight of a single model says nothing."""
    base, model = np.array([1.0, 2.0]), np.array([2.0, 0.0])
    np.testing.assert_allclose(flat_merge(base, [model], "linear", weights=0.1), model)
    merged = flat_merge(base, [model], "linear", weights=0.1, normalise=False)
    np.testing.assert_allclose(merged, [1.1, 1.8])


def test_weights_that_sum_to_zero() -> None:
    with pytest.raises(MergeError, match=r"weights \[1.0, -1.0\] of operator linear sum to 0"):
        flat_merge(np.zeros(2), [np.ones(2), np.ones(2)], "linear", weights=[1, -1])


def test_a_scale_for_each_task_vector() -> None:
    base = np.array([1.0, 2.0])
    models = [np.array([2.0, 0.0]), np.array([3.0, 2.0])]
    np.testing.assert_allclose(flat_merge(base, models, "task-arithmetic", scale=[0.5, 0.25]), [2.0, 1.0])
