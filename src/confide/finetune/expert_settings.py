"""What a person chooses about the experts of a mixture; `raptor` turns it into streams."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from confide.choices import ExpertClipping, RecordWeight, Variant, Vote
from confide.privacy.splits import Rule

_ATTENTION = (
    *("query", "key", "value", "attention.output.dense"),  # BERT
    *("q_proj", "k_proj", "v_proj", "o_proj"),  # decoders
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),  # DeepSeek's latent attention
    *("SelfAttention.q", "SelfAttention.k", "SelfAttention.v", "SelfAttention.o"),  # Switch
)
SHARED = (
    *_ATTENTION,
    *(f"shared_expert.{part}_proj" for part in ("gate", "up", "down")),  # Qwen2-MoE, Llama 4
    *(f"shared_experts.{part}_proj" for part in ("gate", "up", "down")),  # DeepSeek
)
"""What LoRA adapts in the shared stream: q, k, v and o, and experts that every token meets, in any family."""


class ExpertSettings(BaseModel):
    """Settings of `raptor` about the experts. All of them are public, and read by no other method.

    Attributes:
        variant: `raptor` (two streams, each with its own draws), or what it is compared with. `one-draw`:
            both streams on one minibatch, as a joint step. `one-clip`: owners, but one norm over both.
            `one-stream`: one stream over the same parameters, every record reaching all experts (matched
            scope A). `shared-only` (B). `experts-only`: with the head as it was initialised (C).
            `monolithic`: one stream over the shared parameters and the experts of all layers.
            `non-private`: `raptor` without noise and clipping; claims nothing.
        layer: whose experts are trained: `entropy` (the most even owners on public text), `first`, `last`, or
            the number of a block.
        public: file of public texts, one a line, for `entropy`. It must share no text with the records.
        vote: how tokens vote for a record's owner; see `models.moe.owners`.
        train: `lora`, or `weights`.
        rank: r of the experts' LoRA.
        alpha: its scale is alpha / rank.
        steps: of the stream of experts; None takes those of the shared stream.
        learning_rate: at the first step; None takes that of the encoder.
        clipping: rule for the stream of experts; `adaptive` by the quantile, rate and count noise of all
            streams.
        clipping_bound: its C; of the first step for `adaptive`.
        denominator: what divides each expert's noisy sum: `even`, B/E, or `batch`, B.
        record_weight: `residual` multiplies a record's loss by (1 − p)^`record_power`; or `none`.
        record_power: γ.
        record_memory: β of the exponential mean of 1 − p over the steps that drew the record; 0 takes this
            step's alone.
        shared_share: ρ, the shared stream's share of the budget, read as `split` says.
        split: see `privacy.splits.split`.
        diagnostics: measure on the records, after training, what the experts made of them
            (`finetune.diagnostics`); for `private/` alone. The release is the same bits either way.
    """

    variant: Variant = "raptor"
    layer: str = "entropy"
    public: str | None = None
    vote: Vote = "plurality"
    train: Literal["lora", "weights"] = "lora"
    rank: int = Field(default=8, gt=0)
    alpha: float = Field(default=16.0, gt=0)
    steps: int | None = Field(default=None, gt=0)
    learning_rate: float | None = Field(default=0.01, gt=0)
    clipping: ExpertClipping = "normalised"
    clipping_bound: float = Field(default=1.0, gt=0)
    denominator: Literal["even", "batch"] = "even"
    record_weight: RecordWeight = "residual"
    record_power: float = Field(default=1.0, gt=0)
    record_memory: float = Field(default=0.0, ge=0, lt=1)
    shared_share: float = Field(default=0.9, gt=0, lt=1)
    split: Rule = "shared_share"
    diagnostics: bool = False

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
