"""Two things to train: a tiny BERT in float64, and a linear model whose gradients are known by heart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from confide.finetune.binding import Anchor, Binding
from confide.finetune.prepare import micro_batches
from confide.models.adapters import Adapted, Trainable, adapt
from confide.models.backbones import load_classifier
from confide.privacy.streams import Clipping, ParameterGroup, Schedule, Stream
from confide.privacy.units import UnitMap
from confide.tasks.text import Encoded

ROWS = 14


@dataclass
class Bound:
    """A model with the means to train it, and to compute one record's loss."""

    model: nn.Module
    adapted: Adapted
    binding: Binding
    loss: Callable[[int], Tensor]

    def values(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


@pytest.fixture
def bert(tiny_base: Path) -> Callable[..., Bound]:
    """A tiny BERT with 14 records of uneven length, in float64."""
    random = np.random.default_rng(1)
    lengths = random.integers(2, 14, ROWS)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    encoded = Encoded(random.integers(5, 40, offsets[-1]).astype(np.int32), offsets, pad=0)
    labels = torch.from_numpy(random.integers(0, 2, ROWS))

    def make(
        trainable: Trainable,
        units: UnitMap | None = None,
        budget: int = 60,
        dtype: torch.dtype = torch.double,
    ) -> Bound:
        adapted = adapt(load_classifier(tiny_base, ("neg", "pos"), seed=0), trainable, seed=0)
        model: Any = adapted.classifier.model.to(dtype)
        if adapted.lora:  # B starts at zero, where A has no gradient and the anchor none at all
            generator = torch.Generator().manual_seed(2)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator).to(dtype)
        binding = Binding(
            module=model,
            forward=lambda batch: model(**batch).logits,
            parameters=dict(model.named_parameters()),
            batch=encoded.batch,
            micro_batches=micro_batches(encoded, budget),
            labels=labels,
            units=units or UnitMap.records(ROWS),
            anchor_gradient=Anchor(adapted, adapted.encoder).gradient,
        )

        def loss(row: int) -> Tensor:
            ids = encoded.tokens[encoded.offsets[row] : encoded.offsets[row + 1]].astype(np.int64)
            logits = model(input_ids=torch.from_numpy(ids)[None]).logits
            return functional.cross_entropy(logits[0], labels[row])

        return Bound(model, adapted, binding, loss)

    return make


def stream_for(bound: Bound, **fields: Any) -> Stream:
    """One stream over everything that is trained, without noise; keywords replace its fields."""
    groups = (
        ParameterGroup("encoder", bound.adapted.encoder, 0.02, anchored=True),
        ParameterGroup("head", bound.adapted.head, 0.1, anchored=False),
    )
    values: dict[str, Any] = {
        "name": "all",
        "groups": tuple(group for group in groups if group.parameters),
        "steps": 4,
        "draw": "all",
        "sampling_rate": 0.5,
        "clipping": Clipping("flat", 0.7),
        "noise_multiplier": 0.0,
        "denominator": 7.0,
    }
    return Stream(**(values | fields))


@dataclass
class Line:
    """Logits (x·w, 0): a linear model of one weight vector, float64, with a record per row of x."""

    module: nn.Linear
    binding: Binding

    @property
    def weight(self) -> Tensor:
        return self.module.weight.detach().clone()


@pytest.fixture
def line() -> Callable[..., Line]:
    """A linear classifier of features `x` (rows, width): quick, for statistics."""

    def make(x: Tensor, classes: int = 2, labels: Tensor | None = None, part: int | None = None) -> Line:
        module = nn.Linear(x.shape[1], classes, bias=False, dtype=x.dtype)
        nn.init.zeros_(module.weight)
        size = part or len(x)
        binding = Binding(
            module=module,
            forward=lambda batch: module(batch["x"]),
            parameters={"weight": module.weight},
            batch=lambda rows: {"x": x[torch.from_numpy(rows)]},
            micro_batches=lambda rows, position: [
                np.arange(start, min(start + size, len(rows))) for start in range(0, len(rows), size)
            ],
            labels=torch.zeros(len(x), dtype=torch.int64) if labels is None else labels,
            units=UnitMap.records(len(x)),
            anchor_gradient=lambda names: {},
        )
        return Line(module, binding)

    return make


def line_schedule(**fields: Any) -> Schedule:
    """One stream over the linear model, plain SGD; keywords replace its fields."""
    values: dict[str, Any] = {
        "name": "all",
        "groups": (ParameterGroup("head", ("weight",), 1.0, anchored=False),),
        "steps": 1,
        "draw": "all",
        "sampling_rate": 1.0,
        "clipping": Clipping("flat", 1.0),
        "noise_multiplier": 0.0,
        "denominator": 1.0,
        "optimizer": "sgd",
    }
    return Schedule((Stream(**(values | fields)),))
