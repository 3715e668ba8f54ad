"""What a schedule would spend and could learn, from public numbers alone, before anything is spent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from confide.privacy.accountant import epsilon
from confide.privacy.calibration import delta_warning
from confide.privacy.events import queries
from confide.privacy.statement import Claim
from confide.privacy.streams import Schedule, Stream

_FEW_STEPS = 10
_LARGE_RATE = 0.5
_SMALL_BATCH = 10
_LARGE_EPSILON = 10
_MANY_PARAMETERS = 1_000_000


@dataclass(frozen=True)
class StreamPlan:
    """One stream in numbers.

    Attributes:
        noise_multiplier: σ.
        sampling_rate: q.
        expected_batch: q·n, the mean size of a draw.
        steps: planned, and charged.
        queries_per_step: noisy queries of a step.
        trained_parameters: d, which the noise is spread over; None where it isn't known.
    """

    name: str
    noise_multiplier: float
    sampling_rate: float
    expected_batch: float
    steps: int
    queries_per_step: int
    trained_parameters: int | None

    @classmethod
    def of(cls, stream: Stream, units: int, trained_parameters: int | None) -> StreamPlan:
        """The stream's numbers on `units` units."""
        return cls(
            name=stream.name,
            noise_multiplier=stream.noise_multiplier,
            sampling_rate=stream.sampling_rate,
            expected_batch=round(stream.sampling_rate * units, 9),
            steps=stream.steps,
            queries_per_step=1
            + (stream.ascent_noise is not None)
            + (stream.clipping.count_noise is not None),
            trained_parameters=trained_parameters,
        )

    @property
    def noise_to_signal(self) -> float | None:
        """Length of one update's noise, σC√d/B, against the longest mean gradient that clipping allows, C."""
        if self.trained_parameters is None:
            return None
        return self.noise_multiplier * math.sqrt(self.trained_parameters) / self.expected_batch

    @property
    def cosine(self) -> float | None:
        """Between a noisy update and its gradient in the best case, where all gradients of a draw agree."""
        ratio = self.noise_to_signal
        return None if ratio is None else 1 / math.sqrt(1 + ratio**2)


@dataclass(frozen=True)
class Plan:
    """What would be spent, and whether it is sensible.

    Attributes:
        units: n, declared public.
        unit: what is protected.
        claim: None without noise.
        streams: in order.
        queries: noisy queries of the whole schedule.
        advice: sentences about what is unwise, each with its reason; empty where nothing is.
    """

    units: int
    unit: str
    claim: Claim | None
    streams: tuple[StreamPlan, ...]
    queries: int
    advice: tuple[str, ...]


def plan(
    schedule: Schedule, units: int, delta: float | None, trained: Mapping[str, int] | None = None
) -> Plan:
    """The plan of a schedule whose noise is known.

    Args:
        schedule: calibrated.
        units: n, declared public.
        delta: None for a schedule without noise, which claims nothing.
        trained: number of trained parameters by stream; None where that isn't known.

    Raises:
        PrivacyError: no finite bound.
    """
    claim = epsilon(schedule.event(), delta, schedule.adjacency) if delta is not None else None
    sizes = trained or {}
    streams = tuple(StreamPlan.of(stream, units, sizes.get(stream.name)) for stream in schedule.streams)
    asked = queries(schedule.event()) if schedule.private else 0
    return Plan(units, schedule.unit, claim, streams, asked, advice(streams, claim, units))


def advice(streams: tuple[StreamPlan, ...], claim: Claim | None, units: int) -> tuple[str, ...]:
    """What is unwise about these numbers, and why."""
    if claim is None:
        return ("Nothing is noised, so nothing is protected and nothing may be released.",)
    found = [_about(stream, several=len(streams) > 1) for stream in streams]
    sentences = [sentence for about in found for sentence in about]
    if claim.epsilon > _LARGE_EPSILON:
        sentences.append(
            f"ε = {claim.epsilon:.3g} lets the odds of any outcome change by a factor of up to "
            f"{math.exp(min(claim.epsilon, 700)):.2g}; that is hardly a promise. Choose ε below "
            f"{_LARGE_EPSILON}."
        )
    if warning := delta_warning(claim.delta, units):
        sentences.append(f"{warning[0].upper()}{warning[1:]}.")
    return tuple(sentences)


def _about(stream: StreamPlan, *, several: bool) -> list[str]:
    where = f"Stream {stream.name}: " if several else ""
    sentences = []
    ratio, size = stream.noise_to_signal, stream.trained_parameters
    if ratio is not None and size is not None and ratio >= 1:
        averaged = ratio / math.sqrt(stream.steps)
        fewer = (
            f"Train fewer than {size:,} parameters: LoRA on the top block or the head alone have thousands"
            if size > _MANY_PARAMETERS
            else "Train fewer parameters (a head alone, a smaller rank)"
        )
        sentences.append(
            f"{where}the noise of one update is {ratio:.3g} times as long as the longest mean gradient, and "
            f"averaged over all {stream.steps} steps still {averaged:.2g} times. {fewer}, or raise the "
            "batch, the number of records or ε."
        )
    if stream.sampling_rate > _LARGE_RATE:
        sentences.append(
            f"{where}a sampling rate of {stream.sampling_rate:.2g} hides hardly anybody: above {_LARGE_RATE} "
            "the draw no longer lowers the noise that is needed. Lower the batch."
        )
    if stream.steps < _FEW_STEPS:
        sentences.append(
            f"{where}{stream.steps} steps are few to learn in; with the same budget {_FEW_STEPS} to 100 need "
            "only a little more noise each."
        )
    if stream.expected_batch < _SMALL_BATCH:
        empty = math.exp(-stream.expected_batch)
        sentences.append(
            f"{where}draws of {stream.expected_batch:.3g} units on average are small: the noise of a step is "
            f"shared by few, and {empty:.2g} of all draws are empty. Raise the batch."
        )
    return [sentence[0].upper() + sentence[1:] for sentence in sentences]
