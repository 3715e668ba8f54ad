from __future__ import annotations

import numpy as np
import pytest

from confide.merging.personal import factors as module
from confide.merging.personal.factors import factors, spectrum


@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (16, 16), (1, 5), (5, 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_against_numpy(shape: tuple[int, int], dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS", 7)  # several blocks
    matrix = np.random.default_rng(0).normal(size=shape).astype(dtype)
    left, values, right = np.linalg.svd(matrix.astype(float), full_matrices=False)
    np.testing.assert_allclose(spectrum(matrix), values, rtol=1e-12)
    for rank in {1, (min(shape) + 1) // 2, min(shape)}:
        ours = factors(matrix, rank)
        assert [part.shape for part in ours] == [(shape[0], rank), (rank,), (shape[1], rank)]
        np.testing.assert_allclose(ours[1], values[:rank], rtol=1e-12)
        np.testing.assert_allclose(ours[0].T @ ours[0], np.eye(rank), atol=1e-12)
        np.testing.assert_allclose(ours[2].T @ ours[2], np.eye(rank), atol=1e-12)
        best = left[:, :rank] * values[:rank] @ right[:rank]
        np.testing.assert_allclose(ours[0] * ours[1] @ ours[2].T, best, atol=1e-12)


def test_what_rounding_makes_up_is_no_rank() -> None:
    random = np.random.default_rng(1)
    low = random.normal(size=(60, 3)) @ random.normal(size=(3, 40))
    assert len(spectrum(low)) == 3
    left, values, right = factors(low, 3)
    np.testing.assert_allclose(left * values @ right.T, low, atol=1e-12)
    assert spectrum(np.zeros((4, 3))).size == 0
    assert spectrum(np.empty((0, 3))).size == 0


def test_large_and_tiny_scales() -> None:
    matrix = np.random.default_rng(2).normal(size=(9, 6))
    for scale in (1e-30, 1e30):
        single = (matrix * scale).astype(np.float32)
        np.testing.assert_allclose(spectrum(single), np.linalg.svd(single.astype(float))[1], rtol=1e-12)
