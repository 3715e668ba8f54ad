"""What a person chooses for one fine-tune; `methods` turns it into a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from confide import sizes
from confide.choices import AnchorForm, Ascent, Clipping, Decay, Method, Optimizer, Precision, Statistics
from confide.errors import ConfigError
from confide.finetune.expert_settings import SHARED, ExpertSettings
from confide.models.adapters import Trainable
from confide.privacy.events import NOT_POISSON


class Settings(BaseModel):
    """Settings of one fine-tune. All of them are public: none may be chosen by looking at the records.

    Attributes:
        method: `non-private`; `dp-adamw` (one noisy clipped gradient a step); `dp-merging` (a paired ascent
            and an anchor to the base, so that the release merges well); `raptor` (a mixture of experts in two
            streams: what all records share, and one layer's experts, each trained by the records it owns).
        epsilon: ε of the release; unused by `non-private`.
        delta: δ, or a rule for it: `auto` is min(1e-6, 1/(10n)).
        declared_units: n as a public constant: sampling rate, δ and the default batch follow from it, so that
            they don't move when one record is added or removed. None counts the training units, and the
            count is then assumed to be public.
        expected_batch: B, the mean size of a Poisson draw and the denominator; q = B/n. None takes 1024, or
            n/4 where that is less.
        steps: number of noisy steps; all are charged.
        trainable: what is trained beside the head. `raptor` takes LoRA on the attention and the always-active
            experts of all blocks unless `blocks` or `targets` are given.
        learning_rate: of encoder parameters (or adapters) at the first step.
        head_learning_rate: of the head.
        decay: of both rates.
        warmup: steps in which both rates rise from 0 first.
        optimizer: applied to noisy gradients.
        bias_correction: of `adamw`: above 0, the noise's variance is subtracted from the second moment, down
            to this floor; see `privacy.streams.Stream`.
        clipping: rule that bounds a unit's gradient; see `privacy.streams.Clipping`.
        clipping_bound: C; of the first step for `adaptive`.
        head_share: of `per-role`: the head's share of C²; the encoder has the rest.
        clipping_quantile: of `adaptive`: share of the gradients to leave unclipped.
        clipping_rate: of `adaptive`: how fast C follows.
        count_noise: of `adaptive`: noise on the number of unclipped units; None takes B/20.
        ascent: None takes the method's own (`paired` for dp-merging, else `none`). Both streams of `raptor`
            ascend, each over its own parameters.
        ascent_radius: ρ, length of the ascent in weight space.
        ascent_noise_ratio: noise of the ascent query over that of the descent; its answer only gives a
            direction.
        anchor: λ of the pull to the base; None takes the method's own (`DEFAULT_ANCHOR` for dp-merging). In
            `raptor` it pulls experts too.
        anchor_form: see `privacy.streams.Stream`.
        weight_decay: decoupled; only without an anchor.
        publish_accuracy: standard deviation of noise, in test units: the noisy accuracy on the test units is
            charged with the training and stands in the release. None publishes nothing.
        memory: about how much the process may take, such as `8GiB`: micro-batches are made to fit. None
            keeps them at a size that is fast on processors. Changes the result by rounding only.
        precision: of the forward and the backward pass. `bfloat16` runs them under autocast, on micro-batches
            of one fixed shape (`finetune.precision`); weights, norms, sums and noise stay what they are.
        max_length: tokens of a text; longer ones are cut.
        release_statistics: `grams` (for RegMean) or `fisher` of the training records, released beside the
            weights as one more charged query; None for none.
        statistics_noise: σ of that query; calibration pays it first and never changes it. Unused without.
        statistics_bound: R; a unit's statistics are scaled to norm R² (`finetune.released`). None takes what
            made-up texts have, which is public.
        agreement: file of `confide agree`; what contradicts it is refused, and the statement has its hash.
        seed: fixes initial weights; public. Noise and sampling never depend on it.
        experts: of `raptor`.
    """

    method: Method = "dp-merging"
    epsilon: float | None = Field(default=4.0, gt=0)
    delta: Annotated[float, Field(gt=0, lt=1)] | Literal["auto", "1/n", "n^-1.1"] = "auto"
    declared_units: int | None = Field(default=None, gt=0)
    expected_batch: int | None = Field(default=None, gt=0)
    steps: int = Field(default=40, gt=0)
    trainable: Trainable = Trainable()
    learning_rate: float = Field(default=0.03, gt=0)
    head_learning_rate: float = Field(default=0.1, gt=0)
    decay: Decay = "linear"
    warmup: int = Field(default=0, ge=0)
    optimizer: Optimizer = "adamw"
    bias_correction: float = Field(default=0.0, ge=0)
    clipping: Clipping = "flat"
    clipping_bound: float = Field(default=1.0, gt=0)
    head_share: float = Field(default=0.5, gt=0, lt=1)
    clipping_quantile: float = Field(default=0.5, ge=0, le=1)
    clipping_rate: float = Field(default=0.2, gt=0)
    count_noise: float | None = Field(default=None, gt=0)
    ascent: Ascent | None = None
    ascent_radius: float = Field(default=0.5, gt=0)
    ascent_noise_ratio: float = Field(default=1.0, ge=1)
    anchor: float | None = Field(default=None, ge=0)
    anchor_form: AnchorForm = "coupled"
    weight_decay: float = Field(default=0.0, ge=0)
    publish_accuracy: float | None = Field(default=None, gt=0)
    memory: str | None = Field(default=None, pattern=sizes.PATTERN)
    precision: Precision = "float32"
    max_length: int = Field(default=64, gt=2)
    release_statistics: Statistics | None = None
    statistics_noise: float = Field(default=5.0, gt=0)
    statistics_bound: float | None = Field(default=None, gt=0)
    agreement: Path | None = None
    seed: int = Field(default=0, ge=0)
    experts: ExpertSettings = ExpertSettings()

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def of(cls, given: Mapping[str, Any], spell: Callable[[str], str] = str) -> Settings:
        """Settings from keywords.

        Args:
            spell: how a message writes a key (`trainable.rank`); the command line writes its option.

        Raises:
            ConfigError: an unknown key (the message names the near one) or a value out of range.
        """
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            path = [str(part) for part in first["loc"]]
            parts: dict[str, type[BaseModel]] = {"trainable": Trainable, "experts": ExpertSettings}
            nested = parts.get(path[0]) if path else None
            if nested is not None:
                known, path = list(nested.model_fields), path[:2]
            else:
                known, path = list(cls.model_fields), path[:1]  # what follows names an alternative type
            key = ".".join(path)
            if first["type"] == "extra_forbidden":
                if path[-1] in ("sampling", "sampler", "shuffle"):
                    raise ConfigError(f"unknown key {key}: {NOT_POISSON}") from None
                near = get_close_matches(path[-1], known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"unknown key {key}{hint}") from None
            where = f"{spell(key)}: " if key else ""
            raise ConfigError(f"{where}{first['msg']}, not {first['input']}") from None

    @model_validator(mode="before")
    @classmethod
    def _raptor_adapts_what_is_shared(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("method") == "raptor":
            trainable = given.get("trainable", {})
            if isinstance(trainable, Mapping) and trainable.get("kind", "lora") == "lora":
                return {**given, "trainable": {"blocks": 0, "targets": SHARED, **trainable}}
        return given

    @property
    def private(self) -> bool:
        """Whether noise is added, so that something is claimed."""
        return self.method != "non-private" and (
            self.method != "raptor" or self.experts.variant != "non-private"
        )

    @model_validator(mode="after")
    def _budget_fits_method(self) -> Settings:
        if self.private and self.epsilon is None:
            raise ValueError(f"method {self.method} needs an epsilon")
        if self.method != "raptor" and self.experts != ExpertSettings():
            raise ValueError(f"settings of experts belong to method raptor, and not to {self.method}")
        if self.method == "raptor" and self.precision != "float32":
            raise ValueError("raptor trains in float32: bfloat16's rounding flips routing choices")
        if self.bias_correction and self.optimizer != "adamw":
            raise ValueError(
                f"bias_correction is for adamw; {self.optimizer} has no second moment to correct"
            )
        if self.warmup >= self.steps:
            raise ValueError(f"a warmup of {self.warmup} steps must be shorter than the {self.steps} steps")
        if self.release_statistics and not self.private:
            raise ValueError("method non-private adds no noise, so no release_statistics; use public text")
        if self.release_statistics and self.method == "raptor":
            raise ValueError("release_statistics knows none of experts, so raptor has none; leave it out")
        return self
