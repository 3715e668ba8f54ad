"""How much noise a budget needs, on the safe side; and which δ means something."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from confide.errors import PrivacyError
from confide.privacy.accountant import epsilon
from confide.privacy.events import Composed, Mechanism, PoissonGaussian, effective
from confide.privacy.streams import Adjacency, Budget, Schedule

TOLERANCE = 1e-4
_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e6
_MOST_EVALUATIONS = 60


def calibrate(schedule: Schedule, budget: Budget) -> Schedule:
    """The schedule with the smallest noise that fits the budget.

    The noise multipliers of all gradients are scaled by one factor, so their ratios (an ascent with more
    noise, a stream with less) are kept; queries with fixed noise are paid first. The answer is at most 1e-4
    (relative) above the smallest sufficient noise, and its own ε by `accountant.epsilon` is at most the
    budget's.

    Raises:
        PrivacyError: a stream without noise, or a budget that no noise can meet.
    """
    check_fixed_part(schedule, budget)
    factor = smallest_factor(lambda f: schedule.with_noise(f).event(), budget, schedule.adjacency)
    return schedule.with_noise(factor)


def check_fixed_part(schedule: Schedule, budget: Budget) -> None:
    """Whether noise can be found at all.

    Raises:
        PrivacyError: a stream without noise, or queries with fixed noise that spend the whole budget.
    """
    if not schedule.private:
        raise PrivacyError(
            "a stream has noise multiplier 0, which no factor can raise; give it a positive one"
        )
    fixed = schedule.fixed_event()
    if not fixed.events:
        return
    spent = epsilon(fixed, budget.delta, schedule.adjacency).epsilon
    if spent >= budget.epsilon:
        names = [query.name for query in schedule.queries]
        names += [f"the clipping count of {s.name}" for s in schedule.streams if s.clipping.count_noise]
        raise PrivacyError(
            f"queries with fixed noise ({', '.join(names)}) alone cost epsilon = {spent:.4g}, which leaves "
            f"nothing of {budget.epsilon:g} for the gradients; give them more noise, or leave them out"
        )


def noise_multiplier(
    sampling_rate: float,
    steps: int,
    budget: Budget,
    *,
    queries: int = 1,
    adjacency: Adjacency = "add-or-remove-one",
) -> float:
    """The smallest σ of each of `queries` queries per draw with which `steps` draws fit the budget.

    Raises:
        PrivacyError: numbers out of range, or a budget that no noise can meet.
    """
    if queries < 1 or steps < 1:
        raise PrivacyError(f"steps and queries must be at least 1, not {steps} and {queries}")
    return smallest_factor(
        lambda sigma: PoissonGaussian(sampling_rate, (sigma,) * queries, steps), budget, adjacency
    )


def resolve_delta(delta: float | str, units: int) -> float:
    """δ as a number: `auto` is min(1e-6, 1/(10n)); `1/n` and `n^-1.1` are the papers' choices.

    Raises:
        PrivacyError: another word, or a number outside (0, 1).
    """
    if units < 1:
        raise PrivacyError(f"the number of units must be at least 1, not {units}")
    match delta:
        case "auto":
            value = min(1e-6, 1 / (10 * units))
        case "1/n":
            value = 1 / units
        case "n^-1.1":
            value = units**-1.1
        case str():
            try:
                value = float(delta)
            except ValueError:
                raise PrivacyError(f"delta must be a number, auto, 1/n or n^-1.1, not {delta!r}") from None
        case _:
            value = float(delta)
    if not 0 < value < 1:
        raise PrivacyError(f"delta must lie between 0 and 1 (below 1/n to mean anything), not {delta}")
    return value


def delta_warning(delta: float, units: int) -> str | None:
    """Why this δ protects little, or None."""
    if delta <= 1 / (10 * units):
        return None
    return (
        f"delta = {delta:.2g} is above 1/(10n) = {1 / (10 * units):.2g}: publishing one random record "
        f"outright satisfies (0, 1/n)-DP, so such a delta hardly protects anyone; use delta auto"
    )


def smallest_factor(
    event: Callable[[float], PoissonGaussian | Composed], budget: Budget, adjacency: Adjacency
) -> float:
    """The smallest factor, within `TOLERANCE`, whose event costs at most the budget.

    Args:
        event: factor → Gaussian event; its noise grows with the factor.

    Raises:
        PrivacyError: a budget that no factor meets.
    """
    least_sigma = min(_sigmas(event(1.0)))

    from confide.privacy.distinguisher import epsilon_lower  # loads SciPy

    @cache
    def certainly(factor: float, interval: float) -> float:
        return epsilon_lower(event(factor), budget.delta, adjacency, interval)

    def coarsely(factor: float) -> float:
        return certainly(factor, 1e-3)

    def finely(factor: float) -> float:
        return certainly(factor, 1e-4)

    # The certified lower bound is quick and nearly tight: it finds the place, and below it nothing can do.
    low, high = _bracket(coarsely, budget.epsilon, 1 / least_sigma, least_sigma)
    low, high = _shrink(coarsely, budget.epsilon, low, high, 1e-2)
    low, high = low / 1.02, high * 1.02
    while finely(low) <= budget.epsilon and low * least_sigma > _LEAST_NOISE:
        low /= 1.1
    slope = _slope(low, finely(low), high, finely(high)) or -2.0
    low, _ = _shrink(finely, budget.epsilon, low, high, TOLERANCE / 5)

    # The accountant decides: one evaluation where both bounds agree, a few where rounding keeps them apart.
    goal = math.log(budget.epsilon)
    best: float | None = None
    trial, before = low * (1 + TOLERANCE * 0.8), None
    for attempt in range(_MOST_EVALUATIONS):
        cost = epsilon(event(trial), budget.delta, adjacency).epsilon
        if cost <= budget.epsilon:
            best = trial
        else:
            low = trial
        if best is not None and best <= low * (1 + TOLERANCE):
            return best
        if trial * least_sigma > _MOST_NOISE:
            break
        if before is not None:
            slope = _slope(*before, trial, cost) or slope
        before = (trial, cost)
        root = trial * math.exp((goal - math.log(cost)) / slope) if cost > 0 else 0.0
        if best is None:
            trial = min(max(root * (1 + TOLERANCE / 4), low * (1 + TOLERANCE)), low * 4)
        else:
            # Just below the best: if that is too little noise, the best is proven.
            trial = min(root, best / (1 + TOLERANCE * 0.9))
            if not trial > low or attempt % 4 == 3:
                trial = math.sqrt(low * best)
    if best is not None:
        return best
    raise PrivacyError(
        f"no noise meets epsilon = {budget.epsilon:g} at delta = {budget.delta:g}; allow a larger epsilon or "
        "delta, run fewer steps, or lower the sampling rate (a smaller batch, or more records)"
    )


def _sigmas(event: Mechanism | Composed) -> list[float]:
    return [part.noise_multipliers[0] for part in effective(event) if isinstance(part, PoissonGaussian)]


def _slope(x0: float, y0: float, x1: float, y1: float) -> float | None:
    """d log y / d log x, or None where it isn't falling."""
    if min(y0, y1) <= 0 or x0 == x1:
        return None
    slope = math.log(y1 / y0) / math.log(x1 / x0)
    return slope if slope < -1e-3 else None


