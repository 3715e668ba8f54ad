"""Settings that would do nothing beside the others: an error, so that nobody believes they did."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from confide.errors import ConfigError
from confide.finetune.ascent import anchor_of, ascent_of
from confide.finetune.settings import Settings


def keys_of(settings: Mapping[str, Any]) -> set[str]:
    """The keys that keywords for `Settings` choose: of `trainable` as `trainable.rank`; so of `experts`."""
    sections = {name: settings.get(name) for name in ("trainable", "experts")}
    nested = {f"{name}.{key}" for name, own in sections.items() if isinstance(own, Mapping) for key in own}
    return {*settings} | nested


def refuse_idle(settings: Settings, given: Collection[str], spell: Callable[[str], str] = str) -> None:
    """Refuse a setting that was given, but has no effect in this combination.

    A study compares methods under shared settings, of which not all act in each, so it doesn't ask this.

    Args:
        given: keys that were chosen, those of `trainable` as `trainable.rank`, and of `experts`.
        spell: how a message writes a key.

    Raises:
        ConfigError: names the setting and what it needs.
    """
    for keys, acts, needed in (*_conditions(settings), *_experts(settings)):
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
    ascent = ascent_of(settings, encoder=encoder)
    lora = ("rank", "alpha", "train_a", "targets")
    return [
        (tuple(f"trainable.{key}" for key in lora), kind == "lora", "trainable `lora`"),
        (("trainable.blocks",), kind in ("lora", "blocks"), "trainable `lora` or `blocks`"),
        (("anchor",), pulled, "something to train beside the head"),
        (
            ("learning_rate",),
            encoder or (settings.method == "raptor" and settings.experts.learning_rate is None),
            "something to train beside the head",
        ),
        (("anchor_form",), anchor_of(settings, encoder=pulled) > 0, "an anchor"),
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
            "adaptive" in (settings.clipping, settings.method == "raptor" and settings.experts.clipping),
            "clipping `adaptive`",
        ),
        (
            ("head_share",),
            settings.clipping == "per-role" and encoder,
            "clipping `per-role`, and something to train beside the head",
        ),
    ]


def _experts(settings: Settings) -> list[tuple[tuple[str, ...], bool, str]]:
    """`_conditions` of what `raptor` reads."""
    own = settings.experts
    if settings.method != "raptor":
        return []
    variant, lora = own.variant, own.train == "lora"
    apart = variant in ("raptor", "one-draw", "experts-only", "non-private")
    owned = apart or variant == "one-clip"
    chooses = variant not in ("shared-only", "monolithic")
    two = variant in ("raptor", "one-draw")
    dense = tuple(f"trainable.{key}" for key in ("blocks", "rank", "alpha", "train_a", "targets"))
    return [
        (
            ("head_learning_rate", "clipping", "clipping_bound", "head_share", *dense),
            variant != "experts-only",
            "a variant that trains more than experts",
        ),
        (
            ("learning_rate",),
            variant != "experts-only" or own.learning_rate is None,
            "a variant that trains more than experts, or experts without a rate of their own",
        ),
        (("experts.layer",), chooses, "a variant that trains one layer's experts"),
        (
            ("experts.public",),
            own.diagnostics or (chooses and own.layer == "entropy"),
            "a layer to choose by entropy, or diagnostics",
        ),
        (
            ("experts.vote",),
            owned or (chooses and own.layer == "entropy"),
            "owners, or a layer to choose by entropy",
        ),
        (
            ("experts.train", "experts.learning_rate"),
            variant != "shared-only",
            "a variant that trains experts",
        ),
        (("experts.rank", "experts.alpha"), variant != "shared-only" and lora, "experts with train `lora`"),
        (("experts.steps", "experts.denominator"), apart, "a variant with a stream of experts"),
        (
            ("experts.clipping", "experts.clipping_bound"),
            apart and settings.private,
            "a private variant with a stream of experts",
        ),
        (("experts.record_weight",), owned, "a variant in which records have owners"),
        (
            ("experts.record_power", "experts.record_memory"),
            owned and own.record_weight == "residual",
            "record_weight `residual`, and records with owners",
        ),
        (("experts.shared_share", "experts.split"), two, "a private variant with two streams"),
    ]


def _value(settings: Settings, key: str) -> Any:
    first, _, second = key.partition(".")
    value = getattr(settings, first)
    return getattr(value, second) is not None if second else value
