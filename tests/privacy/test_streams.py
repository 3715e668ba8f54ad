from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest

from confide.errors import PrivacyError
from confide.privacy.events import Composed, PoissonGaussian, effective
from confide.privacy.queries import Query
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


def test_adaptive_clipping_asks_one_more_query_on_the_draw(stream: Make) -> None:
    clipping = Clipping("adaptive", 1.0, count_noise=5.0)
    assert clipping.count_multiplier == 10.0  # a unit counts ±1/2
    plain = Schedule((stream(clipping=clipping),))
    assert plain.event() == Composed((PoissonGaussian(0.02, (1.0, 10.0), 50),))
    assert plain.fixed_event() == Composed((PoissonGaussian(0.02, (10.0,), 50),))
    fresh = Schedule((stream(clipping=clipping, ascent="fresh", ascent_radius=0.1, ascent_noise=3.0),))
    assert set(fresh.event().events) == {
        PoissonGaussian(0.02, (3.0,), 50),
        PoissonGaussian(0.02, (1.0, 10.0), 50),
    }
    assert plain.with_noise(2.0).event() == Composed((PoissonGaussian(0.02, (2.0, 10.0), 50),))
    assert Schedule((stream(),)).fixed_event() == Composed(())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rule": "adaptive"}, "count_noise"),
        ({"rule": "flat", "count_noise": 1.0}, "count_noise"),
        ({"rule": "adaptive", "count_noise": 0.0}, "count_noise"),
        ({"rule": "adaptive", "count_noise": math.inf}, "count_noise"),
        ({"rule": "adaptive", "count_noise": 1.0, "quantile": 1.5}, "quantile"),
        ({"rule": "adaptive", "count_noise": 1.0, "quantile_rate": 0.0}, "quantile"),
    ],
)
def test_bad_adaptive_clipping(fields: dict[str, object], message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        Clipping(bound=1.0, **fields)  # type: ignore[arg-type]


def test_queries_beside_the_gradients_are_charged(stream: Make) -> None:
    grams = Query("grams", "gram", (20.0,) * 4)
    schedule = Schedule((stream(),), queries=(grams, Query("score", "accuracy", (30.0,))))
    assert schedule.event().events[1:] == (
        PoissonGaussian(1.0, (20.0,) * 4, 1),
        PoissonGaussian(1.0, (30.0,), 1),
    )
    assert schedule.with_noise(3.0).queries == schedule.queries
    (together,) = effective(grams.event())
    # One concatenated Gaussian: four layers of √4·σ are one of σ.
    assert together == PoissonGaussian(1.0, (10.0,), 1)
    with pytest.raises(PrivacyError, match="same name"):
        dataclasses.replace(schedule, queries=(grams, grams))
    for sigmas in ((), (0.0,), (1.0, -1.0), (math.nan,)):
        with pytest.raises(PrivacyError, match="positive noise"):
            Query("q", "fisher", sigmas)


def test_a_query_alone_on_a_draw_of_its_own() -> None:
    query = Query("sensitivity", "sensitivity", (6.0, 8.0), 0.25)
    schedule = Schedule((), queries=(query,))
    assert schedule.private
    assert schedule.event() == Composed((PoissonGaussian(0.25, (6.0, 8.0), 1),))
    (together,) = effective(schedule.event())
    assert together == PoissonGaussian(0.25, (4.8,), 1)  # before subsampling
    for rate in (0.0, 1.5, math.nan):
        with pytest.raises(PrivacyError, match="sampling rate"):
            dataclasses.replace(query, sampling_rate=rate)
    for purpose in ("gram", "fisher", "accuracy"):  # they ask every unit, so a rate would be a discount
        with pytest.raises(PrivacyError, match="asks every unit"):
            Query("q", purpose, (1.0,), 0.25)
    with pytest.raises(PrivacyError, match="at least one stream or query"):
        Schedule(())


@pytest.mark.parametrize("sampling", ["shuffled", "fixed-size", "without-replacement", ""])
def test_only_poisson_draws_have_a_claim(stream: Make, sampling: str) -> None:
    with pytest.raises(PrivacyError, match=r"22\.8 .* claimed .* 4 .*37\.4"):
        stream(sampling=sampling)
