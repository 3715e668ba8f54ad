"""Exact order statistics of a whole model's magnitudes, without loading or sorting it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from confide.merging.vectors import CHUNK, TaskVectors

_SHIFT = 19
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

    The bits of a float32 that isn't negative sort as its value does: a first pass counts the upper 12 of
    its 31 bits, a second one the lower 19 of those that share the upper ones. Memory is two tables a model.

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
    prefixes, below = _locate(high, np.full(vectors.count, k))
    low = np.zeros((vectors.count, _LOW), np.int64)
    for name in names:
        for _, chunk in vectors.chunks(name):
            for counts, entries, prefix in zip(low, chunk, prefixes, strict=True):
                bits = magnitudes(entries, scratch).view(np.uint32)
                found = bits[bits >> np.uint32(_SHIFT) == prefix] & np.uint32(_LOW - 1)
                np.add.at(counts, found, 1)
    suffixes, below_within = _locate(low, k - below)
    total = sum(vectors.size(name) for name in names)
    values = ((prefixes << _SHIFT) | suffixes).astype(np.uint32).view(np.float32)
    equal = np.take_along_axis(low, suffixes[:, None], axis=1)[:, 0]
    above = total - below - below_within - equal
    return [
        OrderStatistic(float(value), int(same), int(more))
        for value, same, more in zip(values, equal, above, strict=True)
    ]


def _locate(
    counts: npt.NDArray[np.int64], ranks: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each row, the bin that holds the element of that rank, and how many lie in the bins before it."""
    reached = counts.cumsum(axis=1)
    bins = (reached < ranks[:, None]).sum(axis=1)
    before = np.take_along_axis(reached - counts, bins[:, None], axis=1)[:, 0]
    return bins, before
