"""What the routers chose, read where tokens enter the experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from confide.models.moe.layers import SparseLayer


@dataclass(frozen=True)
class Routing:
    """Choices for the tokens of one batch, (batch, length) row by row.

    Attributes:
        expert: (tokens, k); E where a token went to none.
        weight: (tokens, k) float32 or wider, as the layer weighs the answers.
    """

    expert: Tensor
    weight: Tensor


@contextmanager
def routings(layers: Sequence[SparseLayer]) -> Iterator[dict[str, Routing]]:
    """Within the block, the latest call's choices by layer name.

    Routers return different things in different families; the experts are called with the same everywhere.
    Where every expert sees every token, the router's scores tell who counts.
    """
    seen: dict[str, Routing] = {}
    handles = [_watch(layer, seen) for layer in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _watch(layer: SparseLayer, seen: dict[str, Routing]) -> Any:
    if layer.kind == "scaled":

        def after(_: Any, __: Any, output: Any) -> None:
            weight, expert = output[0].detach().topk(layer.top_k, dim=-1)
            seen[layer.name] = Routing(expert, _wide(weight))

        return layer.router.register_forward_hook(after)

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = layer.read(args, kwargs)
        seen[layer.name] = Routing(call.expert, _wide(call.weight.detach()))

    return layer.block.get_submodule("experts").register_forward_pre_hook(before, with_kwargs=True)


def _wide(weight: Tensor) -> Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32))
