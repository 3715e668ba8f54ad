"""Queries beside the gradients: each looks at the records once, with noise that is fixed beforehand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from confide.errors import PrivacyError
from confide.privacy.events import PoissonGaussian

Purpose = Literal["gram", "fisher", "accuracy", "sensitivity"]


@dataclass(frozen=True)
class Query:
    """Statistics of the records that are released with noise.

    Several noise multipliers are one concatenated Gaussian, σ = (Σ σᵢ⁻²)^−½: a Gram matrix for each of
    L layers with equal noise √L·σ costs as much as one with σ.

    Attributes:
        name: unique in the schedule; addresses the noise.
        purpose: what is released, and so what a noise multiplier counts in:
            `gram`: per layer, Σ G over units whose Gram is scaled to Frobenius norm ‖G‖ ≤ R²; in R², on the
            isometric vector (Gⱼⱼ, √2·Gⱼₖ). `fisher`: Σ f over units whose diagonal is scaled to length
            ‖f‖ ≤ R²; in R². `accuracy`: how many test units are labelled rightly, one with several rows by
            the mean over them; in units. `sensitivity`: by stream, Σ over units of the rise of the loss under
            injected noise, cut to [−R, R] (`finetune.private_sensitivity`); in R.
        noise_multipliers: of each released array, positive. Calibration never changes them.
        sampling_rate: public rate q of the Poisson draw that a `sensitivity` reads; 1 for all units, whom all
            other queries ask.
    """

    name: str
    purpose: Purpose
    noise_multipliers: tuple[float, ...]
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        if not self.noise_multipliers or not all(
            math.isfinite(sigma) and sigma > 0 for sigma in self.noise_multipliers
        ):
            raise PrivacyError(
                f"query {self.name!r}: every released array needs a positive noise multiplier, not "
                f"{self.noise_multipliers}"
            )
        if not 0 < self.sampling_rate <= 1:
            raise PrivacyError(
                f"query {self.name!r}: sampling rate must be in (0, 1], not {self.sampling_rate}"
            )
        if self.sampling_rate < 1 and self.purpose != "sensitivity":
            raise PrivacyError(
                f"query {self.name!r} of purpose {self.purpose} asks every unit, so its sampling rate is 1, "
                f"not {self.sampling_rate}"
            )

    def event(self) -> PoissonGaussian:
        """What the query reveals."""
        return PoissonGaussian(self.sampling_rate, self.noise_multipliers, 1)
