"""Two bits an entry: its sign, and which half of the magnitudes of that sign it belongs to."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

GROUPS = 4
_SIGNS = np.array([1, -1, 1, -1], np.float32)
_PLACES = np.arange(0, 8, 2, dtype=np.uint8)


def packed_size(entries: int) -> int:
    """Bytes that hold the codes of so many entries: four to a byte."""
    return -(-entries // 4)


def pack(codes: Bytes) -> Bytes:
    """Codes 0 to 3, four to a byte, the first in the lowest bits.

    Args:
        codes: (n,) uint8.

    Returns:
        (⌈n/4⌉,) uint8; unused bits of the last byte are 0.
    """
    padded = np.zeros(packed_size(codes.size) * 4, np.uint8)
    padded[: codes.size] = codes
    packed: Bytes = np.bitwise_or.reduce(padded.reshape(-1, 4) << _PLACES, axis=1)
    return packed


def unpack(packed: Bytes, entries: int) -> Bytes:
    """(entries,) codes out of `pack`'s bytes."""
    return (packed[:, None] >> _PLACES & np.uint8(3)).reshape(-1)[:entries]


def quantise(values: npt.NDArray[Any]) -> tuple[Bytes, Floats]:
    """Give every entry one of four values: ± the root mean square (RMS) of its group.

    Positive and negative entries are each split at the median of their magnitudes. The RMS of a group keeps
    its norm, so the quantised matrix is as long as the exact one; the mean would come closer but be
    shorter. Paper: DTS (arXiv 2512.01461), thresholding and scaling, with the four levels in 2 bits.

    Args:
        values: n finite floats of any shape, seen as one flat list.

    Returns:
        codes: (⌈n/4⌉,) packed; bit 0 of a code is the sign, bit 1 the upper half.
        scales: (4,) RMS by code; 0 for a group without entries.
    """
    flat = values.reshape(-1).astype(np.float64)
    negative = flat < 0
    magnitudes = np.abs(flat, out=flat)
    upper = np.zeros(flat.size, bool)
    for side in (negative, ~negative):
        if side.any():
            upper |= side & (magnitudes > np.median(magnitudes[side]))
    codes = negative.astype(np.uint8) | upper.astype(np.uint8) << np.uint8(1)
    counts = np.bincount(codes, minlength=GROUPS)
    squares = np.bincount(codes, weights=magnitudes * magnitudes, minlength=GROUPS)
    scales = np.sqrt(squares / np.maximum(counts, 1)).astype(np.float32)
    return pack(codes), scales


def restore(packed: Bytes, scales: Floats, entries: int) -> Floats:
    """(entries,) values that `quantise` chose."""
    values: Floats = (scales * _SIGNS)[unpack(packed, entries)]
    return values
