from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from confide.errors import PrivacyError
from confide.privacy.accountant import epsilon
from confide.privacy.calibration import (
    TOLERANCE,
    calibrate,
    delta_warning,
    noise_multiplier,
    resolve_delta,
)
from confide.privacy.distinguisher import epsilon_lower
from confide.privacy.events import Composed, PoissonGaussian
from confide.privacy.queries import Query
from confide.privacy.streams import Budget, Clipping, Schedule, Stream


def _cost(q: float, sigma: float, steps: int, delta: float) -> float:
    return epsilon(PoissonGaussian(q, (sigma,), steps), delta).epsilon


@pytest.mark.parametrize(
    ("q", "steps", "delta", "eps", "sigma"),
    [
        (16 / 3680, 2300, 1 / 3680, 1.0, 0.9118),
        (16 / 3680, 2300, 1 / 3680, 4.0, 0.5813),
        (1000 / 67349, 1347, 67349**-1.1, 1.0, 2.2780),
        (1.0, 1, 1e-5, 1.0, 3.7306),
        pytest.param(16 / 60000, 37500, 1 / 60000, 1.0, 0.6077, marks=pytest.mark.slow),
        pytest.param(16 / 60000, 37500, 1 / 60000, 4.0, 0.4673, marks=pytest.mark.slow),
        pytest.param(16 / 60000, 37500, 1 / 60000, 8.0, 0.3996, marks=pytest.mark.slow),
    ],
)
def test_smallest_noise_on_the_safe_side(
    q: float, steps: int, delta: float, eps: float, sigma: float
) -> None:
    found = noise_multiplier(q, steps, Budget(eps, delta))
    assert _cost(q, found, steps, delta) <= eps
    assert found == pytest.approx(sigma, rel=3e-4)
    # A little less is provably too little, or the accountant can't show that it is enough.
    less = found / (1 + 2 * TOLERANCE)
    assert (
        epsilon_lower(PoissonGaussian(q, (less,), steps), delta) > eps or _cost(q, less, steps, delta) > eps
    )


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(q=st.floats(1e-3, 1.0), steps=st.integers(1, 300), eps=st.floats(0.1, 4), delta=st.floats(1e-8, 1e-3))
def test_answer_always_fits(q: float, steps: int, eps: float, delta: float) -> None:
    sigma = noise_multiplier(q, steps, Budget(eps, delta))
    assert _cost(q, sigma, steps, delta) <= eps
    assert _cost(q, sigma / 1.01, steps, delta) > eps


def test_paired_needs_root_two_more() -> None:
    budget = Budget(2.0, 1e-5)
    single = noise_multiplier(0.01, 300, budget)
    pair = noise_multiplier(0.01, 300, budget, queries=2)
    assert pair / single == pytest.approx(math.sqrt(2), rel=2 * TOLERANCE)


def test_schedule_keeps_its_ratios(stream: Callable[..., Stream]) -> None:
    schedule = Schedule(
        (
            stream("shared", noise_multiplier=1.0, ascent="paired", ascent_radius=0.05, ascent_noise=3.0),
            stream("experts", noise_multiplier=2.0, steps=20),
        )
    )
    found = calibrate(schedule, Budget(1.5, 1e-6))
    shared, experts = found.streams
    assert shared.ascent_noise == pytest.approx(3 * shared.noise_multiplier)
    assert experts.noise_multiplier == pytest.approx(2 * shared.noise_multiplier)
    assert 1.49 < epsilon(found.event(), 1e-6).epsilon <= 1.5
    assert found.with_noise(1.0) == found


def test_replace_one_needs_more(schedule: Callable[..., Schedule]) -> None:
    budget = Budget(1.0, 1e-5)
    usual = calibrate(schedule(), budget).streams[0].noise_multiplier
    replaced = calibrate(schedule(adjacency="replace-one"), budget)
    assert replaced.streams[0].noise_multiplier > 1.1 * usual
    assert epsilon(replaced.event(), 1e-5, "replace-one").epsilon <= 1.0


def test_no_noise_to_scale(schedule: Callable[..., Schedule]) -> None:
    with pytest.raises(PrivacyError, match="noise multiplier 0"):
        calibrate(schedule(noise_multiplier=0.0), Budget(1.0, 1e-5))


@pytest.mark.slow
def test_impossible_budget_says_what_helps() -> None:
    started = time.monotonic()
    with pytest.raises(PrivacyError, match="fewer steps"):
        noise_multiplier(1.0, 10_000_000, Budget(1e-9, 1e-12))
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(("queries", "steps"), [(0, 1), (1, 0), (-1, 5)])
def test_bad_counts(queries: int, steps: int) -> None:
    with pytest.raises(PrivacyError, match="at least 1"):
        noise_multiplier(0.1, steps, Budget(1.0, 1e-5), queries=queries)


