from __future__ import annotations

import csv
import math
import re
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize, stats

from confide.errors import PrivacyError
from confide.privacy import accountant, losses, renyi
from confide.privacy.accountant import epsilon
from confide.privacy.distinguisher import epsilon_lower
from confide.privacy.events import (
    Composed,
    PoissonGaussian,
    RandomSelection,
    RepeatAndSelect,
    TruncatedPoissonGaussian,
    effective,
)
from confide.privacy.renyi import renyi_replace_one
from confide.privacy.streams import Adjacency

with open(Path(__file__).parent / "data" / "accounting_reference.csv", newline="") as _file:
    ROWS = list(csv.DictReader(_file))


def _composed(groups: str) -> Composed:
    parts = (group.split(":") for group in groups.split(";"))
    return Composed(tuple(PoissonGaussian(float(q), (float(s),), int(k)) for q, s, k in parts))


def _event(row: dict[str, str]) -> Composed:
    """The row's mechanism as an event."""
    mechanism, groups = row["mechanism"], row["effective"]
    if mechanism == "random_selection":
        rare = float(re.search(r"p_hi=(\S+)", row["label"])[1])  # type: ignore[index]
        often, seldom = re.findall(r"\[(\S+?)\]", groups)
        return Composed((RandomSelection((1 - rare, rare), (_composed(often), _composed(seldom))),))
    if mechanism == "truncated_poisson":
        units, cap = (int(found) for found in re.search(r"N=(\d+) .* cap=(\d+)", row["label"]).groups())  # type: ignore[union-attr]
        q, sigma, steps = groups.split(":")
        return Composed((TruncatedPoissonGaussian(float(q), float(sigma), int(steps), units, cap),))
    if mechanism.startswith("repeat_and_select"):
        shape = float(re.search(r"shape=(\d)", mechanism)[1])  # type: ignore[index]
        mean = float(re.search(r"mean runs (\d+)", row["label"])[1])  # type: ignore[index]
        return Composed((RepeatAndSelect(_composed(groups), mean, shape),))
    return _composed(groups)


def _parameters() -> list[object]:
    # Every row runs in CI; the quick suite takes those with fewer steps.
    slow = ("N=25000", "N=60000", "N=73257", "p_hi=0.0724", "p_hi=0.1164", "T=100000", "T=14063", "T=10000")
    return [
        pytest.param(
            row,
            id=f"{row['mechanism']}-{row['label']}",
            marks=[pytest.mark.slow] if any(part in row["label"] for part in slow) else [],
        )
        for row in ROWS
    ]


@pytest.mark.parametrize("row", _parameters())
def test_reference_table(row: dict[str, str]) -> None:
    adjacency = "replace-one" if "replace_one" in row["mechanism"] else "add-or-remove-one"
    event, delta = _event(row), float(row["delta"])
    claim = epsilon(event, delta, adjacency)
    if row["mechanism"] == "truncated_poisson":  # only dp-accounting's own value is known
        assert claim.epsilon == pytest.approx(float(row["eps_upper"]), abs=1e-3)
        assert claim.epsilon_rdp is None
        return
    assert claim.epsilon_rdp is not None
    if row["mechanism"].startswith("repeat_and_select"):
        assert claim.epsilon == claim.epsilon_rdp
        assert claim.epsilon == pytest.approx(float(row["rdp_upper"]), rel=5e-3)
        assert "RDP alone" in claim.accountant
        assert claim.epsilon_lower is None
        return
    exact = float(row["eps_exact"])
    assert exact - 1e-6 <= claim.epsilon <= exact * 1.002 + 2e-3
    assert claim.epsilon <= float(row["eps_upper"]) + 1e-3
    assert "PLD" in claim.accountant
    assert claim.epsilon <= claim.epsilon_rdp
    if row["rdp_upper"]:
        assert claim.epsilon_rdp <= float(row["rdp_upper"]) * 1.005
    lower = claim.epsilon_lower
    assert lower is not None
    assert lower <= exact + 1e-8
    # Rounding of the Fourier transform is all that keeps it from the truth at a tiny δ.
    assert exact - lower <= (1e-3 if delta > 1e-6 else 0.02 if delta > 2e-7 else 0.15)


