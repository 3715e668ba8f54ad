"""What an operator is: a declared specification, and a function from task vectors to one merged vector."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from confide.errors import MergeError
from confide.merging.operators.parameters import Parameter, PerModel, Setting
from confide.merging.stacks import is_stack, is_stack_of_biases
from confide.merging.statistics import Kind, Statistics, Whole, check_statistics
from confide.merging.vectors import TaskVectors

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]

Kernel = Callable[[Vector, int], Vector]
"""(T, n) task vectors of n coordinates of one tensor, and the first one's place in it → (n,) merged.

It may not change its argument; its answer may be changed, and holds until the next call."""

_LONGEST_SIDE = 20_000
_NO_LINEAR_WEIGHT = re.compile(r"embed|pooler|relative_attention_bias|(^|\.)(wte|wpe|shared|lm_head)\.")
_PACKED_QKV = re.compile(r"(^|\.)(Wqkv|qkv|in_proj)(\.|_)weight$")


@dataclass(frozen=True)
class Tensors:
    """Which tensors an operator merges.

    Attributes:
        about: in words, for docs and the merge report.
        match: whether the tensor of this name and shape is one of them.
    """

    about: str
    match: Callable[[str, tuple[int, ...]], bool]


EVERYTHING = Tensors("every tensor", lambda name, shape: True)


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    matrix = len(shape) == 2 and not is_stack_of_biases(name, shape)
    return (matrix or is_stack(name, shape)) and max(shape[-2:]) < _LONGEST_SIDE


MATRICES = Tensors(f"matrices (also stacked experts') with sides under {_LONGEST_SIDE:,}", _is_matrix)
LINEAR = Tensors(
    "weights of attention and MLP",
    lambda name, shape: MATRICES.match(name, shape) and not _NO_LINEAR_WEIGHT.search(name),
)


@dataclass(frozen=True)
class Rule:
    """An operator made ready for particular models: what it had to look up in all of them is fixed.

    Attributes:
        kernel: name of a tensor → what merges its coordinates.
        facts: what was looked up, for the merge report; JSON values. Complete once every tensor is merged.
        label: what the report says of a tensor that is treated in another way; None for the operator's name.
    """

    kernel: Callable[[str], Kernel]
    facts: Mapping[str, Any] = field(default_factory=dict)
    label: Callable[[str], str | None] = lambda name: None


@dataclass(frozen=True)
class Operator:
    """A published way to make one model from many.

    Attributes:
        name: on the command line.
        about: the formula, in a line.
        paper: where it is from.
        function: what the decorated function was; pure. `takes` tells what it is given.
        takes: `coordinates`: (T, n) task vectors → (n,). `matrices`: the task vectors of one tensor, T
            (out, in) matrices that are read when asked for → the merged one, and facts for the report.
            `model`: all `TaskVectors` → the `Rule`.
        parameters: what it takes besides, by keyword; `PerModel` ones as an array (T,).
        tensors: those that it merges.
        others: what the others get: the mean of the task vectors, or nothing, so that the base's stay.
        needs: statistics of each model's data. A function of matrices is given the T Grams of the tensor
            after the matrices, a function of the model all statistics after the task vectors.
        splits_qkv: whether query, key and value that are packed into one matrix are merged separately.
    """

    name: str
    about: str
    paper: str
    function: Callable[..., Any]
    takes: Literal["coordinates", "matrices", "model"] = "coordinates"
    parameters: tuple[Parameter, ...] = ()
    tensors: Tensors = EVERYTHING
    others: Literal["mean", "base"] = "mean"
    needs: Kind | None = None
    splits_qkv: bool = False

    def settings(self, given: Mapping[str, Any]) -> dict[str, Setting]:
        """Every parameter's value: the given one, which may be text, or the default.

        Raises:
            MergeError: an unknown parameter (the message names the near one), or a value out of range.
        """
        known = {parameter.name: parameter for parameter in self.parameters}
        for name in given:
            if name not in known:
                raise MergeError(f"operator {self.name} takes no parameter {name!r}{suggest(name, known)}")
        settings = {}
        for name, parameter in known.items():
            try:
                settings[name] = parameter.read(given.get(name, parameter.default))
            except ValueError as error:
                raise MergeError(f"{name} of operator {self.name} must be {error}") from None
        return settings

    def prepare(
        self, vectors: TaskVectors, settings: Mapping[str, Any], statistics: Sequence[Statistics] = ()
    ) -> Rule:
        """Look at the whole models, as often as the operator needs to.

        Args:
            vectors: T models.
            settings: as given, or from `settings`.
            statistics: of each model, in their order, where the operator needs them.

        Raises:
            MergeError: a wrong setting; statistics missing, not needed, or not of these models' shapes.
        """
        arguments = dict(self.settings(settings))
        for parameter in self.parameters:
            if isinstance(parameter, PerModel):
                arguments[parameter.name] = self._each(parameter.name, arguments, vectors.count)
        check_statistics(self.name, self.needs, statistics, vectors)
        if self.takes == "coordinates":
            return Rule(lambda name: lambda chunk, start: self.function(chunk, **arguments))
        if self.takes == "matrices":
            return self._by_matrix(vectors, arguments, statistics)
        given = (statistics,) if self.needs else ()
        rule: Rule = self.function(vectors, *given, **arguments)
        return rule

    def reason(self, vectors: TaskVectors, statistics: Sequence[Statistics], name: str) -> str | None:
        """Why an operator of matrices gives a tensor what the others get; None if it merges it."""
        if self.takes != "matrices":
            return None
        if not self.tensors.match(name, vectors.base.shape(name)):
            return f"{self.others}: {self.name} merges {self.tensors.about}"
        if statistics and name not in statistics[0].names:
            return f"{self.others}: no statistics of it were given"
        return None

    def _each(self, name: str, arguments: Mapping[str, Any], count: int) -> Any:
        values = np.atleast_1d(np.asarray(arguments[name], float))
        if values.size not in (1, count):
            raise MergeError(f"{name} of operator {self.name} has {values.size} values for {count} models")
        return np.broadcast_to(values, count)

    def _by_matrix(
        self, vectors: TaskVectors, arguments: Mapping[str, Any], statistics: Sequence[Statistics]
    ) -> Rule:
        known: dict[str, Any] = {}
        reason = partial(self.reason, vectors, statistics)

        def kernel(name: str) -> Kernel:
            if reason(name):
                return _mean if self.others == "mean" else _nothing
            turned = name in vectors.turned
            packed = _PACKED_QKV.search(name) or (turned and "c_attn" in name)
            blocks = 3 if self.splits_qkv and packed else 1
            given = (Whole(statistics, name),) if self.needs else ()
            layers = vectors.matrices(name, blocks)
            size = vectors.size(name) // len(layers)
            facts: dict[int, Sequence[Mapping[str, Any]]] = {}

            @lru_cache(maxsize=1)  # chunks come in order, and a whole stack may be too large
            def answer(layer: int) -> Vector:
                merged, facts[layer] = zip(
                    *(self.function(matrices, *given, **arguments) for matrices in layers[layer]), strict=True
                )
                found = [block for number in sorted(facts) for block in facts[number]]
                if found[0]:
                    known[name] = {key: [block[key] for block in found] for key in found[0]}
                whole = np.concatenate(merged)
                return (whole.T if turned else whole).ravel()

            def piece(chunk: Vector, start: int) -> Vector:
                stop = start + chunk.shape[1]
                parts = [
                    answer(layer)[max(start - layer * size, 0) : stop - layer * size]
                    for layer in range(start // size, (stop - 1) // size + 1)
                ]
                return parts[0] if len(parts) == 1 else np.concatenate(parts)

            return piece

        return Rule(kernel, known, reason)


def operator(name: str, **specification: Any) -> Callable[[Callable[..., Any]], Operator]:
    """Make an `Operator` of the decorated function; the arguments are the operator's attributes."""
    return lambda function: Operator(name=name, function=function, **specification)


def suggest(name: str, known: Mapping[str, Any]) -> str:
    """The end of a message about an unknown name: the near one, or all of them."""
    import difflib

    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; it takes {', '.join(known)}" if known else "; it takes none"


def _mean(chunk: Vector, start: int) -> Vector:
    mean: Vector = chunk.mean(axis=0)
    return mean


def _nothing(chunk: Vector, start: int) -> Vector:
    return np.zeros(chunk.shape[1])
