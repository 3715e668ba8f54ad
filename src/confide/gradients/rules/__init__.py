"""Exact per-row gradients by closed formula, one file per kind of layer.

A layer without a rule is not refused: its gradients are recomputed (`confide.gradients.recompute`). A rule is
there because it is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from confide.gradients.contributions import Contribution
from confide.gradients.rules import convolution, embedding, linear, norms

Rule = Callable[[Any, Mapping[str, str], Tensor, Tensor, int], list[Contribution]]
"""(module, trained attribute → parameter name, input, output gradient, rows) → contributions.

The first dimension of input and output gradient is the row, or rows·k with the k entries of a row side by
side.
"""

_RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear.linear,
    nn.LayerNorm: norms.layer_norm,
    nn.GroupNorm: norms.group_norm,
    nn.Embedding: embedding.embedding,
    nn.Conv1d: convolution.convolution,
    nn.Conv2d: convolution.convolution,
}


def rule_of(module: nn.Module) -> Rule | None:
    """The rule for exactly what this module computes, or None.

    A subclass keeps its parent's rule only if it keeps its forward function and its parameters.
    """
    kind = type(module)
    if "forward" in vars(module) or kind.__call__ is not nn.Module.__call__:
        return None
    # Its own class in transformers; a Linear with the weight stored transposed.
    if f"{kind.__module__}.{kind.__qualname__}" == "transformers.pytorch_utils.Conv1D":
        return linear.transposed_linear
    if isinstance(module, nn.Embedding) and kind.forward is not nn.Embedding.forward:
        return embedding.changed_embedding if embedding.only_looks_up(module) else None
    for known, rule in _RULES.items():
        if isinstance(module, known) and kind.forward is known.forward:
            if "weight" not in module._parameters:  # computed from something else
                return None
            if known in (nn.Conv1d, nn.Conv2d) and not convolution.is_plain(module, known):
                return None
            return rule
    return None


def obstacle(module: nn.Module) -> str | None:
    """Why a module's parameters have no per-row gradient at all, or None."""
    return embedding.obstacle(module) if isinstance(module, nn.Embedding) else None
