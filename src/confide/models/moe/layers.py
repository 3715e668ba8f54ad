"""The sparse layers of a model, told by what their modules hold rather than by the model's name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from confide.errors import ModelError
from confide.gradients.experts import Call, OwnerExperts

Kind = Literal["fused", "listed", "scaled"]


@dataclass(frozen=True)
class SparseLayer:
    """A layer in which a router sends each token to some of E experts.

    Attributes:
        name: path of the block that holds router and experts, such as `model.layers.3.mlp`.
        number: of the transformer block it belongs to, from 0.
        block: that module; its `experts` may have been replaced.
        router: its router, always frozen.
        kind: `fused` (weights stacked over experts, called with tokens, choices and weights, as most
            families of transformers 5), `listed` (one module per expert and a one-hot choice, as Switch),
            `scaled` (every expert is called on all tokens, multiplied by their weight, as Llama 4).
        experts: E.
        top_k: experts per token.
    """

    name: str
    number: int
    block: nn.Module
    router: nn.Module
    kind: Kind
    experts: int
    top_k: int

    @property
    def base(self) -> nn.Module:
        """The family's own experts, also while others stand in for them."""
        return base_experts(self.block)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """What a call of the block's experts asks for."""
        match self.kind:
            case "fused":
                inputs, expert, weight = _arguments(self.base, args, kwargs)
                return Call(inputs, expert, weight, len(inputs))
            case "listed":
                inputs, hot, weight = _arguments(self.base, args, kwargs)
                # A token beyond its expert's capacity has no choice at all.
                expert = torch.where(hot.sum(-1) > 0, hot.argmax(-1), self.experts)
                return Call(inputs, expert, weight, len(inputs))
            case "scaled":
                (inputs,) = _arguments(self.base, args, kwargs)
                tokens = len(inputs) // self.experts
                expert = torch.arange(self.experts, device=inputs.device).repeat_interleave(tokens)
                return Call(inputs, expert[:, None], inputs.new_ones(len(inputs), 1), tokens)


def sparse_layers(model: nn.Module) -> list[SparseLayer]:
    """Every layer of experts, from the bottom.

    Raises:
        ModelError: the model has none, or one whose experts are of no known form.
    """
    layers = [
        _layer(path, block)
        for path, block in model.named_modules()
        if "experts" in block._modules and path.rsplit(".", 1)[-1] != "experts"
    ]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no layer of experts: it is a dense model, or of a form that is not "
            "known; use it without expert streams, or make experts of it with `confide moe upcycle`"
        )
    return layers


def base_experts(block: nn.Module) -> nn.Module:
    """The family's own experts of a block."""
    experts = block.get_submodule("experts")
    return experts.base if isinstance(experts, OwnerExperts) else experts


def choose(layers: Sequence[SparseLayer], number: int) -> SparseLayer:
    """The sparse layer of transformer block `number`.

    Raises:
        ModelError: that block has no experts; names those that have.
    """
    for layer in layers:
        if layer.number == number:
            return layer
    raise ModelError(
        f"block {number} has no experts; the sparse layers are {', '.join(str(x.number) for x in layers)}"
    )


def _layer(path: str, block: nn.Module) -> SparseLayer:
    experts = base_experts(block)
    router = next((block._modules[name] for name in ("router", "gate") if name in block._modules), None)
    kind = _kind(experts, router)
    if router is None or kind is None:
        raise ModelError(
            f"{path} holds experts of type {type(experts).__name__} in a form that is not known, so their "
            "gradients can't be clipped exactly; this family can't be trained privately"
        )
    first = re.search(r"\.(\d+)\.", f".{path}.")
    number = int(first[1]) if first else 0
    count = len(experts) if isinstance(experts, nn.ModuleDict) else _stacked(experts).shape[0]
    return SparseLayer(path, number, block, router, kind, count, int(getattr(router, "top_k", 1)))


def _kind(experts: nn.Module, router: nn.Module | None) -> Kind | None:
    if isinstance(experts, nn.ModuleDict):
        plain = all(
            isinstance(getattr(expert, name, None), nn.Linear)
            for expert in experts.values()
            for name in ("wi", "wo")
        )
        return "listed" if plain else None
    if not {"gate_up_proj", "up_proj"} & experts._parameters.keys() or "down_proj" not in experts._parameters:
        return None
    if getattr(experts, "has_post_expert_norm", False) or any(experts._buffers):
        return None
    if hasattr(experts, "is_transposed"):
        return "fused"
    return "scaled" if isinstance(router, nn.Linear) else None


def _stacked(experts: nn.Module) -> nn.Parameter:
    name = "gate_up_proj" if "gate_up_proj" in experts._parameters else "up_proj"
    return experts.get_parameter(name)


def _arguments(experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments in the order in which the experts' forward declares them, whatever their names."""
    if not kwargs:
        return list(args)
    bound = inspect.signature(type(experts).forward).bind(experts, *args, **kwargs)
    return list(bound.arguments.values())[1:]
