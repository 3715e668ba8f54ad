"""Exact per-unit gradients, one file per kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from confide.gradients.parts import Part, Rows
from confide.gradients.rules import embedding, layer_norm, linear

Rule = Callable[[Any, Mapping[str, str], Tensor, Tensor, Rows], list[Part]]
"""(module, trained attribute → parameter name, input, output gradient, row → unit) → parts.

Input and output gradient have the row as their first dimension.
"""

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear.parts,
    nn.LayerNorm: layer_norm.parts,
    nn.Embedding: embedding.parts,
}
"""Exact types only: a subclass may compute something else."""


def obstacle(module: nn.Module) -> str | None:
    """Why a module's parameters can't be clipped exactly, or None."""
    if type(module) not in RULES:
        return "its kind has no exact rule"
    if "forward" in vars(module):
        return "its forward function has been replaced"
    if isinstance(module, nn.Embedding):
        return embedding.obstacle(module)
    return None