def test_all_rows_are_there() -> None:
    assert len(ROWS) == 61
    assert len({f"{row['mechanism']}-{row['label']}" for row in ROWS}) == 61


@pytest.mark.parametrize(("sigma", "delta"), [(0.5, 1e-5), (1.0, 1e-6), (4.0, 1e-8), (20.0, 1e-3)])
def test_one_gaussian_is_balle_and_wangs_formula(sigma: float, delta: float) -> None:
    def excess(eps: float) -> float:
        below = stats.norm.cdf(1 / (2 * sigma) - eps * sigma)
        return float(below - math.exp(eps) * stats.norm.cdf(-1 / (2 * sigma) - eps * sigma) - delta)

    exact = optimize.brentq(excess, 0, 100, xtol=1e-12)
    claim = epsilon(PoissonGaussian(1.0, (sigma,), 1), delta)
    assert exact - 1e-8 <= claim.epsilon <= exact + 1e-4
    # Under replace-one the sum moves by 2C.
    assert epsilon(PoissonGaussian(1.0, (2 * sigma,), 1), delta, "replace-one").epsilon == pytest.approx(
        exact, abs=1e-3
    )


def test_pair_is_one_query_at_half_the_variance() -> None:
    pair = epsilon(PoissonGaussian(0.01, (1.0, 1.0), 500), 1e-5)
    single = epsilon(PoissonGaussian(0.01, (1 / math.sqrt(2),), 500), 1e-5)
    assert pair.epsilon == pytest.approx(single.epsilon, rel=1e-9)


@pytest.mark.slow
def test_pair_costs_more_than_twice_as_many_steps() -> None:
    pair = epsilon(PoissonGaussian(16 / 60000, (0.661, 0.661), 37500), 1 / 60000)
    naive = epsilon(PoissonGaussian(16 / 60000, (0.661,), 75000), 1 / 60000)
    once = epsilon(PoissonGaussian(16 / 60000, (0.661,), 37500), 1 / 60000)
    assert pair.epsilon > 2 * naive.epsilon > 2 * once.epsilon
    # What the naive count calls ε = 4 really is 15.8 (and 18.8 when the ascent is forgotten).
    assert epsilon(PoissonGaussian(16 / 60000, (0.4857, 0.4857), 37500), 1 / 60000).epsilon == pytest.approx(
        15.81, abs=0.02
    )


def test_effective_noise_agrees_with_dp_accountings_composed_event() -> None:
    sigmas, q, steps = (0.9, 2.0, 3.5), 0.03, 40
    orders = [1.5, 2, 3.3, 8, 32]
    native, ours = RdpAccountant(orders), RdpAccountant(orders)
    composed = dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(s) for s in sigmas])
    native.compose(dp_accounting.PoissonSampledDpEvent(q, composed), steps)
    (group,) = effective(PoissonGaussian(q, sigmas, steps))
    single = dp_accounting.GaussianDpEvent(group.noise_multipliers[0])
    ours.compose(dp_accounting.PoissonSampledDpEvent(q, single), steps)
    np.testing.assert_allclose(ours.rdp, native.rdp, rtol=1e-9)


def test_effective_noise_by_two_dimensional_quadrature() -> None:
    """The hockey stick of both queries on one draw equals that of the one Gaussian."""
    q, first, second, eps = 0.2, 1.3, 0.8, 0.5
    x = np.linspace(-12, 13, 2001)
    p1, p0 = stats.norm.pdf(x[:, None], 1, first) * stats.norm.pdf(x[None], 1, second), None
    p0 = stats.norm.pdf(x[:, None], 0, first) * stats.norm.pdf(x[None], 0, second)
    joint = np.maximum((1 - q) * p0 + q * p1 - math.exp(eps) * p0, 0).sum() * (x[1] - x[0]) ** 2
    sigma = PoissonGaussian(q, (first, second), 1).effective_noise_multiplier
    fine = np.linspace(-12, 13, 200001)
    g1, g0 = stats.norm.pdf(fine, 1, sigma), stats.norm.pdf(fine, 0, sigma)
    alone = integrate.trapezoid(np.maximum((1 - q) * g0 + q * g1 - math.exp(eps) * g0, 0), fine)
    assert joint == pytest.approx(alone, rel=1e-3)