def _bracket(
    cost: Callable[[float], float], target: float, start: float, least_sigma: float
) -> tuple[float, float]:
    """Factors around the target: the first costs more (or is tiny), the second at most as much."""
    low = high = start
    if cost(start) > target:
        while cost(high) > target and high * least_sigma < _MOST_NOISE:
            low, high = high, high * 2
    else:
        while cost(low) <= target and low * least_sigma > _LEAST_NOISE:
            low, high = low / 2, low
    return low, high


def _shrink(
    cost: Callable[[float], float], target: float, low: float, high: float, tolerance: float
) -> tuple[float, float]:
    """Narrow until high/low ≤ 1 + tolerance, keeping cost(low) > target ≥ cost(high).

    Aims a little to that side of the log-log interpolated root whose end is the older one, so that both ends
    close in; every fourth step bisects, which bounds their number.
    """
    below, above = cost(low), cost(high)
    step, aim_below = 0, True
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        slope = _slope(low, below, high, above)
        if slope is not None and step % 4 < 3:
            root = low * math.exp(math.log(target / below) / slope)
            aim = root * (1 - tolerance / 3 if aim_below else 1 + tolerance / 3)
            middle = aim if low < aim < high else middle
        value = cost(middle)
        aim_below = value <= target
        if aim_below:
            high, above = middle, value
        else:
            low, below = middle, value
        step += 1
    return low, high
