"""The filter's arithmetic against dp-accounting's own Rényi divergences."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent, rdp
from hypothesis import given, settings
from hypothesis import strategies as st

from confide.errors import PrivacyError
from confide.privacy import rdp_filter, renyi
from confide.privacy.events import Composed, PoissonGaussian
from confide.privacy.rdp_filter import ORDERS

DELTA = 1e-6


def event(rate: float, sigma: float, steps: int) -> Composed:
    return Composed((PoissonGaussian(rate, (sigma,), steps),))


def conversion(alpha: float, divergence: float, delta: float) -> float:
    """Canonne, Kamath and Steinke 2020, proposition 12, written out."""
    return divergence + math.log1p(-1 / alpha) - math.log(delta * alpha) / (alpha - 1)


@pytest.mark.parametrize(
    "runs", [[(0.01, 1.0, 1000)], [(0.05, 4.0, 100)] * 3, [(0.01, 0.8, 500), (0.2, 6.0, 50), (1.0, 20.0, 3)]]
)
def test_against_dp_accounting(runs: list[tuple[float, float, int]]) -> None:
    total = np.zeros(len(ORDERS))
    for rate, sigma, steps in runs:  # one accountant per run, so that the sum over runs is ours
        theirs = rdp.RdpAccountant(ORDERS, NeighboringRelation.ADD_OR_REMOVE_ONE)
        theirs.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), steps)
        total += theirs.rdp
    share = DELTA / len(ORDERS)
    expected = min(conversion(alpha, value, share) for alpha, value in zip(ORDERS, total, strict=True))
    ours = rdp_filter.epsilon([event(*run) for run in runs], DELTA, "add-or-remove-one")
    assert ours == pytest.approx(expected, rel=1e-9)


def test_gaussians_by_hand() -> None:
    """D_α of N(1, σ²) from N(0, σ²) is α/2σ²; of opposite shifts, 4α/2σ²."""
    for adjacency, shift in (("add-or-remove-one", 1), ("replace-one", 2)):
        expected = min(conversion(a, 5 * a * shift**2 / (2 * 9.0**2), DELTA / len(ORDERS)) for a in ORDERS)
        found = rdp_filter.epsilon([event(1.0, 9.0, 2), event(1.0, 9.0, 3)], DELTA, adjacency)  # type: ignore[arg-type]
        assert found == pytest.approx(expected, rel=1e-9)


@settings(max_examples=10, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.01, 0.1, 1.0]), st.floats(1.0, 20.0), st.integers(1, 200)),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([1e-8, 1e-5]),
)
def test_never_below_what_fixed_runs_cost(runs: list[tuple[float, float, int]], delta: float) -> None:
    events = [event(*run) for run in runs]
    filtered = rdp_filter.epsilon(events, delta, "add-or-remove-one")
    fixed = renyi.epsilon(Composed(tuple(events)), delta, "add-or-remove-one")
    assert filtered >= fixed * (1 - 1e-9)
    assert filtered >= rdp_filter.epsilon(events[:-1], delta, "add-or-remove-one")


def test_edges() -> None:
    assert rdp_filter.epsilon([], DELTA, "add-or-remove-one") == 0
    assert rdp_filter.epsilon([event(0.1, 0.0, 1)], DELTA, "add-or-remove-one") == math.inf
    with pytest.raises(PrivacyError, match="between 0 and 1"):
        rdp_filter.epsilon([event(0.1, 1.0, 1)], 0.0, "add-or-remove-one")
