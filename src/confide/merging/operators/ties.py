"""TIES: trim small changes, elect a sign for each coordinate, average those that agree.

The trim is global: one threshold per model over all of its coordinates, as in the paper (mergekit trims each
tensor by itself). Only tensors that some model changed are counted: where a fifth of the model was trained, a
threshold over all coordinates would be 0 and trim nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from confide.merging.operators.specification import Operator, Parameter, Rule, Vector
from confide.merging.selection import magnitudes, order_statistics
from confide.merging.vectors import CHUNK, TaskVectors

_KEEP_NOTHING = math.inf


class Scratch:
    """Arrays that a kernel writes over at each chunk: fresh ones cost more than the arithmetic."""

    def __init__(self, count: int, size: int) -> None:
        self.kept = np.empty((count, size))
        self.total, self.elected, self.merged, self.agreeing = np.empty((4, size))
        self.magnitude = np.empty(size, np.float32)
        self.votes = np.empty(size, np.uint16)
        self.flag, self.zero = np.empty((2, size), bool)


def merge(
    vectors: Vector,
    thresholds: Sequence[float],
    majority: int,
    scale: float,
    scratch: Scratch | None = None,
) -> Vector:
    """λ times the mean of the trimmed entries that have the elected sign (Yadav et al. 2023, algorithm 1).

    Args:
        vectors: (T, n) task vectors.
        thresholds: T magnitudes in float32; entries below are trimmed, equal ones are kept.
        majority: −1, 0 or 1; the sign where the trimmed entries cancel exactly.
        scale: λ.
        scratch: for at least T and n; the answer lies in it until the next call.

    Returns:
        (n,); 0 where every entry is trimmed, or where they cancel and the majority is 0.
    """
    size = vectors.shape[1]
    scratch = scratch or Scratch(*vectors.shape)
    kept, total = _trim(vectors, thresholds, scratch)
    elected, merged, agreeing = scratch.elected[:size], scratch.merged[:size], scratch.agreeing[:size]
    votes, agrees = scratch.votes[:size], scratch.flag[:size]
    np.sign(total, out=elected)
    if majority:
        np.equal(total, 0, out=agrees)
        np.copyto(elected, majority, where=agrees)
    merged[...] = 0
    votes[...] = 0
    for entries in kept:
        # Times the elected sign, what agrees is positive and the rest is not.
        np.multiply(entries, elected, out=agreeing)
        np.greater(agreeing, 0, out=agrees)
        votes += agrees
        np.maximum(agreeing, 0, out=agreeing)
        merged += agreeing
    np.maximum(votes, 1, out=votes)
    elected *= scale
    merged *= elected
    merged /= votes
    return merged


def elect_majority(vectors: TaskVectors, thresholds: Sequence[float]) -> tuple[int, int]:
    """The sign that most coordinates elect, and how many cancel exactly so that they need it.

    Returns:
        majority: sign of Σ sign(Σ_t D̂_t) over all coordinates.
        cancelled: coordinates with entries left whose sum is exactly 0.
    """
    scratch = Scratch(vectors.count, CHUNK)
    balance = cancelled = 0
    for name in vectors.changed:
        for _, chunk in vectors.chunks(name):
            kept, total = _trim(chunk, thresholds, scratch)
            flag, zero = scratch.flag[: total.size], scratch.zero[: total.size]
            positive = int(np.count_nonzero(np.greater(total, 0, out=flag)))
            empty = int(np.count_nonzero(np.equal(total, 0, out=zero)))
            balance += 2 * positive + empty - total.size
            for entries in kept if empty else ():
                zero &= np.equal(entries, 0, out=flag)
            cancelled += empty - int(np.count_nonzero(zero))
    return int(np.sign(balance)), cancelled


def _trim(vectors: Vector, thresholds: Sequence[float], scratch: Scratch) -> tuple[Vector, Vector]:
    """(T, n) entries that are kept, 0 elsewhere, and (n,) their sum; both lie in `scratch`."""
    size = vectors.shape[1]
    kept, total, keep = scratch.kept[:, :size], scratch.total[:size], scratch.flag[:size]
    total[...] = 0
    for entries, out, threshold in zip(vectors, kept, thresholds, strict=True):
        np.greater_equal(magnitudes(entries, scratch.magnitude), np.float32(threshold), out=keep)
        np.multiply(entries, keep, out=out)
        total += out
    return kept, total


def _prepare(vectors: TaskVectors, settings: Mapping[str, float]) -> Rule:
    density, scale = settings["density"], settings["scale"]
    trained = sum(vectors.size(name) for name in vectors.changed)
    trimmed_to = trained - int(trained * density)
    kept = [trained] * vectors.count
    thresholds = [0.0] * vectors.count
    if density == 0:
        kept, thresholds = [0] * vectors.count, [_KEEP_NOTHING] * vectors.count
    elif trimmed_to > 0:
        statistics = order_statistics(vectors, vectors.changed, trimmed_to)
        thresholds = [statistic.value for statistic in statistics]
        kept = [s.above + s.equal if s.value > 0 else s.above for s in statistics]
    majority, cancelled = elect_majority(vectors, thresholds) if vectors.count > 1 else (0, 0)
    facts = {
        "coordinates": sum(vectors.size(name) for name in vectors.names),
        "trained": trained,
        "kept": kept,
        "effective_density": [count / trained if trained else 0.0 for count in kept],
        "thresholds": [value if math.isfinite(value) else None for value in thresholds],
        "majority_sign": majority,
        "cancelled": cancelled,
    }
    scratch = Scratch(vectors.count, CHUNK)
    return Rule(lambda chunk: merge(chunk, thresholds, majority, scale, scratch), facts)


TIES = Operator(
    name="ties",
    about="θ = θ₀ + λ · mean of the trimmed task vectors' entries that have the elected sign",
    paper="Yadav et al. 2023, TIES-Merging: resolving interference when merging models",
    needs_base=True,
    parameters=(
        Parameter("density", "k", 0.2, 0.0, 1.0, "Part of each task vector's coordinates that is kept."),
        Parameter("scale", "λ", 1.0, -math.inf, math.inf, "How far to go along the merged task vector."),
    ),
    prepare=_prepare,
)
