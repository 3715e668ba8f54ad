"""Where each trained parameter's per-row gradient is taken: at its own module, or further out.

A module is a fit place if every tensor that it returns has the row as its first dimension: what is shared by
all rows (a table of relative positions, say) carries only the sum of their gradients. Which tensors those are
is found out, not guessed: the model is called on two and on three rows, and what grows has rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from confide.errors import ModelError
from confide.gradients.rules import Rule, norms, rule_of
from confide.gradients.trace import Call, tensors_in, trace


@dataclass(frozen=True, eq=False)
class Site:
    """A module at whose calls gradients of some parameters are taken.

    Attributes:
        path: the module's name in the model; empty for the model itself.
        names: parameter name inside the module → name given to the engine.
        rule: closed formula; None where the module is run again, row by row.
        has_rows: without a rule: whether each tensor among the arguments has rows, in order.
        outputs: without a rule: which tensors that it returns may bring a gradient.
        steady: nothing in it depends on values, so that rows can be run side by side.
    """

    path: str
    module: nn.Module
    names: dict[str, str]
    rule: Rule | None
    has_rows: tuple[bool, ...] = ()
    outputs: tuple[int, ...] = ()
    steady: bool = True

    def __str__(self) -> str:
        return f"{self.path or 'the model'} ({type(self.module).__name__})"


def plan(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    width: int,
) -> list[Site]:
    """Places that together see every use of the parameters, none twice.

    Args:
        model: `parameters` require gradients, nothing else does.
        args, kwargs: of a call of the model.
        width: number of rows; what has this first dimension has rows.

    Raises:
        ModelError: a parameter is used where no row can be told from another.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    two, three = (_with_rows((args, dict(kwargs)), width, count) for count in (2, 3))
    first, _ = trace(model, set(names), *two)
    second, output = trace(model, set(names), *three)
    for call in second.subtree():
        for unseen in call.unseen:
            raise ModelError(
                f"{type(call.module).__name__} was called without gradients, so parameter {names[unseen]!r} "
                "can't be trained. If it is checkpointed, ask for non-reentrant checkpointing: "
                "use_reentrant=False"
            )
    calls = _Pair.of(first, second, set(names))
    places = _places(calls, names, expand=True)
    shared = {place.call.module for place in places if place.expands}
    if shared and not _survives(model, set(names), three, shared, output):
        places = _places(calls, names, expand=False)
    return _sites(model, names, places)


