"""Processor time of RAPTOR's cycle: a shared and an expert step, beside one step of the monolithic baseline.

    python benchmarks/raptor_cycle.py            a table
    python benchmarks/raptor_cycle.py --json     the same as JSON

A mixture of MiniLM's size (6 blocks of width 384, 8 experts in blocks 1, 3 and 5) with random weights, 32
records of 64 tokens, LoRA of rank 8, float32, one thread. A step is forward pass and clipped sums; noise and
optimizer are left out. Ways take turns; numbers are the least of several runs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor

from confide.finetune.expert_settings import SHARED
from confide.gradients.engine import Engine
from confide.gradients.expert_engine import ExpertEngine
from confide.gradients.experts import Lora
from confide.gradients.joint_engine import JointEngine
from confide.gradients.losses import classification
from confide.models.adapters import Trainable, adapt
from confide.models.backbones import Classifier
from confide.models.moe.attach import attach, attached
from confide.models.moe.bert import MoeBertConfig, MoeBertForSequenceClassification
from confide.models.moe.harden import harden
from confide.models.moe.layers import SparseLayer, sparse_layers
from confide.privacy.streams import Clipping

ROWS, LENGTH, CLASSES, RANK = 32, 64, 4, 8
CLIPPING = Clipping("flat", 1.0)
UNITS = torch.arange(ROWS)


class Case:
    """A mixture with the experts of some layers attached, and a batch."""

    def __init__(self, choose: Callable[[list[SparseLayer]], Sequence[SparseLayer]]) -> None:
        torch.manual_seed(0)
        config = MoeBertConfig(
            hidden_size=384,
            num_hidden_layers=6,
            num_attention_heads=12,
            intermediate_size=1536,
            num_labels=CLASSES,
        )
        self.model: Any = MoeBertForSequenceClassification(config).eval()
        harden(self.model, max_length=LENGTH)
        self.layers = tuple(choose(sparse_layers(self.model)))
        for layer in self.layers:
            attach(layer, Lora(RANK, 2.0 * RANK))
        head = ("classifier.weight", "classifier.bias")
        adapted = adapt(
            Classifier(self.model, None, "bert.", head),
            Trainable(blocks=0, rank=RANK, targets=SHARED),
            0,
            self.layers,
        )
        named = dict(self.model.named_parameters())
        self.shared = {name: named[name] for name in (*adapted.encoder, *adapted.head)}
        self.experts = {name: named[name] for name in adapted.expert_parameters}
        self.batch = {
            "input_ids": torch.randint(1000, 30000, (ROWS, LENGTH)),
            "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.int64),
        }
        self.labels = torch.arange(ROWS) % CLASSES
        self.owner = torch.arange(ROWS) % self.layers[0].experts
        held = [attached(layer) for layer in self.layers]
        # As in training, one for all steps: the first makes its plan.
        self.shared_engine = Engine(self.model, self.shared)
        self.expert_engine = ExpertEngine(self.model, held[0], self.experts) if len(held) == 1 else None
        self.joint_engine = JointEngine(self.model, {**self.shared, **self.experts}, held)

    def losses(self) -> Tensor:
        return classification(self.model(**self.batch).logits, self.labels)

    def forward(self) -> None:
        with torch.no_grad():
            self.losses()

    def shared_step(self) -> None:
        with self.shared_engine as engine:
            engine.add(self.losses(), UNITS, ROWS, CLIPPING)
        engine.take()

    def expert_step(self) -> None:
        assert self.expert_engine is not None
        with self.expert_engine as engine:
            engine.expect(ROWS, self.owner, self.batch["attention_mask"])
            engine.add(self.losses(), UNITS, ROWS, CLIPPING)
        engine.take()

    def joint_step(self) -> None:
        with self.joint_engine as engine:
            engine.expect(ROWS, None, self.batch["attention_mask"])
            engine.add(self.losses(), UNITS, ROWS, CLIPPING)
        engine.take()


def measure(runs: int) -> dict[str, Any]:
    last, every = Case(lambda layers: layers[-1:]), Case(lambda layers: layers)
    ways = {
        "forward": last.forward,
        "shared": last.shared_step,
        "experts": last.expert_step,
        "monolithic": every.joint_step,
    }
    times: dict[str, float] = {}
    for way in ways.values():
        way()
    for _ in range(runs):
        for name, way in ways.items():
            start = time.process_time()
            way()
            times[name] = min(times.get(name, float("inf")), 1000 * (time.process_time() - start))
    cycle = times["shared"] + times["experts"]
    return {
        **{name: round(value, 1) for name, value in times.items()},
        "cycle": round(cycle, 1),
        "experts / forward": round(times["experts"] / times["forward"], 2),
        "cycle / shared": round(cycle / times["shared"], 2),
        "cycle / monolithic": round(cycle / times["monolithic"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    row = measure(arguments.runs)
    if arguments.json:
        print(json.dumps(row, indent=2))
        return
    print("milliseconds of processor time")
    for name, value in row.items():
        print(f"{name:>20} {value}")


if __name__ == "__main__":
    main()
