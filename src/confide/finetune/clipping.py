"""The clipping rule of a stream, from the settings."""

from __future__ import annotations

from collections.abc import Sequence

from confide.finetune.settings import Settings
from confide.privacy.streams import Clipping, ParameterGroup


def clipping_of(settings: Settings, groups: Sequence[ParameterGroup], batch: int) -> Clipping:
    """How the gradient of a stream over the encoder and the head is bounded.

    Args:
        groups: the stream's; at most `encoder` and `head`.
        batch: B, its denominator.
    """
    if not settings.private:
        return Clipping("none", settings.clipping_bound)
    match settings.clipping:
        case "adaptive":
            return Clipping(
                "adaptive",
                settings.clipping_bound,
                quantile=settings.clipping_quantile,
                quantile_rate=settings.clipping_rate,
                count_noise=settings.count_noise or batch / 20,
            )
        case "per-role":
            head = settings.head_share
            shares = tuple(head if group.name == "head" else 1 - head for group in groups)
            return Clipping("per-role", settings.clipping_bound, shares=shares if len(groups) > 1 else (1.0,))
        case rule:
            return Clipping(rule, settings.clipping_bound)
