"""Weight averaging."""

from __future__ import annotations

from confide.merging.operators.specification import Vector, operator


@operator(
    "average",
    about="θ = (1/T) Σ θ_t",
    paper="Wortsman et al. 2022, Model soups: averaging weights of multiple fine-tuned models",
)
def average(vectors: Vector) -> Vector:
    """(1/T) Σ D_t; added to the base it is (1/T) Σ θ_t, whatever the base is."""
    mean: Vector = vectors[0].copy()
    for vector in vectors[1:]:
        mean += vector  # faster than a sum over the first axis
    mean /= len(vectors)
    return mean
