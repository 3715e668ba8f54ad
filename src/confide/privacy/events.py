"""What looked at records, as data. Pricing it is the accountant's job (`privacy.accountant`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from confide.errors import PrivacyError


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
        if not 0 < self.sampling_rate <= 1:
            raise PrivacyError(f"sampling rate must be in (0, 1], not {self.sampling_rate}")
        if not self.noise_multipliers:
            raise PrivacyError("an event needs the noise multiplier of at least one query")
        for sigma in self.noise_multipliers:
            if not (math.isfinite(sigma) and sigma >= 0):
                raise PrivacyError(f"a noise multiplier must be finite and not negative, not {sigma}")
        if self.steps < 0:
            raise PrivacyError(f"steps must not be negative, not {self.steps}")

    @property
    def effective_noise_multiplier(self) -> float:
        """σ of the one Gaussian that reveals exactly as much as all queries on a draw together.

        (Σ σᵢ⁻²)^−½, applied before subsampling: the queries see the same draw, so they are never priced
        as separate subsampled steps (that claims ε = 4 where the truth is 10 to 16).
        """
        if min(self.noise_multipliers) == 0:
            return 0.0
        return float(sum(sigma**-2.0 for sigma in self.noise_multipliers) ** -0.5)


@dataclass(frozen=True)
class Composed:
    """Several events on the same data, fixed beforehand; the order doesn't matter."""

    events: tuple[Event, ...]
    kind: Literal["composed"] = "composed"


Event = Annotated[PoissonGaussian | Composed, Field(discriminator="kind")]
"""Everything the accountant can price. Anything else is refused."""


def leaves(event: PoissonGaussian | Composed) -> tuple[PoissonGaussian, ...]:
    """The Gaussian events of a tree, with equal mechanisms added up, in order of first appearance."""
    found: list[PoissonGaussian] = []
    _collect(event, found)
    steps: dict[tuple[float, tuple[float, ...]], int] = {}
    for leaf in found:
        key = (leaf.sampling_rate, leaf.noise_multipliers)
        steps[key] = steps.get(key, 0) + leaf.steps
    return tuple(PoissonGaussian(rate, sigmas, count) for (rate, sigmas), count in steps.items() if count)


def effective(event: PoissonGaussian | Composed) -> tuple[PoissonGaussian, ...]:
    """The leaves with all queries on a draw replaced by the one Gaussian that reveals as much."""
    steps: dict[tuple[float, float], int] = {}
    for leaf in leaves(event):
        key = (leaf.sampling_rate, leaf.effective_noise_multiplier)
        steps[key] = steps.get(key, 0) + leaf.steps
    return tuple(PoissonGaussian(rate, (sigma,), count) for (rate, sigma), count in steps.items())


def _collect(event: PoissonGaussian | Composed, found: list[PoissonGaussian]) -> None:
    match event:
        case PoissonGaussian():
            found.append(event)
        case Composed():
            for part in event.events:
                _collect(part, found)
        case _:
            raise PrivacyError(
                f"unknown event {type(event).__name__}; it can't be priced, so nothing is claimed"
            )
