"""Which families of mixtures are trained here, and which can't be, with the reason."""

from __future__ import annotations

from collections.abc import Mapping

from confide.errors import ModelError

MIXTURES = frozenset(
    {
        "deepseek_ocr2_text",
        "deepseek_v2",
        "deepseek_v3",
        "gpt_oss",
        "granitemoe",
        "llama4_text",
        "mixtral",
        "olmoe",
        "qwen2_moe",
        "qwen3_moe",
        "switch_transformers",
    }
)
"""Families of transformers that are trained here, for texts with one class each."""

REFUSED: Mapping[str, str] = {
    "nllb-moe": "its experts' capacity is counted over the whole batch and kept between calls",
    "llama4": (
        "it reads images too; save its language model alone, as Llama4ForCausalLM loads it, and train that"
    ),
}
"""Why a family can't be trained, by its `model_type`."""


def refuse(kind: str) -> None:
    """Say why a family can't be trained.

    Args:
        kind: its `model_type`.

    Raises:
        ModelError: it can't.
    """
    if kind in REFUSED:
        raise ModelError(f"a {kind!r} model can't be trained privately: {REFUSED[kind]}")