def test_replace_one_dominates_any_pair_of_shifts_whatever_the_weights() -> None:
    """The proof behind replace-one for adaptive queries: opposite unit shifts are the worst."""
    rng = np.random.default_rng(0)
    x = np.linspace(-9, 9, 301)
    grid = np.stack(np.meshgrid(x, x, indexing="ij"))

    def density(shift: tuple[float, float]) -> np.ndarray:
        squared = (grid[0] - shift[0]) ** 2 + (grid[1] - shift[1]) ** 2
        return np.exp(-squared / 2) / (2 * math.pi)

    origin = density((0.0, 0.0))

    def value(u: tuple[float, float], v: tuple[float, float], w: np.ndarray, alpha: float) -> float:
        left, right = w[0] * origin + w[1] * density(u), w[0] * origin + w[2] * density(v)
        return float(np.maximum(left - alpha * right, 0).sum() * (x[1] - x[0]) ** 2)

    for _ in range(60):
        weights, alpha = rng.exponential(size=3), math.exp(rng.uniform(-1.5, 1.5))
        shifts = []
        for _ in range(2):
            angle, length = rng.uniform(0, 2 * math.pi), 1.5 * math.sqrt(rng.uniform())
            shifts.append((length * math.cos(angle), length * math.sin(angle)))
        worst = value((1.5, 0.0), (-1.5, 0.0), weights, alpha)
        assert value(shifts[0], shifts[1], weights, alpha) <= worst + 1e-6


def test_replace_one_is_tight_not_half_the_noise() -> None:
    event = PoissonGaussian(16 / 3680, (0.5813,), 2300)
    assert epsilon(event, 1 / 3680, "replace-one").epsilon == pytest.approx(4.8386, abs=1e-3)
    halved = PoissonGaussian(16 / 3680, (0.5813 / 2,), 2300)
    assert epsilon(halved, 1 / 3680).epsilon > 50


@pytest.mark.parametrize(("q", "sigma"), [(0.01, 0.6), (0.3, 1.0), (0.7, 3.0), (1.0, 2.0)])
def test_renyi_replace_one_against_quad(q: float, sigma: float) -> None:
    orders = [1.5, 2.0, 7.0]

    def log_mix(x: float, shift: float) -> float:
        return float(
            np.logaddexp(
                math.log1p(-q) + stats.norm.logpdf(x, 0, sigma) if q < 1 else -math.inf,
                math.log(q) + stats.norm.logpdf(x, shift, sigma),
            )
        )

    for order, found in zip(orders, renyi_replace_one(q, sigma, orders), strict=True):
        integral, _ = integrate.quad(
            lambda x, a=order: math.exp(a * log_mix(x, 1.0) + (1 - a) * log_mix(x, -1.0)),
            -3 - 15 * sigma,
            2 * order + 15 * sigma,
            points=[-1, 0, 1, 2 * order - 1],
            limit=500,
            epsrel=1e-12,
        )
        assert found == pytest.approx(math.log(integral) / (order - 1), rel=1e-7)


def test_streams_on_a_shared_draw_cost_more_than_on_own_draws() -> None:
    shared = PoissonGaussian(0.0148, (0.9303, 4.9083), 1347)
    own = Composed((PoissonGaussian(0.0148, (0.9303,), 1347), PoissonGaussian(0.0148, (4.9083,), 1347)))
    assert epsilon(shared, 5e-6).epsilon > epsilon(own, 5e-6).epsilon


