"""The merging operators. Each is a pure function in a file of its own with a declared specification."""

from __future__ import annotations

from confide.errors import MergeError
from confide.merging.operators.average import AVERAGE
from confide.merging.operators.specification import Operator, suggest
from confide.merging.operators.task_arithmetic import TASK_ARITHMETIC
from confide.merging.operators.ties import TIES

OPERATORS: dict[str, Operator] = {operator.name: operator for operator in (AVERAGE, TASK_ARITHMETIC, TIES)}


def find(name: str) -> Operator:
    """The operator of that name.

    Raises:
        MergeError: there is none; the message names the near one.
    """
    if name not in OPERATORS:
        hint = suggest(name.lower().replace("_", "-"), OPERATORS).replace("it takes", "known are")
        raise MergeError(f"unknown operator {name!r}{hint}")
    return OPERATORS[name]


__all__ = ["OPERATORS", "Operator", "find"]
