"""A setting that would do nothing beside the others is an error that names it."""

from __future__ import annotations

from typing import Any

import pytest

from confide.errors import ConfigError
from confide.finetune.idle import keys_of, refuse_idle
from confide.finetune.settings import Settings

HEAD = {"trainable": {"kind": "head"}}
ALL = {"trainable": {"kind": "all"}}
NON_PRIVATE = {"method": "non-private"}


def sparse(variant: str, **experts: Any) -> dict[str, Any]:
    return {"method": "raptor", "experts": {"variant": variant, **experts}}


def ask(**given: Any) -> None:
    refuse_idle(Settings.of(given), keys_of(given))


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"trainable": {"kind": "head", "rank": 4}}, "trainable.rank"),
        ({"trainable": {"kind": "blocks", "train_a": False}}, "trainable.train_a"),
        ({"trainable": {"kind": "all", "blocks": 2}}, "trainable.blocks"),
        ({**HEAD, "anchor": 0.1}, "anchor"),
        ({**HEAD, "learning_rate": 0.1}, "learning_rate"),
        ({**HEAD, "ascent_radius": 0.1}, "ascent_radius"),
        ({"method": "dp-adamw", "ascent_radius": 0.1}, "ascent_radius"),
        ({"ascent": "none", "ascent_radius": 0.1}, "ascent_radius"),
        ({"ascent": "lagged", "ascent_noise_ratio": 2.0}, "ascent_noise_ratio"),
        ({"method": "dp-adamw", "anchor_form": "decoupled"}, "anchor_form"),
        ({"anchor": 0, "anchor_form": "decoupled"}, "anchor_form"),
        ({**NON_PRIVATE, "clipping_bound": 2.0}, "clipping_bound"),
        ({**NON_PRIVATE, "bias_correction": 1e-8}, "bias_correction"),
        ({"method": "raptor", "experts": {"variant": "non-private"}, "clipping": "flat"}, "clipping"),
        ({"method": "raptor", "anchor_form": "decoupled"}, "anchor_form"),
        ({**NON_PRIVATE, "clipping": "adaptive"}, "clipping"),
        ({"clipping_quantile": 0.3}, "clipping_quantile"),
        ({"clipping": "per-role", "count_noise": 3.0}, "count_noise"),
        ({"clipping": "adaptive", "head_share": 0.3}, "head_share"),
        ({**HEAD, "clipping": "per-role", "head_share": 0.3}, "head_share"),
        ({**sparse("raptor"), **HEAD, "learning_rate": 0.1}, "learning_rate"),
        (sparse("shared-only", layer="last"), "experts.layer"),
        (sparse("shared-only", train="weights"), "experts.train"),
        (sparse("monolithic", layer="last"), "experts.layer"),
        (sparse("monolithic", vote="majority"), "experts.vote"),
        (sparse("raptor", layer="2", public="texts.txt"), "experts.public"),
        (sparse("one-stream", layer="2", vote="majority"), "experts.vote"),
        (sparse("raptor", train="weights", rank=4), "experts.rank"),
        (sparse("one-clip", steps=3), "experts.steps"),
        (sparse("one-stream", denominator="batch"), "experts.denominator"),
        (sparse("non-private", clipping="flat"), "experts.clipping"),
        (sparse("one-draw", record_weight="none", record_memory=0.5), "experts.record_memory"),
        (sparse("one-stream", record_power=2.0), "experts.record_power"),
        (sparse("experts-only", shared_share=0.5), "experts.shared_share"),
        ({**sparse("experts-only"), "clipping": "normalised"}, "clipping"),
        ({**sparse("experts-only"), "learning_rate": 0.1}, "learning_rate"),
        ({**sparse("experts-only"), "trainable": {"blocks": 2}}, "trainable.blocks"),
        ({**sparse("raptor", clipping="flat"), "clipping_rate": 0.1}, "clipping_rate"),
    ],
)
def test_idle_settings(given: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key} has no effect here: it needs "):
        ask(**given)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"trainable": {"kind": "lora", "rank": 4, "blocks": 2}},
        {"ascent_radius": 0.1, "ascent_noise_ratio": 2.0, "anchor_form": "decoupled"},
        {"method": "dp-adamw", "ascent": "fresh", "ascent_radius": 0.1, "ascent_noise_ratio": 2.0},
        {"method": "dp-adamw", "anchor": 0.1, "anchor_form": "decoupled"},
        {**HEAD, "anchor": 0, "ascent": "paired", "ascent_radius": 0.1},
        {"clipping": "adaptive", "clipping_quantile": 0.3, "clipping_rate": 0.1, "count_noise": 3.0},
        {**ALL, "clipping": "per-role", "head_share": 0.3, "bias_correction": 1e-8},
        {**NON_PRIVATE, "optimizer": "sgd", "decay": "cosine", "warmup": 3},
        {**sparse("raptor", learning_rate=None), **HEAD, "learning_rate": 0.1},
        sparse("raptor", layer="entropy", public="texts.txt", vote="majority", steps=3, shared_share=0.5),
        {**sparse("raptor", clipping="adaptive", clipping_bound=0.1), "clipping_quantile": 0.3},
        sparse("one-clip", record_power=2.0, record_memory=0.5, rank=4, learning_rate=0.1),
        sparse("non-private", denominator="batch", steps=3),
        sparse("one-stream", vote="majority", public="texts.txt"),
        sparse("shared-only"),
    ],
)
def test_settings_that_act(given: dict[str, Any]) -> None:
    ask(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": "sgd", "bias_correction": 1e-8}, "bias_correction is for adamw"),
        ({"warmup": 40}, "warmup of 40 steps must be shorter than the 40"),
        ({"memory": "8 GB"}, "memory"),
        ({"memory": "lots"}, "memory"),
        ({"publish_accuracy": 0}, "publish_accuracy"),
        ({"head_share": 1}, "head_share"),
    ],
)
def test_settings_that_contradict_each_other(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings.of(given)
