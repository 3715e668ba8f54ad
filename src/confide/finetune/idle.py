"""Settings that would do nothing beside the others: an error, so that nobody believes they did."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from confide.errors import ConfigError
from confide.finetune.settings import Settings


def keys_of(settings: Mapping[str, Any]) -> set[str]:
    """The keys that keywords for `Settings` choose, those of `trainable` as `trainable.rank`."""
    nested = settings.get("trainable")
    return {*settings} | {f"trainable.{key}" for key in nested or () if isinstance(nested, Mapping)}


def refuse_idle(settings: Settings, given: Collection[str], spell: Callable[[str], str] = str) -> None:
    """Refuse a setting that was given, but has no effect in this combination.

    A study compares methods under shared settings, of which not all act in each, so it doesn't ask this.

    Args:
        given: keys that were chosen, those of `trainable` as `trainable.rank`.
        spell: how a message writes a key.

    Raises:
        ConfigError: names the setting and what it needs.
    """
    for keys, acts, needed in _conditions(settings):
        for key in keys:
            if key in given and not acts and _value(settings, key):
                raise ConfigError(f"{spell(key)} has no effect here: it needs {needed}")


def refuse_idle_head(settings: Settings) -> None:
    """Refuse what is for a head, where a model has none of its own.

    Raises:
        ConfigError: names the setting.
    """
    fields = Settings.model_fields
    for key in ("head_learning_rate", "head_share"):
        if getattr(settings, key) != fields[key].default:
            raise ConfigError(f"{key} has no effect here: a language model has no head of its own")
    if settings.clipping == "per-role":
        raise ConfigError(
            "clipping per-role needs a head and an encoder; a language model has no head of its own"
        )


def _conditions(settings: Settings) -> list[tuple[tuple[str, ...], bool, str]]:
    """(keys, whether they act, what they need)."""
    kind = settings.trainable.kind
    encoder = kind != "head"
    private = settings.private
    pulled = encoder or settings.method == "raptor"
    merging = settings.method == "dp-merging" and encoder
    ascent = settings.ascent or ("paired" if merging else "none")
    anchored = pulled and (merging if settings.anchor is None else settings.anchor > 0)
    lora = ("rank", "alpha", "train_a", "targets")
    return [
        (tuple(f"trainable.{key}" for key in lora), kind == "lora", "trainable `lora`"),
        (("trainable.blocks",), kind in ("lora", "blocks"), "trainable `lora` or `blocks`"),
        (("anchor", "learning_rate"), pulled, "something to train beside the head"),
        (("anchor_form",), anchored, "an anchor"),
        (("ascent_radius",), ascent != "none", "an ascent"),
        (
            ("ascent_noise_ratio",),
            private and ascent in ("paired", "fresh"),
            "a private method with ascent `paired` or `fresh`",
        ),
        (
            ("clipping", "clipping_bound", "bias_correction", "delta"),
            private,
            "a private method, as `non-private` neither clips nor adds noise",
        ),
        (
            ("clipping_quantile", "clipping_rate", "count_noise"),
            settings.clipping == "adaptive",
            "clipping `adaptive`",
        ),
        (
            ("head_share",),
            settings.clipping == "per-role" and encoder,
            "clipping `per-role`, and something to train beside the head",
        ),
    ]


def _value(settings: Settings, key: str) -> Any:
    first, _, second = key.partition(".")
    value = getattr(settings, first)
    return getattr(value, second) is not None if second else value
