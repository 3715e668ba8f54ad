"""Exact order statistics of a whole model's coordinates, without loading or sorting it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from confide.merging.vectors import CHUNK, TaskVectors

_SHIFT = 18
_LOW = 1 << _SHIFT
_SIGN = np.uint32(1 << 31)

_SAMPLE = 1 << 20
_BLOCK = 1 << 12
_RARE = 8
"""A sample is worth its while where it is at most one coordinate in so many."""
_MARGIN = 6
"""Standard deviations of a sample's ranks, if its coordinates were drawn one by one."""

Array = npt.NDArray[Any]
Bits = npt.NDArray[np.uint32]
Counts = npt.NDArray[np.int64]
Values = Callable[[], Iterable[Iterable[Array]]]
"""Goes over the coordinates: chunks, each of T arrays (n,)."""


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

    size = sum(vectors.size(name) for name in names)
    # Small chunks say that memory is short, and tables take less than a sample.
    roomy = vectors.chunk == CHUNK and size > _SAMPLE * _RARE
    if roomy and (brackets := _brackets(vectors, names, ranks, size)):
        found = [
            [_within(bracket, k, size) for bracket, k in zip(line, own, strict=True)]
            for line, own in zip(_count(vectors, names, brackets), ranks, strict=True)
        ]
        if all(statistic is not None for line in found for statistic in line):
            return [[statistic for statistic in line if statistic is not None] for line in found]

    def values() -> Iterator[Array]:
        for name in names:
            for _, chunk in vectors.chunks(name, np.float32):
                yield chunk

    return _select(values, ranks, _magnitude_bits, 31)


@dataclass
class _Bracket:
    """Magnitudes between which a sample puts a statistic, and what lies there.

    Attributes:
        low: the smallest one's bits in float32.
        counts: how often it and each next one occur.
        below: how many are smaller.
    """

    low: int
    counts: Counts
    below: int = 0


def _brackets(
    vectors: TaskVectors, names: Sequence[str], ranks: Sequence[Sequence[int]], size: int
) -> list[list[_Bracket]] | None:
    """Where the statistics of blocks, which lie evenly over all coordinates, put those of all.

    They only save a pass: what is found is exact, and what lies outside is looked for in another way.

    Returns:
        One for each statistic; None where they are too wide to help.
    """
    sample = np.concatenate(list(_blocks(vectors, names, size)), axis=1)
    count = sample.shape[1]
    brackets: list[list[_Bracket]] = []
    for own, bits in zip(ranks, sample, strict=True):
        brackets.append([])
        for k in own:
            share = k / size
            margin = _MARGIN * math.sqrt(count * share * (1 - share))
            first, last = math.floor(share * count - margin), math.ceil(share * count + margin)
            if first < 0 or last >= count:
                return None
            low, high = (int(bound) for bound in np.partition(bits, (first, last))[[first, last]])
            if high - low >= _LOW:
                return None
            brackets[-1].append(_Bracket(low, np.zeros(high + 1 - low, np.int64)))
    return brackets


def _blocks(vectors: TaskVectors, names: Sequence[str], size: int) -> Iterator[Bits]:
    """(T, n) bits of magnitudes of short runs of coordinates, some in every tensor that isn't small."""
    step = size * _BLOCK // _SAMPLE
    place = 0
    for name in names:
        end = place + vectors.size(name)
        for start in range(-place % step, vectors.size(name), step):
            stop = min(start + _BLOCK, vectors.size(name))
            yield _magnitude_bits(vectors.piece(name, start, stop, np.float32)[1]).copy()
        place = end


def _count(
    vectors: TaskVectors, names: Sequence[str], brackets: list[list[_Bracket]]
) -> list[list[_Bracket]]:
    """Fill the brackets, in one pass."""
    for name in names:
        for _, chunk in vectors.chunks(name, np.float32):
            for entries, own in zip(chunk, brackets, strict=True):
                bits = _magnitude_bits(entries)
                for each in own:
                    each.below += int(np.count_nonzero(bits < np.uint32(each.low)))
                    places = bits - np.uint32(each.low)  # what lies below becomes huge
                    np.add.at(each.counts, places.compress(places < np.uint32(each.counts.size)), 1)
    return brackets


def _within(bracket: _Bracket, k: int, size: int) -> OrderStatistic | None:
    """The k-th smallest; None if it isn't there."""
    if not bracket.below < k <= bracket.below + int(bracket.counts.sum()):
        return None
    place, before = _locate(bracket.counts, k - bracket.below)
    equal = int(bracket.counts[place])
    value = _value(np.uint32(bracket.low + place), 31)
    return OrderStatistic(value, equal, size - bracket.below - before - equal)


def signed_order_statistics(values: Values, ranks: Sequence[Sequence[int]]) -> list[list[OrderStatistic]]:
    """The k-th smallest values of each model, exactly, in float32; −0 is smaller than 0.

    Args:
        values: gone over twice.
        ranks: for each model its k, 1 for the smallest.
    """
    return _select(values, ranks, _signed_bits, 32)


def _select(
    values: Values, ranks: Sequence[Sequence[int]], key: Callable[[Array], Bits], width: int
) -> list[list[OrderStatistic]]:
    """A first pass counts the upper bits of each value's key, a second one the lower 18 of those that share
    the upper ones with a statistic. Memory is a table a statistic."""
    if not any(ranks):
        return [[] for _ in ranks]
    high = np.zeros((len(ranks), 1 << (width - _SHIFT)), np.int64)
    for chunk in values():
        for counts, entries in zip(high, chunk, strict=True):
            counts += np.bincount(key(entries) >> np.uint32(_SHIFT), minlength=counts.size)
    places = [[_locate(counts, k) for k in own] for counts, own in zip(high, ranks, strict=True)]
    low = [{prefix: np.zeros(_LOW, np.int64) for prefix, _ in own} for own in places]
    for chunk in values():
        for tables, entries in zip(low, chunk, strict=True):
            bits = key(entries)
            prefixes = bits >> np.uint32(_SHIFT)
            for prefix, counts in tables.items():
                np.add.at(counts, bits.compress(prefixes == prefix) & np.uint32(_LOW - 1), 1)
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


def _magnitude_bits(entries: Array) -> Bits:
    """Bits that sort as the magnitudes of float32 do, written over them."""
    bits = entries.view(np.uint32)
    bits &= ~_SIGN
    return bits


def _signed_bits(entries: Array) -> Bits:
    """Bits that sort as the values do: all of a negative float32 are turned over, else its sign alone."""
    bits = _round(entries, np.empty(entries.size, np.float32)).view(np.uint32)
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
