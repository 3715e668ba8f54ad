"""Layers of a mixture's experts that lie stacked in one tensor."""

from __future__ import annotations

import re

_WEIGHTS = re.compile(r"(^|\.)experts\.|(^|\.)(input|output)_linear\.weight$")  # the latter are Granite's
_BIASES = re.compile(r"(^|\.)experts\.\w+_bias$")


def is_stack(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor holds a matrix of every expert: (E, out, in), or (E, in, out)."""
    return len(shape) == 3 and bool(_WEIGHTS.search(name))


def is_stack_of_biases(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor holds a vector of every expert, (E, out), which is no matrix."""
    return len(shape) == 2 and bool(_BIASES.search(name))
