"""Writing a release, and checking one: an explicit list of files, hashed weights, all or nothing."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from confide import files
from confide.errors import ReleaseError
from confide.privacy import statement as statements
from confide.privacy.statement import Statement
from confide.release import card, format
from confide.release.format import ReleaseInfo
from confide.release.hashes import file_hash
from confide.release.tensors import METADATA, Checkpoint

MERGE_REPORT = "merge-report.json"
_TOKENIZER = "The base's tokenizer, which is public; nothing is trained or added here."

PROVENANCE: Mapping[str, str] = {
    "config.json": "The base's architecture, which is public, with the declared label names.",
    "model.safetensors": "Weights: the base's, changed only by the noisy queries that the statement lists.",
    "model.safetensors.index.json": "Which shard holds which tensor: names and sizes of the architecture.",
    "model-*-of-*.safetensors": "A shard of the weights.",
    "heads/*/model.safetensors": "A task's head, as its own release holds it.",
    "tokenizer.json": _TOKENIZER,
    "tokenizer_config.json": _TOKENIZER,
    "special_tokens_map.json": _TOKENIZER,
    "added_tokens.json": _TOKENIZER,
    "vocab.txt": _TOKENIZER,
    "vocab.json": _TOKENIZER,
    "merges.txt": _TOKENIZER,
    "bpe.codes": _TOKENIZER,
    "spiece.model": _TOKENIZER,
    "sentencepiece.bpe.model": _TOKENIZER,
    format.FILE_NAME: "The owner's settings: task, labels, metric, length; names of the head's tensors.",
    statements.FILE_NAME: "The schedule, declared constants of the data, the claim, hashes of the weights.",
    MERGE_REPORT: "Computed from the released weights of the inputs and the base, and from nothing else.",
    card.FILE_NAME: "Written from confide.json, statement.json and merge-report.json.",
}
"""Every file that a release may hold, as a pattern, and where its content comes from. Nothing else leaves."""

TOKENIZER_FILES = tuple(name for name, origin in PROVENANCE.items() if origin == _TOKENIZER)
_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "heads/*/model.safetensors")
_TASK = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def provenance(name: str) -> str | None:
    """Where a file of a release comes from, by its path in the folder; None if it has no place in one."""
    for pattern, origin in PROVENANCE.items():
        if _matches(name, pattern):
            return origin
    return None


def check_task_name(name: str) -> None:
    """Make sure that a task's name can name its head's folder; worth knowing before training.

    Raises:
        ReleaseError: it can't.
    """
    if not _TASK.fullmatch(name):
        raise ReleaseError(f"task name {name!r} can't name a folder; use letters, digits, '.', '-' and '_'")


def write_release(
    path: Path,
    *,
    save: Callable[[Path], None],
    info: ReleaseInfo,
    statement: Statement,
    overwrite: bool = False,
) -> Statement:
    """Write a release folder that appears whole or not at all.

    Args:
        path: the folder to make.
        save: writes the model and its tokenizer (`save_pretrained`), or a merge's tensors, into the
            folder that it is given; only files that `PROVENANCE` lists.
        info: becomes confide.json.
        statement: becomes statement.json; its `weights` are filled in here.
        overwrite: swap out a release that is there.

    Returns:
        The statement as written, with the hashes of the weight files.

    Raises:
        ReleaseError: the folder exists, can't be written, or `save` put something there that the format
            doesn't allow.
    """
    for head in info.heads:
        check_task_name(head.task)
    with files.new_folder(Path(path), overwrite=overwrite) as side:
        save(side)
        files.write_json(side / format.FILE_NAME, info.model_dump(mode="json"))
        weights = {name: file_hash(side / name) for name in _listed(side) if _is_weights(name)}
        statement = statement.model_copy(update={"weights": weights})
        files.write_json(side / statements.FILE_NAME, statement.to_json())
        files.write_text(side / card.FILE_NAME, card.render(info, statement, _merge_report(side)))
        _check_files(side)
        _check_tensors(side, info)
    return statement


def _merge_report(folder: Path) -> Any:
    file = folder / MERGE_REPORT
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def verify(folder: Path) -> Statement:
    """Check that a release is what its statement says: same weights, nothing missing, nothing besides.

    Returns:
        Its statement. The claim in it is not recomputed here (`privacy.accountant`).

    Raises:
        ReleaseError: a file or tensor that doesn't belong, is missing, or was changed.
        PrivacyError: no valid statement.
    """
    folder = Path(folder)
    info = format.read(folder)
    statement = statements.read(folder)
    _check_files(folder)
    present = {name for name in _listed(folder) if _is_weights(name)}
    for name in sorted(present | set(statement.weights)):
        if name not in present:
            raise ReleaseError(f"{folder}: the statement is about {name}, which is missing")
        if name not in statement.weights:
            raise ReleaseError(
                f"{folder}: the statement says nothing about {name}, so nothing is claimed for it"
            )
        if file_hash(folder / name) != statement.weights[name]:
            raise ReleaseError(f"{folder}: {name} was changed after its statement was written")
    _check_tensors(folder, info)
    return statement


def _check_files(folder: Path) -> None:
    odd = [name for name in _listed(folder) if provenance(name) is None]
    if odd:
        raise ReleaseError(f"{folder} holds what is no part of a release: {', '.join(odd)}")
    if not any(_is_weights(name) for name in _listed(folder)):
        raise ReleaseError(f"{folder} holds no weights")


def _check_tensors(folder: Path, info: ReleaseInfo) -> None:
    """Every tensor is the encoder's or a declared head's, and no free text travels beside them."""
    declared = {(head.task, name) for head in info.heads for name in head.tensors}
    whole = Checkpoint.open(folder)
    heads = {name for _, name in declared} if info.kind == "model" else set()
    for name in whole.names:
        if name not in heads and not name.startswith(info.weights_prefix):
            raise ReleaseError(f"{folder}: tensor {name} is neither the encoder's nor a declared head's")
    missing = sorted(heads - set(whole.names))
    checkpoints = [whole]
    if info.kind == "merged":
        found = set()
        for file in sorted((folder / "heads").glob("*/model.safetensors")):
            checkpoints.append(Checkpoint.open(file))
            found |= {(file.parent.name, name) for name in checkpoints[-1].names}
        if found - declared:
            raise ReleaseError(f"{folder}: no head declares {': '.join(sorted(found - declared)[0])}")
        missing = sorted(": ".join(pair) for pair in declared - found)
    if missing:
        raise ReleaseError(f"{folder}: the head's tensor {missing[0]} is missing")
    for checkpoint in checkpoints:
        for metadata in checkpoint.metadata:
            if metadata not in (None, METADATA):
                raise ReleaseError(f"{checkpoint.path}: metadata beyond {METADATA} has no place in a release")


def _listed(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir())


def _is_weights(name: str) -> bool:
    return any(_matches(name, pattern) for pattern in _WEIGHTS)


def _matches(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern)
