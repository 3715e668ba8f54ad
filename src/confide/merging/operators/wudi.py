"""WUDI: the layer that interferes least with every task vector, taken as a stand-in for the inputs.

Published as a loop over the tasks at each step. The loss is quadratic, so two sums of Grams hold all of it: a
step is one matrix product however many models there are, along the same path.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from confide.merging import grams
from confide.merging.operators.actmat import RCOND
from confide.merging.operators.parameters import Choice, Number
from confide.merging.operators.specification import LINEAR, Matrix, operator

_BETAS, _EPSILON = (0.9, 0.999), 1e-8


@operator(
    "wudi",
    about="θ = θ₀ + λ·W, W from Σ D_t by Adam on Σ ‖(W − D_t) D_tᵀ‖² / ‖D_t‖², for each matrix",
    paper="Cheng et al. 2025, Whoever started the interference should end it",
    takes="matrices",
    parameters=(
        Number("scale", 1.0, -math.inf, math.inf, "λ: how far to go along the merged task vector."),
        Choice(
            "solver", "adam", ("adam", "closed"), "The published iterations, or the minimum that they go to."
        ),
        Number("learning_rate", 1e-5, 0.0, 1.0, "Adam's; 2e-5 for RoBERTa in the paper."),
        Number("iterations", 300, 1, 1e6, "Of Adam.", whole=True),
        RCOND,
    ),
    tensors=LINEAR,
    others="base",
)
def wudi(
    matrices: Sequence[Matrix], scale: float, solver: str, learning_rate: float, iterations: int, rcond: float
) -> tuple[Matrix, dict[str, Any]]:
    """λ·W for one matrix (Cheng et al. 2025); a zero task vector has no say.

    With A = Σ C_t/‖D_t‖² and B = Σ D_t C_t/‖D_t‖², C_t = D_tᵀD_t, the gradient is 2(WA − B). The minimum is
    BA⁺: ACTMat with each model weighted by 1/‖D_t‖².
    """

    def pairs() -> Iterator[tuple[Matrix, Matrix]]:
        for matrix in matrices:
            square = float(np.vdot(matrix, matrix))
            if square:
                yield matrix, grams.gram(matrix) / square

    if solver == "closed":
        centre = grams.mean(matrices)
        step, rank = grams.solve(*grams.accumulate(pairs(), centre), rcond)
        return scale * (centre + step), {"rank": rank}
    centre = grams.total(matrices)
    residual, weight = grams.accumulate(pairs(), centre)
    return scale * (centre + descend(residual, weight, learning_rate, iterations)), {}


def descend(residual: Matrix, weight: Matrix, learning_rate: float, iterations: int) -> Matrix:
    """Adam from 0 on the loss whose gradient at U is 2(U·weight − residual), (out, in) float64.

    Products and moments are float32, as in the published code; the sums they start from are float64.
    """
    first, second = _BETAS
    twice, target = (2 * weight).astype(np.float32), (2 * residual).astype(np.float32)
    step, gradient, mean, square, scratch = np.zeros((5, *residual.shape), np.float32)
    for count in range(1, iterations + 1):
        np.matmul(step, twice, out=gradient)
        gradient -= target
        mean *= first
        mean += np.multiply(gradient, 1 - first, out=scratch)
        np.multiply(gradient, gradient, out=gradient)
        square *= second
        square += np.multiply(gradient, 1 - second, out=gradient)
        np.sqrt(square, out=scratch)
        scratch /= math.sqrt(1 - second**count)
        scratch += _EPSILON
        np.divide(mean, scratch, out=scratch)
        step -= np.multiply(scratch, learning_rate / (1 - first**count), out=scratch)
    wide: Matrix = step.astype(np.float64)
    return wide
