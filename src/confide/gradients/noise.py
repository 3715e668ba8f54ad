"""Gaussian noise on clipped sums, drawn and added in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from confide.errors import PrivacyError
from confide.gradients import normals
from confide.gradients.keys import KeyStream
from confide.gradients.normals import Floats, Words

_BLOCK = 1 << 15  # normals at a time: what fits the processor's second-level cache
_SPAN = 1 << 20  # normals per task of a thread
_SMALLEST = 1e-30


def add_noise(sums: Mapping[str, Tensor], std: float, stream: KeyStream) -> dict[str, Tensor]:
    """Add independent N(0, std²) to every value, in place.

    The noise is one long float64 vector that depends on the stream alone, not on threads or devices, laid
    over the tensors in the order of their names. It is added in float64 before the result is rounded to the
    tensor's dtype.

    Args:
        sums: tensors by name, overwritten.
        std: noise standard deviation, σ·C, in gradient units.
        stream: the stream at this query's address (`Key.generator`). Used for this one call only.

    Returns:
        The noisy sums: the same tensors.

    Raises:
        PrivacyError: a standard deviation that is negative, not finite, or so small that float32 loses it.
    """
    if not (math.isfinite(std) and (std == 0 or std >= _SMALLEST)):
        raise PrivacyError(
            f"the noise's standard deviation must be 0 or from {_SMALLEST} to 1e308, not {std}"
        )
    if std > 0:
        local = {name: value.detach().to("cpu").contiguous() for name, value in sums.items()}
        _add(_Vector([value.view(-1).numpy() for value in local.values()]), std, stream)
        for name, value in sums.items():
            if value.data_ptr() != local[name].data_ptr():
                value.detach().copy_(local[name])
    return dict(sums)


class _Vector:
    """Flat arrays seen as one vector, one after the other."""

    def __init__(self, arrays: list[Floats]) -> None:
        self._arrays = arrays
        self._ends = np.cumsum([0, *(array.size for array in arrays)])[1:]
        self.size = int(self._ends[-1]) if arrays else 0

    def add(self, start: int, values: Floats) -> None:
        """Add `values` from index `start` on, in float64; what reaches beyond the end is dropped."""
        stop = min(start + values.size, self.size)
        which = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end = int(self._ends[which])
            upto = min(stop, end)
            array = self._arrays[which]
            piece = array[array.size - (end - start) : array.size - (end - upto)]
            drawn, values = values[: upto - start], values[upto - start :]
            drawn += piece
            piece[:] = drawn
            start, which = upto, which + 1

    def add_at(self, index: npt.NDArray[np.int64], values: Floats) -> None:
        """Add values[i] at index[i], in float64; indices ascend, once each."""
        bounds = np.searchsorted(index, [0, *self._ends])
        for array, end, low, high in zip(self._arrays, self._ends, bounds, bounds[1:], strict=False):
            if low < high:
                place = index[low:high] - (end - array.size)
                array[place] = values[low:high] + array[place]


def _add(vector: _Vector, std: float, stream: KeyStream) -> None:
    table = normals.widths(std)

    def span(start: int) -> npt.NDArray[np.int64]:
        index, drawn = np.empty(_BLOCK, np.int64), np.empty(_BLOCK)
        blocks = range(start, min(start + _SPAN, vector.size), _BLOCK)
        missing = []
        for at, words in zip(blocks, stream.blocks(start, _BLOCK), strict=False):
            missing.append(at + normals.fill(words, table, index, drawn))
            vector.add(at, drawn)
        return np.concatenate(missing)

    starts = range(0, vector.size, _SPAN)
    workers = min(torch.get_num_threads(), len(starts))
    if workers > 1:
        with ThreadPoolExecutor(workers) as pool:
            missing = list(pool.map(span, starts))
    else:
        missing = [span(start) for start in starts]
    if missing:
        left = np.concatenate(missing)
        vector.add_at(left, std * normals.rest(len(left), reader(stream)))


def reader(stream: KeyStream, place: int = 1) -> Callable[[int], Words]:
    """Reads on from word place·2⁶⁴, which no block ever reaches."""
    position = place << 64

    def read(count: int) -> Words:
        nonlocal position
        words = stream.words(position, count)
        position += count + count % 2
        return words

    return read
