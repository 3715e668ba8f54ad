"""One kernel of Grams: the matrix W that Σ_t tr((W − D_t) G_t (W − D_t)ᵀ) is least for."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]

# A Cholesky factor's condition is an estimate; this much below the bound it is no longer believed.
_DOUBT = 10


def gram(matrix: Matrix) -> Matrix:
    """DᵀD in float64; (out, in) → (in, in)."""
    product: Matrix = matrix.T @ matrix
    return product


def mean(matrices: Iterable[Matrix]) -> Matrix:
    """The mean of matrices that are read one by one."""
    total, count = _sum(matrices)
    total /= count
    return total


def total(matrices: Iterable[Matrix]) -> Matrix:
    """The sum of matrices that are read one by one."""
    return _sum(matrices)[0]


def accumulate(pairs: Iterable[tuple[Matrix, Matrix]], centre: Matrix) -> tuple[Matrix, Matrix]:
    """What the least-squares problem is made of, as seen from a matrix near its answer.

    Only one D_t and one G_t are held at a time. Taking the centre off before the product keeps the answer
    exact where all D_t agree, however badly conditioned the Grams are.

    Args:
        pairs: D_t (out, in) and G_t (in, in), symmetric.
        centre: (out, in).

    Returns:
        residual: Σ (D_t − centre) G_t, (out, in).
        weight: Σ G_t, (in, in). The gradient at W is 2((W − centre)·weight − residual).
    """
    residual = np.zeros_like(centre)
    weight = np.zeros((centre.shape[1],) * 2)
    for matrix, own in pairs:
        residual += (matrix - centre) @ own
        weight += own
    return residual, weight


def solve(residual: Matrix, weight: Matrix, rcond: float) -> tuple[Matrix, int]:
    """residual · weight⁺, so that centre + it is the answer.

    Directions in which `weight` has an eigenvalue of at most rcond times its largest one are left out: the
    answer is the centre's there.

    Args:
        residual: (out, in).
        weight: (in, in), symmetric, positive semi-definite up to rounding.
        rcond: of `weight`, whose eigenvalues are squares: the square of what one would ask of task vectors.

    Returns:
        (out, in), and the rank of `weight` that was used.
    """
    from scipy.linalg import lapack

    norm = float(np.abs(weight).sum(axis=0).max())
    if norm == 0 or not math.isfinite(norm):
        # Task vectors whose squares overflow have no answer; whoever writes it complains.
        return np.full_like(residual, norm and math.nan), 0
    factor, failed = lapack.dpotrf(weight)
    if not failed:
        # κ₂ ≤ κ₁ for symmetric matrices, so nothing is near the bound when 1/κ₁ isn't.
        condition, _ = lapack.dpocon(factor, norm)
        if condition > _DOUBT * rcond:
            answer, _ = lapack.dpotrs(factor, residual.T)
            return np.ascontiguousarray(answer.T), len(weight)
    values, vectors = np.linalg.eigh(weight)
    keep = values > rcond * values[-1]
    vectors = vectors[:, keep]
    return ((residual @ vectors) / values[keep]) @ vectors.T, int(keep.sum())


def _sum(matrices: Iterable[Matrix]) -> tuple[Matrix, int]:
    result: Matrix | None = None
    count = 0
    for matrix in matrices:
        result = matrix.copy() if result is None else np.add(result, matrix, out=result)
        count += 1
    if result is None:
        raise ValueError("no matrix to add")
    return result, count