def _with_rows(value: Any, width: int, count: int) -> Any:
    """Tensors with `width` rows get `count` of them, from both ends; others stay."""
    rows = [(0, width - 1, 0)[i] for i in range(count)]

    def pick(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == width:
            return leaf[rows]
        return leaf

    return tree_map(pick, value)


@dataclass(eq=False)
class _Pair:
    """The same call on two rows and on three.

    Attributes:
        uses: ids of parameters used here; all that are inside, where other data may use others.
        sealed: what happens inside depends on the data, so that only the whole is a fit place.
        steady: neither this call nor one below it is sealed.
        lone: its only argument is a tensor.
        scales: it multiplies that tensor by a parameter, and does nothing else.
        leaks: its output's shape depends on the data too.
        places: of `outputs` among the tensors returned.
        single: its only input and its only output have a first dimension of 1.
    """

    module: nn.Module
    inputs: list[bool | None]
    outputs: list[bool | None]
    uses: set[int]
    sealed: bool
    steady: bool
    lone: bool
    scales: bool
    leaks: bool
    single: bool
    places: tuple[int, ...]
    children: list[_Pair]

    @classmethod
    def of(cls, first: Call, second: Call, watched: set[int]) -> _Pair:
        """Compare two calls and all that they called."""
        inputs, outputs = _compare(first.inputs, second.inputs), _compare(first.outputs, second.outputs)
        if first.opaque or second.opaque:
            outputs = [None]
        alike = [c.module for c in first.children] == [c.module for c in second.children]
        children = (
            [cls.of(*both, watched) for both in zip(first.children, second.children, strict=True)]
            if alike
            else []
        )
        dynamic = first.dynamic or second.dynamic
        sealed = dynamic or not alike or any(child.leaks for child in children)
        uses = first.used | second.used
        if sealed:
            uses = {use for top in (first, second) for call in top.subtree() for use in call.used}
            uses |= watched & {id(parameter) for parameter in first.module.parameters()}
            children = []
        return cls(
            module=first.module,
            inputs=inputs,
            outputs=outputs,
            uses=uses,
            sealed=sealed,
            steady=not sealed and all(child.steady for child in children),
            lone=first.lone and second.lone,
            scales=first.scales and second.scales,
            leaks=sealed and not all(outputs),
            single=all([size[:1] for size in sizes] == [(1,)] for sizes in (second.inputs, second.outputs)),
            places=second.places,
            children=children,
        )


def _compare(first: list[torch.Size], second: list[torch.Size]) -> list[bool | None]:
    """Per tensor: has rows (True), is shared by all rows (False), or neither (None)."""
    if len(first) != len(second):
        return [None]
    return [_has_rows(x, y) for x, y in zip(first, second, strict=True)]


def _has_rows(two: torch.Size, three: torch.Size) -> bool | None:
    if two == three:
        return False
    grows = (
        len(two) == len(three) and two[1:] == three[1:] and two[0] % 2 == 0 and two[0] // 2 * 3 == three[0]
    )
    return True if grows else None


@dataclass(frozen=True, eq=False)
class _Place:
    """A call that a parameter's gradient may be taken at, and the calls around it, outermost first."""

    parameter: int
    call: _Pair
    around: tuple[_Pair, ...]
    expands: bool


def _places(top: _Pair, names: Mapping[int, str], *, expand: bool) -> list[_Place]:
    """For each use the innermost fit call, then the outermost of a parameter's modules around it."""
    found = [_fit(parameter, stack, names, expand) for parameter, stack in _uses(top, ())]
    modules: dict[int, set[nn.Module]] = {}
    for place in found:
        modules.setdefault(place.parameter, set()).add(place.call.module)
    outermost = []
    for place in found:
        chain = (*place.around, place.call)
        index = next(i for i, call in enumerate(chain) if call.module in modules[place.parameter])
        expands = place.expands and index == len(chain) - 1
        outermost.append(_Place(place.parameter, chain[index], chain[:index], expands))
    return outermost


def _uses(call: _Pair, around: tuple[_Pair, ...]) -> Iterator[tuple[int, tuple[_Pair, ...]]]:
    """(parameter, calls from the model down to the use)."""
    stack = (*around, call)
    for parameter in call.uses:
        yield parameter, stack
    for child in call.children:
        yield from _uses(child, stack)


def _fit(parameter: int, stack: tuple[_Pair, ...], names: Mapping[int, str], expand: bool) -> _Place:
    for depth in range(len(stack) - 1, -1, -1):
        call = stack[depth]
        if all(id(held) != parameter for held in call.module.parameters()):
            continue
        if call.outputs and all(call.outputs) and None not in call.inputs:
            return _Place(parameter, call, stack[:depth], False)
        if expand and _could_expand(call, parameter):
            return _Place(parameter, call, stack[:depth], True)
    innermost = type(stack[-1].module).__name__
    raise ModelError(
        f"parameter {names[parameter]!r} can't be clipped exactly: neither {innermost}, which uses it, nor "
        "any module around it returns one entry per row; freeze it"
    )


def _could_expand(call: _Pair, parameter: int) -> bool:
    """A rule's layer on one tensor that all rows share: it may be repeated for each of them."""
    own = any(id(held) == parameter for held in call.module.parameters(recurse=False))
    return (
        own
        and call.lone
        and rule_of(call.module) is not None
        and call.single
        and call.inputs == [False] == call.outputs
    )


def _survives(
    model: nn.Module, watched: set[int], inputs: Any, shared: set[nn.Module], expected: Any
) -> bool:
    """Whether the model computes the same when the shared layers' outputs are repeated for each row."""

    def repeat(module: nn.Module, output: Any) -> Any:
        if module in shared and len(output) == 1:
            return output.expand(3, *output.shape[1:])
        return output

    try:
        args, kwargs = inputs
        _, found = trace(model, watched, args, kwargs, repeat)
    except (RuntimeError, IndexError, ValueError):
        return False
    pairs = list(zip(tensors_in(found), tensors_in(expected), strict=True))
    return all(x.shape == y.shape and _close(x, y) for x, y in pairs)


def _close(x: Tensor, y: Tensor) -> bool:
    if not x.is_floating_point():
        return torch.equal(x, y)
    tolerance = 1e-4 if y.dtype in (torch.float32, torch.float64) else 1e-2
    x, y = x.detach().double().nan_to_num(), y.detach().double().nan_to_num()
    return float((x - y).abs().max()) <= tolerance * float(y.abs().max())


def _sites(model: nn.Module, names: Mapping[int, str], places: list[_Place]) -> list[Site]:
    paths = {module: path for path, module in model.named_modules()}
    grouped: dict[nn.Module, list[_Place]] = {}
    for place in places:
        grouped.setdefault(place.call.module, []).append(place)
    sites = []
    for module, own in grouped.items():
        wanted = {place.parameter for place in own}
        inside = {
            path: names[id(parameter)]
            for path, parameter in module.named_parameters(remove_duplicate=True)
            if id(parameter) in wanted
        }
        site = Site(paths[module], module, inside, _rule(own, inside))
        if site.rule is None:
            kinds = {(tuple(place.call.inputs), place.call.places) for place in own}
            if len(kinds) > 1 or any(place.expands for place in own):
                raise ModelError(
                    f"{site} is called in several ways, so its parameter {next(iter(inside.values()))!r} "
                    "can't be clipped exactly; freeze it"
                )
            has_rows, outputs = kinds.pop()
            steady = all(place.call.steady for place in own)
            site = Site(
                site.path, module, inside, None, tuple(bool(kind) for kind in has_rows), outputs, steady
            )
        sites.append(site)
    return sites


def _rule(places: list[_Place], inside: Mapping[str, str]) -> Rule | None:
    if any("." in path for path in inside):
        return None
    if any(not place.call.lone or place.call.sealed for place in places):
        return None
    if all(place.call.scales for place in places):
        return norms.scaling
    return rule_of(places[0].call.module)
