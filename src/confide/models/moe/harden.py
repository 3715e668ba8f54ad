"""Turning off what would make a record's gradient depend on chance, or on other records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from confide.errors import ModelError
from confide.models.moe.families import refuse
from confide.models.moe.layers import sparse_layers

_RANDOM = ("dropout", "jitter")


def harden(model: nn.Module, *, max_length: int) -> None:
    """Make the model's routing and gradients functions of one record, in place.

    Sets every dropout and jitter rate to 0, in modules and configuration, so that training mode is
    deterministic; turns auxiliary losses off, which tie a record to its batch; freezes the routers; and
    raises an expert capacity to `max_length`, because a limit that depends on padding depends on neighbours.

    Args:
        model: with at least one layer of experts.
        max_length: longest sequence in tokens, padding included.

    Raises:
        ModelError: a family that mixes records and can't be mended, float16 where it clamps over the batch,
            or routing in half precision.
    """
    for config in _configs(model):
        refuse(getattr(config, "model_type", ""))
    layers = sparse_layers(model)
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if torch.float16 in dtypes and any(layer.kind == "listed" for layer in layers):
        raise ModelError(
            "in float16 this family clamps hidden states when any record of the batch overflows; load the "
            "model in float32"
        )
    if dtypes & {torch.float16, torch.bfloat16}:
        raise ModelError(
            "half-precision rounding depends on a batch's shape and flips routing choices, so that a "
            "record's gradient depends on its neighbours; load the model in float32"
        )
    for layer in layers:
        if (capacity := getattr(layer.router, "expert_capacity", None)) is not None:
            layer.router.expert_capacity = max(capacity, max_length)
    for module in model.modules():
        _silence(module)
    for config in _configs(model):
        _silence_config(config)
        if hasattr(config, "expert_capacity"):
            # Else a release, built from this, would drop tokens that training didn't.
            config.expert_capacity = max(config.expert_capacity, max_length)
    for layer in layers:
        layer.router.requires_grad_(False)


def _configs(model: nn.Module) -> Iterator[Any]:
    """Every configuration object that a module of the model holds, and those inside it."""
    seen: set[int] = set()
    pending = [module.config for module in model.modules() if hasattr(module, "config")]
    while pending:
        config: Any = pending.pop()
        if id(config) in seen:
            continue
        seen.add(id(config))
        yield config
        pending += [
            getattr(config, name) for name in getattr(config, "sub_configs", {}) if hasattr(config, name)
        ]


def _silence(module: Any) -> None:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        module.p = 0.0
    for name, value in vars(module).items():
        if isinstance(value, float) and any(word in name for word in _RANDOM):
            setattr(module, name, 0.0)


def _silence_config(config: Any) -> None:
    for name, value in vars(config).items():
        if isinstance(value, float) and any(word in name for word in _RANDOM):
            setattr(config, name, 0.0)
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False
