"""A private fine-tune as data: streams, and the schedule that executes and prices them.

The trainer executes a `Schedule`, the accountant prices its `event()`, the statement prints it. Sampling
rate, noise, clipping bound and steps are written down nowhere else. This module knows names and numbers
only; `finetune` binds the names to tensors.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from confide.choices import Adjacency as Adjacency
from confide.choices import AnchorForm, Ascent, Decay, Optimizer, RecordWeight
from confide.errors import PrivacyError
from confide.privacy.events import Composed, PoissonGaussian, require_poisson
from confide.privacy.queries import Query


@dataclass(frozen=True)
class Budget:
    """The (ε, δ) that the released weights may spend."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise PrivacyError(f"epsilon must be a positive number, not {self.epsilon}")
        if not 0 < self.delta < 1:
            raise PrivacyError(
                f"delta must lie between 0 and 1 (below 1/n to mean anything), not {self.delta}"
            )


@dataclass(frozen=True)
class Clipping:
    """How one unit's gradient is bounded.

    Attributes:
        rule: `flat` scales a gradient longer than `bound` down to it; `normalised` maps every gradient g
            to bound·g/(‖g‖ + stability) (AUTO-S, Bu et al. 2023). Either way a unit contributes a vector of
            norm at most `bound` to the sum. `adaptive` is `flat` with a bound that follows a quantile of the
            gradients' norms (Andrew et al. 2021, arXiv 1905.03871); the count that steers it is one more
            query on the draw. `per-role` is `flat` for each of the stream's groups apart, by `shares`, so
            that a long gradient of the head leaves the encoder's alone. `none` leaves gradients as they are,
            and is legal only without noise, where nothing is claimed.
        bound: C, in gradient units; of the first step for `adaptive`; unused by `none`.
        stability: γ of `normalised`; unused by others.
        quantile: share of the gradients that `adaptive` leaves unclipped.
        quantile_rate: η of C ← C·exp(−η(share − quantile)).
        count_noise: of `adaptive`, and only there: standard deviation of the noise on the number of unclipped
            units. Each unit counts ±½ around the middle, so the noise multiplier is twice this. A twentieth
            of the expected batch is usual. Calibration leaves it as it is.
        shares: of `per-role`, and only there: the share of C² for each group of the stream, in order. Group
            g is clipped to C·√share, so that all groups together are at most C long, and the noise is σ·C on
            every parameter, as with `flat`.
    """

    rule: Literal["flat", "normalised", "per-role", "adaptive", "none"]
    bound: float
    stability: float = 0.01
    quantile: float = 0.5
    quantile_rate: float = 0.2
    count_noise: float | None = None
    shares: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bound) and self.bound > 0):
            raise PrivacyError(f"the clipping bound must be a positive number, not {self.bound}")
        if not (math.isfinite(self.stability) and self.stability > 0):
            raise PrivacyError(f"the clipping stability must be a positive number, not {self.stability}")
        if (self.rule == "adaptive") != (self.count_noise is not None):
            raise PrivacyError("count_noise belongs to adaptive clipping, and only to it")
        if self.count_noise is not None and not (math.isfinite(self.count_noise) and self.count_noise > 0):
            raise PrivacyError(f"count_noise must be a positive number, not {self.count_noise}")
        if not (0 <= self.quantile <= 1 and math.isfinite(self.quantile_rate) and self.quantile_rate > 0):
            raise PrivacyError(
                f"quantile must lie between 0 and 1 and its rate above 0, not {self.quantile} and "
                f"{self.quantile_rate}"
            )
        if (self.rule == "per-role") != (self.shares is not None):
            raise PrivacyError("shares belong to per-role clipping, and only to it")
        if self.shares is not None and not (
            all(share > 0 for share in self.shares) and 0 < math.fsum(self.shares) <= 1
        ):
            raise PrivacyError(
                f"shares of the clipping bound must be positive and add up to at most 1, not {self.shares}"
            )

    @property
    def bounds(self) -> tuple[float, ...]:
        """C of each group under `per-role`; the one bound under other rules."""
        if self.shares is None:
            return (self.bound,)
        return tuple(self.bound * math.sqrt(share) for share in self.shares)

    @property
    def count_multiplier(self) -> float | None:
        """Noise multiplier of the count that steers `adaptive`; None for other rules."""
        return None if self.count_noise is None else 2 * self.count_noise


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of a stream that share a learning rate.

    Attributes:
        name: `encoder` or `head`.
        parameters: names as in `model.named_parameters()`.
        learning_rate: at the first step.
        anchored: whether the stream's anchor acts here. Heads have no w₀, hence no anchor.
    """

    name: str
    parameters: tuple[str, ...]
    learning_rate: float
    anchored: bool


@dataclass(frozen=True)
class Stream:
    """A set of parameters trained by one noisy mechanism.

    Attributes:
        name: unique in the schedule; addresses the stream's noise.
        groups: the parameters it owns, with their rates.
        steps: planned number of steps; what is charged, whether or not all are run.
        draw: which Poisson draw it reads; streams that name the same draw share a minibatch.
        sampling_rate: public Poisson rate q; batch sizes are binomial, never fixed.
        clipping: the bound on one unit's contribution to the sum.
        noise_multiplier: σ; the noise on the sum has standard deviation σ·C. 0 trains without privacy.
        denominator: public number that divides the noisy sum (the expected batch), never a realised count.
        expected_draw: B, the public mean size of a draw, which divides the noisy count of `adaptive`
            clipping. None takes `denominator`; of experts with owners it must be stated, as theirs may be
            B/E.
        ascent: where the gradient is taken. `none`: at the weights. `paired`: a noisy gradient on the
            same minibatch first moves the weights by `ascent_radius` along its direction (DP-Merging,
            equations 5 and 6). `fresh`: the same on an own draw. `lagged`: along the previous step's noisy
            gradient, which costs nothing (DP-SAT); its step 0 has no ascent.
        ascent_radius: ρ, a length in weight space.
        ascent_noise: noise multiplier of the ascent query (`paired`, `fresh`); only its direction is
            used, so it may carry more noise than the descent.
        anchor: strength λ of the pull towards the base weights w₀; 0 for none.
        anchor_form: `coupled` adds 2λ(w − w₀) to the noisy gradient before the optimizer (DP-Merging,
            equation 7); `decoupled` moves w by −rate·2λ(w − w₀) beside the optimizer.
        optimizer: rule applied to the noisy gradient.
        bias_correction: of `adamw` only: AdamW's second moment holds the noise's variance (σC/B)² beside the
            gradient's; above 0 the variance is subtracted, and this is the floor of what is left (γ′ of
            DP-AdamBC, Tang et al. 2024, arXiv 2312.14334). 0 leaves it in.
        decay: of the learning rates: `constant`, or `linear` or along half a `cosine` to 0 after the last
            step.
        warmup: steps in which the rates first rise from 0, linearly.
        weight_decay: decoupled decay towards 0; must be 0 beside an anchor, which pulls to w₀.
        sampling: how units join a draw; only `poisson` has a claim.
        record_weight: by what a record's loss is multiplied before its gradient is clipped. `none`: 1.
            `residual`: (1 − p)^`record_power`, where p is the model's probability of the record's own class
            at the weights where the gradient is taken (RAPTOR, arXiv 2609.05770). A constant of that record
            alone, so that it changes nothing about the bound; private.
        record_power: γ of `residual`.
        record_memory: β of `residual`: 1 − p is replaced by its exponential mean over the steps that drew the
            record, before the power. 0 remembers nothing. What a record adds still depends on that record,
            its own draws and the models so far alone, and is clipped, so the price is the same.
        ownership: which experts' parameters a record reaches: `all`, or `owner`, one expert's. The vector of
            all experts together is what is clipped, so that the owner never shows in the price.
        experts: E of the layer whose experts are among the parameters; 0 for none. Public.
    """

    name: str
    groups: tuple[ParameterGroup, ...]
    steps: int
    draw: str
    sampling_rate: float
    clipping: Clipping
    noise_multiplier: float
    denominator: float
    ascent: Ascent = "none"
    ascent_radius: float = 0.0
    ascent_noise: float | None = None
    anchor: float = 0.0
    anchor_form: AnchorForm = "coupled"
    optimizer: Optimizer = "adamw"
    bias_correction: float = 0.0
    decay: Decay = "constant"
    warmup: int = 0
    weight_decay: float = 0.0
    sampling: str = "poisson"
    record_weight: RecordWeight = "none"
    record_power: float = 1.0
    record_memory: float = 0.0
    ownership: Literal["all", "owner"] = "all"
    experts: int = 0
    expected_draw: float | None = None

    def __post_init__(self) -> None:
        where = f"stream {self.name!r}"
        require_poisson(self.sampling)
        if not self.parameters:
            raise PrivacyError(f"{where} trains no parameter")
        if len(set(self.parameters)) != len(self.parameters):
            raise PrivacyError(f"{where} names a parameter twice")
        if self.steps < 1:
            raise PrivacyError(f"{where}: steps must be at least 1, not {self.steps}")
        if not 0 < self.sampling_rate <= 1:
            raise PrivacyError(f"{where}: sampling rate must be in (0, 1], not {self.sampling_rate}")
        if not (math.isfinite(self.denominator) and self.denominator > 0):
            raise PrivacyError(f"{where}: the denominator must be a positive number, not {self.denominator}")
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise PrivacyError(f"{where}: bad noise multiplier {self.noise_multiplier}")
        if self.clipping.rule == "none" and (self.noise_multiplier or self.ascent_noise):
            raise PrivacyError(f"{where}: noise without clipping protects nobody")
        queries_ascent = self.ascent in ("paired", "fresh")
        if queries_ascent != (self.ascent_noise is not None):
            raise PrivacyError(
                f"{where}: ascent_noise belongs to ascent `paired` or `fresh`, and only to them"
            )
        if (self.ascent != "none") != (self.ascent_radius > 0):
            raise PrivacyError(f"{where}: an ascent needs a positive radius, and a radius an ascent")
        if self.anchor < 0 or self.weight_decay < 0:
            raise PrivacyError(f"{where}: anchor and weight decay must not be negative")
        if self.anchor and self.weight_decay:
            raise PrivacyError(f"{where}: weight decay pulls to 0, an anchor to the base; choose one")
        if not (math.isfinite(self.record_power) and self.record_power > 0):
            raise PrivacyError(f"{where}: record_power must be a positive number, not {self.record_power}")
        if not 0 <= self.record_memory < 1:
            raise PrivacyError(f"{where}: record_memory must lie in [0, 1), not {self.record_memory}")
        if self.record_memory and (self.record_weight == "none" or self.ascent != "none"):
            raise PrivacyError(f"{where}: record_memory is for residual weights, and for no ascent")
        if self.experts < 0 or (self.ownership == "owner" and not self.experts):
            raise PrivacyError(f"{where}: ownership `owner` needs the number of experts, not {self.experts}")
        if self.ownership == "owner" and self.denominator < 1:
            raise PrivacyError(
                f"{where}: {self.experts} experts share a draw so small that less than one unit is expected "
                f"for each (the denominator is {self.denominator:g}); raise the batch"
            )
        if self.expected_draw is not None and not (
            math.isfinite(self.expected_draw) and self.expected_draw > 0
        ):
            raise PrivacyError(
                f"{where}: the expected draw must be a positive number, not {self.expected_draw}"
            )
        adaptive = self.clipping.rule == "adaptive"
        if self.ownership == "owner" and adaptive and self.expected_draw is None:
            raise PrivacyError(
                f"{where}: adaptive clipping divides its count of unclipped units by the expected draw, "
                "which for experts with owners need not be the denominator; state expected_draw"
            )
        if not 0 <= self.warmup < self.steps:
            raise PrivacyError(f"{where}: a warmup of {self.warmup} steps doesn't fit into {self.steps}")
        if not (math.isfinite(self.bias_correction) and self.bias_correction >= 0):
            raise PrivacyError(f"{where}: bad floor for the bias correction: {self.bias_correction}")
        if self.bias_correction and self.optimizer != "adamw":
            raise PrivacyError(
                f"{where}: bias correction is for adamw; {self.optimizer} has no second moment"
            )
        if self.clipping.shares is not None and len(self.clipping.shares) != len(self.groups):
            raise PrivacyError(
                f"{where}: per-role clipping needs a share for each of its {len(self.groups)} groups, not "
                f"{len(self.clipping.shares)}"
            )

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of every parameter the stream owns."""
        return tuple(name for group in self.groups for name in group.parameters)

    @property
    def ascent_draw(self) -> str:
        """The draw that the ascent query reads."""
        return f"{self.name}/ascent" if self.ascent == "fresh" else self.draw


