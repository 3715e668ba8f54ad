"""Before training: does a record's output, and its owner's gradient, depend on that record alone?

Asked of the real model, on made-up tokens, so that whether this refuses says nothing about any record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from confide.errors import ModelError
from confide.gradients.expert_engine import ExpertEngine
from confide.gradients.experts import OwnerExperts
from confide.models.moe.attach import attach
from confide.models.moe.layers import SparseLayer
from confide.models.moe.owners import votes, winners
from confide.models.moe.routing import routings
from confide.privacy.streams import Clipping

Side = Literal["right", "left"]
Forward = Callable[[dict[str, Tensor]], Tensor]
TOLERANCE = 1e-4
"""Relative; float32 rounding moves an output by about 1e-6 when a batch's shape changes."""
_LENGTHS = (6, 20, 11, 15)
_UNCLIPPED = Clipping("flat", 1e12)


@dataclass(frozen=True)
class SelfCheck:
    """Largest differences found, relative to the largest value.

    Attributes:
        alone: of a row's output when it is padded beside longer ones.
        swapped: of a row's output when the other rows are others of the same shape.
        leak: largest entry of the Jacobian of a row's output by other rows' embeddings; must be exactly 0.
        gradient: of a row's owner gradient out of a batch from autograd's on the row alone.
    """

    alone: float
    swapped: float
    leak: float
    gradient: float


def self_check(
    model: nn.Module,
    forward: Forward,
    layer: SparseLayer,
    *,
    vocabulary: int,
    pad: int,
    sides: Sequence[Side] = ("right",),
) -> SelfCheck:
    """Compare made-up rows alone, in a batch, and beside other neighbours, and differentiate them.

    Args:
        model: hardened.
        forward: batch of `input_ids` and `attention_mask` → (rows, ·) outputs of which losses are made,
            through `model`.
        layer: whose experts will be trained.
        vocabulary: token ids are below this.
        pad: the padding token's id.
        sides: on which batches will be padded. Absolute positions, as BERT's, need `right`.

    Raises:
        ModelError: a difference above 1e-4; clipping would bound nothing.
    """
    rows = _rows(vocabulary, pad, seed=0)
    others = [rows[0], *_rows(vocabulary, pad, seed=1)[1:]]
    found = [
        SelfCheck(
            alone=_alone(forward, layer, rows, pad, side),
            swapped=_swapped(forward, layer, rows, others, pad, side),
            leak=_leak(model, forward, layer, _padded(rows, pad, side)),
            gradient=_gradient(model, forward, layer, rows, pad, side),
        )
        for side in sides
    ]
    return SelfCheck(*(max(values) for values in zip(*map(astuple, found), strict=True)))


def _limited(layer: SparseLayer, value: float, limit: float, message: str) -> float:
    if not value <= limit:
        raise ModelError(
            f"{layer.name}: {message.format(f'{value:.1e}')}, so clipping would bound something else than a "
            "record; this model can't be trained privately in batches padded like these"
        )
    return value


def _alone(forward: Forward, layer: SparseLayer, rows: list[Tensor], pad: int, side: Side) -> float:
    with torch.no_grad():
        together = forward(_padded(rows, pad, side))
        single = torch.cat([forward(_padded([row], pad, side)) for row in rows])
    what = "a row's output changes by {} when it is padded beside longer rows"
    return _limited(layer, _relative(together, single), TOLERANCE, what)


def _swapped(
    forward: Forward, layer: SparseLayer, rows: list[Tensor], others: list[Tensor], pad: int, side: Side
) -> float:
    with torch.no_grad():
        before = forward(_padded(rows, pad, side))[:1]
        after = forward(_padded(others, pad, side))[:1]
    what = "a row's output changes by {} when its neighbours are exchanged"
    return _limited(layer, _relative(after, before), TOLERANCE, what)


def _rows(vocabulary: int, pad: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, vocabulary, (length,), generator=generator) for length in _LENGTHS]
    return [torch.where(row == pad, (pad + 1) % vocabulary, row) for row in rows]


