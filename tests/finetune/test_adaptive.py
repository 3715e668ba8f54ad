"""Adaptive clipping in the loop, against the recursion written out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from confide.finetune.history import History, State
from confide.finetune.loop import train
from confide.gradients.keys import Keys
from confide.gradients.noise import add_noise
from confide.gradients.sampling import poisson_draw
from confide.privacy.streams import Clipping, ParameterGroup

from .conftest import Line, line_schedule

MakeLine = Callable[..., Line]
KEYS = Keys.fixed(5)
STILL = (ParameterGroup("head", ("weight",), 1e-15, anchored=False),)
"""A rate at which the weights, and so the norms, stay where they are."""


def steady(norms: list[float]) -> torch.Tensor:
    """Records whose gradients at w = 0 have these norms: (p − y) ⊗ x is x/√2 long."""
    return torch.tensor(norms, dtype=torch.double)[:, None] * math.sqrt(2)


def schedule(**fields: Any) -> Any:
    values = {
        "clipping": Clipping("adaptive", 1.0, quantile=0.7, quantile_rate=0.3, count_noise=0.8),
        "steps": 30,
        "sampling_rate": 0.6,
        "denominator": 6.0,
        "noise_multiplier": 1e-9,
    }
    return line_schedule(**(values | fields))


def bounds(history: History) -> list[float]:
    return [record.bound for record in history.steps]


def by_hand(norms: list[float], steps: int, clipping: Clipping, rate: float, batch: float) -> list[float]:
    bound, found = clipping.bound, []
    for step in range(steps):
        found.append(bound)
        drawn = poisson_draw(KEYS.sampling, "all", step, len(norms), rate)
        halves = sum(0.5 if norms[unit] <= bound else -0.5 for unit in drawn)
        noise = add_noise(
            {"n": torch.zeros(1, dtype=torch.double)},
            float(clipping.count_noise or 0),
            KEYS.noise.generator("all", step, "count"),
        )["n"]
        share = (halves + float(noise)) / batch + 0.5
        bound *= math.exp(-clipping.quantile_rate * (share - clipping.quantile))
    return found


@pytest.mark.parametrize("part", [None, 2])
def test_the_bound_follows_the_recursion(line: MakeLine, part: int | None) -> None:
    norms = [0.3, 0.4, 0.55, 0.7, 0.9, 1.3, 2.0, 4.0, 7.0, math.nan]
    plan = schedule(groups=STILL)
    history = train(line(steady(norms), part=part).binding, plan, KEYS)
    expected = by_hand(norms, 30, plan.streams[0].clipping, 0.6, 6.0)
    assert bounds(history) == pytest.approx(expected, rel=1e-9)
    assert len(set(expected)) == 30


def test_the_bound_comes_to_the_quantile(line: MakeLine) -> None:
    norms = [0.01 * (unit + 1) for unit in range(400)]  # the 0.7 quantile is 2.8
    clipping = Clipping("adaptive", 0.05, quantile=0.7, quantile_rate=0.3, count_noise=4.0)
    history = train(
        line(steady(norms)).binding,
        schedule(groups=STILL, clipping=clipping, steps=120, sampling_rate=0.5, denominator=200.0),
        KEYS,
    )
    assert sum(bounds(history)[60:]) / 60 == pytest.approx(2.8, rel=0.08)


def test_noise_follows_the_bound(line: MakeLine) -> None:
    """With no record in the draw, C goes its public way, and noise on the gradient with it."""
    model = line(torch.ones(5, 300, dtype=torch.double), classes=100)
    clipping = Clipping("adaptive", 1.0, quantile=1.0, quantile_rate=2.0, count_noise=1e-9)
    plan = schedule(clipping=clipping, steps=2, sampling_rate=1e-12, denominator=4.0, noise_multiplier=1.5)
    seen: list[torch.Tensor] = []
    history = train(model.binding, plan, KEYS, after_step=lambda state: seen.append(model.weight))
    second = math.exp(-2.0 * (0.5 - 1.0))
    assert bounds(history) == pytest.approx([1.0, second])
    assert float(seen[0].std()) == pytest.approx(1.5 / 4, rel=0.03)
    assert float((model.weight - seen[0]).std()) == pytest.approx(1.5 * second / 4, rel=0.03)


def test_the_bound_stays_in_a_public_range(line: MakeLine) -> None:
    clipping = Clipping("adaptive", 2.0, quantile=0.0, quantile_rate=50.0, count_noise=1e-9)
    history = train(
        line(steady([0.0, 0.0])).binding,
        schedule(clipping=clipping, sampling_rate=1.0, denominator=2.0, steps=3),
        KEYS,
    )
    assert bounds(history) == pytest.approx([2.0, 2e-4, 2e-4])


def test_a_run_goes_on_with_its_bound_bitwise(line: MakeLine) -> None:
    norms = [0.3, 0.4, 0.7, 0.9, 1.3, 2.0]
    plan = schedule(noise_multiplier=0.4, steps=9)
    states: list[State] = []
    whole = line(steady(norms))
    history = train(whole.binding, plan, KEYS, after_step=lambda state: states.append(copy(state())))
    for state in states:
        again = line(steady(norms))
        resumed = train(again.binding, plan, KEYS, start=state)
        assert torch.equal(again.weight, whole.weight)
        assert bounds(resumed) == bounds(history)


def copy(state: State) -> State:
    history = History(dict(state.history.steps_run), list(state.history.steps))
    return State(state.step, {name: value.clone() for name, value in state.tensors.items()}, history)
