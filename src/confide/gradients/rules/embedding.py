"""`nn.Embedding`: a row's gradient touches only the table rows that its tokens name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from confide.gradients.contributions import Contribution, Lookup


def embedding(
    module: nn.Embedding, names: Mapping[str, str], ids: Tensor, g: Tensor, rows: int
) -> list[Contribution]:
    """Output gradients at the ids; those of the padding id are zero, as in torch.

    Args:
        module: the layer.
        names: attribute → parameter name.
        ids: (rows·k, …) integers.
        g: (rows·k, …, width).
        rows: number of rows.
    """
    ids, values = ids.reshape(rows, -1), g.reshape(rows, -1, g.shape[-1])
    if module.padding_idx is not None:
        values = values.masked_fill((ids == module.padding_idx)[..., None], 0)
    return [Lookup(names["weight"], ids.long(), values, module.num_embeddings)]


def changed_embedding(
    module: nn.Embedding, names: Mapping[str, str], ids: Tensor, g: Tensor, rows: int
) -> list[Contribution]:
    """As `embedding`, where a subclass does something to what it looked up, such as scaling it.

    Its forward runs once more, on looked-up values that gradients are taken of (`only_looks_up`).
    """
    values = functional.embedding(ids, module.weight.detach()).requires_grad_()
    with torch.enable_grad(), _LookedUp(module.weight, values):
        output = module.forward(ids)
    (inner,) = torch.autograd.grad(output, values, g.to(output.dtype))
    return embedding(module, names, ids, inner.to(g.dtype), rows)


def only_looks_up(module: nn.Embedding) -> bool:
    """Whether a subclass uses its table for one lookup and nothing else, from ids alone."""
    weight = module.weight.detach().requires_grad_()
    ids = torch.tensor([[2, 0, 1], [1, 2, 2]], device=weight.device) % module.num_embeddings
    values = functional.embedding(ids, weight.detach()).requires_grad_()
    with torch.enable_grad(), _LookedUp(weight, values) as mode:
        try:
            output = functional_call(module, {"weight": weight}, (ids,))
        except Exception:  # it wants other arguments
            return False
    same = [seen.shape == ids.shape and torch.equal(seen, ids) for seen in mode.seen]
    if same != [True] or not isinstance(output, Tensor) or not output.requires_grad:
        return False
    through = torch.autograd.grad(output.sum(), [values, weight], allow_unused=True)
    return through[0] is not None and through[1] is None


class _LookedUp(TorchFunctionMode):
    """Puts `values` in the place of what a lookup in `table` returns."""

    def __init__(self, table: Tensor, values: Tensor) -> None:
        super().__init__()
        self._table, self._values = table, values
        self.seen: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.embedding and len(args) > 1 and args[1] is self._table:
            self.seen.append(args[0])
            return self._values
        return func(*args, **(kwargs or {}))


def obstacle(module: nn.Embedding) -> str | None:
    """Options that change the table in the forward pass, or scale by counts over the whole batch."""
    if module.max_norm is not None:
        return "max_norm changes the table in every forward pass"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq counts tokens across records"
    return None
