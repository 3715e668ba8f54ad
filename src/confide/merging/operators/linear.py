"""A weighted combination of task vectors."""

from __future__ import annotations

import math

import numpy as np

from confide.errors import MergeError
from confide.merging.operators.parameters import PerModel, Switch
from confide.merging.operators.specification import Vector, operator

_SMALLEST_SUM = 1e-8


@operator(
    "linear",
    about="θ = θ₀ + Σ w_t (θ_t − θ₀) / Σ w_t",
    paper="Wortsman et al. 2022, Model soups; the weighted form as in Matena and Raffel 2022, section 2",
    parameters=(
        PerModel("weights", 1.0, -math.inf, math.inf, "How much each model counts."),
        Switch("normalise", True, "Divide the weights by their sum; without, θ = θ₀ + Σ w_t (θ_t − θ₀)."),
    ),
)
def linear(vectors: Vector, weights: Vector, normalise: bool) -> Vector:
    """Σ w_t D_t, over Σ w_t if normalised: then one model is itself, whatever its weight.

    Raises:
        MergeError: normalised weights that sum to zero.
    """
    total = float(weights.sum())
    if normalise and abs(total) < _SMALLEST_SUM:
        raise MergeError(f"the weights {weights.tolist()} of operator linear sum to {total:g}")
    merged: Vector = np.einsum("t,tn->n", weights / total if normalise else weights, vectors)
    return merged
