"""Time and memory of a fine-tune, measured on made-up records before anything is spent."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from confide.finetune import methods
from confide.finetune.binding import Anchor, Binding
from confide.finetune.experts import made_up_experts
from confide.finetune.loop import train
from confide.finetune.memory import micro_batch_tokens, usual_tokens
from confide.finetune.prepare import (
    caches,
    forward_of,
    kept_tokens,
    loss_of,
    made_up,
    micro_batches,
)
from confide.finetune.settings import Settings
from confide.gradients.keys import Keys
from confide.models.adapters import Adapted, adapt
from confide.models.backbones import load_classifier
from confide.models.resolve import resolve
from confide.models.tail import features
from confide.privacy.solve import Known
from confide.privacy.streams import Schedule
from confide.privacy.units import UnitMap
from confide.release.format import Problem
from confide.sizes import bytes_of
from confide.tasks.text import Encoded, buckets

_FEW_ROWS = 4


@dataclass(frozen=True)
class Cost:
    """What training would take on this machine, at most, if all records had the full length.

    Attributes:
        seconds: of the whole training, the frozen blocks included.
        seconds_per_step: of one step of all streams.
        memory_bytes: peak of the process.
    """

    seconds: float
    seconds_per_step: float
    memory_bytes: int


def measure(
    adapted: Adapted,
    schedule: Schedule,
    units: int,
    max_length: int,
    rows_per_unit: int = 1,
    memory: str | None = None,
) -> Cost:
    """Time steps of the real loop on random tokens; no record is looked at.

    The model is trained on nonsense by it, so it can't be used afterwards.

    Args:
        adapted: a model of its own.
        schedule: as it would be trained.
        units: n.
        max_length: tokens of every made-up text; an image has as many as it has.
        rows_per_unit: the most rows of a unit.
        memory: as in `Settings`.

    Raises:
        ConfigError: the memory isn't enough.
    """
    classifier = adapted.classifier
    config: Any = classifier.model.config
    width = int(made_up(classifier, np.array([max_length])).lengths[0])
    all_rows = units * rows_per_unit
    shape = Encoded(np.empty(0, np.int32), np.arange(all_rows + 1, dtype=np.int64) * width, 0)
    problem = classifier.problem
    cached = bool(adapted.first_block) and caches(classifier, adapted.first_block, shape)
    drawn = max(stream.sampling_rate for stream in schedule.streams) * all_rows
    kept = kept_tokens(classifier, adapted.first_block, shape) if cached else 0
    kept *= int(config.hidden_size) * 4
    tokens = usual_tokens(classifier)
    if memory is not None:
        tokens = micro_batch_tokens(
            bytes_of(memory, "memory"),
            adapted,
            schedule,
            kept=kept,
            max_length=max_length,
            rows_per_unit=rows_per_unit,
        )
    many = max(2 * _FEW_ROWS, min(tokens // width, int(drawn)))
    rows = made_up(classifier, np.full(many, max_length))
    inputs: Any = rows
    frozen = 0.0
    if cached:
        batches = buckets(rows.lengths, np.arange(many), tokens)
        started = time.perf_counter()
        inputs = features(classifier, rows, adapted.first_block, batches)
        frozen = (time.perf_counter() - started) / many * all_rows
    module, forward = forward_of(classifier, adapted.first_block, inputs)
    named = dict(classifier.model.named_parameters())
    binding = Binding(
        module=module,
        forward=forward,
        parameters={name: named[name] for name in schedule.parameters},
        batch=inputs.batch,
        micro_batches=micro_batches(inputs, tokens),
        labels=_zeros(problem, many, max_length),
        units=UnitMap.records(many),
        anchor_gradient=Anchor(adapted, schedule.anchored).gradient,
        loss=loss_of(problem),
        experts=made_up_experts(adapted, many),
    )
    few_seconds, many_seconds = (_step(binding, schedule, count) for count in (_FEW_ROWS, many))
    per_row = max(0.0, many_seconds - few_seconds) / (many - _FEW_ROWS)
    step = max(many_seconds, few_seconds + per_row * (drawn - _FEW_ROWS))
    steps = max(stream.steps for stream in schedule.streams)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Cost(frozen + step * steps, step, peak + kept)


def fit_to_base(
    known: Known, base: str, trainable: Mapping[str, Any], *, classes: int, max_length: int
) -> tuple[Schedule, dict[str, int], Cost]:
    """What solved numbers mean for a base: the schedule over its parameters, their number, time and memory.

    Args:
        known: solved; one query is `dp-adamw`, two are `dp-merging`.
        trainable: as in `models.adapters.Trainable`.
        classes: number of labels.

    Raises:
        ConfigError, ModelError, PrivacyError: numbers or a base that can't be trained.
    """
    settings = Settings.of(
        {"method": "dp-merging" if known.queries == 2 else "dp-adamw", "trainable": dict(trainable)}
    )
    labels = tuple(str(number) for number in range(classes))
    adapted = adapt(load_classifier(resolve(base), labels, 0), settings.trainable, 0)
    (own,) = methods.schedule(settings, adapted, known.units).streams
    (planned,) = known.schedule().streams
    ascends = planned.ascent == "paired"
    stream = dataclasses.replace(
        own,
        steps=planned.steps,
        sampling_rate=planned.sampling_rate,
        denominator=planned.denominator,
        noise_multiplier=planned.noise_multiplier,
        ascent=planned.ascent,
        ascent_radius=planned.ascent_radius,
        ascent_noise=planned.ascent_noise,
        anchor=own.anchor if ascends else 0.0,
    )
    schedule = Schedule((stream,), adjacency=known.adjacency)
    sizes = trained_parameters(adapted, schedule)
    return schedule, sizes, measure(adapted, schedule, known.units, max_length)


def trained_parameters(adapted: Adapted, schedule: Schedule) -> dict[str, int]:
    """Number of trained parameters of each stream."""
    named = dict(adapted.classifier.model.named_parameters())
    return {
        stream.name: sum(named[name].numel() for name in stream.parameters) for stream in schedule.streams
    }


def _step(binding: Binding, schedule: Schedule, rows: int) -> float:
    """Seconds of the second step on `rows` made-up records; the first one warms up."""
    streams = tuple(dataclasses.replace(stream, sampling_rate=1.0, steps=2) for stream in schedule.streams)
    ends: list[float] = []
    train(
        dataclasses.replace(binding, units=UnitMap.records(rows)),
        dataclasses.replace(schedule, streams=streams),
        Keys.fixed(0),
        lambda done, total: ends.append(time.perf_counter()),
    )
    return ends[1] - ends[0]


def _zeros(problem: Problem, rows: int, length: int) -> torch.Tensor:
    match problem.target:
        case "class":
            return torch.zeros(rows, dtype=torch.int64)
        case "number":
            return torch.zeros(rows, 1)
        case "tokens" | "text":
            return torch.zeros(rows, length, dtype=torch.int64)
