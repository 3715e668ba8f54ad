"""What experts contribute to each unit's gradient: products of tokens, told apart by unit and expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from confide.gradients.experts import OwnerExperts, Pairs
from confide.gradients.gram import Gram, squared_norms
from confide.gradients.parts import Factors, Part, Rows, Sums


def expert_parts(
    experts: OwnerExperts, names: Mapping[str, str], pairs: Pairs, gradient: Tensor, rows: Rows
) -> list[Part]:
    """Every unit's gradient with respect to the experts' trained parameters, unformed.

    From g = ∂loss/∂(output): dy = weight·g, dh = W₂ᵀdy, du = φ′(u)ᵀdh, each for the kept pairs only. The
    gradient of expert e's W₁ is then Σ du xᵀ over a unit's pairs with e, and so on. Losses are linear in
    nothing here: g is taken at the current weights, so a unit's gradient with respect to expert e is that of
    the whole model with all other parameters held still.

    Args:
        experts: whose forward pass kept `pairs`.
        names: name in `experts` → name in the sums, of what is trained.
        gradient: of the summed losses by the layer's output.
        rows: row of the batch → unit.

    Returns:
        Parts whose sums have the parameters' shapes (E, …).
    """
    form, lora = experts.form, experts.lora
    wide = torch.promote_types(gradient.dtype, torch.float32)
    dy = gradient[pairs.place] * pairs.weight[:, None].to(gradient.dtype)
    with torch.enable_grad():
        u = pairs.hidden.requires_grad_()
        h = form.activation(u)
    (du,) = torch.autograd.grad(h, u, _through(experts, pairs, dy))
    x, h, du, dy = (value.detach().to(wide) for value in (pairs.inputs, h, du, dy))
    products: list[tuple[str, Tensor, Tensor]] = []
    for name, bias, a, g in ((form.up, form.up_bias, x, du), (form.down, form.down_bias, h, dy)):
        if lora is not None:
            factor_a, factor_b = (experts.get_parameter(f"{name}_lora_{end}").to(wide) for end in "AB")
            products.append((f"{name}_lora_A", _rows_times(g, factor_b, pairs) * lora.scale, a))
            products.append((f"{name}_lora_B", g, _rows_times(a, factor_a.mT, pairs) * lora.scale))
            continue
        products.append((name, a, g) if form.transposed else (name, g, a))
        if bias is not None:
            products.append((bias, g.new_ones(len(g), 1), g))
    groups = _Groups(pairs, rows)
    return [
        _Product(names[name], left, right, groups, rows.units)
        for name, left, right in products
        if name in names
    ]


def _through(experts: OwnerExperts, pairs: Pairs, dy: Tensor) -> Tensor:
    """(n, ·) gradient by h, from that by y = (W₂ + s·B·A)h."""
    weight = experts.get_parameter(experts.form.down)
    dh = _rows_times(dy, weight.mT if experts.form.transposed else weight, pairs)
    if experts.lora is not None:
        a, b = (experts.get_parameter(f"{experts.form.down}_lora_{end}") for end in "AB")
        dh = dh.add_(_rows_times(_rows_times(dy, b, pairs), a, pairs), alpha=experts.lora.scale)
    return dh


def _rows_times(values: Tensor, matrices: Tensor, pairs: Pairs) -> Tensor:
    """(n, p) → (n, q): each row times its own expert's matrix (E, p, q)."""
    out = values.new_empty(len(values), matrices.shape[2])
    for expert, (low, high) in enumerate(zip(pairs.starts, pairs.starts[1:], strict=False)):
        if low < high:
            torch.mm(values[low:high], matrices[expert].detach(), out=out[low:high])
    return out


