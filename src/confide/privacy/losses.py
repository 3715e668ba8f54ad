"""Privacy loss distributions (PLD) of events, from dp-accounting's building blocks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import dp_accounting
import numpy as np
from dp_accounting.pld import privacy_loss_distribution as plds

from confide.errors import PrivacyError
from confide.privacy.events import (
    Composed,
    Mechanism,
    PoissonGaussian,
    RandomSelection,
    RepeatAndSelect,
    TruncatedPoissonGaussian,
    effective,
    walk,
)
from confide.privacy.streams import Adjacency

FINEST_INTERVAL = 1e-4
_LARGEST_SUPPORT = 1e6  # points of a loss distribution; a few seconds
_RELATIVE_VARIANCE = 1e-3  # that rounding may add to the privacy loss
_RELATIONS = {
    "add-or-remove-one": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace-one": dp_accounting.NeighboringRelation.REPLACE_ONE,
}


def has_rule(event: Mechanism | Composed) -> bool:
    """Whether PLD can price everything in the event; it has no rule for repeat-and-select."""
    return not any(isinstance(part, RepeatAndSelect) for part in walk(event))


def epsilon(
    event: Mechanism | Composed, delta: float, adjacency: Adjacency, interval: float
) -> tuple[float, str | None]:
    """ε by PLD, and None or why it can't be trusted."""
    mechanisms = effective(event)
    # Every step through the Fourier transform adds rounding error to the tail, about 2⁻⁵³ each; eight times
    # that is taken off δ, and below a hundred times more nothing would be left.
    rounding = 8 * 2.0**-53 * sum(_transforms(mechanism) for mechanism in mechanisms)
    if delta < 100 * rounding:
        return math.inf, f"delta is below {100 * rounding:.1e}, where rounding spoils PLD for so many steps"
    try:
        with np.errstate(all="ignore"):
            value = float(_composed(mechanisms, adjacency, interval).get_epsilon_for_delta(delta - rounding))
    except (ArithmeticError, ValueError, MemoryError) as error:
        return math.inf, f"PLD failed ({type(error).__name__})"
    if not (math.isfinite(value) and value >= 0):
        return math.inf, f"PLD gave {value}"
    return value, None


def _transforms(mechanism: Mechanism) -> int:
    match mechanism:
        case PoissonGaussian() | TruncatedPoissonGaussian():
            return mechanism.steps if mechanism.sampling_rate < 1 else 1
        case RandomSelection():  # the mixture's error is the mixture of its parts' errors
            return max(1 + sum(map(_transforms, effective(part))) for part in mechanism.events)
        case RepeatAndSelect():
            raise PrivacyError("PLD has no rule for repeat-and-select")


def _composed(
    mechanisms: Sequence[Mechanism], adjacency: Adjacency, interval: float
) -> plds.PrivacyLossDistribution:
    total = plds.identity(interval)
    for mechanism in mechanisms:
        total = total.compose(_distribution(mechanism, adjacency, interval))
    return total


def _distribution(
    mechanism: Mechanism, adjacency: Adjacency, interval: float
) -> plds.PrivacyLossDistribution:
    match mechanism:
        case PoissonGaussian(sampling_rate=1):
            sigma = mechanism.noise_multipliers[0] / math.sqrt(mechanism.steps)
            return _step(PoissonGaussian(1, (sigma,), 1), adjacency, interval)
        case PoissonGaussian() | TruncatedPoissonGaussian():
            step = dataclasses.replace(mechanism, steps=1)
            return _step(step, adjacency, interval).self_compose(mechanism.steps)
        case RandomSelection():
            weight, mixture = 0.0, plds.identity(interval)
            for p, part in zip(mechanism.probabilities, mechanism.events, strict=True):
                weight += p
                here = _composed(effective(part), adjacency, interval)
                # The running mixture has the weight of the parts before, so that shares end up as p.
                mixture = mixture.compute_mixture(here, max(0.0, 1 - p / weight)) if weight > p else here
            return mixture
        case RepeatAndSelect():
            raise PrivacyError("PLD has no rule for repeat-and-select")


