"""Clipped sums of per-unit gradients from one forward and one backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.hooks import RemovableHandle

from confide.errors import ModelError
from confide.gradients.clipping import clip_factors
from confide.gradients.contributions import Contribution, PerRow, combine
from confide.gradients.parts import Factors, Part, Rows, Sums, total
from confide.gradients.plan import Site, plan
from confide.gradients.recompute import Recomputation, check_same, take_apart
from confide.gradients.rules import obstacle
from confide.gradients.trace import tensors_in
from confide.privacy.streams import Clipping

_REENTRANT = "If it is checkpointed, ask for non-reentrant checkpointing: use_reentrant=False"


class _Keep(torch.autograd.Function):
    """Holds tensors the way autograd holds what backward needs, so that gradient checkpointing drops and
    recomputes them as well, and changes in place are noticed."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(*tensors)
        return token.view_as(token)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        raise AssertionError("never part of a loss")


@dataclass(eq=False)
class _Use:
    """One call of a site, until the gradients of its outputs arrive.

    Attributes:
        names: path inside the module → parameter name, without those that a site around it answers for.
        kept: autograd's node that holds the tensor arguments.
        waiting: number of outputs whose gradient has not arrived.
        again: how to run it again, where there is no rule.
        before: what came out, by position, where that has to be compared.
    """

    site: Site
    names: dict[str, str]
    kept: Any
    waiting: int
    again: Recomputation | None = None
    before: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)


