"""The merging operators. Each is a pure function in a file of its own with a declared specification."""

from __future__ import annotations

from confide.errors import MergeError
from confide.merging.operators import (
    actmat,
    average,
    fisher,
    linear,
    pcb,
    regmean,
    task_arithmetic,
    ties,
    wudi,
)
from confide.merging.operators.specification import Operator, suggest

OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        average.average,
        linear.linear,
        task_arithmetic.task_arithmetic,
        ties.ties,
        pcb.pcb,
        wudi.wudi,
        actmat.actmat,
        regmean.regmean,
        fisher.fisher,
    )
}


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
