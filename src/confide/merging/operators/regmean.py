"""RegMean: the layer whose outputs are nearest to those of all models on their own inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from confide.merging import grams as kernel
from confide.merging.operators.actmat import RCOND
from confide.merging.operators.parameters import Number
from confide.merging.operators.specification import LINEAR, Matrix, operator


@operator(
    "regmean",
    about="θ = (Σ θ_t G̃_t)(Σ G̃_t)⁻¹ with G̃_t = αG_t + (1 − α) diag G_t, for each Linear weight",
    paper="Jin et al. 2023, Dataless knowledge fusion by merging weights of language models",
    takes="matrices",
    parameters=(
        Number("alpha", 0.9, 0.0, 1.0, "α: what is left of the Grams off the diagonal."),
        Number(
            "ridge", 0.0, 0.0, 1e6, "Added to each Gram's diagonal, as a part of its mean: draws to the mean."
        ),
        RCOND,
    ),
    tensors=LINEAR,
    needs="grams",
)
def regmean(
    matrices: Sequence[Matrix], grams: Sequence[Matrix], alpha: float, ridge: float, rcond: float
) -> tuple[Matrix, dict[str, Any]]:
    """(Σ D_t G̃_t)(Σ G̃_t)⁻¹ (Jin et al. 2023, section 3); where Σ G̃_t is singular, the mean stays.

    Args:
        matrices: T task vectors (out, in) of one Linear weight.
        grams: T means of x xᵀ over the tokens that enter it, (in, in).
        alpha, ridge, rcond: parameters.
    """

    def pairs() -> Iterator[tuple[Matrix, Matrix]]:
        for matrix, gram in zip(matrices, grams, strict=True):
            diagonal = gram.diagonal()
            weight = alpha * gram
            np.fill_diagonal(weight, diagonal + ridge * diagonal.mean())
            yield matrix, weight

    centre = kernel.mean(matrices)
    step, rank = kernel.solve(*kernel.accumulate(pairs(), centre), rcond)
    return centre + step, {"rank": rank}
