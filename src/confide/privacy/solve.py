"""From what is known of a budget, noise, steps and batch to the one that is left out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from confide.errors import PrivacyError
from confide.privacy.accountant import epsilon
from confide.privacy.calibration import noise_multiplier as least_noise
from confide.privacy.distinguisher import epsilon_lower
from confide.privacy.events import PoissonGaussian
from confide.privacy.streams import Adjacency, Budget, Clipping, ParameterGroup, Schedule, Stream

_MOST_STEPS = 10_000_000


@dataclass(frozen=True)
class Known:
    """One stream's numbers; exactly one of ε, σ, batch and length (steps or epochs) may be left out.

    Attributes:
        units: n, declared public.
        delta: δ.
        epsilon: ε.
        noise_multiplier: σ of each query.
        batch: B, the expected size of a draw; q = B/n.
        steps, epochs: the length; an epoch has n/B steps.
        queries: on each draw.
    """

    units: int
    delta: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    batch: float | None = None
    steps: int | None = None
    epochs: float | None = None
    queries: int = 1
    adjacency: Adjacency = "add-or-remove-one"

    def schedule(self) -> Schedule:
        """One stream with these numbers; its name is `all`, its clipping bound 1.

        Raises:
            PrivacyError: something is left out, or out of range.
        """
        if self.noise_multiplier is None or self.batch is None or self.steps is None:
            raise PrivacyError("noise multiplier, batch and steps must be known; solve for them first")
        if self.queries > 2:
            raise PrivacyError(f"a stream asks one or two queries on a draw, not {self.queries}")
        pair = self.queries == 2
        stream = Stream(
            name="all",
            groups=(ParameterGroup("all", ("all",), 1.0, anchored=False),),
            steps=self.steps,
            draw="all",
            sampling_rate=self.batch / self.units,
            clipping=Clipping("flat", 1.0),
            noise_multiplier=self.noise_multiplier,
            denominator=self.batch,
            ascent="paired" if pair else "none",
            ascent_radius=1.0 if pair else 0.0,
            ascent_noise=self.noise_multiplier if pair else None,
        )
        return Schedule((stream,), adjacency=self.adjacency)


def solve(known: Known) -> Known:
    """The same with everything known: the smallest noise, or the most steps or largest batch, that fits.

    Raises:
        PrivacyError: not exactly one is left out, numbers out of range, or a budget that nothing meets.
    """
    _check(known)
    rate = None if known.batch is None else known.batch / known.units
    steps = known.steps
    if known.epochs is not None and known.batch is not None:
        steps = steps_of(known.epochs, known.units, known.batch)
    if known.epsilon is None:
        assert known.noise_multiplier is not None
        assert rate is not None
        assert steps is not None
        event = PoissonGaussian(rate, (known.noise_multiplier,) * known.queries, steps)
        claim = epsilon(event, known.delta, known.adjacency)
        return dataclasses.replace(known, epsilon=claim.epsilon, steps=steps)
    budget = Budget(known.epsilon, known.delta)
    if known.noise_multiplier is None:
        assert rate is not None
        assert steps is not None
        sigma = least_noise(rate, steps, budget, queries=known.queries, adjacency=known.adjacency)
        return dataclasses.replace(known, noise_multiplier=sigma, steps=steps)
    if rate is None:
        size = largest_batch(
            known.units,
            known.noise_multiplier,
            budget,
            steps=steps,
            epochs=known.epochs,
            queries=known.queries,
            adjacency=known.adjacency,
        )
        length = steps if steps is not None else steps_of(known.epochs or 0.0, known.units, size)
        return dataclasses.replace(known, batch=float(size), steps=length)
    return dataclasses.replace(
        known,
        steps=most_steps(
            rate, known.noise_multiplier, budget, queries=known.queries, adjacency=known.adjacency
        ),
    )


def _check(known: Known) -> None:
    if known.units < 1:
        raise PrivacyError(f"the number of records must be at least 1, not {known.units}")
    if known.queries < 1 or (known.steps is not None and known.steps < 1):
        raise PrivacyError(f"steps and queries must be at least 1, not {known.steps} and {known.queries}")
    if known.batch is not None and not 0 < known.batch <= known.units:
        raise PrivacyError(
            f"the expected batch must lie between 0 and the number of records ({known.units}), not "
            f"{known.batch:g}"
        )
    if known.steps is not None and known.epochs is not None:
        raise PrivacyError("give steps or epochs, not both")
    length = known.steps if known.steps is not None else known.epochs
    named = {
        "epsilon": known.epsilon,
        "noise multiplier": known.noise_multiplier,
        "batch": known.batch,
        "steps (or epochs)": length,
    }
    missing = [name for name, value in named.items() if value is None]
    if len(missing) != 1:
        raise PrivacyError(
            f"leave out exactly one of {', '.join(named)}, to be solved for; "
            + (f"{', '.join(missing)} are missing" if missing else "all four are given")
        )


def steps_of(epochs: float, units: int, batch: float) -> int:
    """Steps that draw every unit `epochs` times on average: epochs·n/B, rounded up.

    Raises:
        PrivacyError: epochs that aren't a positive number.
    """
    if not (math.isfinite(epochs) and epochs > 0):
        raise PrivacyError(f"epochs must be a positive number, not {epochs}")
    # As decimals, as typed: 0.1 epochs is not a hair more than a tenth.
    return math.ceil(Fraction(str(epochs)) * units / Fraction(str(batch)))


def most_steps(
    sampling_rate: float,
    noise_multiplier: float,
    budget: Budget,
    *,
    queries: int = 1,
    adjacency: Adjacency = "add-or-remove-one",
) -> int:
    """The most steps of `queries` queries per draw that fit the budget; one more wouldn't.

    Raises:
        PrivacyError: numbers out of range, or not even one step fits.
    """
    return _largest(
        lambda steps: PoissonGaussian(sampling_rate, (noise_multiplier,) * queries, steps),
        _MOST_STEPS,
        budget,
        adjacency,
        "step",
    )


def largest_batch(
    units: int,
    noise_multiplier: float,
    budget: Budget,
    *,
    steps: int | None = None,
    epochs: float | None = None,
    queries: int = 1,
    adjacency: Adjacency = "add-or-remove-one",
) -> int:
    """The largest expected batch, a whole number, with which training fits the budget.

    Args:
        units: n, declared public.
        steps, epochs: one of them; the steps of an epoch fall with the batch.

    Raises:
        PrivacyError: numbers out of range, or not even a batch of one fits.
    """
    if units < 1 or (steps is None) == (epochs is None):
        raise PrivacyError("a batch is solved for with units of at least 1, and either steps or epochs")

    def event(batch: int) -> PoissonGaussian:
        draws = steps if steps is not None else steps_of(epochs or 0.0, units, batch)
        return PoissonGaussian(batch / units, (noise_multiplier,) * queries, draws)

    return _largest(event, units, budget, adjacency, "unit in a batch")


def _largest(
    event: Callable[[int], PoissonGaussian], most: int, budget: Budget, adjacency: Adjacency, what: str
) -> int:
    """The largest whole number up to `most` whose event fits; events cost more with the number."""
    if event(1).effective_noise_multiplier == 0:
        raise PrivacyError("a query has no noise (noise multiplier 0), so no privacy can be claimed")

    def possible(number: int) -> bool:
        return epsilon_lower(event(number), budget.delta, adjacency, 1e-3) <= budget.epsilon

    def fits(number: int) -> bool:
        try:
            return epsilon(event(number), budget.delta, adjacency).epsilon <= budget.epsilon
        except PrivacyError:  # no finite bound
            return False

    # The certified lower bound is quick: what it excludes needs no accountant.
    low, high = 0, 1
    while high < most and possible(high):
        low, high = high, min(2 * high, most)
    top = high if possible(high) else _boundary(possible, low, high)
    if top and fits(top):
        return top
    step, above = 1, top
    while (below := top - step) > 0 and not fits(below):
        above, step = below, 2 * step
    found = _boundary(fits, max(below, 0), above)
    if not found:
        raise PrivacyError(
            f"not even one {what} fits epsilon = {budget.epsilon:g} at delta = {budget.delta:g}; add noise"
        )
    return found


def _boundary(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The number before the first that fails; `low` holds (or is 0), `high` fails."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
