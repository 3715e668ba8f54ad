"""`nn.Embedding`: a unit's gradient touches only the table rows that its tokens name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from confide.gradients.parts import AtIndex, Part, Rows


def parts(module: nn.Embedding, names: Mapping[str, str], ids: Tensor, g: Tensor, rows: Rows) -> list[Part]:
    """Sum the output gradients of equal ids within a unit; what is left is the gradient itself.

    Args:
        module: the layer.
        names: attribute → parameter name.
        ids: (rows, …) integers.
        g: (rows, …, width).
        rows: row → unit.
    """
    unit = rows.unit.view(-1, *[1] * (ids.ndim - 1)).expand(ids.shape).reshape(-1)
    ids, g = ids.reshape(-1), g.reshape(-1, g.shape[-1])
    if module.padding_idx is not None:
        real = ids != module.padding_idx
        unit, ids, g = unit[real], ids[real], g[real]
    pairs, place = torch.unique(unit * module.num_embeddings + ids, return_inverse=True)
    values = g.new_zeros((len(pairs), g.shape[-1])).index_add_(0, place, g)
    index, owner = pairs % module.num_embeddings, pairs // module.num_embeddings
    return [AtIndex(names["weight"], index, owner, values, rows.units)]


def obstacle(module: nn.Embedding) -> str | None:
    """Options that change the table in the forward pass, or scale by counts over the whole batch."""
    if module.max_norm is not None:
        return "max_norm changes the table in every forward pass"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq counts tokens across records"
    return None
