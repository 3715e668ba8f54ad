"""What an operator is: a declared specification, and a function from task vectors to one merged vector."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from confide.errors import MergeError
from confide.merging.vectors import TaskVectors

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Parameter:
    """A number that an operator takes.

    Attributes:
        name: as in the API, and on the command line.
        symbol: as in the paper.
        default: the paper's.
        minimum: smallest value allowed.
        maximum: largest one.
        about: what it does, in a sentence.
    """

    name: str
    symbol: str
    default: float
    minimum: float
    maximum: float
    about: str


@dataclass(frozen=True)
class Rule:
    """An operator made ready for particular models: what it had to look up in all of them is fixed.

    Attributes:
        merge: (T, n) task vectors of some coordinates, float64 → (n,) merged task vector. It may not change
            its argument; its answer may be changed, and holds until the next call.
        facts: what was looked up, for the merge report; JSON values.
    """

    merge: Callable[[Vector], Vector]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Operator:
    """A published way to make one model from many.

    Attributes:
        name: on the command line.
        about: the formula, in a line.
        paper: where it is from.
        needs_base: whether the answer depends on the base model.
        parameters: what it takes.
        prepare: looks at the whole models, as often as it needs to, and returns the rule for a chunk.
    """

    name: str
    about: str
    paper: str
    needs_base: bool
    parameters: tuple[Parameter, ...]
    prepare: Callable[[TaskVectors, Mapping[str, float]], Rule]

    def settings(self, given: Mapping[str, float]) -> dict[str, float]:
        """Every parameter's value: the given one, or the default.

        Raises:
            MergeError: an unknown parameter (the message names the near one), or a value out of range.
        """
        known = {parameter.name: parameter for parameter in self.parameters}
        for name, value in given.items():
            if name not in known:
                raise MergeError(f"operator {self.name} takes no parameter {name!r}{suggest(name, known)}")
            low, high = known[name].minimum, known[name].maximum
            if not math.isfinite(value) or not low <= value <= high:
                span = f"between {low:g} and {high:g}" if math.isfinite(high - low) else "a finite number"
                raise MergeError(f"{name} of operator {self.name} must be {span}, not {value}")
        return {name: float(given.get(name, parameter.default)) for name, parameter in known.items()}


def suggest(name: str, known: Mapping[str, Any]) -> str:
    """The end of a message about an unknown name: the near one, or all of them."""
    import difflib

    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; it takes {', '.join(known)}" if known else "; it takes none"
