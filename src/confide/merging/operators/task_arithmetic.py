"""Task arithmetic: the base plus a multiple of the sum of all task vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping

from confide.merging.operators.specification import Operator, Parameter, Rule, Vector
from confide.merging.vectors import TaskVectors


def merge(vectors: Vector, scale: float) -> Vector:
    """λ Σ D_t (Ilharco et al. 2023, section 4).

    Args:
        vectors: (T, n) task vectors.
        scale: λ; not divided by T.

    Returns:
        (n,)
    """
    total: Vector = vectors.sum(axis=0)
    total *= scale
    return total


def _prepare(vectors: TaskVectors, settings: Mapping[str, float]) -> Rule:
    return Rule(lambda chunk: merge(chunk, settings["scale"]))


TASK_ARITHMETIC = Operator(
    name="task-arithmetic",
    about="θ = θ₀ + λ Σ (θ_t − θ₀)",
    paper="Ilharco et al. 2023, Editing models with task arithmetic",
    needs_base=True,
    parameters=(
        Parameter("scale", "λ", 0.3, -math.inf, math.inf, "How far to go along the sum of the task vectors."),
    ),
    prepare=_prepare,
)
