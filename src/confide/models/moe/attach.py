"""Putting `OwnerExperts` in the place of a layer's experts; their tensors under the plain names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from confide.errors import ModelError
from confide.gradients.experts import Form, Lora, OwnerExperts
from confide.models.moe.layers import SparseLayer


def attach(layer: SparseLayer, lora: Lora | None = None) -> OwnerExperts:
    """Replace the layer's experts; outputs stay the same (bit for bit those of the `eager` implementation).

    Args:
        layer: of a hardened model.
        lora: what to train beside the frozen weights, or None to train the weights.

    Raises:
        ModelError: experts are attached already, or dropout in them is active.
    """
    if isinstance(layer.block.get_submodule("experts"), OwnerExperts):
        raise ModelError(f"{layer.name} has its experts attached already")
    base = layer.base
    active = [module for module in base.modules() if isinstance(module, nn.Dropout) and module.p > 0]
    if active:
        raise ModelError(f"{layer.name} has dropout in its experts; harden the model first")
    parameters, form = _stacked(base) if layer.kind == "listed" else _fused(base, layer.kind == "scaled")
    stand_in = OwnerExperts(base, parameters, form, layer.read, lora)
    layer.block.experts = stand_in
    return stand_in


def merged_experts(layer: SparseLayer) -> dict[str, Tensor]:
    """The experts' tensors under their names in the plain model, LoRA merged: W + (alpha / r)·B·A."""
    held = attached(layer)
    form = held.form
    merged = {name: value.detach() for name, value in held.named_parameters() if "_lora_" not in name}
    if held.lora is not None:
        for name in (form.up, form.down):
            merged[name] = merged[name] + held.delta(name)
    if layer.kind == "listed":
        merged = {
            f"{expert}.{name}.weight": value[number]
            for name, value in merged.items()
            for number, expert in enumerate(_modules(layer.base))
        }
    return {f"{layer.name}.experts.{name}": value for name, value in merged.items()}


def trained_names(layer: SparseLayer) -> tuple[str, ...]:
    """Names in the model of what is trained of the attached experts."""
    return tuple(f"{layer.name}.experts.{name}" for name in attached(layer).trained())


def attached(layer: SparseLayer) -> OwnerExperts:
    """The stand-in of the layer's experts.

    Raises:
        ModelError: there is none.
    """
    experts = layer.block.get_submodule("experts")
    if not isinstance(experts, OwnerExperts):
        raise ModelError(f"{layer.name} has no attached experts")
    return experts


def _fused(experts: nn.Module, scaled: bool) -> tuple[dict[str, nn.Parameter], Form]:
    own: Any = experts
    parameters = {name: value for name, value in experts._parameters.items() if value is not None}
    gated = "gate_up_proj" in parameters
    up = "gate_up_proj" if gated else "up_proj"

    def gate(u: Tensor) -> Tensor:
        first, second = u.chunk(2, dim=-1)
        return second * own.act_fn(first)  # type: ignore[no-any-return]

    activation = gate if scaled else own._apply_gate if gated else own.act_fn
    form = Form(
        up=up,
        down="down_proj",
        up_bias=f"{up}_bias" if f"{up}_bias" in parameters else None,
        down_bias="down_proj_bias" if "down_proj_bias" in parameters else None,
        transposed=scaled or bool(own.is_transposed),
        activation=activation,
    )
    unknown = parameters.keys() - {form.up, form.down, form.up_bias, form.down_bias}
    if unknown:
        raise ModelError(f"{type(experts).__name__} has a parameter of unknown use: {sorted(unknown)[0]}")
    return parameters, form


def _stacked(experts: nn.Module) -> tuple[dict[str, nn.Parameter], Form]:
    modules: list[Any] = list(_modules(experts).values())
    if any(linear.bias is not None for module in modules for linear in (module.wi, module.wo)):
        raise ModelError(f"{type(experts).__name__} has biases, which this form of experts does not")
    parameters = {
        name: nn.Parameter(torch.stack([getattr(module, name).weight.detach() for module in modules]))
        for name in ("wi", "wo")
    }
    return parameters, Form("wi", "wo", None, None, False, modules[0].act)


def _modules(experts: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in experts._modules.items() if module is not None}
