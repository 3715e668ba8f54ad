from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from confide.errors import PrivacyError
from confide.privacy.events import (
    Composed,
    Event,
    PoissonGaussian,
    RandomSelection,
    RepeatAndSelect,
    TruncatedPoissonGaussian,
    effective,
    leaves,
    queries,
    walk,
)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan])
def test_bad_sampling_rate(rate: float) -> None:
    with pytest.raises(PrivacyError, match="sampling rate"):
        PoissonGaussian(rate, (1.0,), 1)


@pytest.mark.parametrize("sigmas", [(), (-1.0,), (1.0, math.inf), (math.nan,)])
def test_bad_noise(sigmas: tuple[float, ...]) -> None:
    with pytest.raises(PrivacyError, match="noise multiplier"):
        PoissonGaussian(0.5, sigmas, 1)


def test_negative_steps() -> None:
    with pytest.raises(PrivacyError, match="steps"):
        PoissonGaussian(0.5, (1.0,), -1)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5))
def test_queries_together_reveal_more_than_each(sigmas: list[float]) -> None:
    effective_sigma = PoissonGaussian(0.5, tuple(sigmas), 1).effective_noise_multiplier
    assert effective_sigma <= min(sigmas) * (1 + 1e-12)
    assert effective_sigma >= min(sigmas) / math.sqrt(len(sigmas)) * (1 - 1e-12)


def test_one_silent_query_spoils_all() -> None:
    assert PoissonGaussian(0.5, (3.0, 0.0), 1).effective_noise_multiplier == 0


def test_alternating_streams_stay_two_groups() -> None:
    a, b = PoissonGaussian(0.1, (1.0,), 1), PoissonGaussian(0.1, (5.0,), 1)
    event = Composed((a, b) * 500)
    assert leaves(event) == (PoissonGaussian(0.1, (1.0,), 500), PoissonGaussian(0.1, (5.0,), 500))
    assert effective(event) == leaves(event)


def test_effective_merges_equal_mechanisms_only() -> None:
    pair, single = PoissonGaussian(0.1, (2.0, 2.0), 3), PoissonGaussian(0.1, (pair_sigma := 2 / 2**0.5,), 4)
    assert len(leaves(Composed((pair, single)))) == 2
    (group,) = effective(Composed((PoissonGaussian(0.1, (2.0, 2.0), 3), PoissonGaussian(0.1, (2.0, 2.0), 4))))
    assert group.steps == 7
    assert group.noise_multipliers[0] == pytest.approx(pair_sigma)


def test_nothing_and_unknown() -> None:
    assert leaves(Composed(())) == ()
    assert leaves(PoissonGaussian(0.1, (1.0,), 0)) == ()
    with pytest.raises(PrivacyError, match="unknown event str"):
        leaves(Composed(("shuffled batches",)))  # type: ignore[arg-type]


SINGLE = PoissonGaussian(0.1, (1.0,), 3)
TREE = Composed(
    (
        SINGLE,
        RandomSelection((0.25, 0.75), (SINGLE, Composed((PoissonGaussian(0.2, (2.0, 4.0), 5),)))),
        RepeatAndSelect(Composed((SINGLE,)), 3.5, 0.0),
        TruncatedPoissonGaussian(0.01, 1.0, 7, 1000, 30),
        PoissonGaussian(0.1, (1.0,), 4),
    )
)


def test_a_tree_round_trips_as_json() -> None:
    adapter = TypeAdapter(Event)
    assert adapter.validate_json(adapter.dump_json(TREE)) == TREE


def test_a_tree_is_flattened_and_walked() -> None:
    gaussian, selection, repeated, truncated = leaves(TREE)
    assert gaussian == PoissonGaussian(0.1, (1.0,), 7)
    assert [type(part) for part in (selection, repeated, truncated)] == [
        RandomSelection,
        RepeatAndSelect,
        TruncatedPoissonGaussian,
    ]
    assert len(list(walk(TREE))) == 8
    assert queries(TREE) == 7 + 10 + 11 + 7
    shuffled = Composed(TREE.events[::-1])
    assert effective(shuffled) == effective(TREE)


@pytest.mark.parametrize("kind", ["shuffled", "fixed-size-gaussian", None, 3])
def test_an_unknown_kind_is_refused_with_the_number(kind: object) -> None:
    forged = {"kind": "composed", "events": [{"kind": kind, "sampling_rate": 0.1, "steps": 10}]}
    with pytest.raises(ValidationError, match=r"unknown event .*Poisson.*22\.8"):
        TypeAdapter(Event).validate_python(forged)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomSelection((0.5, 0.6), (SINGLE, SINGLE)), "add up to 1"),
        (lambda: RandomSelection((1.0,), (SINGLE, SINGLE)), "one probability per event"),
        (lambda: RandomSelection((), ()), "one probability per event"),
        (lambda: RandomSelection((0.0, 1.0), (SINGLE, SINGLE)), "positive"),
        (lambda: RandomSelection((math.nan, 1.0), (SINGLE, SINGLE)), "positive"),
        (lambda: RepeatAndSelect(SINGLE, 0.5, 1.0), "at least 1"),
        (lambda: RepeatAndSelect(SINGLE, 2.0, -1.0), "shape"),
        (lambda: RepeatAndSelect(SINGLE, 2.0, math.inf), "shape"),
        (lambda: TruncatedPoissonGaussian(1.0, 1.0, 1, 10, 5), "below 1"),
        (lambda: TruncatedPoissonGaussian(0.1, 1.0, 1, 10, 0), "cap"),
        (lambda: TruncatedPoissonGaussian(0.1, -1.0, 1, 10, 5), "noise multiplier"),
    ],
)
def test_bad_events(make: object, message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        make()  # type: ignore[operator]


def test_effective_noise_of_extreme_and_of_single_queries() -> None:
    for sigma in (0.7, 1 / 3, 1e-300, 1e300):
        assert PoissonGaussian(0.1, (sigma,), 1).effective_noise_multiplier == sigma
    assert PoissonGaussian(0.1, (1e300, 1e300), 1).effective_noise_multiplier == pytest.approx(1e300 / 2**0.5)
