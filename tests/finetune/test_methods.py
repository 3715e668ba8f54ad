"""Settings become the schedule of the paper that they name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from confide.errors import ConfigError
from confide.finetune.ascent import DEFAULT_ANCHOR
from confide.finetune.methods import schedule
from confide.finetune.settings import Settings
from confide.models.adapters import Adapted, Trainable, adapt
from confide.models.backbones import load_classifier
from confide.privacy.streams import Stream


@pytest.fixture
def lora(tiny_base: Path) -> Adapted:
    return adapt(load_classifier(tiny_base, ("neg", "pos"), seed=0), Trainable(blocks=1), seed=0)


@pytest.fixture
def head(tiny_base: Path) -> Adapted:
    return adapt(load_classifier(tiny_base, ("neg", "pos"), seed=0), Trainable(kind="head"), seed=0)


def stream(adapted: Adapted, units: int = 1000, **settings: Any) -> Stream:
    (only,) = schedule(Settings.model_validate(settings), adapted, units).streams
    return only


def test_dp_adamw(lora: Adapted) -> None:
    s = stream(
        lora, method="dp-adamw", expected_batch=100, steps=7, learning_rate=0.3, head_learning_rate=0.4
    )
    assert (s.sampling_rate, s.denominator, s.steps) == (0.1, 100.0, 7)
    assert (s.ascent, s.ascent_noise, s.anchor, s.noise_multiplier) == ("none", None, 0.0, 1.0)
    assert [(g.name, g.parameters, g.learning_rate, g.anchored) for g in s.groups] == [
        ("encoder", lora.encoder, 0.3, True),
        ("head", lora.head, 0.4, False),
    ]


def test_dp_merging_is_the_papers(lora: Adapted) -> None:
    s = stream(lora, method="dp-merging", ascent_radius=0.2)
    assert (s.ascent, s.ascent_radius, s.ascent_noise) == ("paired", 0.2, s.noise_multiplier)
    assert (s.anchor, s.anchor_form, s.weight_decay) == (DEFAULT_ANCHOR, "coupled", 0.0)
    assert s.ascent_draw == s.draw


def test_ablations(lora: Adapted) -> None:
    assert stream(lora, method="dp-merging", ascent="none").ascent_radius == 0
    assert stream(lora, method="dp-merging", anchor=0).anchor == 0
    lagged = stream(lora, method="dp-merging", ascent="lagged")
    assert (lagged.ascent, lagged.ascent_noise) == ("lagged", None)
    fresh = stream(lora, method="dp-adamw", ascent="fresh", ascent_noise_ratio=3)
    assert (fresh.ascent_noise, fresh.ascent_draw != fresh.draw, fresh.anchor) == (3.0, True, 0.0)


def test_non_private(lora: Adapted) -> None:
    whole = schedule(Settings(method="non-private", epsilon=None), lora, 1000)
    (s,) = whole.streams
    assert not whole.private
    assert (s.noise_multiplier, s.clipping.rule) == (0.0, "none")
    paired = stream(lora, method="non-private", ascent="paired")
    assert paired.ascent_noise == 0.0


def test_a_head_has_no_anchor(head: Adapted) -> None:
    s = stream(head, method="dp-merging")
    assert s.anchor == 0
    assert [group.name for group in s.groups] == ["head"]
    assert stream(head, method="dp-merging", weight_decay=0.1).weight_decay == 0.1
    assert s.ascent == "none"  # and nothing to merge, so it pays for no ascent unless that is asked for
    assert stream(head, method="dp-merging", ascent="paired").ascent == "paired"


def test_default_batch(lora: Adapted) -> None:
    assert stream(lora, units=100).denominator == 25
    assert stream(lora, units=10**6).denominator == 1024
    assert stream(lora, units=2).denominator == 1
    assert stream(lora, units=3, expected_batch=3).sampling_rate == 1


def test_batch_beyond_the_units(lora: Adapted) -> None:
    with pytest.raises(ConfigError, match=r"expected_batch is 11, but there are only 10 users"):
        schedule(Settings(expected_batch=11), lora, 10, unit="user")
    assert schedule(Settings(expected_batch=10), lora, 10, unit="user").unit == "user"


def test_weight_decay_beside_an_anchor(lora: Adapted) -> None:
    with pytest.raises(ConfigError, match="set one of them to 0"):
        stream(lora, method="dp-merging", weight_decay=0.1)
    assert stream(lora, method="dp-merging", weight_decay=0.1, anchor=0).weight_decay == 0.1


@pytest.mark.parametrize(
    "bad",
    [
        {"epsilon": 0},
        {"epsilon": -1},
        {"epsilon": math.nan},
        {"epsilon": math.inf},
        {"epsilon": None},
        {"delta": "soon"},
        {"delta": math.nan},
        {"method": "sgd"},
        {"expected_batch": 0},
        {"steps": 0},
        {"learning_rate": 0},
        {"learning_rate": math.inf},
        {"head_learning_rate": math.nan},
        {"clipping": "none"},
        {"clipping_bound": 0},
        {"clipping_bound": math.inf},
        {"ascent": "double"},
        {"ascent_radius": 0},
        {"ascent_radius": math.inf},
        {"ascent_noise_ratio": 0.5},
        {"ascent_noise_ratio": math.inf},
        {"anchor": -0.1},
        {"anchor": math.inf},
        {"weight_decay": -1},
        {"max_length": 2},
        {"lerning_rate": 0.1},
        {"trainable": {"kind": "lora", "rnk": 2}},
    ],
)
def test_bad_settings(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate(bad)


@pytest.mark.parametrize("key", ["sampling", "sampler", "shuffle"])
def test_another_sampler_is_refused_with_the_number(key: str) -> None:
    with pytest.raises(ConfigError, match=r"only Poisson draws .* 22\.8 .* 37\.4"):
        Settings.of({key: "shuffled"})