@dataclass(frozen=True)
class _Bin:
    """Groups of similar size, to be padded to a common one.

    Attributes:
        groups: their numbers.
        pairs: which pairs are theirs.
        place, slot: where each of those goes.
        slots: size of the largest.
    """

    groups: Tensor
    pairs: Tensor
    place: Tensor
    slot: Tensor
    slots: int

    def padded(self, values: Tensor) -> Tensor:
        """(n, p) → (groups, slots, p), 0 where a group has fewer pairs."""
        room = values.new_zeros(len(self.groups), self.slots, values.shape[1])
        room[self.place, self.slot] = values[self.pairs]
        return room


class _Groups:
    """The pairs of one unit with one expert form a group: their products add up to one gradient.

    Attributes:
        starts: by expert, as in `Pairs`.
        unit: (n,) unit of each pair.
        unit_of: (groups,) unit of each group.
    """

    def __init__(self, pairs: Pairs, rows: Rows) -> None:
        self.starts = pairs.starts
        self.unit = rows.unit[pairs.row]
        sizes = torch.tensor(pairs.starts).diff()
        expert = torch.arange(len(sizes)).repeat_interleave(sizes).to(self.unit.device)
        key, group, count = torch.unique(
            expert * rows.units + self.unit, return_inverse=True, return_counts=True
        )
        self.unit_of = key % max(rows.units, 1)
        order = torch.argsort(group, stable=True)
        slot = torch.empty_like(group)
        slot[order] = torch.arange(len(group), device=group.device) - (count.cumsum(0) - count)[group[order]]
        self._bins: list[_Bin] = []
        height = count.to(torch.float64).log2().ceil()  # at most half of a bin is padding
        for level in height.unique():
            members = (height == level).nonzero()[:, 0]
            place = torch.full_like(count, -1)
            place[members] = torch.arange(len(members), device=place.device)
            inside = (place[group] >= 0).nonzero()[:, 0]
            self._bins.append(
                _Bin(members, inside, place[group[inside]], slot[inside], int(count[members].max()))
            )
        self._grams: dict[int, tuple[Tensor, list[Gram]]] = {}

    def norms(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """‖Σ left rightᵀ‖² of every group, and its slack (`gram.squared_norms`)."""
        squares = torch.zeros(len(self.unit_of), dtype=torch.float64, device=left.device)
        slack = torch.zeros_like(squares)
        for part, a, b in zip(self._bins, self._inner(left), self._inner(right), strict=True):
            squares[part.groups], slack[part.groups] = squared_norms(a, b)
        return squares, slack

    def _inner(self, values: Tensor) -> list[Gram]:
        """Inner products within groups; a bias and its weight share those of the output's gradient."""
        key = id(values)
        if key not in self._grams:
            self._grams[key] = values, [Gram.of(part.padded(values)) for part in self._bins]
        return self._grams[key][1]

    def forget(self) -> None:
        """Free the inner products."""
        self._grams = {}


class _Product:
    """Per-unit gradients Σ left rightᵀ of one stacked parameter, kept as their factors.

    Norms in Gram form within each group (Li et al. 2022, ghost clipping), added over a unit's groups.
    """

    slack: Tensor | None

    def __init__(self, name: str, left: Tensor, right: Tensor, groups: _Groups, units: int) -> None:
        self.name = name
        self._left, self._right, self._groups = left, right, groups
        squares, slack = groups.norms(left, right)
        nothing = squares.new_zeros(units)
        self.squares = nothing.index_add(0, groups.unit_of, squares)
        self.slack = nothing.index_add(0, groups.unit_of, slack)

    def add_to(self, sums: Sums, factors: Factors, rows: Rows) -> None:
        self._groups.forget()
        unit = self._groups.unit
        left, right = factors.kept(self._left, unit), factors.kept(self._right, unit)
        scale = factors.rounded(left.dtype)[unit, None]
        if left.shape[1] < right.shape[1]:
            left = left * scale
        else:
            right = right * scale
        for expert, (low, high) in enumerate(zip(self._groups.starts, self._groups.starts[1:], strict=False)):
            if low < high:
                sums.add_product_at(self.name, expert, left[low:high], right[low:high])
