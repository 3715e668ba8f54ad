"""Applying: a merge with one personal file, or with several for a task that none is of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from confide import files
from confide.errors import MergeError
from confide.merging.personal import file
from confide.merging.personal.file import Heads, PersonalFile
from confide.merging.personal.inputs import Opened, check_base, composed, open_merge, open_model
from confide.merging.personal.residual import Coded, blocks
from confide.merging.personal.similarity import normalised
from confide.merging.vectors import CHUNK
from confide.privacy.statement import Statement
from confide.release import format
from confide.release.export import task_config
from confide.release.format import Head, ReleaseInfo
from confide.release.shards import Values, write_tensors
from confide.release.tensors import FLOATS, encode
from confide.release.tensors import decode as values_of
from confide.release.write import copy_reader, write_release

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


@dataclass(frozen=True)
class Applied:
    """A model that was made from a merge.

    Attributes:
        head: its task.
        weights: of the personal files, in their order.
        statement: its claim.
    """

    head: Head
    weights: tuple[float, ...]
    statement: Statement


def apply(merged: Path, personal: Path, *, out: Path, key: Ed25519PrivateKey | None = None) -> Applied:
    """Write θ_merged + the coded residual, with the task's head, as a release that transformers loads.

    Args:
        merged: release folder of the merge that the file was packed for.
        personal: the file.
        out: folder to make.
        key: signs the statement; the inputs' own signatures are carried as they are.

    Raises:
        MergeError: another base or merge (names both), a tensor that doesn't fit, a value that isn't finite.
        ReleaseError, PrivacyError, ModelError: an input can't be read or isn't what it says; `out` exists.
    """
    merge, read = open_merge(merged), file.read(personal)
    _check_belongs(merge, [read])
    about = read.about
    statement = _write(
        Path(out),
        merge,
        [(1.0, read)],
        about.head,
        read.heads,
        about.encoder_prefix,
        about.absent,
        composed([merge.statement, about.statement]),
        key,
    )
    return Applied(about.head, (1.0,), statement)


def fuse(
    merged: Path,
    personal: Sequence[Path],
    *,
    head: Path,
    similarities: Sequence[float],
    out: Path,
    disjoint: bool = False,
    key: Ed25519PrivateKey | None = None,
) -> Applied:
    """Write a model for a task that is in no personal file: θ_merged + Σ wₜ·(coded residual of t).

    wₜ is the similarity of task t to the new one, clipped at 0 and divided by the sum. Without any similar
    task all weights are 0, and the encoder is the merge's. Paper: DTS (arXiv 2512.01461), for unseen tasks.

    Args:
        merged: release folder of the merge that the files were packed for.
        personal: the files.
        head: release folder of a model of the new task and the same base (`confide train --trainable head`);
            only its head is used.
        similarities: one number a file (`similarity.head_similarities`, or of descriptions).
        out: folder to make.
        disjoint: the caller declares that no unit is in two of all the data sets.
        key: signs the statement, as in `apply`.

    Raises:
        MergeError: another base or merge (names both), a tensor that doesn't fit, a value that isn't finite.
        ReleaseError, PrivacyError, ModelError: an input can't be read or isn't what it says; `out` exists.
    """
    merge, task = open_merge(merged), open_model(head)
    read = [file.read(path) for path in personal]
    if not read or len(read) != len(similarities):
        raise MergeError(f"{len(read)} personal files and {len(similarities)} similarities don't make pairs")
    _check_belongs(merge, read)
    check_base(merge, task.path, task.statement)
    weights = normalised(similarities)
    statements = [merge.statement, *(item.about.statement for item in read), task.statement]
    statement = _write(
        Path(out),
        merge,
        list(zip(weights, read, strict=True)),
        task.head,
        task.heads(),
        task.info.encoder_prefix,
        tuple(name for name in merge.weights.names if name not in task.weights.names),
        composed(statements, disjoint=disjoint),
        key,
    )
    return Applied(task.head, weights, statement)


def unpack(personal: Path, *, out: Path) -> PersonalFile:
    """Write the residual that a personal file stands for as plain float32 tensors, with the task's head.

    Args:
        personal: the file.
        out: safetensors file to write, with the encoder's canonical names; it must not exist.

    Raises:
        MergeError, ModelError, PrivacyError: the file can't be read or was altered.
        ReleaseError: `out` exists or can't be written.
    """
    read = file.read(personal)
    tensors: dict[str, Values] = {
        name: ("F32", layers[0].part.shape, _single(layers)) for name, layers in read.layers.items()
    }
    for name, (dtype, shape, stored) in read.heads.items():
        tensors[name] = (dtype, shape, [stored])
    with files.new_file(Path(out)) as side:
        write_tensors(side, tensors)
    return read


def _single(layers: Sequence[Coded]) -> Iterator[npt.NDArray[np.float32]]:
    for total in blocks([(1.0, coded) for coded in layers], _block_rows(layers[0].part.width)):
        yield total.astype(np.float32)


def _check_belongs(merge: Opened, personal: Sequence[PersonalFile]) -> None:
    ours = merge.hash()
    for item in personal:
        about = item.about
        check_base(merge, item.path, about.statement)
        if about.merge != ours:
            raise MergeError(
                f"{item.path} was packed for the merge with encoder {about.merge}, but {merge.path} "
                f"has {ours}; it fits no other merge"
            )
        for part in about.parts:
            if part.name not in merge.weights.names or merge.weights.dtype(part.name) not in FLOATS:
                raise MergeError(f"{item.path} codes tensor {part.name}, which {merge.path} doesn't have")
            if merge.weights.shape(part.name) != part.shape:
                raise MergeError(
                    f"tensor {part.name} has shape {list(part.shape)} in {item.path} and "
                    f"{list(merge.weights.shape(part.name))} in {merge.path}"
                )


def _write(
    out: Path,
    merge: Opened,
    personal: Sequence[tuple[float, PersonalFile]],
    head: Head,
    heads: Heads,
    prefix: str,
    absent: Sequence[str],
    statement: Statement,
    key: Ed25519PrivateKey | None,
) -> Statement:
    def save(folder: Path) -> None:
        tensors: dict[str, Values] = {
            prefix + name: (
                merge.weights.dtype(name),
                merge.weights.shape(name),
                _values(
                    merge, name, [(w, c) for w, item in personal if w for c in item.layers.get(name, ())]
                ),
            )
            for name in merge.weights.names
            if name not in absent
        }
        for name, (dtype, shape, stored) in heads.items():
            tensors[name] = (dtype, shape, [stored])
        write_tensors(folder / format.WEIGHTS, tensors)
        files.write_json(folder / "config.json", task_config(merge.path, head))
        copy_reader(merge.path, folder, head)

    return write_release(
        out,
        save=save,
        info=ReleaseInfo(kind="model", encoder_prefix=prefix, heads=(head,)),
        statement=statement,
        key=key,
    )


def _values(merge: Opened, name: str, layers: Sequence[tuple[float, Coded]]) -> Iterator[npt.NDArray[Any]]:
    """One tensor of the model in storage form, some rows at a time."""
    if not layers:
        yield merge.checkpoint.stored(merge.weights.stored[name])
        return
    dtype = merge.weights.dtype(name)
    start = 0
    for total in blocks(layers, _block_rows(layers[0][1].part.width)):
        stop = start + total.size
        total += merge.weights.read(name, start, stop)
        written = encode(total, dtype)
        if not np.isfinite(values_of(written, dtype)).all():
            raise MergeError(f"tensor {name}: the residual gives values that {dtype} can't hold")
        yield written
        start = stop


def _block_rows(width: int) -> int:
    return max(1, 8 * CHUNK // width)
