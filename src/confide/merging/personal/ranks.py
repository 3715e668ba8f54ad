"""Which singular values to keep, so that the file fits its budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from confide.errors import MergeError


@dataclass(frozen=True, eq=False)
class Candidate:
    """What could be kept of one tensor.

    Attributes:
        energies: (k,) squared norm that each further unit brings, largest first: σ² of a matrix, or the one
            squared norm of a vector.
        price: bytes of a unit.
    """

    energies: npt.NDArray[np.float64]
    price: float


def choose(candidates: Mapping[str, Candidate], fits: Callable[[Mapping[str, int]], bool]) -> dict[str, int]:
    """How many units of each tensor to keep: those with the most energy a byte, as many as fit.

    One order of all units of all tensors, by energy a byte; since energies fall within a tensor, a prefix of
    that order is a rank for each. The longest prefix that fits is found by halving. That is the best
    choice for the norm of what is lost, up to the last unit and the bytes of a tensor's header entry.

    Args:
        candidates: by tensor name.
        fits: whether the file with so many units of each tensor keeps the budget; a larger one never does
            where a smaller one doesn't.

    Raises:
        MergeError: not even the empty choice fits.
    """
    names = list(candidates)
    owners = np.repeat(np.arange(len(names)), [len(candidates[name].energies) for name in names])
    worth = [candidates[name].energies / candidates[name].price for name in names]
    order = owners[np.argsort(-np.concatenate([*worth, np.empty(0)]), kind="stable")]

    def units(length: int) -> dict[str, int]:
        counts = np.bincount(order[:length], minlength=len(names))
        return {name: int(count) for name, count in zip(names, counts, strict=True)}

    if not fits(units(0)):
        raise MergeError("the budget doesn't even hold the head, the statement and the header")
    low, high = 0, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(units(middle)) else (low, middle - 1)
    return units(low)