class Engine:
    """Per-unit clipped gradient sums of a model, by book-keeping (Bu et al. 2023, algorithm 1).

    Inside `with engine`, the user calls the model and gets one loss per row; `add` runs one backward pass
    with respect to activations only and adds Σ_units factor·gradient to the running sums. No weight
    gradient is formed by autograd and `.grad` is never set. The rounding of the sum itself over units is
    that of the parameters' dtype, float32 or wider.

    Where each parameter's gradient is taken is planned in the first forward pass, which calls the model three
    times more, on a few of its rows.

    Args:
        model: every call of it inside the block computes losses, its inputs have the row as first
            dimension (inputs whose first dimension is another are shared by all rows).
        parameters: what is trained, by name: parameters of `model`, matched by identity. Everything else is
            frozen inside the block.

    Raises:
        ModelError: a parameter that can't be clipped exactly; names it and its module's type.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._model = model
        self._parameters = dict(parameters)
        _refuse_parameters(model, self._parameters)
        self._sites: list[Site] | None = None
        self._checked: set[Site] = set()
        self._independent = False
        self._sums = Sums(self._parameters)
        self._open = ExitStack()
        self._active = False
        self._asleep = False
        self._answered: Counter[str] = Counter()
        self._forget()

    def __enter__(self) -> Self:
        if self._active:
            raise ModelError("the engine is active already")
        _refuse_mode(self._model)
        self._active = True
        self._open = ExitStack()
        # A recomputation that stopped half-way would leave modules that have begun and never ended.
        self._open.enter_context(set_checkpoint_early_stop(False))
        for parameter in self._model.parameters():
            self._open.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(False)
        self._own(True)
        self._hook(self._model.register_forward_pre_hook(self._before_model, with_kwargs=True))
        for site in self._sites or ():
            self._watch(site)
        self._hook(self._model.register_forward_hook(self._after_model))
        return self

    def __exit__(self, *_: object) -> None:
        self._active = False
        self._open.close()
        self._forget()

    @property
    def sites(self) -> tuple[Site, ...]:
        """Where gradients are taken; empty before the first forward pass."""
        return tuple(self._sites or ())

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
            ModelError: a trained parameter was used otherwise than in the first forward pass; a row's loss
                depends on other rows.
        """
        if not self._active:
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
                self._finish()
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
        try:
            grads = torch.autograd.grad(
                losses, [*self._leaves, *watched], weights, retain_graph=keep, allow_unused=True
            )
        except RuntimeError as error:
            if "use_reentrant" in str(error):
                raise ModelError(_REENTRANT) from error
            raise
        for name, grad in zip(self._parameters, grads[len(self._leaves) :], strict=True):
            if grad is not None:
                raise ModelError(
                    f"parameter {name!r} is used outside its module's forward pass, where it was not in the "
                    "first one, so its per-record gradient would be incomplete; freeze it"
                )

    def _check_uses(self, losses: Tensor) -> None:
        if not self._width:
            raise ModelError("the losses must come from calling the engine's own model inside the block")
        if not self._uses or not losses.requires_grad:
            raise ModelError("the losses don't depend on any trained parameter")
        if self._width != len(losses):
            raise ModelError(
                f"the model was called on {self._width} rows, but there are {len(losses)} losses"
            )

    def _check_independence(self, losses: Tensor) -> None:
        """The loss of the first and of the last row must reach no other row of any trained layer."""
        for row in (0, len(losses) - 1):
            weights = torch.zeros_like(losses)
            weights[row] = 1
            self._looking = row
            try:
                self._backward(losses, weights, keep=True)
            finally:
                self._looking = None
        self._independent = True

    def _before_model(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._asleep:
            return
        self._answered.clear()
        self._own(True)
        self._training = torch.is_grad_enabled()
        if self._training and not self._running:
            tensors = tensors_in((args, kwargs))
            if any(tensor.requires_grad for tensor in tensors):
                raise ModelError("an input of the model requires gradients; only its parameters are trained")
            width = max((len(tensor) for tensor in tensors if tensor.ndim), default=0)
            if self._width not in (0, width):
                raise ModelError(f"the model was called on {self._width} rows, and then on {width}")
            self._width = width
            if self._sites is None and width:
                self._plan(args, kwargs)
        for site in self._sites or ():
            if site.module is self._model:
                self._before(site)

    def _after_model(self, *_: Any) -> None:
        if not self._asleep:
            self._training = False

    def _plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._asleep = True
        try:
            self._sites = plan(self._model, self._parameters, args, kwargs, self._width)
        finally:
            self._asleep = False
        for site in self._sites:
            self._watch(site)

    def _watch(self, site: Site) -> None:
        if site.module is not self._model:  # whose own hook may be running, and calls `_before` itself
            self._hook(site.module.register_forward_pre_hook(lambda *_: self._before(site)))

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            return self._after(site, args, kwargs, output)

        self._hook(site.module.register_forward_hook(after, with_kwargs=True, prepend=True))

    def _hook(self, handle: RemovableHandle) -> None:
        self._open.callback(handle.remove)

    def _before(self, site: Site) -> None:
        if not self._asleep:
            for name in site.names.values():
                self._answered[name] += 1
                self._parameters[name].requires_grad_(False)

    def _after(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self._asleep:
            return output
        names = {}
        for path, name in site.names.items():
            self._answered[name] -= 1
            if not self._answered[name]:  # no site around this one answers for it
                self._parameters[name].requires_grad_(True)
                names[path] = name
        if not names:
            return output
        if not torch.is_grad_enabled():
            if self._training:
                raise ModelError(f"{site} was called without gradients, so it can't be trained. {_REENTRANT}")
            return output
        return (
            self._apply_rule(site, names, args, kwargs, output)
            if site.rule
            else (self._apply_again(site, names, args, kwargs, output))
        )

    def _apply_rule(
        self, site: Site, names: dict[str, str], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        inputs, *others = [*args, *kwargs.values()]
        if others or not isinstance(inputs, Tensor) or not isinstance(output, Tensor):
            raise ModelError(f"{site} was called with more than its input tensor")
        inputs = inputs.detach()
        if inputs.ndim and len(inputs) == len(output) == 1 and self._width > 1:
            inputs = inputs.expand(self._width, *inputs.shape[1:])
            output = output.expand(self._width, *output.shape[1:])
        self._check_shape(site, inputs)
        use = _Use(site, names, self._keep([inputs]), 1)
        self._note(use)
        return self._wait_for(use, 0, output)

    def _apply_again(
        self, site: Site, names: dict[str, str], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        arguments, tensors = take_apart(leaves)
        returned, output_spec = tree_flatten(output)
        places = [index for index, leaf in enumerate(returned) if isinstance(leaf, Tensor)]
        if len(tensors) != len(site.has_rows) or max(site.outputs) >= len(places):
            raise ModelError(f"{site} was called with other arguments than in the first forward pass")
        for tensor, has_rows in zip(tensors, site.has_rows, strict=True):
            if has_rows:
                self._check_shape(site, tensor)
        again = Recomputation(site.module, tuple(names), arguments, spec, site.has_rows)
        use = _Use(site, names, self._keep(tensors), len(site.outputs), again)
        self._note(use)
        for index in site.outputs:
            value = returned[places[index]]
            self._check_shape(site, value)
            if site not in self._checked:
                use.before[index] = value.detach()
            # An alias: inside the module others may have read the same tensor.
            returned[places[index]] = self._wait_for(use, index, value.view_as(value))
        return tree_unflatten(returned, output_spec)

    def _check_shape(self, site: Site, tensor: Tensor) -> None:
        if not tensor.ndim or len(tensor) % self._width:
            raise ModelError(
                f"{site} was called on an input of shape {tuple(tensor.shape)} in a batch of {self._width} "
                "rows; its first dimension must be the row, or clipping would bound something else than a "
                "record"
            )

    def _keep(self, tensors: list[Tensor]) -> Any:
        token = torch.zeros((), requires_grad=True)
        return _Keep.apply(token, *tensors).grad_fn  # type: ignore[no-untyped-call]

    def _note(self, use: _Use) -> None:
        if not self._running:  # gradient checkpointing calls modules again
            self._uses.append(use)
            self._expected.update(use.names.values())

    def _wait_for(self, use: _Use, index: int, output: Tensor) -> Tensor:
        if not output.requires_grad:
            leaf = output.detach().requires_grad_()
            if not self._running:
                self._leaves.append(leaf)
            output = leaf.clone()  # which the model may change in place
        if not self._running:
            output.register_hook(lambda gradient: self._receive(use, index, gradient))
        return output

    @property
    def _running(self) -> bool:
        """Whether a backward pass is under way."""
        return self._rows is not None or self._looking is not None

    def _receive(self, use: _Use, index: int, gradient: Tensor) -> None:
        if self._looking is not None:
            self._refuse_leak(use.site, gradient, self._looking)
            return
        if self._rows is None:
            raise ModelError("inside the block gradients are taken by Engine.add, not by backward()")
        use.gradients[index] = gradient
        use.waiting -= 1
        if not use.waiting:
            self._settle(use, self._rows)

    def _refuse_leak(self, site: Site, gradient: Tensor, row: int) -> None:
        others = torch.arange(self._width, device=gradient.device) != row
        leak = gradient.reshape(self._width, -1)[others]
        if bool(((leak != 0) & leak.isfinite()).any()):
            raise ModelError(
                f"the loss of one row depends on other rows at {site}: a record's gradient must depend on that "
                "record alone"
            )

    def _settle(self, use: _Use, rows: Rows) -> None:
        """Turn what a use kept into its contributions, and those that are complete into parts."""
        try:
            tensors = use.kept.saved_tensors
        except RuntimeError as error:
            if "inplace" not in str(error):
                raise
            raise ModelError(f"the input of {use.site} was changed in place after it was used") from error
        if use.again is None:
            found = self._by_rule(use, *tensors)
        else:
            found = self._recomputed(use, use.again, tensors)
        use.kept = use.again = None
        use.before, use.gradients = {}, {}
        for contribution in found:
            name = contribution.name
            self._pending.setdefault(name, []).append(contribution)
            self._expected[name] -= 1
            if not self._expected[name]:
                self._parts.append(combine(self._pending.pop(name), rows))

    def _by_rule(self, use: _Use, inputs: Tensor) -> list[Contribution]:
        gradient = use.gradients.pop(0)
        if gradient.dtype in (torch.float16, torch.bfloat16):
            gradient = gradient.float()
        if inputs.is_floating_point() and inputs.dtype != gradient.dtype:
            inputs = inputs.to(gradient.dtype)
        assert use.site.rule is not None
        return use.site.rule(use.site.module, use.names, inputs, gradient, self._width)

    def _recomputed(self, use: _Use, again: Recomputation, tensors: tuple[Tensor, ...]) -> list[Contribution]:
        self._asleep = True
        self._own(False)
        try:
            found, outputs = again.gradients(tensors, use.gradients, self._width)
        finally:
            self._asleep = False
            self._own(True)
        if use.site not in self._checked:
            check_same(outputs, use.before, str(use.site))
            self._checked.add(use.site)
        return [
            PerRow(use.names[path], values.to(torch.promote_types(values.dtype, torch.float32)))
            for path, values in found.items()
        ]

    def _finish(self) -> None:
        """What is left where a gradient never came, because the losses don't depend on that output."""
        assert self._rows is not None
        for use in self._uses:
            if use.gradients:
                self._settle(use, self._rows)
        self._parts += [combine(uses, self._rows) for uses in self._pending.values()]
        self._pending = {}

    def _own(self, flag: bool) -> None:
        for parameter in self._parameters.values():
            parameter.requires_grad_(flag)

    def _forget(self) -> None:
        self._uses: list[_Use] = []
        self._leaves: list[Tensor] = []
        self._expected: Counter[str] = Counter()
        self._pending: dict[str, list[Contribution]] = {}
        self._parts: list[Part] = []
        self._rows: Rows | None = None
        self._looking: int | None = None
        self._training = False
        self._width = 0


def _refuse_parameters(model: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    names = {id(parameter): name for name, parameter in parameters.items()}
    if not names:
        raise ModelError("nothing to train: the engine was given no parameter")
    if len(names) != len(parameters):
        raise ModelError("two names were given for one parameter")
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
                f"{path} ({kind}) computes statistics of the whole batch, which mix records; replace it by "
                "GroupNorm, or use the statistics it has with .eval()"
            )
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            raise ModelError(
                f"{path} ({kind}) keeps statistics of the records it has seen, without noise; call .eval() "
                "on it or build it with track_running_stats=False"
            )
