"""ACTMat: a layer's task vector stands in for the covariance of its inputs, so no data is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from confide.merging import grams
from confide.merging.operators.parameters import Number
from confide.merging.operators.specification import MATRICES, Matrix, operator

RCOND = Number(
    "rcond",
    1e-12,
    0.0,
    1.0,
    "Eigenvalues of Σ C_t up to this part of the largest count as zero: the mean there.",
)


@operator(
    "actmat",
    about="θ = θ₀ + (Σ D_t C_t)(Σ C_t)⁺ with C_t = D_tᵀD_t for each matrix",
    paper="ACTMat, arXiv 2604.01329",
    takes="matrices",
    parameters=(RCOND,),
    tensors=MATRICES,
    splits_qkv=True,
)
def actmat(matrices: Sequence[Matrix], rcond: float) -> tuple[Matrix, dict[str, Any]]:
    """(Σ D_t C_t)(Σ C_t)⁺, with Grams in float64.

    Seen from the mean M it is M + (Σ (D_t − M) C_t)(Σ C_t)⁺, the same matrix: where no D_t reaches, M is 0.
    """
    centre = grams.mean(matrices)
    residual, weight = grams.accumulate(((matrix, grams.gram(matrix)) for matrix in matrices), centre)
    step, rank = grams.solve(residual, weight, rcond)
    return centre + step, {"rank": rank}
