"""Running the real code on small arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from confide.merging.statistics import ArrayStatistics, Kind
from confide.merging.stream import merge_arrays

Array = npt.NDArray[Any]
WEIGHT, BIAS = "layer.0.weight", "layer.0.bias"


def flat_merge(base: Array, models: Sequence[Array], operator: str, **parameters: Any) -> Array:
    """Merge models that are one tensor each."""
    return merge_arrays({"w": base}, [{"w": model} for model in models], operator, parameters)["w"]


def merge_vectors(
    vectors: Sequence[Array], operator: str, statistics: Sequence[Array] = (), **parameters: Any
) -> Array:
    """Merge task vectors of one tensor, in float64, from a base of zeros."""
    kind: Kind = "grams" if operator == "regmean" else "fisher"
    return merge_arrays(
        {WEIGHT: np.zeros(vectors[0].shape)},
        [{WEIGHT: np.asarray(vector, float)} for vector in vectors],
        operator,
        parameters,
        statistics=[ArrayStatistics(f"statistics {i}", kind, {WEIGHT: s}) for i, s in enumerate(statistics)],
    )[WEIGHT]


def statistics_for(operator: str, models: Sequence[Mapping[str, Array]], seed: int) -> list[ArrayStatistics]:
    """What the operator needs, drawn at random for each model: full-rank Grams, Fisher diagonals."""
    if operator not in ("regmean", "fisher"):
        return []
    found = []
    for number, model in enumerate(models):
        # Of each model its own, so that its statistics go along when models change places.
        content = abs(int(float(sum(values.sum() for values in model.values())) * 1e6))
        rng = np.random.default_rng([seed, content])
        if operator == "fisher":
            arrays = {name: rng.exponential(size=values.shape) for name, values in model.items()}
            found.append(ArrayStatistics(f"statistics {number}", "fisher", arrays))
        else:
            arrays = {}
            for name, values in model.items():
                if values.ndim == 2:
                    inputs = rng.normal(size=(3 * values.shape[1], values.shape[1]))
                    arrays[name] = inputs.T @ inputs / len(inputs)
            found.append(ArrayStatistics(f"statistics {number}", "grams", arrays))
    return found