@pytest.mark.slow
def test_calibration_is_quick() -> None:
    started = time.process_time()
    noise_multiplier(16 / 60000, 37500, Budget(4.0, 1 / 60000))
    assert time.process_time() - started < 6  # 1 to 3 seconds of one core


def test_delta() -> None:
    assert resolve_delta("auto", 100) == 1e-6
    assert resolve_delta("auto", 1_000_000) == 1e-7
    assert resolve_delta("1/n", 60000) == 1 / 60000
    assert resolve_delta("n^-1.1", 67349) == pytest.approx(4.8847e-6, rel=1e-4)
    assert resolve_delta(1e-5, 10) == 1e-5
    assert resolve_delta("1e-5", 10) == 1e-5
    for bad in (0, 1, -1e-5, math.nan, "half", "nan"):
        with pytest.raises(PrivacyError, match="delta"):
            resolve_delta(bad, 10)
    with pytest.raises(PrivacyError, match="units"):
        resolve_delta("auto", 0)


def test_delta_warning() -> None:
    assert delta_warning(1e-6, 1000) is None
    assert "random record" in (delta_warning(1 / 1000, 1000) or "")
    assert delta_warning(1 / 10_000, 1000) is None  # what auto gives for large n
    assert delta_warning(1.01 / 10_000, 1000) is not None


def test_fixed_queries_keep_their_noise_and_are_paid_first(stream: Callable[..., Stream]) -> None:
    """The page's example: a Gram release of σ = 10 costs the gradients a thousandth more noise."""
    plain = Schedule((stream(sampling_rate=16 / 3680, steps=2300),))
    schedule = dataclasses.replace(plain, queries=(Query("grams", "gram", (math.sqrt(48) * 5,) * 48),))
    budget = Budget(4.0, 1 / 3680)
    found = calibrate(schedule, budget)
    assert found.queries == schedule.queries
    assert found.streams[0].noise_multiplier == pytest.approx(0.5837, abs=2e-4)
    assert 3.998 <= epsilon(found.event(), budget.delta).epsilon <= 4.0


def test_the_count_of_adaptive_clipping_is_paid_for(stream: Callable[..., Stream]) -> None:
    clipping = Clipping("adaptive", 1.0, count_noise=1.0)
    budget = Budget(2.0, 1e-5)
    found = calibrate(Schedule((stream(clipping=clipping),)), budget).streams[0]
    plain = calibrate(Schedule((stream(),)), budget).streams[0]
    assert found.clipping == clipping
    # Together they must reveal what the gradient alone does: 1/σ² + 1/(2·1)² is the same.
    together = (found.noise_multiplier**-2 + 1 / 4) ** -0.5
    assert together == pytest.approx(plain.noise_multiplier, rel=3e-4)


def test_a_budget_that_fixed_queries_spend_is_refused_at_once(stream: Callable[..., Stream]) -> None:
    grams = dataclasses.replace(Schedule((stream(),)), queries=(Query("grams", "gram", (0.5,)),))
    with pytest.raises(PrivacyError, match=r"grams.* alone cost epsilon = .* leaves nothing of 1"):
        calibrate(grams, Budget(1.0, 1e-5))
    counted = Schedule((stream("all", clipping=Clipping("adaptive", 1.0, count_noise=0.1)),))
    with pytest.raises(PrivacyError, match="clipping count of all"):
        calibrate(counted, Budget(1.0, 1e-5))


def test_almost_no_room_beside_fixed_queries(stream: Callable[..., Stream]) -> None:
    query = Query("score", "accuracy", (4.0,))
    spent = epsilon(Composed((query.event(),)), 1e-5).epsilon
    schedule = dataclasses.replace(Schedule((stream(),)), queries=(query,))
    found = calibrate(schedule, Budget(spent * 1.01, 1e-5))
    assert found.streams[0].noise_multiplier > 3
    assert epsilon(found.event(), 1e-5).epsilon <= spent * 1.01
    with pytest.raises(PrivacyError, match="alone cost"):
        calibrate(schedule, Budget(spent * 0.9999, 1e-5))


@pytest.mark.parametrize("ascent", ["none", "paired", "fresh", "lagged"])
def test_every_ascent_is_calibrated_exactly(ascent: str, stream: Callable[..., Stream]) -> None:
    asks = ascent in ("paired", "fresh")
    one = stream(
        ascent=ascent, ascent_radius=0.0 if ascent == "none" else 0.1, ascent_noise=3.0 if asks else None
    )
    budget = Budget(1.5, 1e-5)
    found = calibrate(Schedule((one,)), budget)
    assert 1.4985 <= epsilon(found.event(), 1e-5).epsilon <= 1.5
    if asks:
        assert found.streams[0].ascent_noise == pytest.approx(3 * found.streams[0].noise_multiplier)
