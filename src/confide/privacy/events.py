"""What looked at records, as data. Pricing it is the accountant's job (`privacy.accountant`).

An event is a tree: `Composed` and `RandomSelection` hold events, and everything that can't be priced is
refused where it is read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from confide.errors import PrivacyError

NOT_POISSON = (
    "only Poisson draws can be priced, where every unit joins by its own coin toss. Batches of fixed size "
    "from shuffled records, booked as Poisson draws, cost far more than is claimed: at least 22.8 for a "
    "claimed epsilon of 4 with 3,680 records in batches of 16, and at least 37.4 with 60,000 (10 epochs, "
    "delta 1/n)"
)
"""Why another sampler has no claim (Chua et al. 2024, arXiv 2403.17673)."""


def require_poisson(sampling: str) -> None:
    """Raises PrivacyError, with the reason, for any other way to draw minibatches."""
    if sampling != "poisson":
        raise PrivacyError(f"sampling {sampling!r} has no claim: {NOT_POISSON}")


@dataclass(frozen=True)
class PoissonGaussian:
    """`steps` independent Poisson draws, each answered by one Gaussian query per noise multiplier.

    Every unit joins a draw independently with probability `sampling_rate`; each query is the sum of the
    units' contributions, clipped to norm C, plus Gaussian noise of standard deviation
    `noise_multiplier`·C. Later queries on a draw may depend on the answers to earlier ones.

    Attributes:
        sampling_rate: public Poisson rate q in (0, 1]; 1 is a query of the whole data set.
        noise_multipliers: σ of each query on the same draw; DP-Merging's pair has two. 0 means no noise,
            which costs an infinite ε.
        steps: how many times this happens.
    """

    sampling_rate: float
    noise_multipliers: tuple[float, ...]
    steps: int
    kind: Literal["poisson-gaussian"] = "poisson-gaussian"

    def __post_init__(self) -> None:
        _check_sampling(self.sampling_rate, self.noise_multipliers, self.steps)

    @property
    def effective_noise_multiplier(self) -> float:
        """σ of the one Gaussian that reveals exactly as much as all queries on a draw together.

        (Σ σᵢ⁻²)^−½, applied before subsampling: the queries see the same draw, so they are never priced
        as separate subsampled steps (that claims ε = 4 where the truth is 10 to 16).
        """
        least = min(self.noise_multipliers)
        if least == 0:
            return 0.0
        # Relative to the least, which neither overflows nor changes a single query's σ.
        return least / math.sqrt(math.fsum((least / sigma) ** 2 for sigma in self.noise_multipliers))


@dataclass(frozen=True)
class TruncatedPoissonGaussian:
    """Poisson draws of which at most `cap` units, chosen at random, are kept; each answered by one query.

    A unit that joins a full draw takes another's place, which moves the sum by 2C, so a cap near the expected
    batch costs a lot (Ganesh 2025, arXiv 2508.15089). There is one query per draw: the analysis is of a
    single Gaussian, and nobody has shown that σ_eff stands for several queries on a truncated draw.

    Attributes:
        sampling_rate: Poisson rate q in (0, 1) before truncation.
        noise_multiplier: σ of the query.
        steps: how many times this happens.
        units: n, declared public.
        cap: the most units that a draw keeps.
    """

    sampling_rate: float
    noise_multiplier: float
    steps: int
    units: int
    cap: int
    kind: Literal["truncated-poisson-gaussian"] = "truncated-poisson-gaussian"

    def __post_init__(self) -> None:
        _check_sampling(self.sampling_rate, (self.noise_multiplier,), self.steps)
        if self.sampling_rate == 1:
            raise PrivacyError("a truncated draw needs a sampling rate below 1")
        if self.units < 1 or self.cap < 1:
            raise PrivacyError(f"units and cap must be at least 1, not {self.units} and {self.cap}")


@dataclass(frozen=True)
class Composed:
    """Several events on the same data, fixed beforehand; the order doesn't matter."""

    events: tuple[Event, ...]
    kind: Literal["composed"] = "composed"


@dataclass(frozen=True)
class RandomSelection:
    """One of several events, drawn by public probabilities that don't depend on the data.

    δ(ε) = Σ pᵢ δᵢ(ε) for each direction, exact where it is known which was drawn (arXiv 2604.20985, random
    selection). Only the drawn one may ever be exposed; a second draw is a second event.

    Attributes:
        probabilities: positive, adding up to 1.
        events: as many.
    """

    probabilities: tuple[float, ...]
    events: tuple[Event, ...]
    kind: Literal["random-selection"] = "random-selection"

    def __post_init__(self) -> None:
        if not self.events or len(self.probabilities) != len(self.events):
            raise PrivacyError(
                f"a random selection needs one probability per event, not {len(self.probabilities)} for "
                f"{len(self.events)}"
            )
        if not all(0 < p <= 1 for p in self.probabilities) or abs(math.fsum(self.probabilities) - 1) > 1e-12:
            raise PrivacyError(
                f"probabilities of a selection must be positive and add up to 1, not {self.probabilities}"
            )