def test_order_and_splitting_change_nothing() -> None:
    a, b = PoissonGaussian(0.02, (1.1,), 30), PoissonGaussian(0.05, (2.0,), 10)
    whole = epsilon(Composed((a, b)), 1e-5)
    split = [PoissonGaussian(0.02, (1.1,), 1)] * 30 + [PoissonGaussian(0.05, (2.0,), 1)] * 10
    assert epsilon(Composed((b, a)), 1e-5).epsilon == pytest.approx(whole.epsilon, rel=1e-6)
    assert epsilon(Composed(tuple(split[::2] + split[1::2])), 1e-5).epsilon == pytest.approx(
        whole.epsilon, rel=1e-6
    )
    assert epsilon(Composed((Composed((a,)), Composed((b,)))), 1e-5) == whole


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    q=st.floats(1e-4, 0.5),
    sigma=st.floats(0.6, 8.0),
    steps=st.integers(1, 500),
    adjacency=st.sampled_from(["add-or-remove-one", "replace-one"]),
)
def test_more_noise_fewer_steps_or_a_smaller_rate_cost_less(
    q: float, sigma: float, steps: int, adjacency: str
) -> None:
    def cost(q: float, sigma: float, steps: int) -> float:
        claim = epsilon(PoissonGaussian(q, (sigma,), steps), 1e-5, adjacency)  # type: ignore[arg-type]
        assert 0 <= claim.epsilon <= claim.epsilon_rdp < math.inf
        return claim.epsilon

    here = cost(q, sigma, steps)
    slack = 1e-3 + 0.01 * here  # grids differ
    assert cost(q, sigma * 1.2, steps) <= here + slack
    assert cost(q, sigma, max(1, steps // 2)) <= here + slack
    assert cost(q / 2, sigma, steps) <= here + slack


def test_no_noise_no_claim() -> None:
    with pytest.raises(PrivacyError, match="no noise"):
        epsilon(PoissonGaussian(0.1, (1.0, 0.0), 3), 1e-5)
    with pytest.raises(PrivacyError, match="no noise"):
        epsilon_lower(PoissonGaussian(0.1, (0.0,), 3), 1e-5)


def test_nothing_asked_costs_nothing() -> None:
    assert epsilon(Composed(()), 1e-5).epsilon == 0
    assert epsilon(PoissonGaussian(0.1, (1.0,), 0), 1e-5).epsilon == 0
    assert epsilon_lower(Composed(()), 1e-5) == 0


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_bad_delta(delta: float) -> None:
    with pytest.raises(PrivacyError, match="delta"):
        epsilon(PoissonGaussian(0.1, (1.0,), 3), delta)


def test_unknown_event_and_adjacency_are_refused() -> None:
    with pytest.raises(PrivacyError, match="unknown event"):
        epsilon(Composed((object(),)), 1e-5)  # type: ignore[arg-type]
    with pytest.raises(PrivacyError, match="unknown adjacency"):
        epsilon(PoissonGaussian(0.1, (1.0,), 3), 1e-5, "zero-out")  # type: ignore[arg-type]


def test_tiny_delta_falls_back_to_rdp_and_says_so() -> None:
    event = PoissonGaussian(0.01, (1.0,), 10_000)
    claim = epsilon(event, 1e-12)
    assert claim.epsilon == claim.epsilon_rdp > epsilon(event, 1e-8).epsilon
    assert "RDP alone" in claim.accountant
    assert "rounding" in claim.accountant


@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one"])
@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.15, 0.05, 0.005])
def test_little_noise_is_bounded(sigma: float, adjacency: str) -> None:
    event = PoissonGaussian(0.001, (sigma,), 500)
    claim = epsilon(event, 1e-5, adjacency)  # type: ignore[arg-type]
    lower = epsilon_lower(event, 1e-5, adjacency)  # type: ignore[arg-type]
    assert claim.epsilon_rdp >= claim.epsilon >= lower
    assert claim.epsilon > 100
    assert lower > 0.99 * claim.epsilon or sigma < 0.03


def test_a_failing_library_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    event = PoissonGaussian(0.01, (1.0,), 100)
    honest = epsilon(event, 1e-5)
    monkeypatch.setattr(accountant, "_price", accountant._price.__wrapped__)
    for broken in (math.nan, math.inf, -1.0, honest.epsilon * 0.9, OverflowError("too big")):

        def answer(self: object, delta: float, broken: object = broken) -> object:
            if isinstance(broken, Exception):
                raise broken
            return broken

        monkeypatch.setattr(PrivacyLossDistribution, "get_epsilon_for_delta", answer)
        claim = epsilon(event, 1e-5)
        assert claim.epsilon == claim.epsilon_rdp == honest.epsilon_rdp
        assert "RDP alone" in claim.accountant


