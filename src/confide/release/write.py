"""Writing a release, and checking one: an explicit list of files, hashed weights, all or nothing."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confide import files
from confide.errors import ReleaseError
from confide.privacy import statement as statements
from confide.privacy.signature import public_text, sign, signer
from confide.privacy.statement import Statement
from confide.release import agreement, card, format
from confide.release.format import Head, ReleaseInfo
from confide.release.hashes import file_hash
from confide.release.names import model_type
from confide.release.shards import METADATA
from confide.release.tensors import Checkpoint

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MERGE_REPORT = "merge-report.json"
_TOKENIZER = "The base's tokenizer, which is public; nothing is trained or added here."

PROVENANCE: Mapping[str, str] = {
    "config.json": "The base's architecture, which is public, with the declared label names.",
    "model.safetensors": "Weights: the base's, changed only by the noisy queries that the statement lists.",
    "model.safetensors.index.json": "Which shard holds which tensor: names and sizes of the architecture.",
    "model-*-of-*.safetensors": "A shard of the weights.",
    "heads/*/model.safetensors": "A task's head, as its own release holds it.",
    format.STATISTICS: "Statistics of the records: the noisy answer to a query that the statement lists.",
    f"{format.ADAPTER}/{format.ADAPTER_WEIGHTS}": "What was trained of the weights, before it was merged.",
    f"{format.ADAPTER}/{format.ADAPTER_CONFIG}": "The owner's settings of LoRA, and which layers it adapts.",
    "tokenizer.json": _TOKENIZER,
    "tokenizer_config.json": _TOKENIZER,
    "chat_template.jinja": _TOKENIZER,
    "special_tokens_map.json": _TOKENIZER,
    "added_tokens.json": _TOKENIZER,
    "vocab.txt": _TOKENIZER,
    "vocab.json": _TOKENIZER,
    "merges.txt": _TOKENIZER,
    "bpe.codes": _TOKENIZER,
    "spiece.model": _TOKENIZER,
    format.PREPROCESSOR: "The base's mean and deviation of each colour, which are public; the declared size.",
    "sentencepiece.bpe.model": _TOKENIZER,
    format.GENERATION: "How the base ends its texts, which is public.",
    format.FILE_NAME: "The owner's settings: task, labels, metric, length; names of the head's tensors.",
    statements.FILE_NAME: "The schedule, declared constants of the data, the claim, hashes of the files.",
    agreement.FILE_NAME: "What organisations agreed on before training: settings, and the base's hashes.",
    MERGE_REPORT: "Computed from the released weights of the inputs and the base, and from nothing else.",
    card.FILE_NAME: "Written from confide.json, statement.json and merge-report.json.",
}
"""Every file that a release may hold, as a pattern, and where its content comes from. Nothing else leaves."""

TOKENIZER_FILES = (
    *(name for name, origin in PROVENANCE.items() if origin == _TOKENIZER),
    format.PREPROCESSOR,
)
"""What a model needs beside its weights and config.json to read texts, or images."""

COMPANIONS = (*TOKENIZER_FILES, format.GENERATION)
"""These, and what it needs to write texts."""

_WEIGHTS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "heads/*/model.safetensors",
    f"{format.ADAPTER}/{format.ADAPTER_WEIGHTS}",
    format.STATISTICS,
)
_STATISTICS_METADATA = {"format", "kind", "origin", "model", "source"}
_PURPOSES = {"grams": "gram", "fisher": "fisher"}
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
    save: Callable[[Path], Mapping[str, str] | None],
    info: ReleaseInfo,
    statement: Statement,
    key: Ed25519PrivateKey | None = None,
    overwrite: bool = False,
) -> Statement:
    """Write a release folder that appears whole or not at all.

    Args:
        path: the folder to make.
        save: writes the model and its tokenizer (`save_pretrained`), or a merge's tensors, into the
            folder that it is given; only files that `PROVENANCE` lists. It returns the hashes of files that
            it hashed while it wrote them (`tensors.write_tensors`), by their path in the folder.
        info: becomes confide.json.
        statement: becomes statement.json; the hashes of all other files are filled in here.
        key: signs the statement, and with it all files; None leaves it unsigned.
        overwrite: swap out a release that is there.

    Returns:
        The statement as written, with hashes and signature.

    Raises:
        ReleaseError: the folder exists, can't be written, or `save` put something there that the format
            doesn't allow.
    """
    for head in info.heads:
        check_task_name(head.task)
    with files.new_folder(Path(path), overwrite=overwrite) as side:
        known = save(side) or {}
        files.write_json(side / format.FILE_NAME, info.model_dump(mode="json"))
        signed_by = public_text(key) if key else None
        text = card.render(info, statement, signed_by, _merge_report(side), model_type(side))
        files.write_text(side / card.FILE_NAME, text)
        hashes = _hashes(side, known)
        written = {
            "weights": {name: value for name, value in hashes.items() if _is_weights(name)},
            "files": {name: value for name, value in hashes.items() if not _is_weights(name)},
            "signature": None,
        }
        statement = statement.model_copy(update=written)
        statement = sign(statement, key) if key else statement
        files.write_json(side / statements.FILE_NAME, statement.to_json())
        check_names(side)
        check_tensors(side, info)
        check_statistics(side, statement)
        check_agreement(side, statement)
    return statement


def copy_reader(folder: Path, side: Path, head: Head) -> None:
    """Copy what reads a head's records into the folder of a model for this head alone."""
    for name in COMPANIONS:
        if (folder / name).exists():
            shutil.copyfile(folder / name, side / name)
    if size := head.problem.image_size:
        file = side / format.PREPROCESSOR
        base = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        files.write_json(file, format.preprocessor(base, size))


