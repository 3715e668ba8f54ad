"""Linear layers: the weight gradient of a row is Σ_s g_s a_sᵀ over its positions s."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from confide.gradients.contributions import Contribution, PerRow, Product


def linear(
    module: nn.Linear, names: Mapping[str, str], a: Tensor, g: Tensor, rows: int
) -> list[Contribution]:
    """Factors of the weight's gradient, and the bias's.

    Args:
        module: the layer.
        names: attribute → parameter name.
        a: (rows·k, …, in).
        g: (rows·k, …, out).
        rows: number of rows.
    """
    a, g = a.reshape(rows, -1, a.shape[-1]), g.reshape(rows, -1, g.shape[-1])
    return _bias(names, g) + ([Product(names["weight"], g, a)] if "weight" in names else [])


def transposed_linear(
    module: nn.Module, names: Mapping[str, str], a: Tensor, g: Tensor, rows: int
) -> list[Contribution]:
    """As `linear`, for a weight stored (in, out): the `Conv1D` of GPT-2."""
    a, g = a.reshape(rows, -1, a.shape[-1]), g.reshape(rows, -1, g.shape[-1])
    return _bias(names, g) + ([Product(names["weight"], a, g)] if "weight" in names else [])


def _bias(names: Mapping[str, str], g: Tensor) -> list[Contribution]:
    return [PerRow(names["bias"], g.sum(1))] if "bias" in names else []
