"""`nn.Conv1d` and `nn.Conv2d`: a linear layer over patches, which need not overlap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from confide.gradients.contributions import Contribution, PerRow, Product


def convolution(
    module: nn.Conv1d | nn.Conv2d, names: Mapping[str, str], x: Tensor, g: Tensor, rows: int
) -> list[Contribution]:
    """Factors of the weight's gradient over output positions; per group formed, where there are groups.

    Args:
        module: the layer, zero-padded (`is_plain`).
        names: attribute → parameter name.
        x: (rows·k, in, *size).
        g: (rows·k, out, *size after).
        rows: number of rows.
    """
    positions = _by_position(g.flatten(2), rows)
    found: list[Contribution] = []
    if "bias" in names:
        found.append(PerRow(names["bias"], positions.sum(1)))
    if "weight" in names:
        patches = _by_position(_patches(module, x), rows)
        if module.groups == 1:
            found.append(Product(names["weight"], positions, patches))
        else:
            apart = (*positions.shape[:2], module.groups, -1)
            values = torch.einsum("rsgo,rsgi->rgoi", positions.view(apart), patches.view(apart))
            found.append(PerRow(names["weight"], values.reshape(rows, *module.weight.shape)))
    return found


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether this is the convolution that the rule computes; other paddings are recomputed."""
    forward = getattr(kind, "_conv_forward", None)
    return (
        getattr(module, "padding_mode", "") == "zeros"
        and not isinstance(getattr(module, "padding", ""), str)
        and type(module)._conv_forward is forward  # type: ignore[attr-defined]
    )


def _by_position(values: Tensor, rows: int) -> Tensor:
    """(rows·k, channels, S) → (rows, k·S, channels)."""
    return values.mT.reshape(rows, -1, values.shape[1])


def _patches(module: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """(n, in, *size) → (n, in·kernel, S), channels slowest, as the weight is stored."""
    sizes: list[Any] = [module.kernel_size, module.dilation, module.padding, module.stride]
    if isinstance(module, nn.Conv1d):
        x = x[:, :, None]
        sizes = [(one, *size) for one, size in zip((1, 1, 0, 1), sizes, strict=True)]
    kernel, dilation, padding, stride = sizes
    return functional.unfold(x, kernel, dilation, padding, stride)
