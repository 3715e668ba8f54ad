"""Packing: from a merge and one of its models to a personal file that keeps a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from confide.errors import MergeError
from confide.merging.personal import file
from confide.merging.personal.factors import spectrum
from confide.merging.personal.file import About
from confide.merging.personal.inputs import check_base, composed, open_merge, open_model
from confide.merging.personal.ranks import Candidate, choose
from confide.merging.personal.residual import Coded, Part, array, encode, matrix, touched
from confide.merging.vectors import CHUNK, TaskVectors

BUDGET = 0.01
CLOSE = 0.05
"""No layer is added once less than this part of the residual's norm is missing."""


@dataclass(frozen=True)
class Packed:
    """What was packed.

    Attributes:
        about: of the file.
        size: bytes on disk, all of it: head, statement and header included.
        budget: bytes that it was allowed.
        base_size: bytes of the base's weights.
        changed: tensors in which the model differs from the merge; those without a part stay the merge's.
        error: ‖residual − coded‖ / ‖residual‖ over all tensors; 0 where there is no residual.
    """

    about: About
    size: int
    budget: int
    base_size: int
    changed: tuple[str, ...]
    error: float


def pack(
    merged: Path,
    model: Path,
    *,
    out: Path,
    budget: float = BUDGET,
    description: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Packed:
    """Write the personal file of one task: what its model has beyond the merge.

    Every tensor is looked at twice, one at a time: for its singular values, and, when the ranks of all are
    chosen (`ranks.choose`), for the factors. Where everything fits (models that differ in few tensors),
    what the codes missed is coded again as another layer, until the budget is used.

    Args:
        merged: release folder of a merge.
        model: release folder of a task's model of the same base, usually one that was merged.
        out: file to write; it must not exist.
        budget: size of the file on disk as a part of the base's weights in bytes. The head and the statement
            are in the file, so they count.
        description: what the task is about, in public words.
        progress: called with the number of tensors looked at for a layer, and of all looks.

    Raises:
        MergeError: different bases or shapes, a value that isn't finite, or a budget that is too small.
        ReleaseError, PrivacyError, ModelError: an input can't be read or isn't what its statement says;
            `out` exists.
    """
    if not 0 < budget <= 1:
        raise MergeError(f"the budget is a part of the base's size, between 0 and 100 %, not {budget:.6g}")
    merge, task = open_merge(merged), open_model(model)
    check_base(merge, task.path, task.statement)
    if merge.info.encoder_prefix != task.info.encoder_prefix:
        raise MergeError(f"{merge.path} and {task.path} are of different families")
    vectors = TaskVectors(merge.weights, [task.weights])
    names = vectors.changed
    heads = task.heads()
    about = file.with_room_for_hash(
        About(
            encoder_prefix=task.info.encoder_prefix,
            head=task.head,
            description=description,
            merge=merge.hash(),
            absent=vectors.absent,
            parts=(),
            statement=composed([merge.statement, task.statement]),
        )
    )
    base_size = merge.size()
    limit = math.floor(budget * base_size)

    layers: dict[str, list[Coded]] = {name: [] for name in names}

    def with_parts(more: Mapping[str, Part]) -> About:
        parts = [part for name in names for part in (*(c.part for c in layers[name]), more.get(name)) if part]
        return about.model_copy(update={"parts": tuple(parts)})

    def fits(more: Mapping[str, Part]) -> bool:
        return file.size(with_parts(more), heads) <= limit

    if not fits({}):
        raise MergeError(
            f"a budget of {100 * budget:g} % is {limit} bytes, but the head of {task.head.task}, the "
            f"statement and the header alone need {file.size(about, heads)}; allow more"
        )
    error, everything = 1.0 if names else 0.0, bool(names)
    while everything and error > CLOSE:
        everything, error = _add_layer(vectors, layers, fits, progress)
    about = file.write(Path(out), with_parts({}), [coded for name in names for coded in layers[name]], heads)
    return Packed(
        about=about,
        size=Path(out).stat().st_size,
        budget=limit,
        base_size=base_size,
        changed=names,
        error=error,
    )


def _add_layer(
    vectors: TaskVectors,
    layers: Mapping[str, list[Coded]],
    fits: Callable[[Mapping[str, Part]], bool],
    progress: Callable[[int, int], None] | None,
) -> tuple[bool, float]:
    """Code what the layers so far miss, as far as it fits.

    Returns:
        Whether all of it fitted and helped, so that another layer may; and ‖missing‖ / ‖residual‖ after it.
    """
    looks = 2 * len(layers)
    candidates: dict[str, Candidate] = {}
    parts: dict[str, Callable[[int], Part]] = {}
    for number, name in enumerate(layers, start=1):
        missing = _missing(_residual(vectors, name), layers[name])
        if missing.any():
            candidates[name], parts[name] = _candidate(name, missing)
        if progress:
            progress(number, looks)
    chosen = choose(
        candidates, lambda units: fits({n: parts[n](count) for n, count in units.items() if count})
    )
    lost = whole = 0.0
    helped = False
    for number, name in enumerate(layers, start=1):
        residual = _residual(vectors, name)
        missing = _missing(residual, layers[name])
        if chosen.get(name):
            coded = encode(name, missing, parts[name](chosen[name]).rank)
            rest = _missing(missing, [coded])
            # The RMS of a group with a few very large entries can lead further away than nothing does.
            if _square(rest) < _square(missing):
                layers[name].append(coded)
                missing, helped = rest, True
        whole += _square(residual)
        lost += _square(missing)
        if progress:
            progress(len(layers) + number, looks)
    everything = all(chosen[name] == len(candidate.energies) for name, candidate in candidates.items())
    return everything and helped, math.sqrt(lost / whole) if whole else 0.0


def _missing(residual: npt.NDArray[np.float32], layers: Sequence[Coded]) -> npt.NDArray[np.float32]:
    if not layers:
        return residual
    return (residual - array(layers)).astype(np.float32)


def _candidate(name: str, residual: npt.NDArray[np.float32]) -> tuple[Candidate, Callable[[int], Part]]:
    """What could be kept of a tensor, and its part with so many units of that.

    A matrix whose factors would take as much room as its own entries is coded as it is, like a vector: that
    is closer, because one quantised matrix is nearer than the product of two.
    """
    shape, rows = residual.shape, int(touched(name, residual).sum())
    whole = Part(name=name, shape=shape, rows=rows)
    if residual.ndim < 2:
        return Candidate(np.array([_square(residual)]), whole.lengths.bytes), lambda units: whole
    chosen = matrix(name, residual)

    def part(units: int) -> Part:
        factored = Part(name=name, shape=shape, rows=rows, rank=units)
        return factored if factored.lengths.bytes < whole.lengths.bytes else whole

    return Candidate(spectrum(chosen) ** 2, sum(chosen.shape) / 4 + 4), part


def _residual(vectors: TaskVectors, name: str) -> npt.NDArray[np.float32]:
    """θ_t − θ_merged of one tensor, subtracted in float64."""
    merge, task = vectors.base, vectors.models[0]
    residual = np.empty(vectors.size(name), np.float32)
    for start in range(0, len(residual), CHUNK):
        stop = min(start + CHUNK, len(residual))
        ours = merge.read(name, start, stop).astype(np.float64)
        theirs = task.read(name, start, stop).astype(np.float64)
        for label, values in ((merge.label, ours), (task.label, theirs)):
            if not np.isfinite(values).all():
                raise MergeError(f"tensor {name} of {label} holds values that aren't finite (NaN or ∞)")
        with np.errstate(over="ignore"):
            residual[start:stop] = theirs - ours
    if not np.isfinite(residual).all():
        raise MergeError(f"tensor {name}: {task.label} and {merge.label} lie too far apart for float32")
    return residual.reshape(merge.shape(name))


def _square(values: npt.NDArray[Any]) -> float:
    flat = values.reshape(-1).astype(np.float64)
    return float(flat @ flat)
