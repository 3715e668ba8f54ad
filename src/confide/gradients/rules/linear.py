"""`nn.Linear`: the weight gradient of a row is Σ_s g_s a_sᵀ over its positions s."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from confide.gradients.gram import Gram, overflow, squared_norms
from confide.gradients.parts import Factors, Part, PerUnit, Rows, Sums


def parts(module: nn.Linear, names: Mapping[str, str], a: Tensor, g: Tensor, rows: Rows) -> list[Part]:
    """The weight's gradient formed directly where that is cheaper than its Gram norm, else kept as a product.

    Args:
        module: the layer.
        names: attribute → parameter name.
        a: (rows, …, in).
        g: (rows, …, out).
        rows: row → unit.
    """
    a = a.reshape(len(a), -1, a.shape[-1])
    g = g.reshape(len(g), -1, g.shape[-1])
    found: list[Part] = []
    if "bias" in names:
        found.append(PerUnit(names["bias"], rows.sum(g.sum(1))))
    if "weight" in names:
        positions, inputs, outputs = a.shape[1], a.shape[2], g.shape[2]
        if inputs * outputs <= positions * (inputs + outputs):
            found.append(PerUnit(names["weight"], rows.sum(g.mT @ a)))
        else:
            found.append(_Product(names["weight"], a, g, rows))
    return found


class _Product:
    """Weight gradients kept as their factors a and g until they are clipped and summed in one product.

    Norms in Gram form: ‖Σ_s g_s a_sᵀ‖² = Σ_st (a_s·a_t)(g_s·g_t) (Li et al. 2022, ghost clipping; Bu et
    al. 2023, book-keeping).
    """

    slack: Tensor | None

    def __init__(self, name: str, a: Tensor, g: Tensor, rows: Rows) -> None:
        self.name = name
        self._a, self._g = a, g
        if a.shape[1] == 1 and rows.single:
            self.squares, self.slack = rows.sum(_squares(a) * _squares(g)), None
        elif rows.single:
            squares, slack = squared_norms(rows.gram(a), Gram.of(g))
            self.squares, self.slack = rows.sum(squares), rows.sum(slack)
        else:
            self.squares, self.slack = squared_norms(Gram.of(rows.joined(a)), Gram.of(rows.joined(g)))

    def add_to(self, sums: Sums, factors: Factors, rows: Rows) -> None:
        a, g = factors.kept(self._a, rows.unit), factors.kept(self._g, rows.unit)
        scale = factors.rounded(g.dtype)[rows.unit, None, None]
        if a.shape[2] < g.shape[2]:
            a = a * scale
        else:
            g = g * scale
        sums.add_product(self.name, g.flatten(0, 1), a.flatten(0, 1))


def _squares(x: Tensor) -> Tensor:
    """(rows, 1, p) → (rows,) float64."""
    squares = x[:, 0].to(torch.float64).square().sum(-1)
    return squares.masked_fill(squares.sqrt() > overflow(x.dtype), torch.inf)
