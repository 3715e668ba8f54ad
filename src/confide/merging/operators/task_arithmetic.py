"""Task arithmetic: the base plus a multiple of the sum of all task vectors."""

from __future__ import annotations

import math

import numpy as np

from confide.merging.operators.parameters import PerModel
from confide.merging.operators.specification import Vector, operator


@operator(
    "task-arithmetic",
    about="θ = θ₀ + λ Σ (θ_t − θ₀)",
    paper="Ilharco et al. 2023, Editing models with task arithmetic",
    parameters=(
        PerModel(
            "scale", 0.3, -math.inf, math.inf, "λ: how far to go along each task vector; never divided."
        ),
    ),
)
def task_arithmetic(vectors: Vector, scale: Vector) -> Vector:
    """λ Σ D_t (Ilharco et al. 2023, section 4), or Σ λ_t D_t."""
    merged: Vector
    if (scale == scale[0]).all():
        merged = vectors[0].copy()
        for vector in vectors[1:]:
            merged += vector  # faster than a sum over the first axis
        merged *= scale[0]
    else:
        merged = np.einsum("t,tn->n", scale, vectors)
    return merged