@dataclass(frozen=True)
class RepeatAndSelect:
    """An event repeated a random number of times, of which only the best outcome is exposed.

    Hyper-parameter tuning that is paid for (Papernot and Steinke 2022, arXiv 2110.03620, theorem 2). The
    number of runs is truncated negative binomial, drawn once, and never exposed.

    Attributes:
        event: what every single run reveals.
        mean: expected number of runs, at least 1.
        shape: η ≥ 0 of the distribution: 0 is logarithmic, 1 geometric.
    """

    event: Event
    mean: float
    shape: float
    kind: Literal["repeat-and-select"] = "repeat-and-select"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and self.mean >= 1):
            raise PrivacyError(f"the mean number of runs must be at least 1, not {self.mean}")
        if not (math.isfinite(self.shape) and self.shape >= 0):
            raise PrivacyError(
                f"the shape of the number of runs must be finite and not negative, not {self.shape}"
            )


Mechanism = PoissonGaussian | TruncatedPoissonGaussian | RandomSelection | RepeatAndSelect
"""What is left of a tree when compositions are flattened."""

_KINDS = (
    "poisson-gaussian",
    "truncated-poisson-gaussian",
    "composed",
    "random-selection",
    "repeat-and-select",
)


def _known(value: Any) -> Any:
    if isinstance(value, dict) and value.get("kind") not in _KINDS:
        raise ValueError(f"unknown event {value.get('kind')!r}, so nothing is claimed; {NOT_POISSON}")
    return value


Event = Annotated[Mechanism | Composed, Field(discriminator="kind"), BeforeValidator(_known)]
"""Everything the accountant can price. Anything else is refused."""


def leaves(event: Mechanism | Composed) -> tuple[Mechanism, ...]:
    """The mechanisms of a tree, with equal Gaussian ones added up, in order of first appearance."""
    return _added_up(tuple(_flat(event)))


def effective(event: Mechanism | Composed) -> tuple[Mechanism, ...]:
    """The leaves with all queries on a draw replaced by the one Gaussian that reveals as much.

    Sorted at every level, so that the order of events changes no digit of a price.
    """
    return _added_up(tuple(sorted((_effective(leaf) for leaf in _flat(event)), key=_sort_key)))


def walk(event: Mechanism | Composed) -> Iterator[Mechanism]:
    """Every mechanism of a tree, also those inside selections and repetitions."""
    for leaf in _flat(event):
        yield leaf
        match leaf:
            case RandomSelection():
                for part in leaf.events:
                    yield from walk(part)
            case RepeatAndSelect():
                yield from walk(leaf.event)


def queries(event: Mechanism | Composed) -> int:
    """Number of noisy queries: the most of a selection, the expected number (rounded up) of a repetition."""
    total = 0
    for leaf in _flat(event):
        match leaf:
            case PoissonGaussian():
                total += leaf.steps * len(leaf.noise_multipliers)
            case TruncatedPoissonGaussian():
                total += leaf.steps
            case RandomSelection():
                total += max(queries(part) for part in leaf.events)
            case RepeatAndSelect():
                total += math.ceil(leaf.mean * queries(leaf.event))
    return total


def _flat(event: Mechanism | Composed) -> Iterator[Mechanism]:
    match event:
        case Composed():
            for part in event.events:
                yield from _flat(part)
        case PoissonGaussian() | TruncatedPoissonGaussian():
            if event.steps:
                yield event
        case RandomSelection() | RepeatAndSelect():
            yield event
        case _:
            raise PrivacyError(
                f"unknown event {type(event).__name__}; it can't be priced, so nothing is claimed"
            )


def _added_up(found: tuple[Mechanism, ...]) -> tuple[Mechanism, ...]:
    steps: dict[Mechanism, int] = {}
    order: list[Mechanism] = []
    for leaf in found:
        one: Mechanism = dataclasses.replace(leaf, steps=1) if isinstance(leaf, PoissonGaussian) else leaf
        if one not in steps or not isinstance(leaf, PoissonGaussian):
            order.append(one)
        steps[one] = steps.get(one, 0) + (leaf.steps if isinstance(leaf, PoissonGaussian) else 1)
    return tuple(
        dataclasses.replace(leaf, steps=steps[leaf]) if isinstance(leaf, PoissonGaussian) else leaf
        for leaf in order
    )


def _effective(leaf: Mechanism) -> Mechanism:
    match leaf:
        case PoissonGaussian():
            return PoissonGaussian(leaf.sampling_rate, (leaf.effective_noise_multiplier,), leaf.steps)
        case TruncatedPoissonGaussian():
            return leaf
        case RandomSelection():
            parts = (
                (p, Composed(effective(part)))
                for p, part in zip(leaf.probabilities, leaf.events, strict=True)
            )
            ordered = sorted(parts, key=lambda pair: (pair[0], repr(pair[1])))
            return RandomSelection(tuple(p for p, _ in ordered), tuple(part for _, part in ordered))
        case RepeatAndSelect():
            return RepeatAndSelect(Composed(effective(leaf.event)), leaf.mean, leaf.shape)


def _sort_key(leaf: Mechanism) -> tuple[str, float, float, str]:
    if isinstance(leaf, PoissonGaussian):
        return (leaf.kind, leaf.sampling_rate, leaf.noise_multipliers[0], "")
    return (leaf.kind, 0.0, 0.0, repr(leaf))


def _check_sampling(rate: float, sigmas: tuple[float, ...], steps: int) -> None:
    if not 0 < rate <= 1:
        raise PrivacyError(f"sampling rate must be in (0, 1], not {rate}")
    if not sigmas:
        raise PrivacyError("an event needs the noise multiplier of at least one query")
    for sigma in sigmas:
        if not (math.isfinite(sigma) and sigma >= 0):
            raise PrivacyError(f"a noise multiplier must be finite and not negative, not {sigma}")
    if steps < 0:
        raise PrivacyError(f"steps must not be negative, not {steps}")