def test_tiny_losses_get_a_finer_grid() -> None:
    """At the default grid this claim would be several times too large."""
    event = PoissonGaussian(1e-4, (10.0,), 1_000_000)
    claim = epsilon(event, 1e-5)
    lower = epsilon_lower(event, 1e-5, interval=1e-6)
    assert 0 < lower <= claim.epsilon <= lower * 1.05 + 1e-3


LIGHT = Composed((PoissonGaussian(0.02, (3.0,), 100),))
HEAVY = Composed((PoissonGaussian(0.02, (0.9,), 100),))


@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one"])
def test_what_is_remembered_of_a_step_changes_no_digit(adjacency: Adjacency) -> None:
    """Steps priced before, alone, at other lengths and in other company, against a fresh start."""
    one, two = PoissonGaussian(0.1, (0.9,), 4), PoissonGaussian(0.05, (1.5,), 6)
    whole = Composed((one, two, PoissonGaussian(1, (8.0,), 2)))

    def forget() -> None:
        for remembered in (accountant._price, losses._step, renyi._step):
            remembered.cache_clear()

    forget()
    fresh = epsilon(whole, 1e-6, adjacency)
    forget()
    epsilon(one, 1e-6, adjacency)
    epsilon(Composed((two, two)), 1e-6, adjacency)
    accountant._price.cache_clear()
    made = losses._step.cache_info().misses, renyi._step.cache_info().misses
    assert epsilon(whole, 1e-6, adjacency) == fresh
    # Only the step that is new was computed.
    assert (losses._step.cache_info().misses, renyi._step.cache_info().misses) == (made[0] + 1, made[1] + 1)
    accountant._price.cache_clear()
    assert epsilon(whole, 1e-6, adjacency) == fresh


def test_selection_inside_a_composition() -> None:
    """Which event was drawn is known: so δ(ε) is the mixture, with whatever composes in each branch."""
    other = PoissonGaussian(1.0, (5.0,), 1)
    event = Composed((RandomSelection((0.9, 0.1), (LIGHT, HEAVY)), other))
    claim = epsilon(event, 1e-5)
    outside = epsilon(RandomSelection((0.9, 0.1), (Composed((LIGHT, other)), Composed((HEAVY, other)))), 1e-5)
    assert claim.epsilon == pytest.approx(outside.epsilon, abs=2e-4)
    assert epsilon(Composed((LIGHT, other)), 1e-5).epsilon < claim.epsilon
    assert claim.epsilon < epsilon(Composed((HEAVY, other)), 1e-5).epsilon
    assert claim.epsilon_lower is not None
    assert claim.epsilon - 5e-3 <= claim.epsilon_lower <= claim.epsilon


def test_selection_of_one_or_of_equals_is_that_event() -> None:
    for mixed in (RandomSelection((1.0,), (HEAVY,)), RandomSelection((0.5, 0.5), (HEAVY, HEAVY))):
        claim, plain = epsilon(mixed, 1e-5, "replace-one"), epsilon(HEAVY, 1e-5, "replace-one")
        assert claim.epsilon == pytest.approx(plain.epsilon, abs=1e-6)
        assert claim.epsilon_rdp == pytest.approx(plain.epsilon_rdp, rel=1e-9)
        assert claim.epsilon_lower == pytest.approx(plain.epsilon_lower, abs=1e-4)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(p=st.floats(1e-6, 1 - 1e-6), first=st.floats(0.8, 4.0), second=st.floats(0.8, 4.0))
