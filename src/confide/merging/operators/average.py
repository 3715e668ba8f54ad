"""Weight averaging."""

from __future__ import annotations

from collections.abc import Mapping

from confide.merging.operators.specification import Operator, Rule, Vector
from confide.merging.vectors import TaskVectors


def merge(vectors: Vector) -> Vector:
    """(1/T) Σ D_t; added to the base it is (1/T) Σ θ_t, whatever the base is.

    Args:
        vectors: (T, n) task vectors.

    Returns:
        (n,)
    """
    mean: Vector = vectors.mean(axis=0)
    return mean


def _prepare(vectors: TaskVectors, settings: Mapping[str, float]) -> Rule:
    return Rule(merge)


AVERAGE = Operator(
    name="average",
    about="θ = (1/T) Σ θ_t",
    paper="Wortsman et al. 2022, Model soups: averaging weights of multiple fine-tuned models",
    needs_base=False,
    parameters=(),
    prepare=_prepare,
)
