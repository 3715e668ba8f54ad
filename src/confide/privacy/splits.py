"""Dividing one budget between streams: whose gradients get how much of the noise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from scipy import optimize

from confide.errors import PrivacyError
from confide.privacy.calibration import calibrate, check_fixed_part, smallest_factor
from confide.privacy.events import PoissonGaussian, effective
from confide.privacy.streams import Budget, Clipping, Schedule, Stream

Rule = Literal["shared_share", "paper-ratio", "basic"]


def split(
    schedule: Schedule, budget: Budget, shares: Mapping[str, float], rule: Rule = "shared_share"
) -> Schedule:
    """The schedule with noise such that each stream spends its share of the budget.

    Shares of ε are not what they seem: at ρ = 0.9 of ε the larger stream spends 98 % of what can be told
    apart, and the smaller one drowns in noise. So the default divides μ², which adds up over streams.

    Args:
        schedule: the noise multipliers within a stream (ascent and descent) keep their ratio.
        budget: of the whole schedule, which includes queries with fixed noise.
        shares: for every stream by name; positive, adding up to 1. RAPTOR's ρ is the shared stream's.
        rule: `shared_share`: share of μ² = Σ q²T(e^(1/σ²) − 1), the variance of the privacy loss; all noise
            is as small as the joint ε allows. `paper-ratio`: the ratio of noise that shares of ε and δ give
            when each stream is calibrated alone (RAPTOR, arXiv 2609.05770), scaled so that the joint ε is
            the budget's. `basic`: each stream alone at (share·ε, δ/streams), as basic composition has it; the
            joint ε is then smaller than the budget's, and noise is wasted.

    Raises:
        PrivacyError: shares that don't fit the streams, a stream without noise, a budget that can't be met;
            `basic` with streams on one draw or beside fixed queries, where basic composition doesn't hold.
    """
    names = [stream.name for stream in schedule.streams]
    if sorted(shares) != sorted(names):
        raise PrivacyError(f"shares must name every stream ({', '.join(names)}), not {', '.join(shares)}")
    if not all(0 < share <= 1 for share in shares.values()) or abs(math.fsum(shares.values()) - 1) > 1e-9:
        raise PrivacyError(f"shares must be positive and add up to 1, not {dict(shares)}")
    check_fixed_part(schedule, budget)
    match rule:
        case "shared_share":
            return _by_variance(schedule, budget, shares)
        case "paper-ratio":
            return calibrate(_each_alone(schedule, budget, shares), budget)
        case "basic":
            if schedule.fixed_event().events:
                raise PrivacyError("rule basic has no share for queries with fixed noise; use shared_share")
            if len({stream.draw for stream in schedule.streams}) < len(schedule.streams):
                raise PrivacyError(
                    "streams on one draw are not independent mechanisms, so basic composition doesn't hold; "
                    "use shared_share"
                )
            return _each_alone(schedule, budget, shares)
        case _:
            raise PrivacyError(f"unknown rule {rule!r}; use shared_share, paper-ratio or basic")


def variance(stream: Stream) -> float:
    """μ² = Σ q²T(e^(1/σ²) − 1) of everything that a stream's gradients ask."""
    total = 0.0
    for group in effective(Schedule((_gradients(stream),)).event()):
        assert isinstance(group, PoissonGaussian)
        chi = math.expm1(min(group.noise_multipliers[0] ** -2.0, 700.0))
        total += group.sampling_rate**2 * group.steps * chi
    return total


def _by_variance(schedule: Schedule, budget: Budget, shares: Mapping[str, float]) -> Schedule:
    first, *others = schedule.streams

    def at(factor: float) -> Schedule:
        lead = _scaled(first, factor)
        unit = variance(lead) / shares[first.name]
        return dataclasses.replace(
            schedule,
            streams=(lead, *(_scaled(s, _factor_for(s, unit * shares[s.name])) for s in others)),
        )

    return at(smallest_factor(lambda factor: at(factor).event(), budget, schedule.adjacency))


def _factor_for(stream: Stream, goal: float) -> float:
    """The factor on a stream's noise that gives it this μ²."""

    def excess(log_factor: float) -> float:
        return math.log(variance(_scaled(stream, math.exp(log_factor)))) - math.log(goal)

    low, high = math.log(1e-6), math.log(1e12)
    return math.exp(optimize.brentq(excess, low, high, xtol=1e-10) if excess(low) > 0 else low)


def _each_alone(schedule: Schedule, budget: Budget, shares: Mapping[str, float]) -> Schedule:
    streams = []
    for stream in schedule.streams:
        part = Budget(budget.epsilon * shares[stream.name], budget.delta / len(schedule.streams))
        alone = Schedule((_gradients(stream),), schedule.unit, schedule.adjacency)
        (found,) = calibrate(alone, part).streams
        streams.append(
            dataclasses.replace(
                stream, noise_multiplier=found.noise_multiplier, ascent_noise=found.ascent_noise
            )
        )
    return dataclasses.replace(schedule, streams=tuple(streams))


def _gradients(stream: Stream) -> Stream:
    """The stream without the count of adaptive clipping, whose noise is fixed."""
    return dataclasses.replace(stream, clipping=Clipping("flat", stream.clipping.bound))


def _scaled(stream: Stream, factor: float) -> Stream:
    return Schedule((stream,)).with_noise(factor).streams[0]


def best_share(shared: float, experts: float) -> float:
    """The shared stream's share of μ² with the least expected harm by noise.

    Harm is shared·σₛ² + experts·σₑ², and a stream's μ² is as q²T/σ² in first order, so the share is
    √shared / (√shared + √experts). For streams of as many steps.

    Args:
        shared: λₛCₛ², what noise on the shared stream costs per unit of σₛ² (`finetune.sensitivity`).
        experts: λₑE²Cₑ²: their sum is divided by B/E.
    """
    return _share(shared, experts, 1 / 2)


def paper_share(shared: float, experts: float) -> float:
    """RAPTOR's ρ*, a share of ε (arXiv 2609.05770, proposition 1): cube roots, as if σ were 1/(ρε).

    Args:
        shared, experts: as in `best_share`.
    """
    return _share(shared, experts, 1 / 3)


def _share(shared: float, experts: float, power: float) -> float:
    for name, weight in (("shared", shared), ("experts'", experts)):
        if not (math.isfinite(weight) and weight > 0):
            raise PrivacyError(f"noise on the {name} stream must cost something, not {weight:.3g}")
    return float(shared**power / (shared**power + experts**power))
