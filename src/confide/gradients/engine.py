"""Clipped sums of per-unit gradients from one forward and one backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from confide.errors import ModelError
from confide.gradients.clipping import clip_factors, role_factors
from confide.gradients.contributions import Contribution, combine
from confide.gradients.parts import Factors, Part, Rows, Sums, rows_of, total
from confide.gradients.plan import Site
from confide.gradients.rules import obstacle
from confide.gradients.watch import REENTRANT, Use, Watch
from confide.privacy.streams import Clipping


class Engine:
    """Per-unit clipped gradient sums of a model, by book-keeping (Bu et al. 2023, algorithm 1).

    Inside `with engine`, the user calls the model and gets one loss per row; `add` runs one backward pass
    with respect to activations only and adds Σ_units factor·gradient to the running sums. No weight
    gradient is formed by autograd and `.grad` is never set. The rounding of the sum itself over units is
    that of the parameters' dtype, float32 or wider.

    Where each parameter's gradient is taken is planned in the first forward pass, which calls the model up to
    three times more, on a few of its rows.

    The model alone may run under bfloat16 autocast: the engine reads what reached each layer and the
    gradients that came back, whatever their dtype, and computes norms, factors and sums of them in float32
    or wider. Give every micro-batch one shape then, as rounding depends on it.

    Args:
        model: every call of it inside the block computes losses. Its inputs have the row as first dimension;
            an input with another first dimension is shared by all rows.
        parameters: what is trained, by name: parameters of `model`, matched by identity. Everything else is
            frozen inside the block.
        roles: name → group of the stream that it belongs to, for `per-role` clipping.

    Raises:
        ModelError: a parameter that can't be clipped exactly; names it and its module's type.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        roles: Mapping[str, int] | None = None,
    ) -> None:
        self._model = model
        self._parameters = dict(parameters)
        self._roles = roles or {}
        _refuse_parameters(model, self._parameters)
        self._watch = Watch(model, self._parameters)
        self._sums = Sums(self._parameters)
        self._active = False
        self._independent: set[bool] = set()

    def __enter__(self) -> Self:
        if self._active:
            raise ModelError("the engine is active already")
        refuse_mode(self._model)
        self._active = True
        self._watch.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._active = False
        self._watch.close()

    @property
    def sites(self) -> tuple[Site, ...]:
        """Where gradients are taken; empty before the first forward pass."""
        return tuple(self._watch.sites or ())

    def add(
        self, losses: Tensor, unit_of_row: npt.NDArray[np.int64] | Tensor, units: int, clipping: Clipping
    ) -> Tensor:
        """Add the clipped gradients of one micro-batch to the running sums.

        A unit's gradient is the mean of its rows' gradients. Where it isn't finite, the unit contributes
        exactly zero.

        Args:
            losses: (rows,), from a forward pass inside the block; row i depends on row i's record only.
            unit_of_row: (rows,) integers below `units`; all rows of a unit are here.
            units: number of units in the micro-batch.
            clipping: rule and bound C.

        Returns:
            (units,) float64 norms before clipping, NaN or infinite where they are; under `per-role` the
            longest of a unit's groups, in units of C/C_g, so that what exceeds C was clipped. Private.

        Raises:
            ModelError: a trained parameter was used otherwise than in the first forward pass; a row's loss
                depends on other rows.
        """
        if not self._active:
            raise ModelError("Engine.add needs the block `with engine:` around it and the forward pass")
        refuse_autocast()
        rows = rows_of(losses, unit_of_row, units)
        try:
            if not len(losses):
                return torch.zeros(units, dtype=torch.float64, device=losses.device)
            self._check_uses(losses)
            # Again once tokens are flattened: which come first, a row's or a position's, shows only then.
            if self._watch.flattened not in self._independent and len(losses) > 1:
                self._check_independence(losses)
                self._independent.add(self._watch.flattened)
            parts = self._parts(losses, rows)
            with torch.no_grad():
                return self._clip(parts, rows, clipping)
        finally:
            self._watch.forget()

    def take(self) -> dict[str, Tensor]:
        """The sums since the last `take`, float32 or wider, and start again from zero."""
        return self._sums.take()

    def _clip(self, parts: list[Part], rows: Rows, clipping: Clipping) -> Tensor:
        wide = all(parameter.dtype == torch.float64 for parameter in self._parameters.values())
        dtype = torch.float64 if wide else torch.float32
        if clipping.shares is not None:
            return self._clip_roles(parts, rows, clipping, clipping.shares, dtype)
        squares, slack = total(parts, rows)
        factors = Factors(clip_factors(squares, slack, clipping, dtype) * rows.share)
        while parts:
            parts.pop().add_to(self._sums, factors, rows)
        return squares.clamp(min=0).sqrt()

    def _clip_roles(
        self,
        parts: list[Part],
        rows: Rows,
        clipping: Clipping,
        shares: tuple[float, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        if any(part.name not in self._roles for part in parts):
            raise ModelError("per-role clipping needs the role of every parameter; give them to the engine")
        groups = [[part for part in parts if self._roles[part.name] == role] for role in range(len(shares))]
        parts.clear()
        squares, slacks = zip(*(total(group, rows) for group in groups), strict=True)
        each = role_factors(squares, slacks, clipping, dtype)
        for group, values in zip(groups, each, strict=True):
            factors = Factors(values * rows.share)
            while group:
                group.pop().add_to(self._sums, factors, rows)
        relative = [square.clamp(min=0) / share for square, share in zip(squares, shares, strict=True)]
        return torch.stack(relative).amax(0).sqrt()

    def _parts(self, losses: Tensor, rows: Rows) -> list[Part]:
        """Run the backward pass; each parameter's uses become one part as soon as all are there."""
        parts: list[Part] = []
        missing = Counter(name for use in self._watch.uses for name in use.names.values())
        held: dict[str, list[Contribution]] = {}

        def receive(contributions: list[Contribution]) -> None:
            for contribution in contributions:
                name = contribution.name
                held.setdefault(name, []).append(contribution)
                missing[name] -= 1
                if not missing[name]:
                    parts.append(combine(held.pop(name), rows))

        def arrive(use: Use, gradient: Tensor, index: int) -> None:
            receive(self._watch.collect(use, gradient, index))

        self._backward(losses, torch.ones_like(losses), arrive, keep=False)
        with torch.no_grad():
            for use in self._watch.uses:  # the losses depend on some of its outputs only
                if use.gradients:
                    receive(self._watch.settle(use))
            return parts + [combine(uses, rows) for uses in held.values()]

    def _backward(
        self, losses: Tensor, weights: Tensor, receive: Callable[[Use, Tensor, int], None], *, keep: bool
    ) -> None:
        leaves, watched = self._watch.leaves, list(self._parameters.values())
        self._watch.listen(receive)
        try:
            grads = torch.autograd.grad(
                losses, [*leaves, *watched], weights, retain_graph=keep, allow_unused=True
            )
        except RuntimeError as error:
            if "use_reentrant" in str(error):
                raise ModelError(REENTRANT) from error
            raise
        finally:
            self._watch.listen(None)
        for name, grad in zip(self._parameters, grads[len(leaves) :], strict=True):
            if grad is not None:
                raise ModelError(
                    f"parameter {name!r} is used where it was not in the first forward pass, so its "
                    "per-record gradient would be incomplete; freeze it"
                )

    def _check_uses(self, losses: Tensor) -> None:
        width = self._watch.width
        if not width:
            raise ModelError("the losses must come from calling the engine's own model inside the block")
        if not self._watch.uses or not losses.requires_grad:
            raise ModelError("the losses don't depend on any trained parameter")
        if width != len(losses):
            raise ModelError(f"the model was called on {width} rows, but there are {len(losses)} losses")

    def _check_independence(self, losses: Tensor) -> None:
        """The loss of the first and of the last row must reach no other row of any trained layer."""
        for row in (0, len(losses) - 1):
            others = torch.arange(len(losses), device=losses.device) != row

            def refuse_leak(use: Use, gradient: Tensor, _: int, others: Tensor = others) -> None:
                leak = gradient.reshape(len(others), -1)[others]
                if bool(((leak != 0) & leak.isfinite()).any()):
                    raise ModelError(
                        f"the loss of one row depends on other rows at {use.site}: a record's gradient must "
                        "depend on that record alone"
                    )

            weights = torch.zeros_like(losses)
            weights[row] = 1
            self._backward(losses, weights, refuse_leak, keep=True)


def _refuse_parameters(model: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    names = {id(parameter): name for name, parameter in parameters.items()}
    if not names:
        raise ModelError(
            "nothing to train: the engine was given no parameter; pass those to be trained by name, as from "
            "model.named_parameters()"
        )
    for name, parameter in parameters.items():
        if names[id(parameter)] != name:
            raise ModelError(
                f"{name!r} and {names[id(parameter)]!r} are two names of one parameter; name it once"
            )
    held = {id(parameter) for parameter in model.parameters()}
    missing = [name for key, name in names.items() if key not in held]
    if missing:
        raise ModelError(f"parameter {missing[0]!r} belongs to no module of the model given to the engine")
    for path, module in model.named_modules():
        own = [names[id(value)] for value in module.parameters(recurse=False) if id(value) in names]
        reason = obstacle(module) if own else None
        if reason is not None:
            raise ModelError(
                f"parameter {own[0]!r} of {path or 'the model'} ({type(module).__name__}) can't be clipped "
                f"exactly: {reason}; freeze it"
            )


def refuse_mode(model: nn.Module) -> None:
    if torch.get_float32_matmul_precision() != "highest":
        raise ModelError(
            "float32 matrix products have reduced precision, which voids the clipping bound; call "
            'torch.set_float32_matmul_precision("highest")'
        )
    refuse_autocast()
    for path, module in model.named_modules():
        kind = type(module).__name__
        if not module.training:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ModelError(f"{path} ({kind}) is active dropout; set its rate to 0 or call model.eval()")
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ModelError(
                f"{path} ({kind}) computes statistics of the whole batch, which mix records; replace it by "
                "GroupNorm, or use the statistics it has with .eval()"
            )
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            raise ModelError(
                f"{path} ({kind}) keeps statistics of the records it has seen, without noise; call .eval() "
                "on it or build it with track_running_stats=False"
            )


def refuse_autocast() -> None:
    """Where norms and sums are computed; the call of the model may stand in a block of its own.

    Raises:
        ModelError: autocast is on.
    """
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise ModelError(
            "autocast would take norms and sums in half precision, which voids the clipping bound; put "
            "nothing but the call of the model into `with torch.autocast(…)`"
        )
