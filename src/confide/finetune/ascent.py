"""DP-Merging's two terms: where a stream takes its gradient, and what pulls it to the base."""

from __future__ import annotations

from typing import Any

from confide.choices import Ascent
from confide.errors import ConfigError
from confide.finetune.settings import Settings

DEFAULT_ANCHOR = 0.001


def ascent_of(settings: Settings, *, encoder: bool) -> Ascent:
    """Where gradients are taken, with the method's own where nothing is chosen; `encoder` as below."""
    return settings.ascent or ("paired" if settings.method == "dp-merging" and encoder else "none")


def anchor_of(settings: Settings, *, encoder: bool) -> float:
    """λ, with the method's own where nothing is chosen; `encoder` as below."""
    if not encoder:
        return 0.0
    own = DEFAULT_ANCHOR if settings.method == "dp-merging" else 0.0
    return own if settings.anchor is None else settings.anchor


def ascent_and_anchor(settings: Settings, *, encoder: bool) -> dict[str, Any]:
    """The fields of a `Stream` that say so, with the method's own where nothing is chosen.

    Args:
        encoder: whether anything beside the head is trained. A head alone has nothing to merge, so it
            doesn't pay for an ascent, and no base to be pulled to.

    Raises:
        ConfigError: anchor and weight decay together.
    """
    ascent, anchor = ascent_of(settings, encoder=encoder), anchor_of(settings, encoder=encoder)
    if anchor and settings.weight_decay:
        raise ConfigError("weight_decay pulls to 0 and an anchor to the base; set one of them to 0")
    queried = ascent in ("paired", "fresh")
    return {
        "ascent": ascent,
        "ascent_radius": settings.ascent_radius if ascent != "none" else 0.0,
        "ascent_noise": float(settings.private) * settings.ascent_noise_ratio if queried else None,
        "anchor": anchor,
        "anchor_form": settings.anchor_form,
        "weight_decay": settings.weight_decay,
    }
