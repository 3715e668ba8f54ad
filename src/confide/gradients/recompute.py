"""Per-row gradients of any module: it is run again on one row at a time.

Slower than a rule, and right for whatever the module does with its parameters, because nothing about it is
assumed: only that its outputs for a row follow from its inputs for that row, which is checked.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from confide.errors import ModelError
from confide.gradients import entrywise, tables

_AT_ONCE = 1 << 22  # values of a parameter's gradients in one go: their copies should stay small
_WIDE = (torch.float32, torch.float64)
_TOLERANCE = 1e-3  # relative to the largest value; in half precision, times 64


@dataclass(frozen=True, eq=False)
class Recomputation:
    """One call of a module, to be run again.

    Attributes:
        names: paths of parameters inside the module.
        arguments: what was passed, flat, with marks in the place of tensors (`take_apart`).
        spec: that of (args, kwargs).
        has_rows: for each tensor among the arguments, whether its first dimension is the row (or rows·k).
        together: whether to try all rows at once. torch.func can crash on shapes that depend on values.
    """

    module: nn.Module
    names: tuple[str, ...]
    arguments: list[Any]
    spec: TreeSpec
    has_rows: tuple[bool, ...]
    together: bool

    def gradients(
        self, tensors: Sequence[Tensor], gradients: Mapping[int, Tensor], rows: int
    ) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
        """Per-row gradients (rows, *shape) by path, and the outputs that came out again.

        Args:
            tensors: the call's tensor arguments.
            gradients: by position among the tensors that the module returns.
            rows: number of rows.
        """
        places = sorted(gradients)
        given = [_split(gradients[place], rows) for place in places]
        split = [_split(x, rows) if own else x for x, own in zip(tensors, self.has_rows, strict=True)]
        result = self._at_once(split, given, places) if self.together else None
        found, outputs = result or self._one_by_one(split, given, places)
        return found, dict(zip(places, outputs, strict=True))

    def entrywise(
        self, tensors: Sequence[Tensor], gradients: Mapping[int, Tensor], found: Mapping[str, Tensor]
    ) -> frozenset[str]:
        """Parameters for which `by_entry` gives the gradients `found`, which `gradients` did."""
        if not self.together or len(gradients) != 1:
            return frozenset()
        ((place, g),) = gradients.items()
        held = self._parameters()

        def call(values: Mapping[str, Tensor]) -> Tensor:
            return self._call(values, tensors, [place])[0]

        good = []
        for name, values in found.items():
            if entrywise.acts(call, name, held[name], g.shape):
                again, _ = entrywise.gradient(call, name, held[name], g, len(values))
                if agree(again, values):
                    good.append(name)
        return frozenset(good)

    def by_entry(
        self, tensors: Sequence[Tensor], gradients: Mapping[int, Tensor], rows: int, names: frozenset[str]
    ) -> dict[str, Tensor]:
        """As `gradients`, for parameters that act entry by entry: all rows at once; the others as usual."""
        others = tuple(name for name in self.names if name not in names)
        found = replace(self, names=others).gradients(tensors, gradients, rows)[0] if others else {}
        held = self._parameters()
        for place, g in gradients.items():
            for name in names:

                def call(values: Mapping[str, Tensor], place: int = place) -> Tensor:
                    return self._call(values, tensors, [place])[0]

                found[name] = entrywise.gradient(call, name, held[name], g, rows)[0]
        return found

    def maps(
        self, tensors: Sequence[Tensor], gradients: Mapping[int, Tensor], rows: int
    ) -> dict[str, Tensor]:
        """By path, the map through which all rows read a parameter (`tables.maps`); empty if one has none."""
        held = self._parameters()
        if not self.together or len(gradients) != 1 or any(x.dtype not in _WIDE for x in held.values()):
            return {}
        (place,) = gradients
        first = [x[: len(x) // rows] if own else x for x, own in zip(tensors, self.has_rows, strict=True)]

        def on(own: Sequence[Tensor]) -> tables.Call:
            return lambda values: self._call(values, own, [place])[0]

        return tables.maps(on(first), on(tensors), held, rows) or {}

    def _call(
        self, parameters: Mapping[str, Tensor], own: Sequence[Tensor], places: list[int]
    ) -> list[Tensor]:
        given = iter(own)
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self.arguments]
        args, kwargs = tree_unflatten(leaves, self.spec)
        output = functional_call(self.module, dict(parameters), args, kwargs)
        found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        return [found[place] for place in places]

    def _parameters(self) -> dict[str, Tensor]:
        held = dict(self.module.named_parameters())
        return {name: held[name].detach() for name in self.names}

    def _at_once(
        self, split: list[Tensor], gradients: list[Tensor], places: list[int]
    ) -> tuple[dict[str, Tensor], list[Tensor]] | None:
        parameters = self._parameters()

        def one(own: list[Tensor], gradient: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
            outputs, pull = vjp(  # type: ignore[misc]
                lambda values: self._call(values, own, places), parameters
            )
            return pull(gradient)[0], outputs

        dims = [0 if own else None for own in self.has_rows]
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")
                several = max(1, _AT_ONCE // max(value.numel() for value in parameters.values()))
                found, outputs = vmap(one, (dims, 0), chunk_size=several)(split, gradients)
        except Exception:  # torch.func refuses control flow on values, random numbers and more
            return None
        return found, [output.flatten(0, 1) for output in outputs]

    def _one_by_one(
        self, split: list[Tensor], gradients: list[Tensor], places: list[int]
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        parameters = self._parameters()
        found: dict[str, list[Tensor]] = {name: [] for name in parameters}
        outputs: list[list[Tensor]] = [[] for _ in places]
        for row in range(len(gradients[0])):
            own = [x[row] if has_rows else x for x, has_rows in zip(split, self.has_rows, strict=True)]
            leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
            with torch.enable_grad():
                again = self._call(leaves, own, places)
            reached = [(y, g[row]) for y, g in zip(again, gradients, strict=True) if y.requires_grad]
            pulled = torch.autograd.grad(
                [y for y, _ in reached], list(leaves.values()), [g for _, g in reached], allow_unused=True
            )
            for (name, value), one in zip(leaves.items(), pulled, strict=True):
                found[name].append(torch.zeros_like(value) if one is None else one)
            for kept, output in zip(outputs, again, strict=True):
                kept.append(output.detach())
        return {name: torch.stack(each) for name, each in found.items()}, [
            torch.cat(each) for each in outputs
        ]


_TENSOR = object()


def take_apart(leaves: Sequence[Any]) -> tuple[list[Any], list[Tensor]]:
    """Arguments with marks in the place of tensors, and the tensors."""
    return (
        [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves],
        [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)],
    )


def check_same(
    again: Mapping[int, Tensor], before: Mapping[int, Tensor], place: str, *, half: bool = False
) -> None:
    """Refuse a module whose rows come out differently when they are alone.

    Args:
        half: what came out before was computed in half precision, whatever its dtype.

    Raises:
        ModelError: an output differs by more than rounding.
    """
    for index, x in again.items():
        y = before[index]
        if x.shape != y.shape or not agree(x, y, half=half):
            raise ModelError(
                f"{place} computes something else for a row alone than for the row in its batch (it mixes "
                "rows, draws random numbers or keeps a state), so its parameters can't be clipped exactly; "
                "freeze them, or call the model with use_cache=False if it is a decoder"
            )


def agree(x: Tensor, y: Tensor, *, half: bool = False) -> bool:
    """Whether each row is the same up to rounding; one that overflows says nothing."""
    tolerance = _TOLERANCE * (64 if half or y.dtype in (torch.float16, torch.bfloat16) else 1)
    return all(
        not bool(one.isfinite().all() & other.isfinite().all())
        or not len(one)
        or float((one - other).abs().max()) <= tolerance * float(other.abs().max())
        for one, other in zip(x.double().flatten(1), y.double().flatten(1), strict=True)
    )


def _split(x: Tensor, rows: int) -> Tensor:
    """(rows·k, …) → (rows, k, …)."""
    return x.reshape(rows, len(x) // rows, *x.shape[1:])
