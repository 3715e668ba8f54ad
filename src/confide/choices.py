"""Words that settings and commands choose from; nothing is imported here, so that commands start fast."""

from __future__ import annotations

from typing import Literal

Method = Literal["dp-merging", "dp-adamw", "raptor", "non-private"]
Trained = Literal["lora", "blocks", "all", "head"]
Optimizer = Literal["adamw", "sgd"]
Decay = Literal["constant", "linear", "cosine"]
Clipping = Literal["flat", "normalised", "per-role", "adaptive"]
Ascent = Literal["none", "paired", "fresh", "lagged"]
AnchorForm = Literal["coupled", "decoupled"]
Precision = Literal["float32", "bfloat16"]
Adjacency = Literal["add-or-remove-one", "replace-one"]
Metric = Literal["accuracy", "macro-f1", "pearson", "spearman", "rmse", "perplexity"]
Statistics = Literal["grams", "fisher"]

Variant = Literal[
    "raptor",
    "one-draw",
    "one-clip",
    "one-stream",
    "shared-only",
    "experts-only",
    "monolithic",
    "non-private",
]
ExpertClipping = Literal["flat", "normalised", "adaptive"]
RecordWeight = Literal["residual", "none"]
Vote = Literal["plurality", "majority"]
