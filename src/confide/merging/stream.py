"""The merge itself: tensors stream through one rule, and each leaves a line in the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from confide.errors import MergeError
from confide.merging.operators import find
from confide.merging.operators.specification import Rule
from confide.merging.statistics import Statistics
from confide.merging.vectors import CHUNK, Arrays, TaskVectors, not_finite
from confide.release.tensors import FLOATS, STORAGE, decode, encode

Array = npt.NDArray[Any]
_SHORT = 8192


@dataclass(frozen=True)
class TensorLine:
    """What happened to one tensor.

    Attributes:
        name: canonical.
        rule: the operator; or why the tensor is the base's own.
        norm: ‖merged task vector‖, before it is rounded to the output's dtype.
        cosines: with each model's task vector; None where one of the two is zero.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    rule: str
    norm: float
    cosines: tuple[float | None, ...]


def merge_arrays(
    base: Mapping[str, Array],
    models: Sequence[Mapping[str, Array]],
    operator: str,
    parameters: Mapping[str, Any] | None = None,
    statistics: Sequence[Statistics] = (),
) -> dict[str, Array]:
    """Merge models that are in memory, by the very code that merges folders.

    Args:
        base: θ₀ by name. Integer arrays must be equal everywhere.
        models: θ_t with the same names and shapes.
        operator: its name, one of `OPERATORS`.
        parameters: the operator's; defaults are its paper's.
        statistics: of each model, where the operator needs them.

    Returns:
        New arrays under the base's names, in the base's dtypes.

    Raises:
        MergeError: what can't be merged; models are called "model 1", "model 2", … in messages.
    """
    chosen = find(operator)
    vectors = TaskVectors(
        Arrays("base", base), [Arrays(f"model {i}", model) for i, model in enumerate(models, start=1)]
    )
    rule = chosen.prepare(vectors, parameters or {}, statistics)
    merged: dict[str, Array] = {}
    for name in base:
        parts = list(merge_tensor(vectors, name, rule, operator, lambda line: None))
        flat = np.concatenate(parts) if parts else np.empty(0, base[name].dtype)
        merged[name] = flat.reshape(base[name].shape)
    return merged


def merge_tensor(
    vectors: TaskVectors,
    name: str,
    rule: Rule,
    operator: str,
    note: Callable[[TensorLine], None],
    dtype: str | None = None,
) -> Iterator[Array]:
    """The merged values of one tensor of the base, piece by piece, in storage form.

    Args:
        vectors: the models; `name` is one of their base's tensors.
        rule: prepared on the same models.
        operator: its name, for the report.
        note: is given the tensor's line after its last piece.
        dtype: of the pieces; None for the base's.

    Raises:
        MergeError: a value that isn't finite, in an input or in the result.
    """
    dtype = dtype or vectors.base.dtype(name)
    if why := reason(vectors, name):
        return _copy(vectors, name, why, note, dtype)
    return _merge(vectors, name, rule, operator, note, dtype)


def reason(vectors: TaskVectors, name: str) -> str | None:
    """Why a tensor of the merge is the base's own; None if it is merged."""
    if name in vectors.buffers:
        return "buffer: equal in every model"
    if name in vectors.absent:
        return "base: no model has it"
    return None if name in vectors.changed else "base: no model changed it"


def _merge(
    vectors: TaskVectors,
    name: str,
    rule: Rule,
    operator: str,
    note: Callable[[TensorLine], None],
    dtype: str,
) -> Iterator[Array]:
    squares, products = np.zeros(vectors.count), np.zeros(vectors.count)
    square = 0.0
    start = 0
    kernel = rule.kernel(name)
    for base, chunk in vectors.chunks(name):
        here = _dot(chunk, chunk)
        if not np.isfinite(here).all():
            _blame(vectors, name)
        merged = kernel(chunk, start)
        start += base.size
        squares += here
        products += _dot(chunk, merged)
        square += float(_dot(merged, merged))
        merged += base
        written = encode(merged, dtype)
        if not np.isfinite(decode(written, dtype)).all():
            raise MergeError(
                f"tensor {name}: {operator} gives values that {dtype} can't hold; nothing was written"
            )
        yield written
    norm = math.sqrt(square)
    cosines = tuple(
        float(np.clip(product / (norm * math.sqrt(own)), -1, 1)) if norm and own else None
        for product, own in zip(products, squares, strict=True)
    )
    rule_name = rule.label(name) or operator
    note(TensorLine(name, dtype, vectors.base.shape(name), rule_name, norm, cosines))


def _copy(
    vectors: TaskVectors, name: str, rule: str, note: Callable[[TensorLine], None], dtype: str
) -> Iterator[Array]:
    size = vectors.size(name)
    for start in range(0, size, CHUNK):
        piece = vectors.base.read(name, start, min(start + CHUNK, size))
        if dtype not in FLOATS:
            yield piece.astype(STORAGE[dtype])
            continue
        if not np.isfinite(piece).all():
            _blame(vectors, name)
        written = encode(piece, dtype)
        if not np.isfinite(decode(written, dtype)).all():
            raise MergeError(
                f"tensor {name} of base {vectors.base.label} holds values that {dtype} can't hold"
            )
        yield written
    nothing = (None,) * vectors.count
    note(TensorLine(name, dtype, vectors.base.shape(name), rule, 0.0, nothing))


def _dot(one: Array, other: Array) -> Array:
    """Products summed over the last axis, in parts so short that BLAS starts no threads of its own."""
    size = one.shape[-1]
    cut = size - size % _SHORT
    parts = (each[..., :cut].reshape(*each.shape[:-1], -1, _SHORT) for each in (one, other))
    with np.errstate(invalid="ignore", over="ignore"):
        total: Array = np.vecdot(*parts).sum(axis=-1) + np.vecdot(one[..., cut:], other[..., cut:])
    return total


def _blame(vectors: TaskVectors, name: str) -> None:
    """Raise the error that names who holds the value that isn't finite; float64 overflow blames nobody."""
    for weights in (vectors.base, *vectors.models):
        for start in range(0, vectors.size(name), CHUNK):
            values = weights.read(name, start, min(start + CHUNK, vectors.size(name)))
            if not np.isfinite(values).all():
                raise MergeError(not_finite(name, weights))
    raise MergeError(f"tensor {name}: the models lie so far apart that their distance overflows")
