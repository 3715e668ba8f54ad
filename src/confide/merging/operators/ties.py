"""TIES: trim small changes, elect a sign for each coordinate, average those that agree.

The trim is global: one threshold per model over all of its coordinates, as in the paper. Only tensors that
some model changed are counted: where a fifth of the model was trained, a threshold over all coordinates would
be 0 and trim nothing. `per-tensor` is what mergekit does: a threshold for each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from confide.errors import MergeError
from confide.merging.operators.parameters import Choice, Number, PerModel
from confide.merging.operators.specification import Kernel, Rule, Vector, operator
from confide.merging.selection import OrderStatistic, magnitudes, order_statistics
from confide.merging.vectors import TaskVectors

_KEEP_NOTHING = math.inf
_SMALLEST_MASS = 1e-8

Thresholds = Mapping[str, Sequence[float]]
"""Tensor → T magnitudes in float32; entries below are trimmed, equal ones are kept."""


class Scratch:
    """Arrays that a kernel writes over at each chunk: fresh ones cost more than the arithmetic."""

    def __init__(self, size: int) -> None:
        self.total, self.spread, self.merged, self.entries = np.empty((4, size))
        self.magnitude = np.empty(size, np.float32)
        self.votes, self.positive = np.empty((2, size), np.uint16)
        self.mass, self.positive_mass = np.empty((2, size))
        self.flag, self.keep = np.empty((2, size), bool)

    def of(self, size: int) -> Scratch:
        """The first part of every array."""
        part = copy(self)
        for name, array in vars(self).items():
            setattr(part, name, array[:size])
        return part


def disjoint_merge(
    vectors: Vector,
    thresholds: Sequence[float],
    majority: int,
    scale: float,
    scratch: Scratch | None = None,
    weights: Vector | None = None,
    mean: bool = True,
) -> Vector:
    """λ times the mean of the trimmed entries that have the elected sign (Yadav et al. 2023, algorithm 1).

    Args:
        vectors: (T, n) task vectors.
        thresholds: T magnitudes in float32; entries below are trimmed, equal ones are kept.
        majority: −1, 0 or 1; the sign where the trimmed entries cancel exactly.
        scale: λ.
        scratch: for at least n; the answer lies in it until the next call.
        weights: T factors of the entries, in the election too; the mean is over their sum. None for 1.
        mean: of the entries that agree; otherwise their sum.

    Returns:
        (n,); 0 where every entry is trimmed, or where they cancel and the majority is 0.
    """
    sums = _trim(vectors, thresholds, weights, scratch or Scratch(vectors.shape[1]), mean)
    merged, flag = sums.merged, sums.flag
    np.copysign(sums.spread, sums.total, out=merged)
    cancelled = _cancelled(sums)
    merged[cancelled] *= majority
    positive = np.greater(merged, 0, out=flag)
    # What agrees with the sign of Σ D̂ adds up to (Σ|D̂| + |Σ D̂|)/2.
    merged += sums.total
    merged *= scale / 2
    if mean and weights is None:
        sums.votes -= sums.positive
        sums.positive *= positive
        sums.votes *= ~positive
        sums.votes += sums.positive
        merged /= np.maximum(sums.votes, 1, out=sums.votes)
    elif mean:
        mass = np.where(positive, sums.positive_mass, sums.mass - sums.positive_mass)
        np.copyto(mass, 1, where=np.abs(mass) < _SMALLEST_MASS)
        merged /= mass
    return merged


def elect_majority(
    vectors: TaskVectors, thresholds: Thresholds, weights: Vector | None = None
) -> tuple[int, int]:
    """The sign that most coordinates elect, and how many cancel exactly so that they need it.

    Returns:
        majority: sign of Σ sign(Σ_t D̂_t) over all coordinates.
        cancelled: coordinates with entries left whose sum is exactly 0.
    """
    scratch = Scratch(vectors.chunk)
    balance = cancelled = 0
    for name in vectors.changed:
        for _, chunk in vectors.chunks(name):
            sums = _trim(chunk, thresholds[name], weights, scratch, False)
            positive = int(np.count_nonzero(np.greater(sums.total, 0, out=sums.flag)))
            negative = int(np.count_nonzero(np.less(sums.total, 0, out=sums.flag)))
            balance += positive - negative
            cancelled += _cancelled(sums).size
    return int(np.sign(balance)), cancelled


def _cancelled(sums: Scratch) -> npt.NDArray[np.int64]:
    """Coordinates with entries left whose sum is exactly 0."""
    zero = np.equal(sums.total, 0, out=sums.flag)
    zero &= np.greater(sums.spread, 0, out=sums.keep)
    return np.flatnonzero(zero)


def _trim(
    vectors: Vector, thresholds: Sequence[float], weights: Vector | None, scratch: Scratch, counted: bool
) -> Scratch:
    """Sums over the trimmed and weighted entries of each coordinate.

    Returns:
        total: Σ D̂.
        spread: Σ |D̂|.
        votes, positive: if counted and without weights, how many entries are kept, and are above 0.
        mass, positive_mass: if counted and with weights, the same, each counting as its weight.
    """
    sums = scratch.of(vectors.shape[1])
    entries, keep = sums.entries, sums.keep
    counts = (sums.votes, sums.positive) if weights is None else (sums.mass, sums.positive_mass)
    for array in (sums.total, sums.spread, *(counts if counted else ())):
        array[...] = 0
    for number, (own, threshold) in enumerate(zip(vectors, thresholds, strict=True)):
        if np.float32(threshold) > 0:
            np.greater_equal(magnitudes(own, sums.magnitude), np.float32(threshold), out=keep)
        else:
            np.not_equal(own, 0, out=keep)
        np.copyto(entries, keep)
        entries *= own
        if weights is not None:
            entries *= weights[number]
        sums.total += entries
        if counted:
            for count, which in zip(counts, (keep, np.greater(entries, 0, out=sums.flag)), strict=True):
                count += which if weights is None else which * weights[number]
        sums.spread += np.abs(entries, out=entries)
    return sums


@operator(
    "ties",
    about="θ = θ₀ + λ · mean of the trimmed task vectors' entries that have the elected sign",
    paper="Yadav et al. 2023, TIES-Merging: resolving interference when merging models",
    takes="model",
    parameters=(
        PerModel("density", 0.2, 0.0, 1.0, "Part of each task vector's coordinates that is kept."),
        Number("scale", 1.0, -math.inf, math.inf, "λ: how far to go along the merged task vector."),
        Choice(
            "trim", "global", ("global", "per-tensor"), "One threshold per model, or one for each tensor."
        ),
        Choice("merge", "mean", ("mean", "sum"), "What becomes of the entries that agree."),
        PerModel("weights", 1.0, -math.inf, math.inf, "Factors of the trimmed entries, before the election."),
        Choice("zero_sum", "majority", ("majority", "plus"), "The sign elected where the entries cancel."),
        Choice(
            "equal",
            "all",
            ("all", "first"),
            "Which of the entries that equal a tensor's own threshold are kept.",
        ),
    ),
)
def ties(
    vectors: TaskVectors,
    density: Vector,
    scale: float,
    trim: str,
    merge: str,
    weights: Vector,
    zero_sum: str,
    equal: str,
) -> Rule:
    """Look up the thresholds of all models and the sign that most coordinates elect."""
    factors = None if (weights == 1).all() else weights
    trained = sum(vectors.size(name) for name in vectors.changed)
    if trim == "global":
        if equal == "first":
            raise MergeError("equal 'first' of operator ties needs trim 'per-tensor'")
        own, kept, _ = _thresholds(vectors, vectors.changed, density, 0)
        thresholds: Thresholds = dict.fromkeys(vectors.changed, own)
    else:
        found = {name: _thresholds(vectors, [name], density, 1) for name in vectors.changed}
        thresholds = {name: own for name, (own, _, _) in found.items()}
        kept = [sum(counts) for counts in zip(*(counts for _, counts, _ in found.values()), strict=True)]
    majority, cancelled = 1, 0
    if zero_sum == "majority":
        alone = vectors.count == 1
        majority, cancelled = (0, 0) if alone else elect_majority(vectors, thresholds, factors)
    facts: dict[str, Any] = {
        "coordinates": sum(vectors.size(name) for name in vectors.names),
        "trained": trained,
        "kept": kept,
        "effective_density": [count / trained if trained else 0.0 for count in kept],
        "majority_sign": majority,
        "cancelled": cancelled,
    }
    if trim == "global":
        facts["thresholds"] = [value if math.isfinite(value) else None for value in own]
    scratch = Scratch(vectors.chunk)

    def of_tensor(name: str) -> Kernel:
        left = list(found[name][2]) if equal == "first" else []

        def kernel(chunk: Vector, start: int) -> Vector:
            if left:
                chunk = _first_equal(chunk, thresholds[name], left)
            return disjoint_merge(chunk, thresholds[name], majority, scale, scratch, factors, merge == "mean")

        return kernel

    return Rule(of_tensor, facts)


def _first_equal(vectors: Vector, thresholds: Sequence[float], left: list[int]) -> Vector:
    """The task vectors, without the entries that equal a threshold and come after the first `left` of them.

    Args:
        left: how many may still come, by model; what is used here is taken off.
    """
    scratch = np.empty(vectors.shape[1], np.float32)
    rest = vectors
    for number, (entries, threshold) in enumerate(zip(vectors, thresholds, strict=True)):
        places = np.flatnonzero(magnitudes(entries, scratch) == np.float32(threshold))
        if len(places) > left[number]:
            rest = vectors.copy() if rest is vectors else rest
            rest[number, places[left[number] :]] = 0
        left[number] = max(0, left[number] - len(places))
    return rest


def _thresholds(
    vectors: TaskVectors, names: Sequence[str], density: Vector, more: int
) -> tuple[list[float], list[int], list[int]]:
    """Each model's threshold over some tensors, how many entries it keeps, and room for how many equal ones.

    The k-th smallest magnitude, k = d − int(d·density) + more. The paper keeps it besides the int(d·density)
    larger ones (more = 0); mergekit doesn't, and keeps one entry at least (more = 1). Room: where not all
    entries that equal the threshold are kept, but exactly as many as the density says.
    """
    size = sum(vectors.size(name) for name in names)
    wanted = [max(more, int(size * each)) for each in density]
    ranks = [size - count + more for count in wanted]
    inside = [[k] if 1 <= k <= size and part > 0 else [] for k, part in zip(ranks, density, strict=True)]
    thresholds, kept, room = [], [], []
    everything = OrderStatistic(0.0, size, 0)
    statistics = order_statistics(vectors, names, inside)
    for k, own, part, most in zip(ranks, statistics, density, wanted, strict=True):
        found = own[0] if own else everything
        nothing = part == 0 or k > size
        thresholds.append(_KEEP_NOTHING if nothing else found.value)
        count = found.above + (found.equal if found.value > 0 or not own else 0)
        kept.append(0 if nothing else count)
        room.append(max(0, most - found.above))
    return thresholds, kept, room
