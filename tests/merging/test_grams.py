"""The kernel that WUDI, ACTMat and RegMean share."""

from __future__ import annotations

import numpy as np
import pytest

from confide.merging import grams


def system(rank: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    factor = rng.normal(size=(rank, 8))
    weight = factor.T @ factor
    return rng.normal(size=(5, 8)) @ weight, weight


@pytest.mark.parametrize("rank", [1, 5, 8, 20])
def test_solve_is_the_pseudo_inverse(rank: int) -> None:
    residual, weight = system(rank)
    answer, used = grams.solve(residual, weight, 1e-12)
    expected = residual @ np.linalg.pinv(weight, rcond=1e-12, hermitian=True)
    np.testing.assert_allclose(answer, expected, rtol=1e-6, atol=1e-8)
    assert used == min(rank, 8)


def test_nothing_known_is_no_step() -> None:
    answer, rank = grams.solve(np.ones((2, 3)), np.zeros((3, 3)), 1e-12)
    assert rank == 0
    assert not answer.any()


@pytest.mark.parametrize("rcond", [0.0, 1e-13, 1e-9, 1e-5, 0.5, 1.0])
def test_the_factorisation_never_decides(rcond: float) -> None:
    """Where Cholesky answers, eigenvalues would have kept all directions."""
    values = np.array([1, 1e-2, 1e-6, 1e-10])
    turn, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(4, 4)))
    weight = (turn * values) @ turn.T
    _, rank = grams.solve(np.ones((2, 4)), weight, rcond)
    assert rank == (values > rcond).sum()


def test_accumulate_sees_the_centre() -> None:
    rng = np.random.default_rng(2)
    matrices = [rng.normal(size=(3, 4)) for _ in range(3)]
    weights = [grams.gram(rng.normal(size=(6, 4))) for _ in range(3)]
    centre = grams.mean(matrices)
    np.testing.assert_allclose(centre, sum(matrices) / 3)
    np.testing.assert_allclose(grams.total(matrices), sum(matrices))
    residual, weight = grams.accumulate(zip(matrices, weights, strict=True), centre)
    np.testing.assert_allclose(weight, sum(weights))
    expected = sum((m - centre) @ w for m, w in zip(matrices, weights, strict=True))
    np.testing.assert_allclose(residual, expected, atol=1e-12)
    with pytest.raises(ValueError, match="no matrix"):
        grams.mean([])
