"""Each unknown against the others: what is solved for gives back what was known."""

from __future__ import annotations

import dataclasses

import pytest

from confide.errors import PrivacyError
from confide.privacy.accountant import epsilon
from confide.privacy.events import PoissonGaussian
from confide.privacy.solve import Known, largest_batch, most_steps, solve, steps_of
from confide.privacy.streams import Adjacency, Budget

KNOWN = Known(units=2000, delta=1e-5, epsilon=2.0, noise_multiplier=1.5, batch=100.0, steps=60)


def _cost(known: Known) -> float:
    return epsilon(known.schedule().event(), known.delta, known.adjacency).epsilon


@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one"])
def test_one_more_step_would_not_fit(adjacency: Adjacency) -> None:
    budget = Budget(1.0, 1e-5)

    def cost(steps: int) -> float:
        return epsilon(PoissonGaussian(0.05, (2.0, 2.0), steps), budget.delta, adjacency).epsilon

    steps = most_steps(0.05, 2.0, budget, queries=2, adjacency=adjacency)
    assert cost(steps) <= budget.epsilon < cost(steps + 1)


def test_a_larger_batch_would_not_fit() -> None:
    budget = Budget(1.0, 1e-5)

    def cost(batch: int) -> float:
        return epsilon(PoissonGaussian(batch / 1000, (1.2,), 50), budget.delta).epsilon

    batch = largest_batch(1000, 1.2, budget, steps=50)
    assert cost(batch) <= budget.epsilon < cost(batch + 1)
    whole = largest_batch(1000, 50.0, budget, steps=50)
    assert whole == 1000


def test_each_unknown_is_found() -> None:
    noise = solve(dataclasses.replace(KNOWN, noise_multiplier=None))
    assert 1.999 <= _cost(noise) <= 2.0
    priced = solve(dataclasses.replace(noise, epsilon=None))
    assert priced.epsilon == _cost(noise)
    steps = solve(dataclasses.replace(noise, steps=None))
    assert steps.steps == 60  # a thousandth less noise buys no step
    batch = solve(dataclasses.replace(noise, batch=None))
    assert batch.batch == 100


def test_epochs_are_steps_of_the_batch() -> None:
    assert steps_of(10, 3680, 16) == 2300
    assert steps_of(0.1, 1000, 10) == 10
    assert steps_of(1, 1000, 300) == 4
    found = solve(Known(units=3680, delta=1 / 3680, epsilon=4.0, batch=16.0, epochs=10))
    assert found.steps == 2300
    assert found.noise_multiplier == pytest.approx(0.5813, abs=2e-4)
    batch = solve(Known(units=500, delta=1e-5, epsilon=2.0, noise_multiplier=1.0, epochs=5))
    assert batch.steps == steps_of(5, 500, batch.batch or 0)
    assert _cost(batch) <= 2.0
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(PrivacyError, match="epochs"):
            steps_of(bad, 100, 10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "all four are given"),
        ({"noise_multiplier": None, "batch": None}, "noise multiplier, batch are missing"),
        ({"noise_multiplier": None, "epochs": 2.0}, "not both"),
        ({"noise_multiplier": None, "batch": 3000.0}, "expected batch"),
        ({"noise_multiplier": None, "batch": 0.0}, "expected batch"),
        ({"noise_multiplier": None, "steps": 0}, "at least 1"),
        ({"noise_multiplier": None, "queries": 0}, "at least 1"),
        ({"noise_multiplier": None, "units": 0}, "at least 1"),
        ({"noise_multiplier": None, "epsilon": -1.0}, "epsilon"),
        ({"noise_multiplier": 0.0, "steps": None}, "no noise"),
        ({"noise_multiplier": 0.05, "steps": None}, "not even one step"),
        ({"noise_multiplier": 0.05, "batch": None}, "not even one unit"),
    ],
)
def test_what_cannot_be_solved(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        solve(dataclasses.replace(KNOWN, **changes))  # type: ignore[arg-type]


def test_an_unsolved_plan_is_no_schedule() -> None:
    with pytest.raises(PrivacyError, match="solve"):
        dataclasses.replace(KNOWN, steps=None).schedule()