def _merge_report(folder: Path) -> Any:
    file = folder / MERGE_REPORT
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def verify(folder: Path) -> Statement:
    """Check that a release is what its statement says: the same files, nothing missing, nothing besides.

    Returns:
        Its statement, whose signature, if there is one, is right. The claim in it is not recomputed here
        (`privacy.composition.check`), and whose key signed it is the caller's business.

    Raises:
        ReleaseError: a file or tensor that doesn't belong, is missing, or was changed.
        PrivacyError: no valid statement, or a wrong signature.
    """
    folder = Path(folder)
    info = format.read(folder)
    said = statements.load(folder)
    statement = statements.parse(said, str(folder / statements.FILE_NAME))
    signer(said, str(folder / statements.FILE_NAME))
    check_names(folder)
    check_files(folder, statement)
    check_weights(folder, statement)
    check_tensors(folder, info)
    check_statistics(folder, statement)
    check_agreement(folder, statement)
    return statement


def _hashes(folder: Path, known: Mapping[str, str]) -> dict[str, str]:
    """Hashes of all files. Weights go to the disk meanwhile, which the folder's sync would wait for later."""
    names = [name for name in _listed(folder) if name != statements.FILE_NAME]
    with ThreadPoolExecutor(1) as pool:
        synced = pool.map(files.sync, [folder / name for name in names if _is_weights(name)])
        hashes = {name: known.get(name) or file_hash(folder / name) for name in names}
        list(synced)  # raises what went wrong
    return hashes


def check_names(folder: Path) -> None:
    """Whether the folder holds only what a release may hold.

    Raises:
        ReleaseError: naming what it holds besides.
    """
    odd = [name for name in _listed(folder) if provenance(name) is None or not (folder / name).is_file()]
    if odd:
        raise ReleaseError(f"{folder} holds what is no part of a release: {', '.join(odd)}")
    if not any(_is_weights(name) for name in _listed(folder)):
        raise ReleaseError(f"{folder} holds no weights")


def check_weights(folder: Path, statement: Statement) -> None:
    """Whether the weight files are those that the statement is about.

    Raises:
        ReleaseError: one is missing, was changed, or the statement doesn't name it.
    """
    present = {name for name in _listed(folder) if _is_weights(name)}
    _compare(folder, present, statement.weights)


