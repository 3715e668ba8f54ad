from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from confide.merging.personal.factors import factors
from confide.merging.personal.residual import Part, array, blocks, encode, matrix, touched


def reference_codes(values: np.ndarray) -> np.ndarray:
    """The published rule, written out: each entry is ± the RMS of its sign's lower or upper half."""
    flat = values.reshape(-1)
    result = np.zeros_like(flat)
    for sign in (1, -1):
        chosen = np.flatnonzero(flat >= 0) if sign == 1 else np.flatnonzero(flat < 0)
        if not len(chosen):
            continue
        middle = np.median(np.abs(flat[chosen]))
        for half in (chosen[np.abs(flat[chosen]) <= middle], chosen[np.abs(flat[chosen]) > middle]):
            if len(half):
                result[half] = sign * np.sqrt(np.mean(flat[half] ** 2))
    return result.reshape(values.shape)


def reference(residual: np.ndarray, rank: int) -> np.ndarray:
    """DTS of a matrix by numpy's own decomposition; its signs are free, so ours are taken."""
    left, values, right = np.linalg.svd(residual.astype(float), full_matrices=False)
    ours = factors(residual, rank)[0]
    signs = np.sign((left[:, :rank] * ours).sum(0))
    left, right = left[:, :rank] * signs, right[:rank] * signs[:, None]
    return reference_codes(left) * values[:rank] @ reference_codes(right)


@pytest.mark.parametrize("shape", [(30, 10), (10, 30), (16, 16)])
@pytest.mark.parametrize("rank", [1, 4])
def test_a_matrix_is_the_papers(shape: tuple[int, int], rank: int) -> None:
    residual = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    coded = encode("w", residual, rank)
    np.testing.assert_allclose(array([coded]), reference(residual, rank), atol=1e-6)
    bits = 2 * (shape[0] + shape[1]) * rank
    assert coded.codes.nbytes == -(-2 * shape[0] * rank // 8) + -(-2 * shape[1] * rank // 8)
    assert coded.codes.nbytes * 8 - bits < 16
    assert (coded.scales.size, coded.values.size, coded.bitmap.size) == (8, rank, 0)


def test_a_vector_is_the_papers() -> None:
    residual = np.random.default_rng(1).normal(size=37).astype(np.float32)
    coded = encode("b", residual, None)
    np.testing.assert_allclose(array([coded]), reference_codes(residual.astype(float)), rtol=1e-6)
    assert (coded.codes.nbytes, coded.scales.size, coded.values.size) == (10, 4, 0)


def test_the_codes_keep_the_norm_of_gaussian_factors() -> None:
    residual = np.random.default_rng(2).normal(size=(300, 200)).astype(np.float32)
    left, values, right = factors(residual, 20)
    near = array([encode("w", residual, 20)])
    exact = left * values @ right.T
    assert np.linalg.norm(near) / np.linalg.norm(exact) == pytest.approx(1, abs=0.01)
    assert np.linalg.norm(near - exact) / np.linalg.norm(exact) == pytest.approx(0.53, abs=0.01)


@pytest.mark.parametrize("rank", [None, 1, 3])
def test_rows_that_nobody_touched_stay_zero(rank: int | None) -> None:
    residual = np.zeros((21, 5), np.float32)
    rows = [0, 8, 9, 20]
    residual[rows] = np.random.default_rng(3).normal(size=(4, 5))
    coded = encode("e", residual, rank)
    assert (coded.part.rows, coded.bitmap.nbytes) == (4, 3)
    near = array([coded])
    assert np.flatnonzero(near.any(1)).tolist() == rows
    np.testing.assert_array_equal(near[rows], array([encode("e", residual[rows], rank)]))


@settings(deadline=None)
@given(st.lists(st.integers(1, 7), max_size=4), st.integers(0, 2**32 - 1), st.integers(1, 4), st.booleans())
def test_every_shape_in_blocks(shape: list[int], seed: int, rows: int, sparse: bool) -> None:
    random = np.random.default_rng(seed)
    residual = np.asarray(random.normal(size=shape), np.float32)
    if sparse and residual.ndim:
        residual[random.random(len(residual)) < 0.5] = 0
    if not residual.any():
        return
    rank = min(matrix("w", residual).shape) if len(shape) > 1 else None
    for chosen in {rank, None}:
        coded = encode("t", residual, chosen)
        lengths = coded.part.lengths
        assert coded.bitmap.nbytes == lengths.bitmap
        assert coded.codes.nbytes == lengths.codes
        assert (coded.scales.size, coded.values.size) == (lengths.scales, lengths.values)
        whole = array([coded])
        assert whole.shape == residual.shape
        kept = touched("w", residual)
        assert not whole.reshape(len(kept), -1)[~kept].any()
        pieces = np.concatenate(list(blocks([(0.5, coded), (2.0, coded)], rows)))
        np.testing.assert_allclose(pieces, 2.5 * whole.reshape(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"shape": (3, 4), "rows": 4, "rank": 1},
        {"shape": (3, 4), "rows": 3, "rank": 4},
        {"shape": (3, 4), "rows": 2, "rank": 3},
        {"shape": (3, 4), "rows": 0, "rank": 1},
        {"shape": (3, 4), "rows": 3, "rank": 0},
        {"shape": (3, 0), "rows": 3},
        {"shape": (3,), "rows": 3, "rank": 2},
    ],
)
def test_impossible_parts(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Part.model_validate({"name": "t"} | fields)


def test_a_stack_of_experts_has_the_rows_of_all() -> None:
    """What one expert learned nothing of is left out, and factors are as wide as a layer's input."""
    residual = np.random.default_rng(3).normal(size=(3, 5, 4)).astype(np.float32)
    residual[1] = 0
    coded = encode("layer.1.mlp.experts.up_proj", residual, 2)
    assert (coded.part.height, coded.part.width, coded.part.rows) == (15, 4, 10)
    found = array([coded])
    assert found.shape == residual.shape
    assert not found[1].any()
    rows = residual[[0, 2]].reshape(10, 4)
    np.testing.assert_allclose(found[[0, 2]].reshape(10, 4), reference(rows, 2), atol=1e-6)
