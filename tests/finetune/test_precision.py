"""bfloat16 trains on micro-batches of one shape, in which a row's place and neighbours change no bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from confide.errors import ConfigError, ModelError
from confide.finetune import run
from confide.finetune.base import PublicBase
from confide.finetune.history import History
from confide.finetune.loop import train
from confide.finetune.precision import Shape, check_every_place, halved, refuse_experts, width_and_room
from confide.finetune.prepare import forward_of
from confide.finetune.run import finetune, prepare
from confide.finetune.selfcheck import check_gradients
from confide.finetune.settings import Settings
from confide.finetune.tuned import FineTuned
from confide.gradients.keys import Keys
from confide.models.adapters import Trainable, adapt
from confide.models.backbones import Classifier, load_classifier
from confide.privacy.streams import Clipping, Schedule
from confide.privacy.units import UnitMap
from confide.tasks.records import TaskData
from confide.tasks.text import Encoded, encode, packs

from .conftest import ROWS, Bound, stream_for

RULES = {
    "flat": Clipping("flat", 0.5),
    "normalised": Clipping("normalised", 0.5),
    "per-role": Clipping("per-role", 0.5, shares=(0.3, 0.7)),
    "adaptive": Clipping("adaptive", 0.5, count_noise=1.0),
}
SMALL = {
    "method": "dp-adamw",
    "expected_batch": 15,
    "steps": 2,
    "max_length": 20,
    "precision": "bfloat16",
    "trainable": {"kind": "lora", "blocks": 1, "rank": 2},
}


def tune(base: Path, task: TaskData, **settings: Any) -> FineTuned:
    chosen, public = Settings.of(SMALL | settings), PublicBase.of(str(base))
    return finetune(prepare(task, public, chosen.max_length), public, chosen, simulate=3)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=30), st.integers(4, 9))
def test_packs_cover_rows_and_keep_units_whole(sizes: list[int], size: int) -> None:
    position = np.repeat(np.arange(len(sizes)), sizes)
    packed = packs(position, size)
    assert np.array_equal(np.concatenate(packed), np.arange(len(position)))
    assert all(0 < len(pack) <= size for pack in packed)
    units = [set(position[pack]) for pack in packed]
    assert sum(map(len, units)) == len(sizes)


def test_the_shape_follows_from_public_numbers() -> None:
    assert Shape.of(64, 63, tokens=8192, expected=1024, rows_per_unit=1) == Shape(128, 64, 63)
    assert Shape.of(64, 63, tokens=8192, expected=15, rows_per_unit=1) == Shape(23, 64, 63)
    assert Shape.of(512, 512, tokens=1024, expected=100, rows_per_unit=8) == Shape(8, 512, 512)
    batch = Shape(2, 9, 8).batch(Encoded(np.arange(24, dtype=np.int32), np.array([0, 4, 15, 24]), 0))
    assert batch(np.array([0]))["input_ids"].shape == (1, 9)
    for row in (1, 2):
        with pytest.raises(ModelError, match="more than 8 tokens"):
            batch(np.array([0, row]))


@pytest.mark.parametrize(
    ("rule", "paired"), [("flat", True), ("normalised", False), ("per-role", False), ("adaptive", True)]
)
def test_rows_that_fill_up_add_nothing(bert: Callable[..., Bound], rule: str, paired: bool) -> None:
    """In float64, with units of several rows: the history as well, and the noisy count of `adaptive`."""
    units = UnitMap.column("user", [str(row // 2) for row in range(ROWS)], 2)
    fields: dict[str, Any] = {"clipping": RULES[rule], "noise_multiplier": 0.3}
    if paired:
        fields |= {"ascent": "paired", "ascent_radius": 0.3, "ascent_noise": 0.3}

    def trained(rows: int) -> tuple[History, dict[str, Tensor]]:
        bound = bert(Trainable(kind="blocks", blocks=1), units=units)
        binding = replace(
            bound.binding,
            rows=rows,
            micro_batches=lambda _, position: packs(position, 5),
            batch=bound.binding.batch,
        )
        history = train(binding, Schedule((stream_for(bound, **fields),)), Keys.fixed(0))
        return history, bound.values()

    (plain, ours), (filled, theirs) = trained(0), trained(5)
    for one, other in zip(plain.steps, filled.steps, strict=True):
        assert (one.units, one.unclipped, one.clipped) == (other.units, other.unclipped, other.clipped)
        assert one.loss == pytest.approx(other.loss, rel=1e-9)
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "trainable", [{"kind": "lora", "blocks": 1, "rank": 2}, {"kind": "all"}, {"kind": "head"}]
)
def test_every_micro_batch_has_one_shape(
    tiny_base: Path,
    make_task: Callable[..., TaskData],
    monkeypatch: pytest.MonkeyPatch,
    trainable: dict[str, Any],
) -> None:
    shapes: list[tuple[int, ...]] = []
    plain = run.train

    def watched(binding: Any, *rest: Any) -> History:
        def forward(batch: dict[str, Tensor]) -> Tensor:
            outputs: Tensor = binding.forward(batch)
            assert outputs.dtype == torch.float32
            shapes.append(tuple(next(iter(batch.values())).shape[:2]))
            return outputs

        return plain(replace(binding, forward=forward), *rest)

    monkeypatch.setattr(run, "train", watched)
    tuned = tune(tiny_base, make_task(), trainable=trainable, steps=3)
    assert set(shapes) == {(23, {"head": 1, "lora": 20, "all": 21}[trainable["kind"]])}
    assert len(shapes) >= 3
    assert {p.dtype for p in tuned.adapted.classifier.model.parameters()} == {torch.float32}  # type: ignore[union-attr]
    assert all(np.isfinite(step.loss) for step in tuned.history.steps)


def test_it_learns_what_float32_learns(tiny_base: Path, make_task: Callable[..., TaskData]) -> None:
    task = make_task()
    wide = tune(tiny_base, task, method="non-private", epsilon=None, steps=20, precision="float32")
    half = tune(tiny_base, task, method="non-private", epsilon=None, steps=20)
    assert abs(wide.score() - half.score()) <= 0.2
    first = [tuned.history.steps[0].loss for tuned in (wide, half)]
    assert first[0] == pytest.approx(first[1], rel=0.02)
    assert first[0] != first[1]


@pytest.fixture
def tiny(tiny_base: Path) -> Classifier:
    return load_classifier(tiny_base, ("neg", "pos"), seed=0)


def test_a_row_that_depends_on_its_place_is_refused(tiny: Classifier) -> None:
    adapt(tiny, Trainable(kind="all"), seed=0)
    inputs = encode(tiny.tokenizer, ["fine film", "a very dull plot"], 20)
    module, forward = forward_of(tiny, 0, inputs)
    half, parameters = halved(module, forward), dict(tiny.model.named_parameters())
    shape = Shape(5, 21, 20)
    check_gradients(tiny, module, half, parameters, inputs, 0.1)
    check_every_place(tiny, module, half, parameters, inputs, shape)

    def placed(batch: dict[str, Tensor]) -> Tensor:
        outputs = half(batch)
        return outputs * (1 + 1e-6 * torch.arange(len(outputs))[:, None])

    with pytest.raises(ModelError, match="depends on its place in the micro-batch"):
        check_every_place(tiny, module, placed, parameters, inputs, shape)


def test_a_short_record_moves_no_other(tmp_path: Path, tiny_base: Path) -> None:
    """Where nothing is padded a Llama leaves its mask out, and its attention rounds in another way."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=33,
        pad_token_id=0,
    )
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_base).save_pretrained(tmp_path)
    llama = load_classifier(tmp_path, ("neg", "pos"), seed=0)
    inputs = encode(llama.tokenizer, ["fine film"], 32)
    module, forward = forward_of(llama, 0, inputs)
    half, parameters = halved(module, forward), dict(llama.model.named_parameters())
    width, room = width_and_room(llama, inputs, 32)
    check_every_place(llama, module, half, parameters, inputs, Shape(5, width, room))
    with pytest.raises(ModelError, match="depends on its place in the micro-batch"):
        check_every_place(llama, module, half, parameters, inputs, Shape(5, room, room))
    with pytest.raises(ModelError, match="choose a max_length of 32"):
        width_and_room(llama, inputs, 33)


def test_experts_are_refused(sparse_base: Path, make_task: Callable[..., TaskData]) -> None:
    with pytest.raises(ConfigError, match="raptor trains in float32"):
        Settings.of({"method": "raptor", "precision": "bfloat16"})
    with pytest.raises(ModelError, match=r"has experts, whose routing .* precision float32"):
        refuse_experts(load_classifier(sparse_base, ("neg", "pos"), seed=0).model)
    with pytest.raises(ModelError, match="has experts"):
        tune(sparse_base, make_task())