def check_files(folder: Path, statement: Statement) -> None:
    """Whether everything beside the weights is as it was written; the card may be edited by people.

    Raises:
        ReleaseError: as `check_weights`. Statements that hold no hashes of files can't be compared.
    """
    own = {card.FILE_NAME, statements.FILE_NAME}
    stated = {name: value for name, value in statement.files.items() if name not in own}
    if statement.files:
        present = {name for name in _listed(folder) if not _is_weights(name)} - own
        _compare(folder, present, stated)


def _compare(folder: Path, present: set[str], stated: Mapping[str, str]) -> None:
    for name in sorted(present | set(stated)):
        if name not in present:
            raise ReleaseError(f"{folder}: the statement is about {name}, which is missing")
        if name not in stated:
            raise ReleaseError(
                f"{folder}: the statement says nothing about {name}, so nothing is claimed for it"
            )
        if file_hash(folder / name) != stated[name]:
            raise ReleaseError(f"{folder}: {name} was changed after its statement was written")


def check_tensors(folder: Path, info: ReleaseInfo) -> None:
    """Whether every tensor is the encoder's or a declared head's, and no free text travels beside them.

    Raises:
        ReleaseError: naming the tensor or the file.
    """
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
    adapter = folder / format.ADAPTER / format.ADAPTER_WEIGHTS
    checkpoints += [Checkpoint.open(adapter)] if adapter.exists() else []
    if missing:
        raise ReleaseError(f"{folder}: the head's tensor {missing[0]} is missing")
    for checkpoint in checkpoints:
        for metadata in checkpoint.metadata:
            if metadata not in (None, METADATA):
                raise ReleaseError(f"{checkpoint.path}: metadata beyond {METADATA} has no place in a release")


def check_statistics(folder: Path, statement: Statement) -> None:
    """Whether statistics in the folder are what the statement's one run asked, and nothing travels with them.

    Raises:
        ReleaseError: they are of another kind or origin than its query, or there is no query, or no file.
    """
    file = folder / format.STATISTICS
    asked = {
        query.purpose
        for spending in statement.spendings
        if statement.kind == "training" and spending.schedule
        for query in spending.schedule.queries
    } & set(_PURPOSES.values())
    if not file.exists():
        if asked:
            raise ReleaseError(f"{folder}: the statement lists statistics, but {file.name} is missing")
        return
    about = Checkpoint.open(file).metadata[0] or {}
    if set(about) != _STATISTICS_METADATA or about["origin"] != "released":
        raise ReleaseError(f"{file}: metadata beyond those of released statistics have no place in a release")
    if _PURPOSES.get(str(about["kind"])) not in asked or about["source"] != statement.spendings[0].dataset:
        raise ReleaseError(f"{file}: the statement lists no query for them, so nothing covers them")


def check_agreement(folder: Path, statement: Statement) -> None:
    """Whether the agreement in the folder is the one that the statement is about.

    Raises:
        ReleaseError: it is another one, or a run's isn't there.
        ConfigError: the file is no agreement.
    """
    file = folder / agreement.FILE_NAME
    if statement.kind == "training" and statement.agreement and not file.exists():
        raise ReleaseError(f"{folder}: the statement is about an agreement, but {file.name} is missing")
    if file.exists() and agreement.read(file).hash != statement.agreement:
        raise ReleaseError(f"{file}: the statement is about another agreement, or none")


def _listed(folder: Path) -> list[str]:
    """Everything in the folder, by its path there; a link to a folder counts, as it hides what is there."""
    return sorted(
        file.relative_to(folder).as_posix()
        for file in folder.rglob("*")
        if file.is_symlink() or not file.is_dir()
    )


def _is_weights(name: str) -> bool:
    return any(_matches(name, pattern) for pattern in _WEIGHTS)


def _matches(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern)
