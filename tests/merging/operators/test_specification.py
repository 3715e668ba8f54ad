"""What every operator declares, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from confide.errors import MergeError
from confide.merging.operators import OPERATORS, find
from confide.merging.operators.parameters import Choice, Number, PerModel, Switch

from .helpers import flat_merge


@pytest.mark.parametrize(
    ("operator", "parameters", "message"),
    [
        ("tie", {}, "unknown operator 'tie'; did you mean 'ties'"),
        ("task_arithmetic", {}, "did you mean 'task-arithmetic'"),
        ("zzz", {}, "known are average, linear, task-arithmetic, ties"),
        ("ties", {"densitty": 0.2}, "no parameter 'densitty'; did you mean 'density'"),
        ("average", {"scale": 1.0}, "no parameter 'scale'; it takes none"),
        ("ties", {"density": 1.5}, "between 0 and 1, not 1.5"),
        ("ties", {"density": math.nan}, "between 0 and 1, not nan"),
        ("task-arithmetic", {"scale": math.inf}, "a finite number, not inf"),
        ("ties", {"trim": "by-tensor"}, "trim of operator ties must be global or per-tensor, not by-tensor"),
        ("ties", {"density": True}, "between 0 and 1, not True"),
        ("ties", {"density": "many"}, "between 0 and 1, not many"),
        ("linear", {"normalise": "maybe"}, "true or false, not maybe"),
        ("linear", {"normalise": 1.0}, "true or false, not 1.0"),
        ("linear", {"weights": [1, 2, 3]}, "weights of operator linear has 3 values for 1 models"),
        ("wudi", {"iterations": 2.5}, "a whole number between 1 and 1e.06, not 2.5"),
        ("fisher", {"weights": -1}, "a finite number of at least 0, not -1"),
    ],
)
def test_what_an_operator_doesnt_take(operator: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(MergeError, match=message):
        flat_merge(np.zeros(2, np.float32), [np.ones(2, np.float32)], operator, **parameters)


def test_every_operator_is_specified() -> None:
    for name, operator in OPERATORS.items():
        assert find(name) is operator
        assert operator.paper
        assert operator.about
        defaults = operator.settings({})
        assert operator.settings(defaults) == defaults
        assert operator.settings({name: str(value).lower() for name, value in defaults.items()}) == defaults
    papers = {"density": 0.2, "scale": 1.0, "trim": "global", "merge": "mean", "zero_sum": "majority"}
    assert OPERATORS["ties"].settings({}).items() >= papers.items()
    assert OPERATORS["task-arithmetic"].settings({}) == {"scale": 0.3}


def test_the_command_lists_every_operator() -> None:
    from confide.cli import merge

    assert ", ".join(OPERATORS) == merge._OPERATORS


def test_settings_on_the_command_line() -> None:
    from confide.cli.merge import _parameters

    assert _parameters(["density=0.2", "trim=per-tensor"]) == {"density": "0.2", "trim": "per-tensor"}
    for wrong in (["density"], ["=1"], ["density=1", "density=2"]):
        with pytest.raises(MergeError, match="--set takes NAME=VALUE, each name once"):
            _parameters(wrong)


def test_parameters_as_text() -> None:
    weights = PerModel("w", 1.0, 0, 2, "")
    assert weights.read("0.5,1") == (0.5, 1.0) == weights.read([0.5, 1])
    assert weights.read("0.5") == 0.5
    with pytest.raises(ValueError, match="between 0 and 2, not 3"):
        weights.read("0.5,3")
    assert Number("n", 3, 1, 9, "", whole=True).read("4") == 4
    assert Switch("s", True, "").read("false") is False
    assert Choice("c", "a", ("a", "b"), "").read("b") == "b"
