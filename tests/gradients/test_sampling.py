from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from confide.errors import PrivacyError
from confide.gradients.keys import Key
from confide.gradients.sampling import poisson_draw

KEY = Key.fixed(11)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 600_000), st.integers(0, 600_000), st.floats(1e-6, 1.0))
def test_appending_units_changes_no_ones_inclusion(count: int, more: int, rate: float) -> None:
    small = poisson_draw(KEY, "d", 0, count, rate)
    large = poisson_draw(KEY, "d", 0, count + more, rate)
    assert np.array_equal(small, large[large < count])


def test_units_are_sorted_distinct_int64_and_in_range() -> None:
    units = poisson_draw(KEY, "d", 3, 300_001, 0.3)
    assert units.dtype == np.int64
    assert (np.diff(units) > 0).all()
    assert units[0] >= 0
    assert units[-1] < 300_001


def test_batch_sizes_are_binomial() -> None:
    n, q = 1000, 0.02
    sizes = np.array([len(poisson_draw(KEY, "d", step, n, q)) for step in range(4000)])
    edges = np.arange(10, 32)
    observed = np.array(
        [(sizes <= 10).sum(), *(np.sum(sizes == k) for k in edges[1:-1]), (sizes >= 31).sum()]
    )
    cdf = stats.binom(n, q).cdf
    expected = np.array([cdf(10), *(cdf(k) - cdf(k - 1) for k in edges[1:-1]), 1 - cdf(30)]) * len(sizes)
    assert stats.chisquare(observed, expected).pvalue > 1e-4


def test_every_unit_has_the_same_rate_and_pairs_are_independent() -> None:
    steps, n, q = 4000, 40, 0.25
    joined = np.zeros((steps, n))
    for step in range(steps):
        joined[step, poisson_draw(KEY, "e", step, n, q)] = 1
    z = (joined.mean(0) - q) / np.sqrt(q * (1 - q) / steps)
    assert np.abs(z).max() < 4.5
    off = np.corrcoef(joined.T)[~np.eye(n, dtype=bool)] * np.sqrt(steps)
    assert np.abs(off).max() < 5.5


def test_draws_of_different_steps_and_names_differ() -> None:
    base = poisson_draw(KEY, "d", 0, 1000, 0.5)
    assert not np.array_equal(base, poisson_draw(KEY, "d", 1, 1000, 0.5))
    assert not np.array_equal(base, poisson_draw(KEY, "e", 0, 1000, 0.5))
    assert np.array_equal(base, poisson_draw(KEY, "d", 0, 1000, 0.5))


def test_extremes() -> None:
    assert np.array_equal(poisson_draw(KEY, "d", 0, 10, 1.0), np.arange(10))
    assert len(poisson_draw(KEY, "d", 0, 10, 1e-12)) == 0
    assert len(poisson_draw(KEY, "d", 0, 0, 0.5)) == 0
    assert len(poisson_draw(KEY, "d", 0, 10_000, float(np.nextafter(1, 0)))) == 10_000


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, float("nan"), float("inf")])
def test_bad_rates_are_refused(rate: float) -> None:
    with pytest.raises(PrivacyError, match="sampling rate"):
        poisson_draw(KEY, "d", 0, 10, rate)