def test_selection_lies_between_its_parts(p: float, first: float, second: float) -> None:
    parts = [PoissonGaussian(0.05, (sigma,), 20) for sigma in (first, second)]
    costs = sorted(epsilon(part, 1e-5).epsilon for part in parts)
    claim = epsilon(RandomSelection((p, 1 - p), tuple(parts)), 1e-5)
    other_way = epsilon(RandomSelection((1 - p, p), tuple(parts[::-1])), 1e-5)
    assert costs[0] - 1e-4 <= claim.epsilon <= costs[1] + 1e-4
    assert claim.epsilon == other_way.epsilon
    assert claim.epsilon_lower is None or claim.epsilon_lower <= claim.epsilon


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.01, 0.1, 1.0]), st.floats(1.0, 30.0), st.integers(1, 30)),
        min_size=2,
        max_size=4,
    ),
    st.randoms(),
)
def test_more_events_never_cost_less_in_any_order(
    groups: list[tuple[float, float, int]], random: np.random.Generator
) -> None:
    events = [PoissonGaussian(q, (sigma,), steps) for q, sigma, steps in groups]
    whole = epsilon(Composed(tuple(events)), 1e-5)
    assert 0 <= whole.epsilon < math.inf
    random.shuffle(events)
    assert epsilon(Composed((Composed(tuple(events[:1])), *events[1:])), 1e-5) == whole
    fewer = epsilon(Composed(tuple(events[1:])), 1e-5).epsilon
    assert fewer <= whole.epsilon + 1e-3 + 0.005 * whole.epsilon  # grids differ


def test_what_no_single_accountant_can_price() -> None:
    truncated = TruncatedPoissonGaussian(0.01, 1.0, 10, 1000, 30)
    repeated = RepeatAndSelect(LIGHT, 3.0, 1.0)
    with pytest.raises(PrivacyError, match="nothing prices both"):
        epsilon(Composed((truncated, repeated)), 1e-5)
    alone = epsilon(Composed((repeated, HEAVY)), 1e-5)
    assert "RDP alone: PLD has no rule for repeat-and-select" in alone.accountant
    assert alone.epsilon == alone.epsilon_rdp
    # What was composed beside the repetition is certainly told apart.
    assert alone.epsilon_lower == epsilon(HEAVY, 1e-5).epsilon_lower
    with pytest.raises(PrivacyError, match=r"rounding.*RDP has no rule"):
        epsilon(TruncatedPoissonGaussian(0.01, 1.0, 10_000, 1000, 30), 1e-12)
    for silent in (
        TruncatedPoissonGaussian(0.01, 0.0, 1, 1000, 30),
        RepeatAndSelect(PoissonGaussian(0.1, (0.0,), 1), 2.0, 1.0),
    ):
        with pytest.raises(PrivacyError, match="no noise"):
            epsilon(silent, 1e-5)


def test_a_far_cap_changes_nothing_and_a_near_one_costs() -> None:
    plain = epsilon(PoissonGaussian(0.01, (1.0,), 100), 1e-5)
    far = epsilon(TruncatedPoissonGaussian(0.01, 1.0, 100, 1000, 1000), 1e-5)
    near = epsilon(TruncatedPoissonGaussian(0.01, 1.0, 100, 1000, 15), 1e-5)
    assert far.epsilon == pytest.approx(plain.epsilon, abs=1e-6)
    assert near.epsilon > plain.epsilon + 0.1


@pytest.mark.parametrize(
    "event",
    [
        PoissonGaussian(0.01, (1e-300,), 10),
        PoissonGaussian(0.01, (1e-160, 1.0), 10),
        PoissonGaussian(0.01, (1e300,), 10),
        PoissonGaussian(0.01, (1.0,), 10**400),
        PoissonGaussian(1.0, (5e-324,), 1),
    ],
)
def test_numbers_out_of_all_proportion_claim_nothing(event: PoissonGaussian) -> None:
    with pytest.raises(PrivacyError):
        epsilon(event, 1e-6)


def test_more_steps_than_the_grid_has_points_take_no_memory() -> None:
    claim = epsilon(PoissonGaussian(0.01, (1.0,), 10**15), 1e-6)
    assert claim.accountant.split(" ")[2:4] == ["RDP", "alone:"]
    assert claim.epsilon_lower is None
    assert claim.epsilon > 1e10
