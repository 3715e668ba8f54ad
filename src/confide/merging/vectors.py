"""Task vectors in chunks: models beside their base, checked against each other, never loaded whole."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from confide.errors import MergeError
from confide.release.tensors import FLOATS, Checkpoint, dtype_of

Piece = tuple[npt.NDArray[Any], npt.NDArray[Any]]

CHUNK = 1 << 16
"""Coordinates at a time: small enough that a chunk of several models stays in the cache."""

_VOCABULARY = ("word_embeddings.weight", "tok_embeddings.weight", "embed_tokens.weight", "lm_head.weight")
_LABELS = ("classifier.weight", "classifier.out_proj.weight", "score.weight")
_UNUSED_BY_SOME_CLASSIFIERS = "pooler."


class Weights(Protocol):
    """A model's tensors by canonical name, read piece by piece.

    Attributes:
        label: what messages call the model.
        names: of every tensor.
    """

    @property
    def label(self) -> str: ...
    @property
    def names(self) -> Collection[str]: ...
    def dtype(self, name: str) -> str: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, start: int, stop: int) -> npt.NDArray[Any]: ...


class Arrays:
    """Weights that are in memory."""

    def __init__(self, label: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self.label = label
        self.names: Collection[str] = arrays.keys()
        self._arrays = arrays

    def dtype(self, name: str) -> str:
        return dtype_of(self._arrays[name])

    def shape(self, name: str) -> tuple[int, ...]:
        return self._arrays[name].shape

    def read(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        return self._arrays[name].reshape(-1)[start:stop]


class Encoder:
    """The encoder in a checkpoint, under its canonical names."""

    def __init__(self, label: str, checkpoint: Checkpoint, stored: Mapping[str, str]) -> None:
        self.label = label
        self.names: Collection[str] = stored.keys()
        self.checkpoint = checkpoint
        self.stored = stored

    def dtype(self, name: str) -> str:
        return self.checkpoint.dtype(self.stored[name])

    def shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.shape(self.stored[name])

    def read(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        return self.checkpoint.read(self.stored[name], start, stop)


class Matrices(Sequence[npt.NDArray[np.float64]]):
    """D_t of one layer, or of some of its outputs: T matrices (out, in) float64, read when asked for.

    Args:
        start, stop: which outputs.
        expert: whose layer it is, where those of a layer's experts are stacked.
    """

    def __init__(self, vectors: TaskVectors, name: str, start: int, stop: int, expert: int = 0) -> None:
        self._vectors, self._name, self._expert = vectors, name, expert
        self._start, self._stop = start, stop

    def __len__(self) -> int:
        return self._vectors.count

    def __getitem__(self, index: Any) -> Any:
        """
        Raises:
            MergeError: a value that isn't finite.
        """
        base, model = self._vectors.base, self._vectors.models[range(len(self))[index]]
        difference = self._read(model)
        difference -= self._read(base)
        return difference

    def _read(self, weights: Weights) -> npt.NDArray[np.float64]:
        """(stop − start, in)"""
        height, width = weights.shape(self._name)[-2:]
        turned = self._name in self._vectors.turned
        start, stop = (0, height) if turned else (self._start, self._stop)
        place = self._expert * height * width
        values = weights.read(self._name, place + start * width, place + stop * width).astype(np.float64)
        values = values.reshape(-1, width)
        if turned:
            values = np.ascontiguousarray(values[:, self._start : self._stop].T)
        if not np.isfinite(values).all():
            raise MergeError(not_finite(self._name, weights))
        return values


class TaskVectors:
    """D_t = θ_t − θ₀ of T models that were trained from one base.

    Attributes:
        base: θ₀.
        models: θ_t.
        count: T.
        chunk: coordinates at a time.
        names: floating-point tensors that the models have, sorted.
        buffers: integer tensors; equal everywhere.
        absent: tensors of the base that no model has (a pooler that the classifier doesn't use).
        turned: matrices, or stacks of them, that are kept as (in, out), where all others are (out, in).

    Raises:
        MergeError: no models; a tensor missing, unexpected, of another shape or kind; integer buffers that
            differ. The message names the tensor, the models and both shapes.
    """

    def __init__(
        self, base: Weights, models: Sequence[Weights], turned: Collection[str] = frozenset()
    ) -> None:
        if not models:
            raise MergeError("a merge needs at least one model")
        self.base = base
        self.models = tuple(models)
        self.count = len(models)
        self.turned = turned
        self.chunk = CHUNK
        present = {name for model in models for name in model.names}
        self.absent = tuple(sorted(name for name in base.names if name not in present))
        for name in self.absent:
            if not name.startswith(_UNUSED_BY_SOME_CLASSIFIERS):
                raise MergeError(f"tensor {name} of base {base.label} is missing from {models[0].label}")
        for model in models:
            for name in sorted(set(model.names).difference(base.names)):
                raise MergeError(f"tensor {name} of {model.label} is not in base {base.label}")
        for name in sorted(present):
            for model in models:
                _check_same(name, base, model)
        self.names = tuple(sorted(name for name in present if base.dtype(name) in FLOATS))
        self.buffers = tuple(sorted(present.difference(self.names)))
        for name in self.buffers:
            for model in models:
                if not np.array_equal(_all(base, name), _all(model, name)):
                    raise MergeError(
                        f"integer tensor {name} differs between {model.label} and base {base.label}; "
                        "integers are not merged"
                    )
        self._reserve()

    def size(self, name: str) -> int:
        """How many coordinates a tensor has."""
        return math.prod(self.base.shape(name))

    def only(self, names: Collection[str]) -> TaskVectors:
        """The same task vectors, restricted to some tensors."""
        part = copy(self)
        part.names = tuple(name for name in self.names if name in names)
        part.__dict__["changed"] = tuple(name for name in self.changed if name in names)
        return part

    def in_chunks(self, size: int) -> TaskVectors:
        """The same task vectors, read in chunks of `size` coordinates."""
        other = copy(self)
        other.chunk = size
        other._reserve()
        return other

    @cached_property
    def changed(self) -> tuple[str, ...]:
        """Tensors in which some task vector isn't zero."""
        return tuple(name for name in self.names if self._differs(name))

    def chunks(self, name: str, dtype: npt.DTypeLike = np.float64) -> Iterator[Piece]:
        """`piece` after piece of a flattened tensor, in order."""
        size = self.size(name)
        for start in range(0, size, self.chunk):
            yield self.piece(name, start, min(start + self.chunk, size), dtype)

    def piece(self, name: str, start: int, stop: int, dtype: npt.DTypeLike = np.float64) -> Piece:
        """Coordinates [start, stop) of a flattened tensor, at most `chunk` of them.

        Args:
            dtype: of the task vectors, float64 or float32: the difference, rounded once.

        Returns:
            base: (n,) θ₀.
            vectors: (T, n) D_t. Both may be written over, and are by the next piece.
        """
        size = stop - start
        stored = self.base.read(name, start, stop)
        kind = np.result_type(stored, dtype)
        base = self._base.view(kind)[:size]
        vectors = self._vectors.view(dtype)[:, :size]
        base[...] = stored
        with np.errstate(invalid="ignore", over="ignore"):
            for model, vector in zip(self.models, vectors, strict=True):
                values = model.read(name, start, stop)
                if vector.dtype == np.float64:
                    vector[...] = values
                    vector -= base
                else:
                    np.subtract(values, base, out=vector, casting="same_kind")
        return base, vectors

    def matrices(self, name: str, blocks: int = 1) -> list[list[Matrices]]:
        """Of each expert of a stack, or of the one layer that a matrix is: the layer whole, or cut into
        blocks of as many outputs each, if that is possible.
        """
        *stack, height, width = self.base.shape(name)
        rows = width if name in self.turned else height
        size = rows // blocks if rows % blocks == 0 else rows
        return [
            [Matrices(self, name, start, start + size, expert) for start in range(0, rows, max(size, 1))]
            for expert in range(math.prod(stack))
        ]

    def _reserve(self) -> None:
        self._base, self._vectors = np.empty(self.chunk), np.empty((self.count, self.chunk))

    def _differs(self, name: str) -> bool:
        size = self.size(name)
        for start in range(0, size, self.chunk):
            stop = min(start + self.chunk, size)
            base = self.base.read(name, start, stop)
            if any(not np.array_equal(base, model.read(name, start, stop)) for model in self.models):
                return True
        return False


def not_finite(name: str, weights: Weights) -> str:
    """The message about a tensor that holds NaN or infinity."""
    return f"tensor {name} of {weights.label} holds values that aren't finite (NaN or ∞)"


def _all(weights: Weights, name: str) -> npt.NDArray[Any]:
    return weights.read(name, 0, math.prod(weights.shape(name)))


def _check_same(name: str, base: Weights, model: Weights) -> None:
    if name not in model.names:
        raise MergeError(f"tensor {name} is missing from {model.label}, though another model has it")
    ours, theirs = model.shape(name), base.shape(name)
    if ours != theirs:
        words = ""
        if name.endswith(_VOCABULARY) and ours[1:] == theirs[1:]:
            words = f"; the vocabularies have {ours[0]} and {theirs[0]} tokens"
        elif name.endswith(_LABELS) and ours[1:] == theirs[1:]:
            words = f"; the label spaces have {ours[0]} and {theirs[0]} labels"
        raise MergeError(
            f"tensor {name} has shape {list(ours)} in {model.label} and {list(theirs)} in base "
            f"{base.label}{words}"
        )
    if (model.dtype(name) in FLOATS) != (base.dtype(name) in FLOATS):
        raise MergeError(
            f"tensor {name} is {model.dtype(name)} in {model.label} and {base.dtype(name)} in base "
            f"{base.label}"
        )
