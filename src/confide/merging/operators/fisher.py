"""Fisher-weighted averaging: each coordinate counts as much as a model's predictions depend on it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from confide.errors import MergeError
from confide.merging.operators.parameters import Number, PerModel, Switch
from confide.merging.operators.specification import Kernel, Rule, Vector, operator
from confide.merging.statistics import Statistics, pieces
from confide.merging.vectors import TaskVectors


def merge(vectors: Vector, fishers: Vector) -> Vector:
    """Σ F_t D_t / Σ F_t; the mean where every F_t is 0.

    Args:
        vectors: (T, n) task vectors.
        fishers: (T, n), not negative.

    Returns:
        (n,)
    """
    total = fishers.sum(axis=0)
    mean = vectors.mean(axis=0)
    # From the mean, so that models that agree are kept exactly.
    weighted = np.einsum("tn,tn->n", fishers, vectors - mean)
    merged: Vector = mean + np.divide(weighted, total, out=np.zeros_like(mean), where=total > 0)
    return merged


@operator(
    "fisher",
    about="θ = Σ w_t F_t θ_t / Σ w_t F_t, coordinate by coordinate",
    paper="Matena and Raffel 2022, Merging models with Fisher-weighted averaging",
    takes="model",
    parameters=(
        PerModel("weights", 1.0, 0.0, math.inf, "w_t: how much each model counts."),
        Number("floor", 1e-6, 0.0, 1.0, "Smallest value of a Fisher diagonal, before it is normalised."),
        Switch("normalise", True, "Divide each model's diagonal by its length over all tensors."),
    ),
    needs="fisher",
)
def fisher(
    vectors: TaskVectors, statistics: Sequence[Statistics], weights: Vector, floor: float, normalise: bool
) -> Rule:
    """Σ w_t F_t D_t / Σ w_t F_t (Matena and Raffel 2022, section 3), with max(F, floor)/‖F‖ for F.

    Raises:
        MergeError: weights that are all 0, or a diagonal that is 0 everywhere and can't be normalised.
    """
    lengths = []
    for each in statistics:
        parts = (piece for name in each.names for piece in pieces(each, name))
        length = math.sqrt(sum(float(np.vdot(part, part)) for part in parts))
        if normalise and length == 0:
            raise MergeError(f"{each.label}: the Fisher diagonal is 0 everywhere, so it can't be normalised")
        lengths.append(length)
    if not weights.any():
        raise MergeError("the weights of operator fisher are all 0")
    factors = weights / np.array(lengths) if normalise else weights

    def kernel(name: str) -> Kernel:
        if name not in statistics[0].names:
            return lambda chunk, start: merge(chunk, np.ones_like(chunk))

        def of_chunk(chunk: Vector, start: int) -> Vector:
            stop = start + chunk.shape[1]
            own = np.stack([each.read(name, start, stop) for each in statistics]).astype(np.float64)
            return merge(chunk, np.maximum(own, floor) * factors[:, None])

        return of_chunk

    return Rule(
        kernel,
        {"lengths": lengths},
        lambda name: None if name in statistics[0].names else "mean: no statistics of it were given",
    )
