"""Poisson draws: every unit joins independently with the public rate."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt

from confide.errors import PrivacyError
from confide.gradients.keys import Key

_BLOCK = 1 << 18


def poisson_draw(key: Key, draw: str, step: int, count: int, rate: float) -> npt.NDArray[np.int64]:
    """The units of one draw.

    Unit u reads word u of the draw's own stream and joins if the word is below rate·2⁶⁴, so its
    inclusion depends on nothing else: not on the other units, nor on how many there are. The probability
    is `rate` rounded down to a multiple of 2⁻⁶⁴, never above what is charged.

    Args:
        key: the sampling key, private.
        draw: name of the draw.
        step: step of the schedule.
        count: n, number of units.
        rate: public Poisson rate q in (0, 1].

    Returns:
        Sorted numbers of the drawn units; private. An empty draw is legal.

    Raises:
        PrivacyError: a rate outside (0, 1].
    """
    if not 0 < rate <= 1:
        raise PrivacyError(f"sampling rate must be in (0, 1], not {rate}")
    if rate == 1:
        return np.arange(count, dtype=np.int64)
    threshold = np.uint64(int(Fraction(rate) * 2**64))
    stream = key.generator(draw, step, "draw")
    found = [np.empty(0, np.int64)]
    for start in range(0, count, _BLOCK):
        size = min(_BLOCK, count - start)
        joins = stream.words(start, size) < threshold
        found.append(start + np.flatnonzero(joins).astype(np.int64))
    return np.concatenate(found)
