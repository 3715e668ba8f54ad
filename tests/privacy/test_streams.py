from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from confide.errors import PrivacyError
from confide.privacy.events import Composed, PoissonGaussian
from confide.privacy.streams import Budget, Clipping, Schedule, Stream

Make = Callable[..., Stream]


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.inf, math.nan])
def test_bad_epsilon(epsilon: float) -> None:
    with pytest.raises(PrivacyError, match="epsilon"):
        Budget(epsilon, 1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, 1.5, -1e-6, math.nan])
def test_bad_budget_delta(delta: float) -> None:
    with pytest.raises(PrivacyError, match="delta"):
        Budget(1.0, delta)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_bad_clipping(bound: float) -> None:
    with pytest.raises(PrivacyError, match="bound"):
        Clipping("flat", bound)
    with pytest.raises(PrivacyError, match="stability"):
        Clipping("normalised", 1.0, bound)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parameters": ()}, "no parameter"),
        ({"parameters": ("w", "w")}, "twice"),
        ({"steps": 0}, "steps"),
        ({"sampling_rate": 0.0}, "sampling rate"),
        ({"sampling_rate": 1.01}, "sampling rate"),
        ({"denominator": 0.0}, "denominator"),
        ({"denominator": math.nan}, "denominator"),
        ({"noise_multiplier": -1.0}, "noise multiplier"),
        ({"noise_multiplier": math.inf}, "noise multiplier"),
        ({"ascent": "paired", "ascent_radius": 0.1}, "ascent_noise"),
        ({"ascent": "lagged", "ascent_radius": 0.1, "ascent_noise": 1.0}, "ascent_noise"),
        ({"ascent": "lagged"}, "radius"),
        ({"ascent_radius": 0.1}, "radius"),
        ({"anchor": -1.0}, "negative"),
        ({"anchor": 0.1, "weight_decay": 0.1}, "choose one"),
    ],
)
def test_contradictory_streams(stream: Make, fields: dict[str, object], message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        stream(**fields)


def test_bad_schedules(stream: Make) -> None:
    with pytest.raises(PrivacyError, match="at least one"):
        Schedule(())
    with pytest.raises(PrivacyError, match="same name"):
        Schedule((stream("a"), stream("a", parameters=("other",))))
    with pytest.raises(PrivacyError, match="belongs to"):
        Schedule((stream("a", parameters=("w",)), stream("b", parameters=("w",))))
    with pytest.raises(PrivacyError, match="different sampling rates"):
        Schedule((stream("a", draw="d"), stream("b", draw="d", sampling_rate=0.03)))


def test_events_of_every_ascent(stream: Make) -> None:
    def event(**fields: object) -> Composed:
        return Schedule((stream(**fields),)).event()

    single = PoissonGaussian(0.02, (1.0,), 50)
    assert event() == Composed((single,))
    assert event(ascent="lagged", ascent_radius=0.1) == Composed((single,))
    paired = event(ascent="paired", ascent_radius=0.1, ascent_noise=3.0)
    assert paired == Composed((PoissonGaussian(0.02, (3.0, 1.0), 50),))
    fresh = event(ascent="fresh", ascent_radius=0.1, ascent_noise=3.0)
    assert sorted(fresh.events, key=lambda e: e.noise_multipliers) == [  # type: ignore[union-attr]
        single,
        PoissonGaussian(0.02, (3.0,), 50),
    ]


def test_shared_draw_of_streams_that_stop_at_different_steps(stream: Make) -> None:
    both = Schedule((stream("a", draw="d", steps=30), stream("b", draw="d", noise_multiplier=4.0, steps=50)))
    assert both.event() == Composed(
        (PoissonGaussian(0.02, (1.0, 4.0), 30), PoissonGaussian(0.02, (4.0,), 20))
    )
    own = Schedule((stream("a", steps=30), stream("b", noise_multiplier=4.0)))
    assert own.event() == Composed((PoissonGaussian(0.02, (1.0,), 30), PoissonGaussian(0.02, (4.0,), 50)))


def test_fresh_ascent_of_streams_on_one_draw_has_own_draws(stream: Make) -> None:
    options = {"draw": "d", "ascent": "fresh", "ascent_radius": 0.1, "ascent_noise": 2.0}
    event = Schedule((stream("a", **options), stream("b", **options))).event()
    assert len(event.events) == 3
    assert PoissonGaussian(0.02, (1.0, 1.0), 50) in event.events


def test_with_noise_scales_everything(stream: Make) -> None:
    schedule = Schedule((stream(ascent="paired", ascent_radius=0.1, ascent_noise=3.0),))
    scaled = schedule.with_noise(2.0).streams[0]
    assert (scaled.noise_multiplier, scaled.ascent_noise) == (2.0, 6.0)
    assert schedule.private
    assert not schedule.with_noise(0.0).private
    silent_ascent = Schedule((stream(ascent="paired", ascent_radius=0.1, ascent_noise=0.0),))
    assert not silent_ascent.private


def test_an_ascent_draw_is_charged_at_its_own_rate(stream: Make) -> None:
    fresh = stream(
        name="a", parameters=("w",), ascent="fresh", ascent_radius=0.1, ascent_noise=1.0, sampling_rate=0.01
    )
    other = stream(name="b", parameters=("v",), draw="a/ascent", sampling_rate=0.5)
    for streams in ((fresh, other), (other, fresh)):
        with pytest.raises(PrivacyError, match="different sampling rates"):
            Schedule(streams)
