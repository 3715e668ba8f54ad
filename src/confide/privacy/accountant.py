"""What an event costs: an upper bound on ε at a given δ.

Privacy loss distributions (PLD) from dp-accounting, rounded pessimistically by connect-the-dots (Doroshenko
et al. 2022, arXiv 2207.04380), with the Rényi bound (RDP) beside them. Queries on one draw are first replaced
by the one Gaussian of σ_eff = (Σσᵢ⁻²)^−½, which holds for adaptive queries too:

- add or remove one: given the other members of a draw, both the answers without the unit and those with it
  are images of N(0, 1) and N(1/σ_eff, 1) under one random map, so the mixture over its membership is too.
- replace one: for any weights the pair with opposite shifts of full length is hardest to tell apart (the best
  test set is convex and stays inside itself when moved away from the other shift), so it is at every query,
  whatever was answered before. The pair is (1−q)N(0)+qN(+1) against (1−q)N(0)+qN(−1).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version

import dp_accounting
import numpy as np
import numpy.typing as npt
from dp_accounting import pld, rdp
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

from confide.errors import PrivacyError
from confide.privacy.distinguisher import epsilon_lower
from confide.privacy.events import Composed, PoissonGaussian, effective
from confide.privacy.statement import Claim
from confide.privacy.streams import Adjacency

FINEST_INTERVAL = 1e-4
_LARGEST_SUPPORT = 1e6  # points of a loss distribution; a few seconds
_LONGEST_QUADRATURE = 2e4  # in σ; sixteen points each
_RELATIVE_VARIANCE = 1e-3  # that rounding may add to the privacy loss

# Fractional orders matter: a small rate and little noise make the Rényi divergence jump between 3 and 4.
ORDERS: tuple[float, ...] = (
    *(1 + step / 100 for step in range(2, 10, 2)),
    *(1 + step / 20 for step in range(2, 80)),
    *(5 + step / 10 for step in range(60)),
    *(float(order) for order in (*range(11, 64), 80, 96, 128, 192, 256, 384, 512, 768, 1024)),
)

_RELATIONS = {
    "add-or-remove-one": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace-one": dp_accounting.NeighboringRelation.REPLACE_ONE,
}


def epsilon(
    event: PoissonGaussian | Composed, delta: float, adjacency: Adjacency = "add-or-remove-one"
) -> Claim:
    """The (ε, δ) that everything in `event` satisfies together.

    ε is the larger of both directions after composition, from PLD. Where floating point can't be trusted
    (δ near the rounding of the Fourier transform, overflow at tiny noise, a result that contradicts the
    certified lower bound), it is the RDP bound instead, and `accountant` says so.

    Args:
        event: what looked at the records.
        delta: δ in (0, 1).
        adjacency: which data sets are neighbours.

    Raises:
        PrivacyError: a query without noise, an unknown event, a δ out of range, or no finite bound: nothing
            can be claimed.
    """
    if not 0 < delta < 1:
        raise PrivacyError(f"delta must lie between 0 and 1, not {delta}")
    if adjacency not in _RELATIONS:
        raise PrivacyError(f"unknown adjacency {adjacency!r}; use one of {sorted(_RELATIONS)}")
    # Sorted, so that the order of events changes no digit; remembered, as merges price the same runs again.
    groups = sorted(effective(event), key=lambda group: (group.sampling_rate, group.noise_multipliers))
    return _price(tuple(groups), delta, adjacency)


@lru_cache(maxsize=512)
def _price(groups: tuple[PoissonGaussian, ...], delta: float, adjacency: Adjacency) -> Claim:
    if any(group.noise_multipliers[0] == 0 for group in groups):
        raise PrivacyError("a query has no noise (noise multiplier 0), so no privacy can be claimed")
    renyi = _rdp(groups, delta, adjacency)
    if not math.isfinite(renyi):
        raise PrivacyError("the noise is so small that no finite epsilon bounds the privacy loss; add noise")
    library = f"dp-accounting {version('dp-accounting')}"
    interval = _interval(groups)
    value, problem = _pld(groups, delta, adjacency, interval)
    if problem is None and value > renyi:
        problem = "the PLD bound is not below it"
    lower = epsilon_lower(Composed(groups), delta, adjacency) or None
    if problem is None and lower is not None and value < lower - 1e-6:
        problem = "the PLD bound lies below a certified lower bound"
    if problem is not None:
        value, used = renyi, f"{library} RDP alone: {problem}"
    else:
        used = f"{library} PLD, connect-the-dots, interval {interval:.3g}"
    return Claim(epsilon=value, delta=delta, epsilon_rdp=renyi, epsilon_lower=lower, accountant=used)


def _pld(
    groups: Sequence[PoissonGaussian], delta: float, adjacency: Adjacency, interval: float
) -> tuple[float, str | None]:
    """ε by PLD, and None or why it can't be trusted."""
    # Every step through the Fourier transform adds rounding error to the tail, about 2⁻⁵³ each; eight times
    # that is taken off δ, and below a hundred times more nothing would be left.
    rounding = 8 * 2.0**-53 * sum(group.steps if group.sampling_rate < 1 else 1 for group in groups)
    if delta < 100 * rounding:
        return math.inf, f"delta is below {100 * rounding:.1e}, where rounding spoils PLD for so many steps"
    accountant = pld.PLDAccountant(_RELATIONS[adjacency], interval)
    try:
        with np.errstate(all="ignore"):
            accountant.compose(_as_dp_event(groups))
            value = float(accountant.get_epsilon(delta - rounding))
    except (ArithmeticError, ValueError, MemoryError) as error:
        return math.inf, f"PLD failed ({type(error).__name__})"
    if not (math.isfinite(value) and value >= 0):
        return math.inf, f"PLD gave {value}"
    return value, None


