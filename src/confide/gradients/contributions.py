"""What one use of a parameter adds to each row's gradient, and how the uses of a parameter combine.

A weight may be used twice: by tied layers, or by a layer that is called again. Its gradient is the sum over
all uses, so the norm needs their inner products as well, and is taken here once all uses are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from confide.gradients.gram import Gram, Mixed, overflow, squared_norms
from confide.gradients.parts import AtIndex, Factors, Part, PerUnit, Rows, Sums


@dataclass(frozen=True)
class PerRow:
    """Gradients formed one by one: `values` (rows, *shape of the parameter)."""

    name: str
    values: Tensor


@dataclass(frozen=True)
class Product:
    """Gradients Σ_s left_s right_sᵀ over a row's positions s: `left` (rows, S, d), `right` (rows, S, p).

    `left` is (1, S, d) where all rows share it.
    """

    name: str
    left: Tensor
    right: Tensor

    def formed(self) -> Tensor:
        """(rows, d, p)."""
        return self.left.mT @ self.right


@dataclass(frozen=True)
class Lookup:
    """Gradients Σ_s e(id_s) value_sᵀ of a table: `ids` (rows, S), `values` (rows, S, p).

    A position whose value is zero adds nothing. `size` is the table's number of rows.
    """

    name: str
    ids: Tensor
    values: Tensor
    size: int


Contribution = PerRow | Product | Lookup


def combine(uses: Sequence[Contribution], rows: Rows) -> Part:
    """All uses of one parameter as one part, whose norm is that of their sum."""
    lookups = [use for use in uses if isinstance(use, Lookup)]
    products = [use for use in uses if isinstance(use, Product)]
    if len(lookups) == len(uses):
        return _at_index(lookups, rows)
    if len(lookups) + len(products) < len(uses) or _is_cheaper_formed(products, lookups):
        return PerUnit(uses[0].name, _formed(uses, rows))
    return _Factored(products, lookups, rows)


def _is_cheaper_formed(products: Sequence[Product], lookups: Sequence[Lookup]) -> bool:
    """S·p·d to form Σ_s left_s right_sᵀ against S²(p + d) for its Gram norm."""
    positions = sum(use.left.shape[1] for use in products) + sum(use.ids.shape[1] for use in lookups)
    d, p = products[0].left.shape[2], products[0].right.shape[2]
    return d * p <= positions * (d + p)


def _formed(uses: Sequence[Contribution], rows: Rows) -> Tensor:
    """(units, …): the sum over uses, in the shape of the first use that was not a lookup."""
    total: Tensor | None = None
    for use in sorted(uses, key=lambda use: isinstance(use, Lookup)):
        match use:
            case PerRow():
                values = rows.sum(use.values)
            case Product():
                values = rows.sum(use.formed())
            case Lookup():
                width = use.values.shape[-1]
                table = use.values.new_zeros((rows.units * use.size, width))
                place = rows.unit[:, None] * use.size + use.ids
                table.index_add_(0, place.flatten(), use.values.flatten(0, 1))
                values = table.view(rows.units, use.size, width)
        total = values if total is None else total + values.view(total.shape)
    assert total is not None
    return total


def _at_index(uses: Sequence[Lookup], rows: Rows) -> AtIndex:
    """Sum the values of equal ids within a unit; what is left is the gradient itself."""
    unit = torch.cat([rows.unit[:, None].expand(use.ids.shape).flatten() for use in uses])
    ids = torch.cat([use.ids.flatten() for use in uses])
    values = torch.cat([use.values.flatten(0, 1) for use in uses])
    pairs, place = torch.unique(unit * uses[0].size + ids, return_inverse=True)
    summed = values.new_zeros((len(pairs), values.shape[-1])).index_add_(0, place, values)
    return AtIndex(uses[0].name, pairs % uses[0].size, pairs // uses[0].size, summed, rows.units)


class _Factored:
    """Gradients kept as their factors until they are clipped and summed in one matrix product per use.

    Norms in Gram form: ‖Σ_s g_s a_sᵀ‖² = Σ_st (a_s·a_t)(g_s·g_t) (Li et al. 2022, ghost clipping; Bu et
    al. 2023, book-keeping), where s and t run over the positions of all uses.
    """

    slack: Tensor | None

    def __init__(self, products: Sequence[Product], lookups: Sequence[Lookup], rows: Rows) -> None:
        self.name = products[0].name
        self._products, self._lookups = products, lookups
        only = products[0] if len(products) == 1 and not lookups else None
        if only is not None and only.left.shape[1] == 1 and rows.single:
            self.squares, self.slack = rows.sum(_squares(only.right) * _squares(only.left)), None
        elif only is not None and rows.single:
            left_gram = Gram.of(only.left).expand(len(only.right))
            squares, slack = squared_norms(rows.gram(only.right), left_gram)
            self.squares, self.slack = rows.sum(squares), rows.sum(slack)
        else:
            right = [use.right for use in products] + [use.values for use in lookups]
            dense = _joined([use.left.expand(rows.count, -1, -1) for use in products], rows)
            left = Mixed(dense, _joined([use.ids for use in lookups], rows)) if lookups else dense
            self.squares, self.slack = squared_norms(Gram.of(_joined(right, rows)), Gram.of(left))

    def add_to(self, sums: Sums, factors: Factors, rows: Rows) -> None:
        for use in self._products:
            right = factors.kept(use.right, rows.unit)
            scale = factors.rounded(right.dtype)[rows.unit, None, None]
            if len(use.left) < len(right):
                sums.add_product(self.name, use.left[0], (right * scale).sum(0))
                continue
            left = factors.kept(use.left, rows.unit)
            if right.shape[2] < left.shape[2]:
                right = right * scale
            else:
                left = left * scale
            sums.add_product(self.name, left.flatten(0, 1), right.flatten(0, 1))
        for lookup in self._lookups:
            values = factors.kept(lookup.values, rows.unit)
            values = values * factors.rounded(values.dtype)[rows.unit, None, None]
            sums.add_at(self.name, lookup.ids.flatten(), values.flatten(0, 1))


def _joined(values: Sequence[Tensor], rows: Rows) -> Tensor:
    """(rows, S_i, …) of several uses → (units, Σ m·S_i, …)."""
    joined = [rows.joined(value) for value in values]
    return joined[0] if len(joined) == 1 else torch.cat(joined, 1)


def _squares(x: Tensor) -> Tensor:
    """(rows, 1, p) → (rows,) float64."""
    squares = x[:, 0].to(torch.float64).square().sum(-1)
    return squares.masked_fill(squares.sqrt() > overflow(x.dtype), torch.inf)
