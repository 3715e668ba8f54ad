"""One forward pass as a tree of module calls: shapes, and where which parameter was used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(eq=False)
class Call:
    """One call of a module.

    Attributes:
        inputs: shapes of the tensors among its arguments, in order.
        lone: its only argument is a tensor.
        outputs: shapes of the tensors it returned through which a gradient may come.
        places: which of the tensors it returned those are.
        used: ids of the watched parameters that its own code used, not that of modules it called.
        unseen: as `used`, in a call made without gradients.
        opaque: something else went in or out that tensors may hide in, such as a cache.
        blind: it was called without gradients.
        dynamic: its own code chose entries by their value, so that shapes depend on data.
        scales: all that its own code does is to multiply its argument by a watched parameter.
        children: calls that it made, in order.
    """

    module: nn.Module
    inputs: list[torch.Size]
    lone: bool = False
    outputs: list[torch.Size] = field(default_factory=list)
    places: tuple[int, ...] = ()
    used: set[int] = field(default_factory=set)
    unseen: set[int] = field(default_factory=set)
    opaque: bool = False
    blind: bool = False
    dynamic: bool = False
    scales: bool = False
    functions: list[tuple[str, tuple[Any, ...], Any]] = field(default_factory=list)
    children: list[Call] = field(default_factory=list)

    def subtree(self) -> Iterator[Call]:
        """This call and all below it."""
        yield self
        for child in self.children:
            yield from child.subtree()


def trace(
    model: nn.Module,
    watched: set[int],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    change: Callable[[nn.Module, Any], Any] = lambda module, output: output,
) -> tuple[Call, Any]:
    """Call the model once; its tree of calls, and its output.

    Args:
        model: its trained parameters require gradients.
        watched: ids of parameters.
        args, kwargs: of the call.
        change: what takes the place of each module's output.
    """
    top = Call(nn.Module(), [])
    stack = [top]

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        call = Call(module, [tensor.shape for tensor in tensors_in((args, kwargs))])
        call.lone = [isinstance(value, Tensor) for value in (*args, *kwargs.values())] == [True]
        call.opaque = not _is_plain((args, kwargs))
        call.blind = not torch.is_grad_enabled()
        stack[-1].children.append(call)
        stack.append(call)

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        call = stack.pop()
        returned = tensors_in(output)
        call.places = tuple(i for i, tensor in enumerate(returned) if tensor.requires_grad)
        call.outputs = [returned[i].shape for i in call.places]
        call.opaque |= not _is_plain(output)
        call.scales = call.lone and _is_scaling(call, next(iter((*args, *kwargs.values()))), output, watched)
        call.functions = []
        return change(module, output)

    with _hooked(model, before, after), _Uses(watched, stack), _Dynamic(stack), torch.enable_grad():
        output = model(*args, **kwargs)
    return top.children[0], output


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a nested value, in a fixed order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _is_plain(value: Any) -> bool:
    known = (Tensor, nn.Module, bool, int, float, str, torch.dtype, torch.device, Enum)
    return all(leaf is None or isinstance(leaf, known) for leaf in tree_leaves(value))


def _is_scaling(call: Call, argument: Tensor, output: Any, watched: set[int]) -> bool:
    if call.children or len(call.functions) != 1:
        return False
    name, factors, product = call.functions[0]
    if name not in ("mul", "multiply", "__mul__", "__rmul__") or product is not output or len(factors) != 2:
        return False
    weight = factors[1] if factors[0] is argument else factors[0]
    inputs = factors[0] if factors[0] is argument else factors[1]
    if inputs is not argument or id(weight) not in watched:
        return False
    trailing: torch.Size = argument.shape[argument.ndim - weight.ndim :]
    return bool(weight.ndim < argument.ndim and weight.shape == trailing)


@contextmanager
def _hooked(model: nn.Module, before: Any, after: Any) -> Iterator[None]:
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Uses(TorchFunctionMode):
    """Notes functions that a watched parameter enters and something differentiable leaves."""

    def __init__(self, watched: set[int], stack: list[Call]) -> None:
        super().__init__()
        self._watched, self._stack = watched, stack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._stack[-1].functions.append((getattr(func, "__name__", ""), tuple(args), output))
        used = {id(tensor) for tensor in tensors_in((args, kwargs))} & self._watched
        if used and any(tensor.requires_grad for tensor in tensors_in(output)):
            self._stack[-1].used |= used
        elif used and self._stack[-1].blind and any(x.is_floating_point() for x in tensors_in(output)):
            self._stack[-1].unseen |= used
        return output


class _Dynamic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations whose output's shape depends on values."""

    def __init__(self, stack: list[Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stack = stack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.dynamic_output_shape in func.tags:
            masks = [tensor for tensor in tensors_in(args[1:]) if tensor.dtype in (torch.bool, torch.uint8)]
            if func.overloadpacket is not torch.ops.aten.index or masks:
                self._stack[-1].dynamic = True
        return func(*args, **(kwargs or {}))