@dataclass(frozen=True)
class Schedule:
    """The ordered list of streams of one fine-tune: the object that trains is the object that is charged.

    Streams on one draw step together on the same minibatch; the others alternate in order.

    Attributes:
        streams: in order of execution within a step; none where queries are all that is asked.
        unit: what the claim protects: `record`, or the name of a column whose values are the units.
        adjacency: which data sets are neighbours.
        queries: statistics of the records that are released beside the gradients.
    """

    streams: tuple[Stream, ...]
    unit: str = "record"
    adjacency: Adjacency = "add-or-remove-one"
    queries: tuple[Query, ...] = ()

    def __post_init__(self) -> None:
        if not self.streams and not self.queries:
            raise PrivacyError("a schedule needs at least one stream or query")
        names = [stream.name for stream in self.streams] + [query.name for query in self.queries]
        if len(set(names)) != len(names):
            raise PrivacyError(f"two streams or queries have the same name: {names}")
        owner: dict[str, str] = {}
        rates: dict[str, float] = {}
        for stream in self.streams:
            for parameter in stream.parameters:
                if parameter in owner:
                    raise PrivacyError(
                        f"{parameter} belongs to streams {owner[parameter]!r} and {stream.name!r}"
                    )
                owner[parameter] = stream.name
            for draw in {stream.draw, stream.ascent_draw}:
                if rates.setdefault(draw, stream.sampling_rate) != stream.sampling_rate:
                    raise PrivacyError(f"streams on draw {draw!r} state different sampling rates")

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of every trained parameter."""
        return tuple(name for stream in self.streams for name in stream.parameters)

    @property
    def anchored(self) -> tuple[str, ...]:
        """Names of the parameters that an anchor pulls."""
        return tuple(
            name
            for stream in self.streams
            for group in stream.groups
            if stream.anchor and group.anchored
            for name in group.parameters
        )

    @property
    def private(self) -> bool:
        """Whether every query carries noise."""
        return all(
            s.noise_multiplier > 0 and (s.ascent_noise is None or s.ascent_noise > 0) for s in self.streams
        )

    def event(self) -> Composed:
        """What the whole schedule reveals about the records.

        Queries on one draw are one event whose noise combines before subsampling; different draws
        compose. A draw whose streams run for different numbers of steps is priced in segments. The count of
        adaptive clipping is a query on the stream's draw.
        """
        return self._event(gradients=True)

    def fixed_event(self) -> Composed:
        """The part of `event` that `with_noise` doesn't change: queries beside the gradients, and counts."""
        return self._event(gradients=False)

    def _event(self, *, gradients: bool) -> Composed:
        asked: dict[str, list[tuple[int, float]]] = {}
        rates: dict[str, float] = {}
        for stream in self.streams:
            rates[stream.ascent_draw] = rates[stream.draw] = stream.sampling_rate
            sigmas = [(stream.draw, stream.clipping.count_multiplier)]
            if gradients:
                sigmas = [
                    (stream.ascent_draw, stream.ascent_noise),
                    (stream.draw, stream.noise_multiplier),
                    *sigmas,
                ]
            for draw, sigma in sigmas:
                if sigma is not None:
                    asked.setdefault(draw, []).append((stream.steps, sigma))
        events: list[PoissonGaussian] = []
        for draw, planned in asked.items():
            done = 0
            for end in sorted({steps for steps, _ in planned}):
                together = tuple(sigma for steps, sigma in planned if steps >= end)
                events.append(PoissonGaussian(rates[draw], together, end - done))
                done = end
        return Composed((*events, *(query.event() for query in self.queries)))

    def with_noise(self, factor: float) -> Schedule:
        """The same schedule with the noise of every gradient, ascents included, multiplied by `factor`.

        Queries beside the gradients and the counts of adaptive clipping keep their noise: it says how
        precise they are, which doesn't depend on how many steps are trained.
        """
        return dataclasses.replace(
            self,
            streams=tuple(
                dataclasses.replace(
                    stream,
                    noise_multiplier=stream.noise_multiplier * factor,
                    ascent_noise=None if stream.ascent_noise is None else stream.ascent_noise * factor,
                )
                for stream in self.streams
            ),
        )
