"""Clipped sums of per-unit gradients with respect to one layer's experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from confide.errors import ModelError
from confide.gradients.clipping import clip_factors
from confide.gradients.engine import refuse_mode
from confide.gradients.expert_parts import expert_parts
from confide.gradients.experts import OwnerExperts, Watch
from confide.gradients.parts import Factors, Rows, Sums, rows_of, total
from confide.privacy.streams import Clipping


class ExpertEngine:
    """Per-unit clipped gradient sums of the experts of one layer, as `Engine` gives them of a dense model.

    Inside `with engine`, the user announces the rows (`expect`), calls the model, gets one loss per row and
    passes them to `add`. Below the layer nothing is differentiated, so a step costs little more than a
    forward pass. Each row reaches the parameters of its owner only (RAPTOR's expert stream), or of every
    expert (its monolithic baseline); the forward pass is the same either way.

    Args:
        model: holds the experts; every call of it inside the block computes losses.
        experts: attached to a layer of the model.
        parameters: what is trained, by name: some of `experts.trained()`, matched by identity. Everything
            else is frozen inside the block.

    Raises:
        ModelError: a parameter that isn't the experts', or that the model uses elsewhere too.
    """

    def __init__(
        self, model: nn.Module, experts: OwnerExperts, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self._model = model
        self._experts = experts
        self._names = trained_names(model, experts, parameters)
        self._wide = all(parameter.dtype == torch.float64 for parameter in parameters.values())
        self._sums = Sums(parameters)
        self._frozen: list[tuple[nn.Parameter, bool]] = []
        self._active = False
        self._independent = False

    def __enter__(self) -> Self:
        if self._active:
            raise ModelError("the engine is active already")
        refuse_mode(self._model)
        self._frozen = [(parameter, parameter.requires_grad) for parameter in self._model.parameters()]
        for parameter, _ in self._frozen:
            parameter.requires_grad_(False)
        self._active = True
        return self

    def __exit__(self, *_: object) -> None:
        for parameter, flag in self._frozen:
            parameter.requires_grad_(flag)
        self._frozen = []
        self._active = False
        self._experts.watch = None

    def expect(
        self,
        rows: int,
        owner: npt.NDArray[np.int64] | Tensor | None = None,
        mask: npt.NDArray[Any] | Tensor | None = None,
    ) -> None:
        """Announce the rows of the next call of the model.

        Args:
            rows: how many.
            owner: (rows,) the expert whose parameters each row reaches; None for all experts. Private.
            mask: (rows, length), 0 at padding, whose gradient is left out; None for no padding.

        Raises:
            ModelError: an owner that is no expert of the layer.
        """
        if not self._active:
            raise ModelError("ExpertEngine.expect needs the block `with engine:` around it")
        self._experts.watch = watch_for(self._experts, rows, owner, mask)

    def add(
        self,
        losses: Tensor,
        unit_of_row: npt.NDArray[np.int64] | Tensor,
        units: int,
        clipping: Clipping,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Add the clipped gradients of one micro-batch to the running sums.

        A unit's gradient is the mean of its rows' gradients; where it isn't finite, the unit contributes
        exactly zero.

        Args:
            losses: (rows,), from a forward pass announced by `expect`; row i depends on row i's record only.
            unit_of_row: (rows,) integers below `units`; all rows of a unit are here.
            units: number of units in the micro-batch.
            clipping: rule and bound C.
            weights: (rows,) multiply the losses before clipping, as constants (`residual_weights`).

        Returns:
            (units,) float64 norms before clipping, NaN or infinite where they are. Private.

        Raises:
            ModelError: the forward pass was not announced, or a row's loss depends on other rows.
        """
        rows = rows_of(losses, unit_of_row, units)
        watch, self._experts.watch = self._experts.watch, None
        if not len(losses):
            return torch.zeros(units, dtype=torch.float64, device=losses.device)
        if watch is None or watch.rows != len(losses):
            raise ModelError(f"ExpertEngine.expect({len(losses)}, …) must come before the forward pass")
        if watch.output is None or watch.pairs is None or not losses.requires_grad:
            raise ModelError("the losses don't depend on the experts that are trained")
        if not self._independent and len(losses) > 1:
            check_independence(losses, watch)
            self._independent = True
        weights = torch.ones_like(losses) if weights is None else weights.detach().to(losses.dtype)
        (gradient,) = torch.autograd.grad(losses, watch.output, weights)
        with torch.no_grad():
            return self._clip(watch, gradient, rows, clipping)

    def take(self) -> dict[str, Tensor]:
        """The sums since the last `take`, (E, …) each, and start again from zero.

        An expert that no row reached is all zeros; it gets its noise like any other.
        """
        return self._sums.take()

    def _clip(self, watch: Watch, gradient: Tensor, rows: Rows, clipping: Clipping) -> Tensor:
        assert watch.pairs is not None
        parts = expert_parts(self._experts, self._names, watch.pairs, gradient, rows)
        squares, slack = total(parts, rows)
        dtype = torch.float64 if self._wide else torch.float32
        factors = Factors(clip_factors(squares, slack, clipping, dtype) * rows.share)
        while parts:
            parts.pop().add_to(self._sums, factors, rows)
        return squares.clamp(min=0).sqrt()


def watch_for(
    experts: OwnerExperts,
    rows: int,
    owner: npt.NDArray[np.int64] | Tensor | None,
    mask: npt.NDArray[Any] | Tensor | None,
) -> Watch:
    """What the next forward pass of these experts is to keep.

    Raises:
        ModelError: an owner that is no expert of the layer.
    """
    device = experts.get_parameter(experts.form.up).device
    if owner is not None:
        owner = torch.as_tensor(owner, dtype=torch.int64, device=device)
        if owner.shape != (rows,):
            raise ModelError(f"need one owner per row; got shape {tuple(owner.shape)} for {rows} rows")
        if rows and not 0 <= int(owner.min()) <= int(owner.max()) < experts.experts:
            raise ModelError(f"owners must lie between 0 and {experts.experts - 1}")
    return Watch(rows, owner, None if mask is None else torch.as_tensor(mask, device=device))


def check_independence(losses: Tensor, watch: Watch) -> None:
    """The loss of the first and of the last row must reach no other row of the layer's output.

    Raises:
        ModelError: it does.
    """
    assert watch.output is not None
    rows = len(losses)
    for row in (0, rows - 1):
        weights = torch.zeros_like(losses)
        weights[row] = 1
        (gradient,) = torch.autograd.grad(losses, watch.output, weights, retain_graph=True)
        # Layers that repeat their tokens for every expert still have the row as the next dimension.
        leak = gradient.view(-1, rows, watch.length, gradient.shape[1])
        others = torch.arange(rows, device=losses.device) != row
        found = leak[:, others]
        if bool(((found != 0) & found.isfinite()).any()):
            raise ModelError(
                "the loss of one row depends on other rows at the experts: a record's gradient must "
                "depend on that record alone"
            )


def trained_names(
    model: nn.Module, experts: OwnerExperts, parameters: Mapping[str, nn.Parameter]
) -> dict[str, str]:
    """Name in the experts → name of the trained parameter.

    Raises:
        ModelError: a parameter that isn't the experts', or that the model uses elsewhere too.
    """
    if not parameters:
        raise ModelError("nothing to train: the engine was given no parameter")
    trained = {id(value): name for name, value in experts.trained().items()}
    names: dict[str, str] = {}
    for name, parameter in parameters.items():
        own = trained.get(id(parameter))
        if own is None:
            raise ModelError(f"{name!r} is no trained parameter of the experts that were attached")
        names[own] = name
    holders = {id(value): path for path, value in _uses(model, experts)}
    if not any(module is experts for module in model.modules()):
        raise ModelError("the experts are not attached to a layer of this model")
    for name, parameter in parameters.items():
        if id(parameter) in holders:
            raise ModelError(
                f"{name!r} is used by {holders[id(parameter)]} too; shared experts can't be clipped exactly"
            )
    return names


def _uses(model: nn.Module, experts: OwnerExperts) -> list[tuple[str, nn.Parameter]]:
    """Every parameter held by a module of the model other than the experts, with where it is held."""
    return [
        (path or "the model", parameter)
        for path, module in model.named_modules()
        if module is not experts
        for parameter in module._parameters.values()
        if parameter is not None
    ]
