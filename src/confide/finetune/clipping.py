"""The clipping rules of streams, from the settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from confide.finetune.settings import Settings
from confide.privacy.streams import Clipping, ParameterGroup


def clipping_of(settings: Settings, groups: Sequence[ParameterGroup], batch: int) -> Clipping:
    """How the gradient of a stream over the encoder and the head is bounded.

    Args:
        groups: the stream's; at most `encoder` and `head`.
        batch: B, its denominator.
    """
    if settings.private and settings.clipping == "per-role":
        head = settings.head_share
        shares = tuple(head if group.name == "head" else 1 - head for group in groups)
        return Clipping("per-role", settings.clipping_bound, shares=shares if len(groups) > 1 else (1.0,))
    return _of(settings.clipping, settings.clipping_bound, settings, batch)


def expert_clipping_of(settings: Settings, batch: int) -> Clipping:
    """How the gradient of the stream over experts is bounded.

    Args:
        batch: B, its expected draw, whatever its denominator is.
    """
    return _of(settings.experts.clipping, settings.experts.clipping_bound, settings, batch)


def _of(rule: Any, bound: float, settings: Settings, batch: int) -> Clipping:
    if not settings.private:
        return Clipping("none", bound)
    if rule == "adaptive":
        return Clipping(
            rule,
            bound,
            quantile=settings.clipping_quantile,
            quantile_rate=settings.clipping_rate,
            count_noise=settings.count_noise or batch / 20,
        )
    return Clipping(rule, bound)
