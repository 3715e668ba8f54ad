"""Singular values and vectors from the small Gram matrix, never more vectors than are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.linalg import eigh

Matrix = npt.NDArray[np.float64]

_ROWS = 2048


def spectrum(matrix: npt.NDArray[Any]) -> Matrix:
    """Singular values, largest first, without those that rounding may have made up.

    They are the roots of the eigenvalues of the Gram matrix of the shorter side, in float64. An eigenvalue
    is known up to about n·2⁻⁵²·the largest, so a singular value below 4·10⁻⁷ of the largest (n = 768) can't
    be told from 0 and is left out.

    Args:
        matrix: (m, n) finite floats.

    Returns:
        (k ≤ min(m, n),) float64.
    """
    if not matrix.size:
        return np.empty(0)
    squares = eigh(_gram(_tall(matrix)), eigvals_only=True, check_finite=False)[::-1]
    known = squares > squares[0] * len(squares) * np.finfo(np.float64).eps
    values: Matrix = np.sqrt(squares[known & (squares > 0)])
    return values


def factors(matrix: npt.NDArray[Any], rank: int) -> tuple[Matrix, Matrix, Matrix]:
    """The thin singular value decomposition, cut to the largest `rank` singular values.

    Args:
        matrix: (m, n) finite floats.
        rank: 0 < rank ≤ len(spectrum(matrix)).

    Returns:
        left (m, rank), values (rank,), right (n, rank), float64, so that matrix ≈ left · values · rightᵀ. No
        larger matrix than these, the Gram matrix and a block of rows is made.
    """
    tall = _tall(matrix)
    side = tall.shape[1]
    squares, vectors = eigh(
        _gram(tall), subset_by_index=(side - rank, side - 1), check_finite=False, driver="evr"
    )
    values, short = np.sqrt(squares[::-1]), vectors[:, ::-1]
    long = np.concatenate([block @ short for block in _blocks(tall)]) / values
    return (long, values, short) if tall is matrix else (short, values, long)


def _tall(matrix: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T


def _gram(tall: npt.NDArray[Any]) -> Matrix:
    gram = np.zeros((tall.shape[1],) * 2)
    for block in _blocks(tall):
        gram += block.T @ block
    return gram


def _blocks(tall: npt.NDArray[Any]) -> Iterator[Matrix]:
    for start in range(0, tall.shape[0], _ROWS):
        yield tall[start : start + _ROWS].astype(np.float64, order="C")
