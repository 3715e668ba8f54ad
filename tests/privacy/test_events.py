from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from confide.errors import PrivacyError
from confide.privacy.events import Composed, PoissonGaussian, effective, leaves


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
