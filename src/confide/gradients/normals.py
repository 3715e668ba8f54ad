"""Standard normals in float64 from uniform words: nearly always one table look-up and one product.

The area under exp(−x²/2), x ≥ 0, is cut into rectangles of 1/4096 of it each, stacked under the curve, and
what is left: the slivers between stack and curve, the foot and the tail. Twelve bits of a word choose a
rectangle or, in 3 of 4096 cases, the rest, which is sampled by rejection; the word itself is the signed
position in the rectangle. (The ziggurat of Marsaglia and Tsang 2000 without rejection in the common case.)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]

_PARTS = 4096
_NARROWEST = 0.0447  # leaves the fewest parts over; any value is exact


def _stack() -> tuple[Floats, Floats]:
    """Right ends x of the rectangles from the top down, and the curve there."""
    area = math.sqrt(math.pi / 2) / _PARTS
    x = [_NARROWEST]
    height = [math.exp(-(_NARROWEST**2) / 2)]
    while (lower := height[-1] - area / x[-1]) > 0:
        height.append(lower)
        x.append(math.sqrt(-2 * math.log(lower)))
    return np.array(x), np.array(height)


_X, _HEIGHT = _stack()
_RECTANGLES = len(_X) - 1
_END, _FOOT, _TAIL = float(_X[-1]), len(_X), len(_X) + 1

# Slivers 0 … _RECTANGLES lie between neighbouring right ends, the first between 0 and the narrowest.
_LEFT = np.concatenate([[0.0], _X[:-1]])
_RISE = np.concatenate([[1.0], _HEIGHT[:-1]]) - _HEIGHT


def _sliver_areas() -> Floats:
    nodes, weights = np.polynomial.legendre.leggauss(12)
    half = (_X - _LEFT)[:, None] / 2
    x = _LEFT[:, None] + half * (1 + nodes)
    above = _HEIGHT[:, None] * np.expm1((_X[:, None] ** 2 - x**2) / 2)
    return np.asarray((above * weights * half).sum(1))


_REST = np.cumsum(
    [*_sliver_areas(), _END * _HEIGHT[-1], math.sqrt(math.pi / 2) * math.erfc(_END / math.sqrt(2))]
)


def widths(scale: float) -> Floats:
    """(4096,) table for `fill`: factor from signed 64-bit words to values; 0 where the rest is chosen."""
    table = np.zeros(_PARTS)
    table[:_RECTANGLES] = _X[:-1] * (scale * 2.0**-63)
    return table


def fill(words: Words, table: Floats, index: npt.NDArray[np.int64], out: Floats) -> npt.NDArray[np.int64]:
    """Turn words into normals.

    Args:
        words: (n,) uniform.
        table: from `widths`.
        index: (n,) scratch.
        out: (n,) receives the normals, and 0 at the positions returned.

    Returns:
        Where a value from `rest` belongs instead.
    """
    signed = words.view(np.int64)
    np.bitwise_and(signed, _PARTS - 1, out=index)
    np.take(table, index, mode="wrap", out=out)
    np.multiply(out, signed, out=out)
    return np.flatnonzero(index >= _RECTANGLES)


def rest(count: int, read: Callable[[int], Words]) -> Floats:
    """(count,) normals, given that no rectangle was chosen.

    The tail is Marsaglia's (1964). The largest value is 9.9, which an ideal normal exceeds once in 10²²
    draws.

    Args:
        count: how many.
        read: returns that many fresh uniform words.
    """
    choice = read(count)
    part = np.searchsorted(_REST, _uniform(choice) * _REST[-1], side="right")
    part = np.minimum(part, _TAIL)
    values = np.empty(count)
    pending = np.arange(count)
    while pending.size:
        u, v = np.split(_uniform(read(2 * pending.size)), 2)
        at = part[pending]
        sliver = np.minimum(at, _RECTANGLES)
        x = _LEFT[sliver] + u * (_X[sliver] - _LEFT[sliver])
        kept = v * _RISE[sliver] < _HEIGHT[sliver] * np.expm1((_X[sliver] ** 2 - x**2) / 2)
        foot, tail = at == _FOOT, at == _TAIL
        x[foot], kept[foot] = u[foot] * _END, True
        x[tail] = np.sqrt(_END**2 - 2 * np.log(u[tail]))
        kept[tail] = v[tail] * x[tail] < _END
        values[pending[kept]] = x[kept]
        pending = pending[~kept]
    return np.where(choice & np.uint64(1), values, -values)


def _uniform(words: Words) -> Floats:
    """In the open interval (0, 1)."""
    return np.asarray(((words >> np.uint64(11)) + 0.5) * 2.0**-53)
