"""Exact order statistics of a whole model's coordinates, without loading or sorting it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from confide.merging.vectors import CHUNK, TaskVectors

_SHIFT = 18
_LOW = 1 << _SHIFT
_SIGN = np.uint32(1 << 31)

Bits = npt.NDArray[np.uint32]
Values = Callable[[], Iterable[Iterable[npt.NDArray[Any]]]]
"""Goes over the coordinates: chunks, each of T arrays (n,), n at most `CHUNK`."""


@dataclass(frozen=True)
class OrderStatistic:
    """The k-th smallest value of one model, and how many lie where.

    Attributes:
        value: in float32.
        equal: how many values equal it.
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
    single = _round(entries, out)
    return np.abs(single, out=single)


def order_statistics(
    vectors: TaskVectors, names: Sequence[str], ranks: Sequence[Sequence[int]]
) -> list[list[OrderStatistic]]:
    """The k-th smallest magnitudes of each task vector over some tensors, exactly.

    Args:
        vectors: T task vectors.
        names: tensors to look at.
        ranks: for each model its k, 1 for the smallest; at most as many as there are coordinates.
    """

    def values() -> Iterator[npt.NDArray[np.float64]]:
        for name in names:
            for _, chunk in vectors.chunks(name):
                yield chunk

    def bits(entries: npt.NDArray[Any], out: npt.NDArray[np.float32]) -> Bits:
        return magnitudes(entries, out).view(np.uint32)

    return _select(values, ranks, bits, 31)


def signed_order_statistics(values: Values, ranks: Sequence[Sequence[int]]) -> list[list[OrderStatistic]]:
    """The k-th smallest values of each model, exactly, in float32; −0 is smaller than 0.

    Args:
        values: gone over twice.
        ranks: for each model its k, 1 for the smallest.
    """
    return _select(values, ranks, _signed_bits, 32)


def _select(
    values: Values,
    ranks: Sequence[Sequence[int]],
    key: Callable[[npt.NDArray[Any], npt.NDArray[np.float32]], Bits],
    width: int,
) -> list[list[OrderStatistic]]:
    """A first pass counts the upper bits of each value's key, a second one the lower 18 of those that share
    the upper ones with a statistic. Memory is a table a statistic."""
    if not any(ranks):
        return [[] for _ in ranks]
    scratch = np.empty(CHUNK, np.float32)
    high = np.zeros((len(ranks), 1 << (width - _SHIFT)), np.int64)
    for chunk in values():
        for counts, entries in zip(high, chunk, strict=True):
            bits = key(entries, scratch)
            bits >>= np.uint32(_SHIFT)
            counts += np.bincount(bits, minlength=counts.size)
    places = [[_locate(counts, k) for k in own] for counts, own in zip(high, ranks, strict=True)]
    low = [{prefix: np.zeros(_LOW, np.int64) for prefix, _ in own} for own in places]
    for chunk in values():
        for tables, entries in zip(low, chunk, strict=True):
            bits = key(entries, scratch)
            prefixes = bits >> np.uint32(_SHIFT)
            for prefix, counts in tables.items():
                np.add.at(counts, bits[prefixes == prefix] & np.uint32(_LOW - 1), 1)
    statistics = []
    for counts, own, found, tables in zip(high, ranks, places, low, strict=True):
        size = int(counts.sum())
        line = []
        for k, (prefix, below) in zip(own, found, strict=True):
            suffix, below_within = _locate(tables[prefix], k - below)
            equal = int(tables[prefix][suffix])
            value = _value(np.uint32(prefix << _SHIFT | suffix), width)
            line.append(OrderStatistic(value, equal, size - below - below_within - equal))
        statistics.append(line)
    return statistics


def _round(entries: npt.NDArray[Any], out: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    out = out[: entries.size]
    with np.errstate(over="ignore"):
        np.copyto(out, entries, casting="same_kind")
    return out


def _signed_bits(entries: npt.NDArray[Any], out: npt.NDArray[np.float32]) -> Bits:
    """Bits that sort as the values do: all of a negative float32 are turned over, else its sign alone."""
    bits = _round(entries, out).view(np.uint32)
    turned = (bits.view(np.int32) >> 31).view(np.uint32)
    turned |= _SIGN
    bits ^= turned
    return bits


def _value(bits: np.uint32, width: int) -> float:
    if width == 32:
        bits = bits ^ _SIGN if bits & _SIGN else ~bits
    return float(bits.view(np.float32))


def _locate(counts: npt.NDArray[np.int64], rank: int) -> tuple[int, int]:
    """The bin that holds the element of that rank, and how many lie in the bins before it."""
    reached = counts.cumsum()
    place = int(np.searchsorted(reached, rank))
    return place, int(reached[place] - counts[place])
