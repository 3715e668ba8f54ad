"""Hooks on the planned modules: what each call was given, and the gradients of what it returned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import set_checkpoint_early_stop

from confide.errors import ModelError
from confide.gradients.contributions import Contribution, PerRow, Product
from confide.gradients.plan import Site, plan
from confide.gradients.recompute import Recomputation, agree, check_same, take_apart
from confide.gradients.trace import tensors_in

REENTRANT = "If it is checkpointed, ask for non-reentrant checkpointing: use_reentrant=False"


class _Keep(torch.autograd.Function):
    """Holds tensors the way autograd holds what backward needs, so that gradient checkpointing drops and
    recomputes them as well, and changes in place are noticed."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return token.view_as(token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("never part of a loss")


class _Alias(torch.autograd.Function):
    """The same values as a tensor of its own instead of a view, which a change in place would cut off from
    its hooks."""

    @staticmethod
    def forward(ctx: Any, view: Tensor) -> Tensor:
        return view.data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


@dataclass(eq=False)
class Use:
    """One call of a site, until the gradients of its outputs arrive.

    Attributes:
        names: path inside the module → parameter name, without those that a site around it answers for.
        kept: autograd's node that holds the tensor arguments.
        waiting: number of outputs whose gradient has not arrived.
        again: how to run it again, where there is no rule.
        before: what came out, by position, where that has to be compared.
        half: it ran under autocast.
        given: places of the tensors among the arguments, and whether each has rows.
    """

    site: Site
    names: dict[str, str]
    kept: Any
    waiting: int
    again: Recomputation | None = None
    before: dict[int, Tensor] = field(default_factory=dict)
    half: bool = False
    given: tuple[tuple[int, bool], ...] = ()
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def take(self) -> tuple[Tensor, ...]:
        """The tensor arguments; they are let go.

        Raises:
            ModelError: one was changed in place since.
        """
        try:
            tensors: tuple[Tensor, ...] = self.kept.saved_tensors
        except RuntimeError as error:
            if "inplace" not in str(error):
                raise
            raise ModelError(f"the input of {self.site} was changed in place after it was used") from error
        self.kept = None
        return tensors


