"""Owner gradients of a family against plain autograd on its own model, one record at a time."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from tests.models.moe.families import FAMILIES, Pooled, batch, build, losses
from torch import Tensor, nn

from confide.finetune.expert_settings import SHARED
from confide.gradients.engine import Engine
from confide.gradients.expert_engine import ExpertEngine
from confide.gradients.experts import Lora
from confide.models.moe.attach import attach, merged_experts
from confide.models.moe.harden import harden
from confide.models.moe.layers import SparseLayer, sparse_layers
from confide.models.moe.owners import owner_maps
from confide.privacy.streams import Clipping

LENGTHS = [5, 9, 3, 7]
LABELS = torch.tensor([0, 1, 2, 1])
UNCLIPPED = Clipping("flat", 1e12)
KINDS = {"weights": None, "LoRA": Lora(rank=3, alpha=6.0)}
COLUMNS = ("output", "right", "left", "everyone", "shared", "alone_right", "alone_left")


@dataclass(frozen=True)
class Exactness:
    """Largest differences: of outputs as they are, of gradients relative to the gradients' largest entry.

    Attributes:
        output: of the model with experts attached, before training, from its own.
        right, left: of owner gradients out of a batch padded on that side, from a backward pass of its own
            per record through the family's model in that batch.
        everyone: the same of gradients with respect to all experts, padded on the right.
        shared: the same of what the shared stream adapts, attention and always-active experts.
        alone_right, alone_left: of owner gradients out of a batch, from the record alone without padding:
            what the family's own rounding adds when the batch's shape changes.
    """

    output: float
    right: float
    left: float
    everyone: float
    shared: float
    alone_right: float
    alone_left: float


def measure(family: str, lora: Lora | None) -> Exactness:
    model = build(family)
    harden(model, max_length=16)
    layer = sparse_layers(model)[-1]
    right, left = batch(LENGTHS), batch(LENGTHS, left=True)
    with torch.no_grad():
        before = model(**right)
    plain = copy.deepcopy(model)
    experts = attach(layer, lora)
    with torch.no_grad():
        output = float((model(**right) - before).abs().max())
    if lora is not None:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, value in experts.trained().items():
                if name.endswith("_lora_B"):
                    value.normal_(std=0.2, generator=generator)
    write_experts(plain, layer)
    owner = owners(model, layer, right)
    assert len(set(owner.tolist())) > 1
    together = {
        side: autograd(plain, layer, lora, experts.trained(), inputs)
        for side, inputs in (("right", right), ("left", left))
    }
    alone = autograd(plain, layer, lora, experts.trained(), None)
    mine_right = per_record(model, experts, right, owner)
    mine_left = per_record(model, experts, left, owner)
    return Exactness(
        output,
        error(mine_right, owned(together["right"], owner)),
        error(mine_left, owned(together["left"], owner)),
        error(per_record(model, experts, right, None), together["right"]),
        error(*shared_gradients(model, right)),
        error(mine_right, owned(alone, owner)),
        error(mine_left, owned(alone, owner)),
    )


def owned(gradients: list[dict[str, Tensor]], owner: Tensor) -> list[dict[str, Tensor]]:
    """The part of each record's gradient that belongs to its owner, zero elsewhere."""

    def only(value: Tensor, expert: int) -> Tensor:
        kept = torch.zeros_like(value)
        kept[expert] = value[expert]
        return kept

    return [
        {name: only(value, int(owner[row])) for name, value in record.items()}
        for row, record in enumerate(gradients)
    ]


def owners(model: nn.Module, layer: SparseLayer, inputs: dict[str, Tensor]) -> Tensor:
    rows = len(inputs["input_ids"])
    maps = owner_maps([layer], lambda b: model(**b), [(torch.arange(rows).numpy(), inputs)], rows)
    return torch.from_numpy(maps[layer.name])


def per_record(
    model: nn.Module, experts: Any, inputs: dict[str, Tensor], owner: Tensor | None
) -> list[dict[str, Tensor]]:
    """Each record's gradient out of one padded batch: its loss alone has weight 1, the others' 0."""
    engine = ExpertEngine(model, experts, experts.trained())
    found = []
    with engine:
        for row in range(len(LABELS)):
            engine.expect(len(LABELS), owner, inputs["attention_mask"])
            only_row = torch.eye(len(LABELS), dtype=torch.float64)[row]
            engine.add(
                losses(model, inputs, LABELS), torch.arange(len(LABELS)), len(LABELS), UNCLIPPED, only_row
            )
            found.append(engine.take())
    return found


