"""What a layer contributes to each unit's gradient, kept until the clip factors are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from confide.gradients.clipping import round_down
from confide.gradients.gram import Gram


class Rows:
    """Which row of a micro-batch belongs to which unit.

    Attributes:
        unit: (rows,) int64, each row's unit. Private.
        units: number of units in the micro-batch.
        share: (units,) float64, 1 / rows of the unit: a unit's gradient is the mean over its rows.
    """

    def __init__(self, unit: Tensor, units: int) -> None:
        self.unit = unit
        self.units = units
        self.count = len(unit)
        self._sizes = torch.bincount(unit, minlength=units)
        self.share = 1.0 / self._sizes.clamp(min=1).to(torch.float64)
        self.single = bool((self._sizes <= 1).all())
        self._gram: Gram | None = None
        self._identity = self.count == units and bool((unit == torch.arange(units, device=unit.device)).all())

    def sum(self, values: Tensor) -> Tensor:
        """(rows, …) → (units, …), adding up the rows of a unit."""
        if self._identity:
            return values
        return values.new_zeros((self.units, *values.shape[1:])).index_add_(0, self.unit, values)

    def gram(self, tokens: Tensor) -> Gram:
        """Inner products of an input; layers that share it (query, key, value) come one after another."""
        held = self._gram
        if held is None or not isinstance(held.tokens, Tensor) or not _same(held.tokens, tokens):
            held = self._gram = Gram.of(tokens)
        return held

    def joined(self, values: Tensor) -> Tensor:
        """(rows, S, p) → (units, m·S, p): the rows of a unit one after another, short units padded with 0."""
        if self._identity:
            return values
        order = torch.argsort(self.unit, stable=True)
        starts = self._sizes.cumsum(0) - self._sizes
        slot = torch.arange(self.count, device=order.device) - starts[self.unit[order]]
        longest = int(self._sizes.max())
        room = values.new_zeros((self.units, longest, *values.shape[1:]))
        room[self.unit[order], slot] = values[order]
        return room.flatten(1, 2)


class Sums:
    """Running clipped sums, by parameter name, in float32 or wider."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._like = {
            name: (value.shape, torch.promote_types(value.dtype, torch.float32), value.device)
            for name, value in parameters.items()
        }
        self._values: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Add a tensor of the parameter's shape."""
        held = self._values.get(name)
        shape, dtype, _ = self._like[name]
        if held is None:
            self._values[name] = value.reshape(shape).to(dtype)
        else:
            held.add_(value.reshape(shape))

    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        """Add leftᵀ·right, of as many values as the parameter."""
        held = self._values.get(name)
        if held is None:
            self._values[name] = (left.T @ right).view(self._like[name][0])
        else:
            held.view(left.shape[1], right.shape[1]).addmm_(left.T, right)

    def add_at(self, name: str, index: Tensor, values: Tensor) -> None:
        """Add values[i] to row index[i]."""
        self._held(name).index_add_(0, index, values)

    def add_product_at(self, name: str, index: int, left: Tensor, right: Tensor) -> None:
        """Add leftᵀ·right to entry `index` of a stacked parameter; a stack of vectors takes one row."""
        held = self._held(name)[index]
        held.view(left.shape[1], right.shape[1]).addmm_(left.T, right)

    def _held(self, name: str) -> Tensor:
        if name not in self._values:
            shape, dtype, device = self._like[name]
            self._values[name] = torch.zeros(shape, dtype=dtype, device=device)
        return self._values[name]

    def take(self) -> dict[str, Tensor]:
        """Every sum, zeros where nothing was added; starts again from zero."""
        values, self._values = self._values, {}
        return {
            name: values[name] if name in values else torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype, device) in self._like.items()
        }


class Factors:
    """By how much each unit's gradient is scaled on its way into the sum.

    Attributes:
        dropped: (units,) bool, units that add exactly nothing; None where there are none.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        dropped = values == 0
        self.dropped = dropped if bool(dropped.any()) else None
        self._rounded: dict[torch.dtype, Tensor] = {}

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """(units,) in `dtype`, never more than the exact factors."""
        if dtype not in self._rounded:
            self._rounded[dtype] = round_down(self._values, dtype)
        return self._rounded[dtype]

    def kept(self, values: Tensor, unit: Tensor | None = None) -> Tensor:
        """`values` (units, …), or of the units `unit` (k, …), with dropped units' exactly 0, NaN included."""
        if self.dropped is None:
            return values
        dropped = self.dropped if unit is None else self.dropped[unit]
        return values.masked_fill(dropped.view(-1, *[1] * (values.ndim - 1)), 0)


class Part(Protocol):
    """One parameter's share of every unit's gradient (the sum over the unit's rows).

    Attributes:
        name: of the parameter.
        squares: (units,) float64, squared norms; non-finite where the gradient is.
        slack: (units,) float64 bounds on how far the true squared norms lie above, or None where the very
            values that are summed were measured.
    """

    name: str
    squares: Tensor
    slack: Tensor | None

    def add_to(self, sums: Sums, factors: Factors, rows: Rows) -> None:
        """Add Σ factor·gradient to the running sums."""


@dataclass
class PerUnit:
    """Gradients of one parameter formed one by one: `values` is (units, *shape)."""

    name: str
    values: Tensor
    slack: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.squares = self.values.flatten(1).to(torch.float64).square().sum(1)

    def add_to(self, sums: Sums, factors: Factors, rows: Rows) -> None:
        flat = factors.kept(self.values.flatten(1))
        sums.add(self.name, torch.mv(flat.T, factors.rounded(flat.dtype)))


@dataclass
class AtIndex:
    """Gradients that touch few rows of a table: `values` (k, width) at (unit, index), each pair once."""

    name: str
    index: Tensor
    unit: Tensor
    values: Tensor
    units: int
    slack: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        squares = self.values.to(torch.float64).square().sum(1)
        self.squares = squares.new_zeros(self.units).index_add_(0, self.unit, squares)

    def add_to(self, sums: Sums, factors: Factors, rows: Rows) -> None:
        values = factors.kept(self.values, self.unit)
        sums.add_at(self.name, self.index, values * factors.rounded(values.dtype)[self.unit, None])


def _same(x: Tensor, y: Tensor) -> bool:
    return (
        x.data_ptr() == y.data_ptr()
        and x.shape == y.shape
        and x.stride() == y.stride()
        and x.dtype == y.dtype
        and x._version == y._version
    )


def total(parts: Iterable[Part], rows: Rows) -> tuple[Tensor, Tensor]:
    """Squared norms of the units' mean gradients over all parameters, and their slack; (units,) each."""
    squares = torch.zeros_like(rows.share)
    slack = torch.zeros_like(rows.share)
    for part in parts:
        squares += part.squares
        if part.slack is not None:
            slack += part.slack
    return squares * rows.share**2, slack * rows.share**2