@lru_cache(maxsize=16)
def _step(
    mechanism: PoissonGaussian | TruncatedPoissonGaussian, adjacency: Adjacency, interval: float
) -> plds.PrivacyLossDistribution:
    """One step, remembered: where several runs are priced together, each was priced alone before."""
    relation = _RELATIONS[adjacency]
    match mechanism:
        case PoissonGaussian():
            return plds.from_gaussian_mechanism(
                standard_deviation=mechanism.noise_multipliers[0],
                value_discretization_interval=interval,
                sampling_prob=mechanism.sampling_rate,
                neighboring_relation=relation,
            )
        case TruncatedPoissonGaussian():
            return plds.from_truncated_subsampled_gaussian_mechanism(
                dataset_size=mechanism.units,
                sampling_probability=mechanism.sampling_rate,
                truncated_batch_size=mechanism.cap,
                noise_multiplier=mechanism.noise_multiplier,
                value_discretization_interval=interval,
                neighboring_relation=relation,
            )


@dataclass(frozen=True)
class _Spread:
    """How far a composed privacy loss reaches, roughly; sizes a grid, never a claim."""

    variance: float = 0.0
    mean: float = 0.0
    widest: float = 0.0
    steps: int = 0
    accurate: float = FINEST_INTERVAL

    def with_own_accuracy(self) -> _Spread:
        if not self.steps:
            return self
        accurate = 2 * math.sqrt(_RELATIVE_VARIANCE * self.variance / self.steps)
        return _Spread(self.variance, self.mean, self.widest, self.steps, min(self.accurate, accurate))


def interval_of(event: Mechanism | Composed) -> float:
    """Grid of the privacy loss: fine against the loss of one step, coarse enough for bounded time.

    Connect-the-dots adds at most interval²/4 to the variance of each step's loss, so a step whose loss is
    below the grid would be overcharged; the support of the composed loss bounds time.
    """
    whole = _spread(effective(event))
    span = 2 * whole.widest + whole.mean + 20 * math.sqrt(whole.variance)
    # Rounded to two digits, so that a claim recomputed elsewhere uses the same grid.
    return float(f"{max(whole.accurate, span / _LARGEST_SUPPORT):.1e}")


def _spread(mechanisms: Sequence[Mechanism]) -> _Spread:
    parts = [_spread_of(mechanism) for mechanism in mechanisms]
    return _Spread(
        variance=sum(part.variance for part in parts),
        mean=sum(part.mean for part in parts),
        widest=max((part.widest for part in parts), default=0.0),
        steps=sum(part.steps for part in parts),
        accurate=min((part.accurate for part in parts), default=FINEST_INTERVAL),
    ).with_own_accuracy()


def _spread_of(mechanism: Mechanism) -> _Spread:
    match mechanism:
        case PoissonGaussian():
            return _gaussian_spread(mechanism.sampling_rate, mechanism.noise_multipliers[0], mechanism.steps)
        case TruncatedPoissonGaussian():
            whole = _gaussian_spread(mechanism.sampling_rate, mechanism.noise_multiplier, mechanism.steps)
            moved = _gaussian_spread(mechanism.sampling_rate, mechanism.noise_multiplier / 2, 1)
            return _Spread(whole.variance, whole.mean, moved.widest, whole.steps)
        case RandomSelection():
            parts = [_spread(effective(part)) for part in mechanism.events]
            return _Spread(
                variance=max(part.variance for part in parts),
                mean=max(part.mean for part in parts),
                widest=max(part.widest for part in parts),
                steps=max(part.steps for part in parts),
                accurate=min(part.accurate for part in parts),
            )
        case RepeatAndSelect():
            raise PrivacyError("PLD has no rule for repeat-and-select")


def _gaussian_spread(q: float, sigma: float, steps: int) -> _Spread:
    peak = 1 / (2 * sigma**2) + 10 / sigma + 1 / sigma**2
    chi = q**2 * math.expm1(min(1 / sigma**2, 700.0))
    return _Spread(
        variance=steps * min(chi, q * (1 / sigma**2 + 1 / (4 * sigma**4))),
        mean=steps * min(chi, q / sigma**2) / 2,
        widest=peak if q < 1 else 1 / (2 * sigma**2) + 20 / sigma,
        steps=steps,
    )
