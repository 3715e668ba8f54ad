"""The merge gap by hand."""

from __future__ import annotations

import pytest

from confide.errors import ConfigError
from confide.geometry.gap import merge_gap, task_gaps


def test_is_the_mean_over_tasks_of_individual_minus_merged() -> None:
    individual, merged = {"a": 0.75, "b": 0.5}, {"b": 0.625, "a": 0.5}
    assert task_gaps(individual, merged) == {"a": 0.25, "b": -0.125}
    assert merge_gap(individual, merged) == 0.0625
    assert merge_gap(merged, individual) == -0.0625


@pytest.mark.parametrize(
    ("individual", "merged", "message"),
    [
        ({}, {}, "at least one task"),
        ({"a": 0.5}, {"a": 0.5, "b": 0.5}, "'b' is scored in one"),
        ({"a": 0.5, "c": 1.0}, {"a": 0.5}, "'c' is scored in one"),
        ({"a": float("nan")}, {"a": 0.5}, "'a' has a score that is not finite"),
        ({"a": 0.5}, {"a": float("inf")}, "'a' has a score that is not finite"),
    ],
)
def test_refuses(individual: dict[str, float], merged: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        merge_gap(individual, merged)
