"""Milliseconds of processor time for per-record expert gradients, beside vmap and a loop over records.

    python benchmarks/expert_pass.py            a table
    python benchmarks/expert_pass.py --json     the same as JSON

One layer of a Switch transformer: 8 experts of width 768 and 3072, 32 records of 64 tokens, float32, one
thread. Each record's tokens prefer one expert; what share of them go to the owner is printed. `pass` is
everything from the output's gradient to the clipped sums of all experts; the ratio is to a forward pass of
transformers' own layer. All ways give the same sums, which is checked first. Ways take turns; numbers are the
least of several runs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor, nn

from confide.gradients.expert_engine import ExpertEngine
from confide.gradients.experts import Lora, OwnerExperts
from confide.models.moe.attach import attach
from confide.models.moe.harden import harden
from confide.models.moe.layers import sparse_layers
from confide.models.moe.owners import votes, winners
from confide.models.moe.routing import routings
from confide.privacy.streams import Clipping

EXPERTS, WIDTH, INNER, ROWS, LENGTH, RANK = 8, 768, 3072, 32, 64, 16
CLIPPING = Clipping("flat", 1.0)
Gradients = dict[str, Tensor]


class Case:
    """A layer, its inputs, and the gradient of the losses by its output."""

    def __init__(self, lora: Lora | None) -> None:
        from transformers import SwitchTransformersConfig
        from transformers.models.switch_transformers.modeling_switch_transformers import (
            SwitchTransformersLayerFF,
        )

        torch.manual_seed(0)
        config = SwitchTransformersConfig(
            d_model=WIDTH, d_ff=INNER, num_experts=EXPERTS, expert_capacity=LENGTH, dropout_rate=0.0
        )
        self.model: Any = SwitchTransformersLayerFF(config, is_sparse=True)
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, std=WIDTH**-0.5)
        nn.init.ones_(self.model.layer_norm.weight)
        harden(self.model, max_length=LENGTH)
        preferred = self.model.mlp.router.classifier.weight[torch.randint(EXPERTS, (ROWS,))].detach()
        self.inputs = torch.randn(ROWS, LENGTH, WIDTH) + 1.2 * preferred[:, None] / preferred.norm(dim=1)[0]
        self.direction = torch.randn(ROWS, LENGTH, WIDTH) / (WIDTH * LENGTH) ** 0.5
        (self.layer,) = sparse_layers(self.model)
        mask = torch.ones(ROWS, LENGTH)
        with torch.no_grad(), routings([self.layer]) as seen:
            self.forward()
        self.choice = seen[self.layer.name]
        cast = votes(self.choice, mask, self.layer)
        self.owner = winners(cast)
        hits = self.choice.expert[:, 0] == self.owner.repeat_interleave(LENGTH)
        self.share = float(hits.float().mean())
        self.plain_ms = least(self.no_grad)
        self.experts: OwnerExperts = attach(self.layer, lora)
        for name, value in self.experts.trained().items():
            if name.endswith("_lora_B"):
                nn.init.normal_(value, std=0.02)

    def forward(self) -> Tensor:
        output: Tensor = self.model(self.inputs)
        return output

    def no_grad(self) -> None:
        with torch.no_grad():
            self.forward()

    def losses(self, output: Tensor) -> Tensor:
        return (output * self.direction).sum((1, 2))

    def confide(self) -> tuple[Gradients, float]:
        """Clipped sums, and the time after the forward pass."""
        with ExpertEngine(self.model, self.experts, self.experts.trained()) as engine:
            engine.expect(ROWS, self.owner)
            losses = self.losses(self.forward())
            start = time.process_time()
            engine.add(losses, torch.arange(ROWS), ROWS, CLIPPING)
            sums = engine.take()
            return sums, time.process_time() - start

    def tokens(self) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return self.model.layer_norm(self.inputs), self.choice.weight.view(ROWS, LENGTH)

    def one(self, weights: Gradients, x: Tensor, scale: Tensor, direction: Tensor) -> Tensor:
        """A record's loss as a function of its owner's weights (its other tokens' terms are constants)."""
        lora = self.experts.lora
        hidden = x @ weights["wi"].mT
        if lora is not None:
            hidden = hidden + lora.scale * (x @ weights["wi_lora_A"].mT) @ weights["wi_lora_B"].mT
        hidden = hidden.relu()
        out = hidden @ weights["wo"].mT
        if lora is not None:
            out = out + lora.scale * (hidden @ weights["wo_lora_A"].mT) @ weights["wo_lora_B"].mT
        return (out * scale[:, None] * direction).sum()

    def vmap(self) -> tuple[Gradients, float]:
        """torch.func.vmap over records, each with its owner's weights gathered."""
        start = time.process_time()
        x, weight = self.tokens()
        own = self.choice.expert.view(ROWS, LENGTH) == self.owner[:, None]
        every = {name: value.detach()[self.owner] for name, value in self.experts.named_parameters()}
        trained = {name: every.pop(name) for name in self.experts.trained()}

        def loss(trained: Gradients, rest: Gradients, *record: Tensor) -> Tensor:
            return self.one({**trained, **rest}, *record)

        gradients = torch.func.vmap(torch.func.grad(loss))(trained, every, x, weight * own, self.direction)
        norms = torch.stack([value.flatten(1).square().sum(1) for value in gradients.values()]).sum(0).sqrt()
        factor = (CLIPPING.bound / norms).clamp(max=1)
        sums = {
            name: torch.zeros_like(self.experts.get_parameter(name)).index_add_(
                0, self.owner, value * factor.view(-1, 1, 1)
            )
            for name, value in gradients.items()
        }
        return sums, time.process_time() - start

    def loop(self) -> tuple[Gradients, float]:
        """Autograd record by record, on the owner's tokens only."""
        start = time.process_time()
        x, weight = self.tokens()
        own = self.choice.expert.view(ROWS, LENGTH) == self.owner[:, None]
        trained = self.experts.trained()
        sums = {name: torch.zeros_like(value) for name, value in trained.items()}
        for row, expert in enumerate(self.owner.tolist()):
            weights = {name: value[expert].detach() for name, value in self.experts.named_parameters()}
            leaves = [weights[name].requires_grad_() for name in trained]
            at = own[row]
            loss = self.one(weights, x[row, at], weight[row, at], self.direction[row, at])
            gradients = torch.autograd.grad(loss, leaves)
            norm = torch.stack([value.square().sum() for value in gradients]).sum().sqrt()
            factor = min(1.0, CLIPPING.bound / float(norm))
            for name, value in zip(trained, gradients, strict=True):
                sums[name][expert].add_(value, alpha=factor)
        return sums, time.process_time() - start


def least(call: Callable[[], Any], runs: int = 5) -> float:
    """Milliseconds of processor time."""
    call()
    times = []
    for _ in range(runs):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return 1000 * min(times)


def measure(lora: Lora | None, runs: int) -> dict[str, Any]:
    case = Case(lora)
    ways = {"confide": case.confide, "vmap": case.vmap, "loop": case.loop}
    sums = {name: way()[0] for name, way in ways.items()}
    for name in ("vmap", "loop"):
        for key, value in sums["confide"].items():
            gap = float((sums[name][key] - value).abs().max() / value.abs().max())
            # A hidden unit within rounding of 0 may fall on either side of it.
            assert gap < 1e-3, (name, key, gap)
    times: dict[str, float] = {}
    for _ in range(runs):
        for name, way in ways.items():
            times[name] = min(times.get(name, float("inf")), 1000 * way()[1])
    return {
        "trained": "weights" if lora is None else f"LoRA r={lora.rank}",
        "owner share": round(case.share, 2),
        "forward": round(case.plain_ms, 1),
        **{name: round(value, 1) for name, value in times.items()},
        "ratio": round(times["confide"] / case.plain_ms, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(lora, arguments.runs) for lora in (Lora(RANK, 2.0 * RANK), None)]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print("milliseconds of processor time; ratio: confide's pass to a forward pass of the layer")
    print(" | ".join(f"{name:>11}" for name in rows[0]))
    for row in rows:
        print(" | ".join(f"{value!s:>11}" for value in row.values()))


if __name__ == "__main__":
    main()
