"""Exact order statistics of a whole model's magnitudes, without loading or sorting it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from confide.merging.vectors import CHUNK, TaskVectors

_SHIFT = 18
_HIGH = 1 << (31 - _SHIFT)
_LOW = 1 << _SHIFT


@dataclass(frozen=True)
class OrderStatistic:
    """The k-th smallest magnitude of one task vector, and how many lie where.

    Attributes:
        value: in float32.
        equal: how many magnitudes equal it.
        above: how many exceed it.
    """

    value: float
    equal: int
    above: int


def magnitudes(entries: npt.NDArray[Any], out: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """|D| rounded to float32, in which magnitudes are compared; rounding never swaps two of them.

    Args:
        entries: (n,) of a task vector.
        out: (≥ n,) is written over.

    Returns:
        (n,) view of `out`.
    """
    out = out[: entries.size]
    with np.errstate(over="ignore"):
        np.copyto(out, entries, casting="same_kind")
    return np.abs(out, out=out)


def order_statistics(vectors: TaskVectors, names: Sequence[str], k: int) -> list[OrderStatistic]:
    """The k-th smallest magnitude of each task vector over some tensors, exactly.

    The bits of a float32 that isn't negative sort as its value does: a first pass counts the upper 13 of
    its 31 bits, a second one the lower 18 of those that share the upper ones. Memory is two tables a model.

    Args:
        vectors: T task vectors.
        names: tensors to look at; together they have at least k coordinates.
        k: 1 for the smallest.
    """
    scratch = np.empty(CHUNK, np.float32)
    high = np.zeros((vectors.count, _HIGH), np.int64)
    for name in names:
        for _, chunk in vectors.chunks(name):
            for counts, entries in zip(high, chunk, strict=True):
                bits = magnitudes(entries, scratch).view(np.uint32)
                bits >>= np.uint32(_SHIFT)
                counts += np.bincount(bits, minlength=_HIGH)
    places = [_locate(counts, k) for counts in high]
    low = np.zeros((vectors.count, _LOW), np.int64)
    for name in names:
        for _, chunk in vectors.chunks(name):
            for counts, entries, (prefix, _) in zip(low, chunk, places, strict=True):
                bits = magnitudes(entries, scratch).view(np.uint32)
                found = bits[bits >> np.uint32(_SHIFT) == prefix] & np.uint32(_LOW - 1)
                np.add.at(counts, found, 1)
    total = sum(vectors.size(name) for name in names)
    statistics = []
    for counts, (prefix, below) in zip(low, places, strict=True):
        suffix, below_within = _locate(counts, k - below)
        value = np.uint32(prefix << _SHIFT | suffix).view(np.float32)
        equal = int(counts[suffix])
        statistics.append(OrderStatistic(float(value), equal, total - below - below_within - equal))
    return statistics


def _locate(counts: npt.NDArray[np.int64], rank: int) -> tuple[int, int]:
    """The bin that holds the element of that rank, and how many lie in the bins before it."""
    reached = counts.cumsum()
    place = int(np.searchsorted(reached, rank))
    return place, int(reached[place] - counts[place])
