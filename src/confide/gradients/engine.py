"""Clipped sums of per-unit gradients from one forward and one backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from confide.errors import ModelError
from confide.gradients.clipping import clip_factors
from confide.gradients.parts import Factors, Part, Rows, Sums, total
from confide.gradients.rules import RULES, obstacle
from confide.privacy.streams import Clipping


@dataclass(frozen=True)
class _Layer:
    """A module whose parameters are trained: its path, and attribute → parameter name."""

    path: str
    module: nn.Module
    names: dict[str, str]


@dataclass
class _Use:
    """One call of a layer: its input, until the output's gradient arrives."""

    layer: _Layer
    inputs: Tensor
    version: int
    gradient: Tensor | None = None


class Engine:
    """Per-unit clipped gradient sums of a model, by book-keeping (Bu et al. 2023, algorithm 1).

    Inside `with engine`, the user calls the model and gets one loss per row; `add` runs one backward pass
    with respect to activations only and adds Σ_units factor·gradient to the running sums. No weight
    gradient is formed by autograd and `.grad` is never set. The rounding of the sum itself over units is
    that of the parameters' dtype, float32 or wider.

    Args:
        model: every call of it inside the block computes losses, its inputs have the row as first
            dimension (inputs whose first dimension is 1 are shared by all rows).
        parameters: what is trained, by name: parameters of `model`, matched by identity. Everything else is
            frozen inside the block.

    Raises:
        ModelError: a parameter that can't be clipped exactly; names it and its module's type.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._model = model
        self._parameters = dict(parameters)
        self._layers = _cover(model, self._parameters)
        self._sums = Sums(self._parameters)
        self._handles: list[RemovableHandle] = []
        self._frozen: list[tuple[nn.Parameter, bool]] = []
        self._uses: dict[nn.Module, _Use] = {}
        self._leaves: list[Tensor] = []
        self._width = 0
        self._rows: Rows | None = None
        self._parts: list[Part] = []
        self._looking = False
        self._independent = False

    def __enter__(self) -> Self:
        if self._handles:
            raise ModelError("the engine is active already")
        _refuse_mode(self._model)
        self._frozen = [(parameter, parameter.requires_grad) for parameter in self._model.parameters()]
        for parameter, _ in self._frozen:
            parameter.requires_grad_(False)
        self._own(True)
        self._handles.append(self._model.register_forward_pre_hook(self._before_model, with_kwargs=True))
        for layer in self._layers:
            self._handles.append(layer.module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(
                layer.module.register_forward_hook(_bound(self, layer), with_kwargs=True, prepend=True)
            )
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for parameter, flag in self._frozen:
            parameter.requires_grad_(flag)
        self._frozen = []
        self._forget()

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
            (units,) float64 norms before clipping, NaN or infinite where they are. Private.

        Raises:
            ModelError: a trained layer was called on something else than one entry per row, or twice; a
                trained parameter is used outside its module; a row's loss depends on other rows.
        """
        if not self._handles:
            raise ModelError("Engine.add needs the block `with engine:` around it and the forward pass")
        unit = torch.as_tensor(unit_of_row, dtype=torch.int64, device=losses.device)
        if losses.ndim != 1 or unit.shape != losses.shape:
            raise ModelError(
                f"need one loss and one unit per row; got losses of shape {tuple(losses.shape)} and units of "
                f"shape {tuple(unit.shape)}"
            )
        if len(unit) and not 0 <= int(unit.min()) <= int(unit.max()) < units:
            raise ModelError(f"units of rows must lie between 0 and {units - 1}")
        try:
            if not len(losses):
                return torch.zeros(units, dtype=torch.float64, device=losses.device)
            self._check_uses(losses)
            if not self._independent and len(losses) > 1:
                self._check_independence(losses)
            self._rows = Rows(unit, units)
            self._backward(losses, torch.ones_like(losses), keep=False)
            with torch.no_grad():
                return self._clip(self._rows, clipping)
        finally:
            self._forget()

    def take(self) -> dict[str, Tensor]:
        """The sums since the last `take`, float32 or wider, and start again from zero."""
        return self._sums.take()

    def _clip(self, rows: Rows, clipping: Clipping) -> Tensor:
        squares, slack = total(self._parts, rows)
        wide = all(parameter.dtype == torch.float64 for parameter in self._parameters.values())
        dtype = torch.float64 if wide else torch.float32
        factors = Factors(clip_factors(squares, slack, clipping, dtype) * rows.share)
        while self._parts:
            self._parts.pop().add_to(self._sums, factors, rows)
        return squares.clamp(min=0).sqrt()

    def _backward(self, losses: Tensor, weights: Tensor, *, keep: bool) -> None:
        watched = list(self._parameters.values())
        grads = torch.autograd.grad(
            losses, [*self._leaves, *watched], weights, retain_graph=keep, allow_unused=True
        )
        for name, grad in zip(self._parameters, grads[len(self._leaves) :], strict=True):
            if grad is not None:
                raise ModelError(
                    f"parameter {name!r} is used outside its module's forward pass, so its per-record "
                    "gradient would be incomplete; freeze it or call its module"
                )

    def _check_uses(self, losses: Tensor) -> None:
        if not self._width:
            raise ModelError("the losses must come from calling the engine's own model inside the block")
        if not self._uses or not losses.requires_grad:
            raise ModelError("the losses don't depend on any trained parameter")
        for use in self._uses.values():
            if use.inputs.shape[0] != len(losses):
                raise ModelError(
                    f"{use.layer.path} ({type(use.layer.module).__name__}) was called on an input of shape "
                    f"{tuple(use.inputs.shape)} in a batch of {len(losses)} rows; its first dimension must "
                    "be the row, or clipping would bound something else than a record"
                )
            if use.inputs._version != use.version:
                raise ModelError(f"the input of {use.layer.path} was changed in place after it was used")

    def _check_independence(self, losses: Tensor) -> None:
        """The loss of the first and of the last row must reach no other row of any trained layer."""
        for row in (0, len(losses) - 1):
            weights = torch.zeros_like(losses)
            weights[row] = 1
            self._looking = True
            try:
                self._backward(losses, weights, keep=True)
            finally:
                self._looking = False
            others = torch.arange(len(losses), device=losses.device) != row
            for use in self._uses.values():
                if use.gradient is None:
                    continue
                leak = use.gradient[others]
                if bool(((leak != 0) & leak.isfinite()).any()):
                    raise ModelError(
                        f"the loss of one row depends on other rows at {use.layer.path} "
                        f"({type(use.layer.module).__name__}): a record's gradient must depend on that "
                        "record alone"
                    )
                use.gradient = None
        self._independent = True

    def _before_model(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = list(_tensors((args, kwargs)))
        if any(tensor.requires_grad for tensor in tensors):
            raise ModelError("an input of the model requires gradients; only its parameters are trained")
        self._width = max((len(tensor) for tensor in tensors if tensor.ndim), default=0)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(False)

    def _after(self, layer: _Layer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        for attribute in layer.names:
            getattr(layer.module, attribute).requires_grad_(True)
        if not torch.is_grad_enabled():
            return output
        inputs, *others = [*args, *kwargs.values()]
        if others or not isinstance(inputs, Tensor) or not isinstance(output, Tensor):
            raise ModelError(f"{layer.path} was called with more than its input tensor")
        if layer.module in self._uses or self._rows is not None:
            raise ModelError(
                f"{layer.path} ({type(layer.module).__name__}) was called twice before Engine.add: shared "
                "layers and gradient checkpointing can't be clipped exactly yet"
            )
        inputs = inputs.detach()
        if inputs.ndim and len(inputs) == 1 and self._width > 1:
            inputs = inputs.expand(self._width, *inputs.shape[1:])
            output = output.expand(self._width, *output.shape[1:])
        if not output.requires_grad:
            output = output.detach().requires_grad_()
            self._leaves.append(output)
        self._uses[layer.module] = _Use(layer, inputs, inputs._version)
        output.register_hook(lambda gradient: self._receive(layer, gradient))
        return output

    def _receive(self, layer: _Layer, gradient: Tensor) -> None:
        if self._looking:
            self._uses[layer.module].gradient = gradient
            return
        if self._rows is None:
            raise ModelError("inside the block gradients are taken by Engine.add, not by backward()")
        inputs = self._uses.pop(layer.module).inputs
        if gradient.dtype in (torch.float16, torch.bfloat16):
            gradient = gradient.float()
        if inputs.is_floating_point() and inputs.dtype != gradient.dtype:
            inputs = inputs.to(gradient.dtype)
        rule = RULES[type(layer.module)]
        self._parts += rule(layer.module, layer.names, inputs, gradient, self._rows)

    def _own(self, flag: bool) -> None:
        for parameter in self._parameters.values():
            parameter.requires_grad_(flag)

    def _forget(self) -> None:
        self._uses = {}
        self._leaves = []
        self._parts = []
        self._rows = None
        self._width = 0


def _bound(engine: Engine, layer: _Layer) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        return engine._after(layer, args, kwargs, output)

    return hook


def _cover(model: nn.Module, parameters: dict[str, nn.Parameter]) -> list[_Layer]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    if not names:
        raise ModelError("nothing to train: the engine was given no parameter")
    if len(names) != len(parameters):
        raise ModelError(
            "two names were given for one parameter; tied parameters can't be clipped exactly yet"
        )
    found: dict[str, str] = {}
    layers: list[_Layer] = []
    for path, module in model.named_modules():
        own = {
            attribute: names[id(parameter)]
            for attribute, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in names
        }
        if not own:
            continue
        kind = type(module).__name__
        for name in own.values():
            if name in found:
                raise ModelError(
                    f"parameter {name!r} is tied: {found[name]} and {path or 'the model'} ({kind}) share it; "
                    "tied weights can't be clipped exactly yet"
                )
            found[name] = path or "the model"
        reason = obstacle(module)
        if reason is not None:
            raise ModelError(
                f"parameter {next(iter(own.values()))!r} of {path or 'the model'} ({kind}) can't be clipped "
                f"exactly: {reason}; freeze it"
            )
        layers.append(_Layer(path, module, own))
    missing = [name for name in parameters if name not in found]
    if missing:
        raise ModelError(f"parameter {missing[0]!r} belongs to no module of the model given to the engine")
    return layers


def _refuse_mode(model: nn.Module) -> None:
    if torch.get_float32_matmul_precision() != "highest":
        raise ModelError(
            "float32 matrix products have reduced precision, which voids the clipping bound; call "
            'torch.set_float32_matmul_precision("highest")'
        )
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise ModelError(
            "autocast would take norms and sums in half precision, which voids the clipping bound"
        )
    for path, module in model.named_modules():
        kind = type(module).__name__
        if not module.training:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ModelError(f"{path} ({kind}) is active dropout; set its rate to 0 or call model.eval()")
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ModelError(
                f"{path} ({kind}) mixes records of a batch; freeze it with .eval() or replace it"
            )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
