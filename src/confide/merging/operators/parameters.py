"""What an operator may take: numbers, one number for each model, switches, choices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Setting = float | bool | str | tuple[float, ...]


@dataclass(frozen=True)
class Number:
    """A number in a range.

    Attributes:
        name: as in the API, and on the command line.
        default: the paper's.
        minimum, maximum: the smallest and the largest value allowed.
        about: what it does, in a sentence.
        whole: only integers.
    """

    name: str
    default: float
    minimum: float
    maximum: float
    about: str
    whole: bool = False

    def read(self, value: Any) -> Setting:
        """The checked value.

        Args:
            value: a number, or text that holds one.

        Raises:
            ValueError: it isn't one, or lies out of range; the message says what it must be.
        """
        return self._number(value)

    def _number(self, value: Any) -> float:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        fits = math.isfinite(number) and self.minimum <= number <= self.maximum
        if not fits or (self.whole and number != int(number)):
            raise ValueError(f"{self._span()}, not {value}")
        return int(number) if self.whole else number

    def _span(self) -> str:
        kind = "a whole number" if self.whole else "a finite number"
        low, high = math.isfinite(self.minimum), math.isfinite(self.maximum)
        if low and high:
            return f"{'a whole number ' if self.whole else ''}between {self.minimum:g} and {self.maximum:g}"
        return f"{kind} of at least {self.minimum:g}" if low else kind


@dataclass(frozen=True)
class PerModel(Number):
    """One number for all models, or one for each, in their order; as text separated by commas."""

    def read(self, value: Any) -> Setting:
        """The checked number, or a tuple of them."""
        if isinstance(value, str) and "," in value:
            value = value.split(",")
        if isinstance(value, Sequence) and not isinstance(value, str):
            return tuple(self._number(each) for each in value)
        return self._number(value)


@dataclass(frozen=True)
class Switch:
    """Yes or no."""

    name: str
    default: bool
    about: str

    def read(self, value: Any) -> Setting:
        """True or false; as text `true` or `false`.

        Raises:
            ValueError: anything else.
        """
        known = {"true": True, "false": False, True: True, False: False}
        if not isinstance(value, bool | str) or value not in known:
            raise ValueError(f"true or false, not {value}")
        return known[value]


@dataclass(frozen=True)
class Choice:
    """One of several words."""

    name: str
    default: str
    choices: tuple[str, ...]
    about: str

    def read(self, value: Any) -> Setting:
        """The word.

        Raises:
            ValueError: it isn't one of them; the message lists them.
        """
        if not isinstance(value, str) or value not in self.choices:
            raise ValueError(f"{' or '.join(self.choices)}, not {value}")
        return value


Parameter = Number | Switch | Choice
