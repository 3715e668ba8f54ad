"""Rényi divergences of events (RDP): they add up, whatever was chosen after seeing earlier answers."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import dp_accounting
import numpy as np
import numpy.typing as npt
from dp_accounting import rdp
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

from confide.errors import PrivacyError
from confide.privacy.events import (
    Composed,
    Mechanism,
    PoissonGaussian,
    RandomSelection,
    RepeatAndSelect,
    TruncatedPoissonGaussian,
    effective,
    queries,
    walk,
)
from confide.privacy.streams import Adjacency

_Array = npt.NDArray[np.float64]
_ROUNDING = 2.0**-50  # of the logarithm of one query's moment
_LONGEST_QUADRATURE = 2e4  # in σ; sixteen points each

# Fractional orders matter: a small rate and little noise make the Rényi divergence jump between 3 and 4.
ORDERS: tuple[float, ...] = (
    *(1 + step / 100 for step in range(2, 10, 2)),
    *(1 + step / 20 for step in range(2, 80)),
    *(5 + step / 10 for step in range(60)),
    *(float(order) for order in (*range(11, 64), 80, 96, 128, 192, 256, 384, 512, 768, 1024)),
)


def has_rule(event: Mechanism | Composed) -> bool:
    """Whether RDP can price everything in the event; it has no rule for truncated draws."""
    return not any(isinstance(part, TruncatedPoissonGaussian) for part in walk(event))


def require_rule(event: Mechanism | Composed) -> None:
    """Raises PrivacyError where RDP has no rule."""
    if not has_rule(event):
        raise PrivacyError(
            "RDP has no rule for truncated Poisson draws, so no filter can add them to what is chosen later; "
            "split a draw that is too large for memory instead of dropping units"
        )


def epsilon(event: Mechanism | Composed, delta: float, adjacency: Adjacency) -> float:
    """ε by RDP; infinite where no order gives a finite one."""
    divergence = divergences(event, adjacency)
    finite = np.isfinite(divergence)
    if not finite.any():
        return math.inf
    orders = np.asarray(ORDERS)[finite]
    # Rounding can leave a divergence at 0 or a hair below; dp-accounting would take it for ε = 0.
    rounded = np.maximum(divergence[finite], 0.0) + _ROUNDING * queries(event) / (orders - 1)
    return float(compute_epsilon(orders, rounded, delta)[0])


def divergences(
    event: Mechanism | Composed, adjacency: Adjacency, orders: Sequence[float] = ORDERS
) -> npt.NDArray[np.float64]:
    """Rényi divergences of everything in `event` together; the larger of both directions.

    Args:
        event: what looked at the records.
        adjacency: which data sets are neighbours.
        orders: (k,) orders above 1.

    Returns:
        (k,) infinite where an order can't be computed.

    Raises:
        PrivacyError: an event for which RDP has no rule.
    """
    require_rule(event)
    mechanisms = effective(event)
    total = _gaussians([m for m in mechanisms if isinstance(m, PoissonGaussian)], adjacency, orders)
    for mechanism in mechanisms:
        match mechanism:
            case RandomSelection():
                total = total + _selection(mechanism, adjacency, orders)
            case RepeatAndSelect():
                total = total + _repetition(mechanism, adjacency, orders)
    return total


def _selection(event: RandomSelection, adjacency: Adjacency, orders: Sequence[float]) -> _Array:
    """log Σ pᵢ e^((α−1)Dᵢ) / (α−1): the moment of a mixture is the mixture of the moments."""
    less = np.asarray(orders, dtype=np.float64) - 1
    moments = [
        math.log(p) + less * divergences(part, adjacency, orders)
        for p, part in zip(event.probabilities, event.events, strict=True)
    ]
    return np.asarray(np.logaddexp.reduce(moments) / less)


def _repetition(event: RepeatAndSelect, adjacency: Adjacency, orders: Sequence[float]) -> _Array:
    """Papernot and Steinke 2022, theorem 2, with the best second order among all that are tried."""
    every = np.asarray(sorted({*orders, *ORDERS}), dtype=np.float64)
    base = divergences(event.event, adjacency, every.tolist())
    log_stop = _log_stopping_probability(event.mean, event.shape)
    with np.errstate(invalid="ignore"):
        second = (1 + event.shape) * float(np.min((1 - 1 / every) * base - log_stop / every))
    bound = base + math.log(event.mean) / (every - 1) + second
    bound = np.minimum.accumulate(bound[::-1])[::-1]  # a divergence grows with its order
    return np.asarray(bound[np.searchsorted(every, np.asarray(orders, dtype=np.float64))])


def _log_stopping_probability(mean: float, shape: float) -> float:
    """log γ of the truncated negative binomial distribution with this mean, from below."""

    def mean_at(log_gamma: float) -> float:
        more = -math.expm1(log_gamma) / math.exp(log_gamma)  # 1/γ − 1
        return more / -log_gamma if shape == 0 else more * shape / -math.expm1(shape * log_gamma)

    if mean == 1:
        return 0.0
    low, high = -700.0, -1e-300
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_at(middle) >= mean else (low, middle)
    return low


def _gaussians(
    groups: Sequence[PoissonGaussian], adjacency: Adjacency, orders: Sequence[float]
) -> npt.NDArray[np.float64]:
    total = np.zeros(len(orders))
    try:
        for group in groups:
            q, sigma = group.sampling_rate, group.noise_multipliers[0]
            total += group.steps * _step(q, sigma, adjacency, tuple(orders))
    except (ArithmeticError, ValueError):
        return np.full(len(orders), math.inf)
    return total


@lru_cache(maxsize=256)
def _step(
    sampling_rate: float, noise_multiplier: float, adjacency: Adjacency, orders: tuple[float, ...]
) -> _Array:
    """(k,) of one step, remembered, so read-only."""
    with np.errstate(all="ignore"), _quiet():
        if adjacency == "replace-one":
            found = renyi_replace_one(sampling_rate, noise_multiplier, orders)
        else:
            accountant = rdp.RdpAccountant(orders)
            event = dp_accounting.GaussianDpEvent(noise_multiplier)
            if sampling_rate < 1:
                event = dp_accounting.PoissonSampledDpEvent(sampling_rate, event)
            accountant.compose(event)
            found = np.asarray(accountant.rdp, dtype=np.float64)
    found.setflags(write=False)
    return found


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