def _as_dp_event(groups: Sequence[PoissonGaussian]) -> dp_accounting.DpEvent:
    events = []
    for group in groups:
        gaussian = dp_accounting.GaussianDpEvent(group.noise_multipliers[0])
        sampled = (
            dp_accounting.PoissonSampledDpEvent(group.sampling_rate, gaussian)
            if group.sampling_rate < 1
            else gaussian
        )
        events.append(dp_accounting.SelfComposedDpEvent(sampled, group.steps))
    return dp_accounting.ComposedDpEvent(events)


def _interval(groups: Sequence[PoissonGaussian]) -> float:
    """Grid of the privacy loss: fine against the loss of one step, coarse enough for bounded time.

    Connect-the-dots adds at most interval²/4 to the variance of each step's loss, so a step whose loss is
    below the grid would be overcharged; the support of the composed loss bounds time.
    """
    variance = mean = widest = 0.0
    for group in groups:
        q, sigma = group.sampling_rate, group.noise_multipliers[0]
        peak = 1 / (2 * sigma**2) + 10 / sigma + 1 / sigma**2
        chi = q**2 * math.expm1(min(1 / sigma**2, 700.0))
        variance += group.steps * min(chi, q * (1 / sigma**2 + 1 / (4 * sigma**4)))
        mean += group.steps * min(chi, q / sigma**2) / 2
        widest = max(widest, peak if q < 1 else 1 / (2 * sigma**2) + 20 / sigma)
    steps = sum(group.steps for group in groups)
    if not steps:
        return FINEST_INTERVAL
    accurate = 2 * math.sqrt(_RELATIVE_VARIANCE * variance / steps)
    span = 2 * widest + mean + 20 * math.sqrt(variance)
    # Rounded to two digits, so that a claim recomputed elsewhere uses the same grid.
    return float(f"{max(min(FINEST_INTERVAL, accurate), span / _LARGEST_SUPPORT):.1e}")


def _rdp(groups: Sequence[PoissonGaussian], delta: float, adjacency: Adjacency) -> float:
    """ε by RDP; infinite where no order gives a finite one."""
    divergences = _divergences(groups, adjacency, ORDERS)
    finite = np.isfinite(divergences)
    if not finite.any():
        return math.inf
    # Rounding can leave a divergence a hair below 0; dp-accounting would take it for ε = 0.
    orders, divergences = np.asarray(ORDERS)[finite], np.maximum(divergences[finite], 0.0)
    return float(compute_epsilon(orders, divergences, delta)[0])


def renyi(
    event: PoissonGaussian | Composed, adjacency: Adjacency, orders: Sequence[float] = ORDERS
) -> npt.NDArray[np.float64]:
    """Rényi divergences of everything in `event` together; the larger of both directions.

    Args:
        event: what looked at the records.
        adjacency: which data sets are neighbours.
        orders: (k,) orders above 1.

    Returns:
        (k,) infinite where an order can't be computed.
    """
    return _divergences(effective(event), adjacency, orders)


def _divergences(
    groups: Sequence[PoissonGaussian], adjacency: Adjacency, orders: Sequence[float]
) -> npt.NDArray[np.float64]:
    try:
        with np.errstate(all="ignore"), _quiet():
            if adjacency == "add-or-remove-one":
                accountant = rdp.RdpAccountant(orders)
                accountant.compose(_as_dp_event(groups))
                return np.asarray(accountant.rdp, dtype=np.float64)
            divergences = np.zeros(len(orders))
            for group in groups:
                q, sigma = group.sampling_rate, group.noise_multipliers[0]
                divergences += group.steps * renyi_replace_one(q, sigma, orders)
            return divergences
    except (ArithmeticError, ValueError):
        return np.full(len(orders), math.inf)


def renyi_replace_one(
    sampling_rate: float, noise_multiplier: float, orders: Sequence[float]
) -> npt.NDArray[np.float64]:
    """Rényi divergences of one step under replace-one, by quadrature of the tight dominating pair.

    The integrand is analytic and falls like a Gaussian, so the trapezoid rule is exact up to rounding.

    Args:
        sampling_rate: q in (0, 1].
        noise_multiplier: σ.
        orders: (k,) orders above 1.

    Returns:
        (k,) infinite where it would take too long: D_α((1−q)N(0,σ²)+qN(1,σ²) ‖ (1−q)N(0,σ²)+qN(−1,σ²)).
    """
    q, sigma = sampling_rate, noise_multiplier
    alphas = np.asarray(orders, dtype=np.float64)
    if q == 1:
        return alphas * 2 / sigma**2
    result = np.empty(len(alphas))
    for index, alpha in enumerate(alphas):
        # The mass of PᵅQ^(1−α) lies between the shifts −1 and 2α−1 of its Gaussian parts.
        if (2 * alpha + 2) / sigma > _LONGEST_QUADRATURE:
            result[index] = math.inf  # an order that never wins at so little noise
            continue
        x = np.arange(-2 - 12 * sigma, 2 * alpha + 12 * sigma, sigma / 16)
        base = math.log1p(-q)
        up = np.logaddexp(base, math.log(q) + (2 * x - 1) / (2 * sigma**2))
        down = np.logaddexp(base, math.log(q) + (-2 * x - 1) / (2 * sigma**2))
        log_density = -(x**2) / (2 * sigma**2) - math.log(16 * math.sqrt(2 * math.pi))
        exponent = log_density + alpha * up + (1 - alpha) * down
        peak = float(exponent.max())
        result[index] = (peak + math.log(float(np.exp(exponent - peak).sum()))) / (alpha - 1)
    return result


@contextmanager
def _quiet() -> Iterator[None]:
    """dp-accounting warns of every order that its series can't reach, and leaves it out."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
