"""`nn.LayerNorm`: per-unit gradients are small, so they are formed one by one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.functional import layer_norm

from confide.gradients.parts import Part, PerUnit, Rows


def parts(module: nn.LayerNorm, names: Mapping[str, str], x: Tensor, g: Tensor, rows: Rows) -> list[Part]:
    """Σ g·x̂ for the weight and Σ g for the bias, over all positions of a row.

    Args:
        module: the layer.
        names: attribute → parameter name.
        x: (rows, …, *normalized_shape).
        g: same shape.
        rows: row → unit.
    """
    width = len(module.normalized_shape)
    found: list[Part] = []
    if "weight" in names:
        normal = layer_norm(x, module.normalized_shape, eps=module.eps)
        found.append(PerUnit(names["weight"], rows.sum(_over_positions(normal.mul_(g), width))))
    if "bias" in names:
        found.append(PerUnit(names["bias"], rows.sum(_over_positions(g, width))))
    return found


def _over_positions(values: Tensor, width: int) -> Tensor:
    """(rows, …, *shape) → (rows, *shape)."""
    between = tuple(range(1, values.ndim - width))
    return values.sum(between) if between else values