class Watch:
    """Watches a model's forward passes, and hands over contributions during the backward pass.

    While a module runs, the parameters that it answers for don't require gradients; everywhere else they do,
    so that a use which nobody watches shows up as an ordinary gradient.

    Attributes:
        width: rows of the model's inputs; 0 before it was called.
        flattened: some tensor had several entries per row in its first dimension.
        uses: calls since `forget`.
        leaves: tensors that the backward pass has to reach.
        sites: the plan, made in the first forward pass.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._model = model
        self._parameters = parameters
        self._open = ExitStack()
        self._checked: set[tuple[Site, tuple[tuple[int, bool], ...]]] = set()
        self._places: dict[Site, dict[int, bool]] = {}
        self._entrywise: dict[tuple[Any, ...], frozenset[str]] = {}
        self._tables: set[tuple[Any, ...]] = set()
        self._answered: Counter[str] = Counter()
        self._asleep = False
        self._training = False
        self._receive: Callable[[Use, Tensor, int], None] | None = None
        self.sites: list[Site] | None = None
        self.width = 0
        self.flattened = False
        self.uses: list[Use] = []
        self.leaves: list[Tensor] = []

    def open(self) -> None:
        """Freeze everything else, and put the hooks in place."""
        self._open = ExitStack()
        # A recomputation that stopped half-way would leave modules that have begun and never ended.
        self._open.enter_context(set_checkpoint_early_stop(False))
        for parameter in self._model.parameters():
            self._open.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(False)
        self._own(True)
        handle = self._model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        self._open.callback(handle.remove)
        for site in self.sites or ():
            self._hook(site)
        handle = self._model.register_forward_hook(self._after_model)
        self._open.callback(handle.remove)

    def close(self) -> None:
        """Take the hooks away; every parameter is as it was."""
        self._open.close()
        self.forget()

    def forget(self) -> None:
        """Start again with no call."""
        self.uses, self.leaves, self.width, self.flattened = [], [], 0, False
        self._receive = None
        self._training = False

    def listen(self, receive: Callable[[Use, Tensor, int], None] | None) -> None:
        """A backward pass begins: what to call with each gradient; None when it ends."""
        self._receive = receive

    def collect(self, use: Use, gradient: Tensor, index: int) -> list[Contribution]:
        """Note a gradient; once all of the use's have come, its contributions."""
        use.gradients[index] = gradient
        use.waiting -= 1
        return self.settle(use) if not use.waiting else []

    def settle(self, use: Use) -> list[Contribution]:
        """Contributions of a use from the gradients that have come; its memory is freed."""
        tensors, gradients, before, again = use.take(), use.gradients, use.before, use.again
        use.gradients, use.before, use.again = {}, {}, None
        if again is None:
            return self._by_rule(use, tensors[0], gradients[0])
        self._asleep = True
        self._own(False)
        try:
            return self._again(use, again, tensors, gradients, before)
        finally:
            self._asleep = False
            self._own(True)

    def _again(
        self,
        use: Use,
        again: Recomputation,
        tensors: tuple[Tensor, ...],
        gradients: dict[int, Tensor],
        before: dict[int, Tensor],
    ) -> list[Contribution]:
        """Row by row the first time; from then on as tables or entry by entry, where that gave the same."""
        wide = next(iter(use.site.module.parameters())).dtype  # wider than what autocast passed around
        tensors = tuple(_widened(tensor, wide) for tensor in tensors)
        gradients = {place: _widened(gradient, wide) for place, gradient in gradients.items()}
        shapes = (use.site, use.given, again.names, *(tensor.shape[1:] for tensor in tensors))
        if not before and shapes in self._tables:
            found = self._as_tables(use, again, tensors, gradients)
            if found:
                return list(found)
        if not before and shapes in self._entrywise:
            return _per_row(use, again.by_entry(tensors, gradients, self.width, self._entrywise[shapes]))
        values, outputs = again.gradients(tensors, gradients, self.width)
        if before:
            check_same(outputs, before, str(use.site), half=use.half)
            if self.width > 1:  # a row that is alone says little about rows
                self._checked.add((use.site, use.given))
        self._entrywise[shapes] = again.entrywise(tensors, gradients, values)
        if len(self._entrywise[shapes]) < len(values):
            found = self._as_tables(use, again, tensors, gradients)
            formed = {use.names[path]: value for path, value in values.items()}
            if found and all(agree(use.formed(), formed[use.name]) for use in found):
                self._tables.add(shapes)
        return _per_row(use, values)

    def _as_tables(
        self, use: Use, again: Recomputation, tensors: tuple[Tensor, ...], gradients: dict[int, Tensor]
    ) -> list[Product]:
        maps = again.maps(tensors, gradients, self.width)
        right = next(iter(gradients.values()))
        right = right.reshape(self.width, -1, right.shape[-1])
        return [Product(use.names[path], left[None], right) for path, left in maps.items()]

    def _by_rule(self, use: Use, inputs: Tensor, gradient: Tensor) -> list[Contribution]:
        gradient = _widened(gradient, torch.float32)
        if inputs.is_floating_point() and inputs.dtype != gradient.dtype:
            inputs = inputs.to(gradient.dtype)
        assert use.site.rule is not None
        return use.site.rule(use.site.module, use.names, inputs, gradient, self.width)

    def _before_model(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._asleep:
            return
        self._training = torch.is_grad_enabled()
        if self._receive is None:
            self._answered.clear()
            self._own(True)
            if self._training:
                self._measure(args, kwargs)
        for site in self.sites or ():
            if site.module is self._model:
                self._before(site)

    def _measure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = tensors_in((args, kwargs))
        if any(tensor.requires_grad for tensor in tensors):
            raise ModelError("an input of the model requires gradients; only its parameters are trained")
        width = max((len(tensor) for tensor in tensors if tensor.ndim), default=0)
        if self.width not in (0, width):
            raise ModelError(f"the model was called on {self.width} rows, and then on {width}")
        self.width = width
        if self.sites is None and width:
            self._asleep = True
            try:
                self.sites = plan(self._model, self._parameters, args, kwargs, width)
            finally:
                self._asleep = False
            for site in self.sites:
                self._hook(site)

    def _after_model(self, *_: Any) -> None:
        if not self._asleep:
            self._training = False

    def _hook(self, site: Site) -> None:
        def before(*_: Any) -> None:
            self._before(site)

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            return self._after(site, args, kwargs, output)

        if site.module is not self._model:  # whose own hook may be running, and calls `_before` itself
            self._open.callback(site.module.register_forward_pre_hook(before).remove)
        handle = site.module.register_forward_hook(after, with_kwargs=True, prepend=True)
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
                raise ModelError(f"{site} was called without gradients, so it can't be trained. {REENTRANT}")
            return output
        if site.rule is None:
            return self._note_call(site, names, args, kwargs, output)
        return self._note_input(site, names, args, kwargs, output)

    def _note_input(
        self, site: Site, names: dict[str, str], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        inputs, *others = [*args, *kwargs.values()]
        if others or not isinstance(inputs, Tensor) or not isinstance(output, Tensor):
            raise ModelError(f"{site} was called with more than its input tensor")
        inputs = inputs.detach()
        if inputs.ndim and len(inputs) == len(output) == 1 and self.width > 1:
            inputs = inputs.expand(self.width, *inputs.shape[1:])
            output = output.expand(self.width, *output.shape[1:])
        self._check_shape(site, inputs)
        use = Use(site, names, _kept([inputs]), 1)
        self._note(use)
        return self._wait_for(use, 0, output)

    def _note_call(
        self, site: Site, names: dict[str, str], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        arguments, tensors = take_apart(leaves)
        returned, output_spec = tree_flatten(output)
        places = [index for index, leaf in enumerate(returned) if isinstance(leaf, Tensor)]
        if max(site.outputs) >= len(places):
            raise ModelError(f"{site} returned something else than in the first forward pass")
        given = self._given(site, leaves)
        has_rows = tuple(kind for _, kind in given)
        for tensor, kind in zip(tensors, has_rows, strict=True):
            if kind:
                self._check_shape(site, tensor)
        again = Recomputation(site.module, tuple(names), arguments, spec, has_rows, site.steady)
        use = Use(site, names, _kept(tensors), len(site.outputs), again, given=given)
        use.half = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
        self._note(use)
        for index in site.outputs:
            value = returned[places[index]]
            self._check_shape(site, value)
            if (site, given) not in self._checked:
                use.before[index] = value.detach().clone()
            if len(site.outputs) > 1 or any(value is leaf for leaf in leaves):
                value = value.clone()  # inside the module others may have read the same tensor
            returned[places[index]] = self._wait_for(use, index, value)
        return tree_unflatten(returned, output_spec)

    def _given(self, site: Site, leaves: list[Any]) -> tuple[tuple[int, bool], ...]:
        """Places of tensors among the arguments, and whether each has rows.

        As planned, in the order of the first call. An argument may come and go: masks are left out where
        nothing is padded. Whether a new one has rows is guessed by its length, and what comes out compared.
        """
        tensors = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        if site not in self._places:
            fits = len(tensors) == len(site.has_rows)
            self._places[site] = dict(zip(tensors, site.has_rows, strict=True)) if fits else {}
        planned = self._places[site]
        return tuple(
            (place, planned.get(place, bool(tensor.ndim) and len(tensor) % self.width == 0))
            for place, tensor in tensors.items()
        )

    def _check_shape(self, site: Site, tensor: Tensor) -> None:
        if not tensor.ndim or len(tensor) % self.width:
            raise ModelError(
                f"{site} was called on a tensor of shape {tuple(tensor.shape)} in a batch of {self.width} "
                "rows; its first dimension must be the row, or clipping would bound something else than a "
                "record"
            )
        self.flattened |= len(tensor) > self.width

    def _note(self, use: Use) -> None:
        if self._receive is None:  # else gradient checkpointing calls modules again
            self.uses.append(use)

    def _wait_for(self, use: Use, index: int, output: Tensor) -> Tensor:
        first = self._receive is None
        if not output.requires_grad:
            leaf = output.detach().requires_grad_()
            if first:
                self.leaves.append(leaf)
            output = leaf.clone()  # which the model may change in place
        elif output._is_view():
            # Products keep their factors, never their result: nobody else reads a linear layer's output.
            source = output._base.grad_fn if output._base is not None else None
            alone = source is not None and source.name() == "AddmmBackward0"
            output = _Alias.apply(output) if alone else output.clone()  # type: ignore[no-untyped-call]

        def arrive(gradient: Tensor) -> None:
            if self._receive is None:
                raise ModelError("inside the block gradients are taken by Engine.add, not by backward()")
            self._receive(use, gradient, index)

        if first:
            output.register_hook(arrive)  # type: ignore[no-untyped-call]
        return output

    def _own(self, flag: bool) -> None:
        for parameter in self._parameters.values():
            parameter.requires_grad_(flag)


def _per_row(use: Use, found: Mapping[str, Tensor]) -> list[Contribution]:
    return [
        PerRow(use.names[path], values.to(torch.promote_types(values.dtype, torch.float32)))
        for path, values in found.items()
    ]


def _kept(tensors: list[Tensor]) -> Any:
    token = torch.zeros((), requires_grad=True)
    return _Keep.apply(token, *tensors).grad_fn  # type: ignore[no-untyped-call]


def _widened(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype` if it is of half precision."""
    return tensor.to(dtype) if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