def shared_gradients(
    model: nn.Module, inputs: dict[str, Tensor]
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Each record's gradient of what is shared: by the engine, out of one batch, and by autograd."""
    endings = tuple(f".{target}" for target in SHARED)
    parameters = {
        f"{name}.weight": module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.endswith(endings)
    }
    rows = torch.eye(len(LABELS), dtype=torch.float64)
    engine, found, truth = Engine(model, parameters), [], []
    with engine:
        for row in rows:
            weighted = losses(model, inputs, LABELS) * row
            engine.add(weighted, torch.arange(len(LABELS)), len(LABELS), UNCLIPPED)
            found.append(engine.take())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    for row in range(len(LABELS)):
        loss = losses(model, inputs, LABELS)[row]
        truth.append(dict(zip(parameters, torch.autograd.grad(loss, [*parameters.values()]), strict=True)))
    return found, truth


def write_experts(plain: Pooled, layer: SparseLayer) -> None:
    with torch.no_grad():
        for name, value in merged_experts(layer).items():
            plain.get_parameter(name).copy_(value)


def autograd(
    plain: Pooled,
    layer: SparseLayer,
    lora: Lora | None,
    trained: dict[str, nn.Parameter],
    together: dict[str, Tensor] | None,
) -> list[dict[str, Tensor]]:
    """Gradients of the family's own model, a backward pass per record; by the chain rule for LoRA.

    Args:
        together: the batch that all records are in; None for each record alone, without padding.
    """
    for parameter in plain.parameters():
        parameter.requires_grad_(False)
    experts = plain.get_submodule(f"{layer.name}.experts")
    parameters = dict(experts.named_parameters())
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    found = []
    inputs = batch(LENGTHS)
    for row, length in enumerate(LENGTHS):
        if together is None:
            alone = {name: value[row : row + 1, :length] for name, value in inputs.items()}
            loss = losses(plain, alone, LABELS[row : row + 1]).sum()
        else:
            loss = losses(plain, together, LABELS)[row]
        values = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        gradients = {
            name: torch.zeros_like(p) if value is None else value
            for (name, p), value in zip(parameters.items(), values, strict=True)
        }
        if layer.kind == "listed":
            gradients = {
                name: torch.stack([gradients[f"expert_{e}.{name}.weight"] for e in range(layer.experts)])
                for name in ("wi", "wo")
            }
        if lora is not None:
            gradients = _factors(gradients, lora, trained, layer)
        found.append(gradients)
    return found


def _factors(
    gradients: dict[str, Tensor], lora: Lora, trained: dict[str, nn.Parameter], layer: SparseLayer
) -> dict[str, Tensor]:
    found = {}
    transposed = layer.kind == "scaled" or bool(getattr(layer.base, "is_transposed", False))
    for name in {name.removesuffix("_lora_A").removesuffix("_lora_B") for name in trained}:
        dw = gradients[name].mT if transposed else gradients[name]
        a, b = trained[f"{name}_lora_A"].detach(), trained[f"{name}_lora_B"].detach()
        found[f"{name}_lora_A"] = lora.scale * b.mT @ dw
        found[f"{name}_lora_B"] = lora.scale * dw @ a.mT
    return found


def error(found: list[dict[str, Tensor]], truth: list[dict[str, Tensor]]) -> float:
    largest = max(float(value.abs().max()) for record in truth for value in record.values())
    assert largest > 1e-4, largest
    worst = 0.0
    for mine, other in zip(found, truth, strict=True):
        assert mine.keys() == other.keys(), (mine.keys(), other.keys())
        worst = max(worst, *(float((mine[name] - other[name]).abs().max()) for name in other))
    return worst / largest


def table() -> str:
    """The table of docs/moe-measured.md: upper bounds, a decade above what is measured here."""
    lines = [
        "| family | trained | output | owner, right | owner, left | everyone | shared | alone, right "
        "| alone, left |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        for kind, lora in KINDS.items():
            found = measure(family, lora)
            assert found.output == 0
            cells = ["0", *(_bound(getattr(found, name)) for name in COLUMNS[1:])]
            lines.append(f"| {family} | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _bound(value: float) -> str:
    return f"{10.0 ** math.ceil(math.log10(max(value, 1e-15)) + 1):.0e}"


if __name__ == "__main__":
    print(table())