def _padded(rows: Sequence[Tensor], pad: int, side: Side) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), pad)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        at = slice(len(row)) if side == "right" else slice(longest - len(row), None)
        ids[number, at] = row
        mask[number, at] = 1
    return {"input_ids": ids, "attention_mask": mask}


def _relative(found: Tensor, truth: Tensor) -> float:
    scale = float(truth.abs().max()) + torch.finfo(truth.dtype).tiny
    return float((found - truth).abs().max()) / scale


def _leak(model: nn.Module, forward: Forward, layer: SparseLayer, batch: dict[str, Tensor]) -> float:
    leaves: list[Tensor] = []

    def cut(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if leaves or not torch.equal(args[0], batch["input_ids"]):  # positions have tables as well
            return output
        leaves.append(output.detach().requires_grad_())
        return leaves[0]

    handles = [m.register_forward_hook(cut) for m in model.modules() if isinstance(m, nn.Embedding)]
    try:
        with torch.enable_grad():
            output = forward(batch)
    finally:
        for handle in handles:
            handle.remove()
    if not leaves:
        raise ModelError(f"{type(model).__name__} has no embedding of its tokens to differentiate by")
    worst = 0.0
    for row in (0, len(output) - 1):
        weight = torch.linspace(1, 2, output.shape[1], dtype=output.dtype, device=output.device)
        (gradient,) = torch.autograd.grad(output[row] @ weight, leaves[0], retain_graph=True)
        elsewhere = torch.arange(len(gradient), device=gradient.device) != row
        worst = max(worst, float(gradient[elsewhere].abs().max()))
    return _limited(layer, worst, 0.0, "a row's output has derivative {} with respect to another row")


def _gradient(
    model: nn.Module, forward: Forward, layer: SparseLayer, rows: list[Tensor], pad: int, side: Side
) -> float:
    batch = _padded(rows, pad, side)
    count = len(rows)
    with torch.no_grad(), routings([layer]) as seen:
        forward(batch)
        owner = winners(votes(seen[layer.name], batch["attention_mask"], layer))
    held = layer.block.get_submodule("experts")
    experts = held if isinstance(held, OwnerExperts) else attach(layer)
    trained = experts.trained()
    flags = {name: parameter.requires_grad for name, parameter in trained.items()}
    worst = 0.0
    try:
        engine = ExpertEngine(model, experts, trained)
        for row in range(count):
            with engine:
                engine.expect(count, owner, batch["attention_mask"])
                value = _loss(forward(batch))
                only = torch.eye(count, dtype=value.dtype, device=value.device)[row]
                engine.add(value, torch.arange(count), count, _UNCLIPPED, only)
                found = engine.take()
            for parameter in trained.values():
                parameter.requires_grad_(True)
            with torch.enable_grad():
                loss = _loss(forward(_padded(rows[row : row + 1], pad, side))).sum()
            truth = dict(
                zip(
                    trained, torch.autograd.grad(loss, list(trained.values()), allow_unused=True), strict=True
                )
            )
            worst = max(worst, _difference(found, truth, int(owner[row])))
    finally:
        for name, parameter in trained.items():
            parameter.requires_grad_(flags[name])
        layer.block.experts = held
    what = "a row's owner gradient is off by {} in a batch"
    return _limited(layer, worst, TOLERANCE, what)


def _loss(output: Tensor) -> Tensor:
    """(rows,) a smooth function of each row's outputs."""
    return output.flatten(1).logsumexp(1) - output.flatten(1)[:, 0]


def _difference(found: Mapping[str, Tensor], truth: Mapping[str, Tensor | None], owner: int) -> float:
    """Of the owner's part, and of the zeros elsewhere, relative to the largest entry."""
    largest = max(float(value.abs().max()) for value in truth.values() if value is not None)
    worst = 0.0
    for name, value in found.items():
        want = torch.zeros_like(value)
        gradient = truth[name]
        if gradient is not None:
            want[owner] = gradient[owner]
        worst = max(worst, float((value - want).abs().max()))
    return worst / (largest + torch.finfo(torch.float32).tiny)
