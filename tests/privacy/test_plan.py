"""Numbers of a plan by hand, and each piece of advice where it belongs and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from confide.privacy.accountant import epsilon
from confide.privacy.plan import plan
from confide.privacy.streams import Clipping, Schedule, Stream

MakeStream = Callable[..., Stream]
SENSIBLE = {"sampling_rate": 0.05, "steps": 40, "noise_multiplier": 2.0, "denominator": 500.0}


def test_numbers_by_hand(stream: MakeStream) -> None:
    schedule = Schedule((stream(**SENSIBLE, ascent="paired", ascent_radius=0.1, ascent_noise=3.0),))
    found = plan(schedule, 10_000, 1e-6, {"all": 10_000})
    (one,) = found.streams
    assert (one.expected_batch, one.queries_per_step, found.queries) == (500.0, 2, 80)
    assert one.noise_to_signal == pytest.approx(2.0 * 100 / 500)
    assert one.cosine == pytest.approx(1 / math.hypot(1, 0.4))
    assert found.claim == epsilon(schedule.event(), 1e-6)
    assert found.advice == ()


def test_streams_and_counts(stream: MakeStream) -> None:
    adaptive = Clipping("adaptive", 1.0, count_noise=50.0)
    schedule = Schedule((stream("a", **SENSIBLE, clipping=adaptive), stream("b", **SENSIBLE)))
    found = plan(schedule, 10_000, 1e-6)
    assert [s.queries_per_step for s in found.streams] == [2, 1]
    assert found.streams[0].noise_to_signal is None
    assert found.queries == 120


@pytest.mark.parametrize(
    ("fields", "trained", "delta", "words"),
    [
        ({}, 10_000_000, 1e-6, ["12.6 times", "averaged over all 40 steps still 2 times", "LoRA"]),
        ({}, 90_000, 1e-6, ["1.2 times", "a head alone"]),
        ({"sampling_rate": 0.6, "noise_multiplier": 20.0}, None, 1e-6, ["sampling rate of 0.6"]),
        ({"steps": 5}, None, 1e-6, ["5 steps are few"]),
        ({"sampling_rate": 0.0005}, None, 1e-6, ["small", "0.0067 of all draws are empty"]),
        ({}, None, 1e-4, ["publishing one random record"]),
        ({"noise_multiplier": 0.5}, None, 1e-6, ["hardly a promise"]),
    ],
)
def test_advice(
    stream: MakeStream, fields: dict[str, object], trained: int | None, delta: float, words: list[str]
) -> None:
    schedule = Schedule((stream(**(SENSIBLE | fields)),))
    (sentence,) = plan(schedule, 10_000, delta, {"all": trained} if trained else None).advice
    assert all(word in sentence for word in words), sentence


def test_advice_names_the_stream(stream: MakeStream) -> None:
    schedule = Schedule((stream("a", **SENSIBLE), stream("b", **(SENSIBLE | {"steps": 3}))))
    (sentence,) = plan(schedule, 10_000, 1e-6).advice
    assert sentence.startswith("Stream b: 3 steps")


def test_without_noise_nothing_is_claimed(stream: MakeStream) -> None:
    found = plan(Schedule((stream(noise_multiplier=0.0),)), 1000, None)
    assert found.claim is None
    assert found.queries == 0
    assert "nothing is protected" in found.advice[0]
