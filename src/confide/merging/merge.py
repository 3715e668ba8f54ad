"""Merging releases: one encoder from many, every head kept, the claim composed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from confide import files
from confide.errors import MergeError, ReleaseError
from confide.merging.operators import find
from confide.merging.operators.parameters import Setting
from confide.merging.operators.specification import Operator, Rule
from confide.merging.statistics import StatisticsFile, match_statistics
from confide.merging.stream import TensorLine, merge_tensor
from confide.merging.vectors import Encoder, TaskVectors
from confide.privacy import statement as statements
from confide.privacy.composition import check, compose
from confide.privacy.statement import Base, Statement
from confide.release import format
from confide.release.format import Head, ReleaseInfo
from confide.release.hashes import base_hash, encoder_hash
from confide.release.names import encoder_prefix, encoder_tensors, model_type
from confide.release.tensors import Checkpoint, write_tensors
from confide.release.write import MERGE_REPORT, TOKENIZER_FILES, verify, write_release


@dataclass(frozen=True)
class Input:
    """A release that is merged.

    Attributes:
        path: its folder.
        info: its confide.json.
        statement: its claim; None if it came without one, so that nothing can be claimed for the merge.
        weights: of the encoder, under canonical names.
        heads: with the checkpoint that holds each.
    """

    path: Path
    info: ReleaseInfo
    statement: Statement | None
    weights: Encoder
    heads: tuple[tuple[Head, Checkpoint], ...]

    @property
    def tasks(self) -> str:
        """What the merge report calls it: a path would tell where its owner keeps it."""
        return "+".join(head.task for head in self.info.heads)


@dataclass(frozen=True)
class MergeReport:
    """What was merged and how; `merge-report.json` of the release.

    Attributes:
        operator: its name.
        parameters: all of them, defaults included.
        base: the public model that every input was trained from.
        models: tasks of each input, in the order of the cosines.
        facts: what the operator looked up in the whole models: thresholds, effective density.
        tensors: a line for each.
        info: confide.json of the merge.
        statement: its claim.
    """

    operator: str
    parameters: Mapping[str, Setting]
    base: Base
    models: tuple[str, ...]
    facts: Mapping[str, Any]
    tensors: tuple[TensorLine, ...]
    info: ReleaseInfo
    statement: Statement


def merge(
    models: Sequence[Path],
    *,
    base: Path,
    operator: str,
    out: Path,
    parameters: Mapping[str, Any] | None = None,
    statistics: Sequence[Path] = (),
    disjoint: bool = False,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> MergeReport:
    """Merge releases that were trained from one base, and write the merge as a release.

    The encoder is written under the plain encoder class's names, in the base's dtype, with the base's
    config.json and tokenizer; a head for each task is copied as it is.

    Args:
        models: release folders; merges may be merged again.
        base: folder of the public base model.
        operator: its name, one of `OPERATORS`.
        out: the folder to make.
        parameters: the operator's; defaults are its paper's.
        statistics: a file for each model, in any order, where the operator needs them
            (`merging.statistics`).
        disjoint: the caller declares that no unit is in two of the data sets, so the merge costs the
            largest claim; otherwise what was spent on each is added up.
        overwrite: swap out a release that is there.
        progress: called with the number of tensors written, and of all.

    Raises:
        MergeError: unknown operator or parameter; inputs of different bases, shapes or vocabularies; two
            heads for one task; statistics that are missing or of another model; a value that isn't finite.
        ModelError, ReleaseError: an input can't be read, or isn't what its statement says; `out` exists.
        PrivacyError: a statement is altered, or claims less than its events cost; statistics that no claim
            covers.
    """
    chosen = find(operator)
    settings = chosen.settings(parameters or {})
    out, base = Path(out), Path(base)
    if out.exists() and not overwrite:
        raise ReleaseError(f"{out} exists already; choose another folder or remove it first")
    inputs = [_read(Path(model)) for model in models]
    _check_tasks(inputs)
    public = _same_base(inputs, base)
    _same_vocabulary(inputs, base)
    checkpoint = Checkpoint.open(base)
    prefix = encoder_prefix(checkpoint, model_type(base))
    weights = Encoder(str(base), checkpoint, encoder_tensors(checkpoint, prefix))
    vectors = TaskVectors(weights, [item.weights for item in inputs])
    rule = chosen.prepare(vectors, settings, _statistics(inputs, statistics))
    info = ReleaseInfo(
        kind="merged",
        encoder_prefix=inputs[0].info.encoder_prefix,
        heads=tuple(head for item in inputs for head in item.info.heads),
    )
    composed = compose(
        [item.statement or _without_claim(item, public) for item in inputs],
        disjoint=disjoint,
        base=public,
        weights={},
    )
    lines: list[TensorLine] = []

    def save(folder: Path) -> None:
        _write_encoder(folder, vectors, rule, chosen, lines, progress)
        for item in inputs:
            _write_heads(folder, item)
        _copy_base(folder, base)
        files.write_json(folder / MERGE_REPORT, _report(chosen, settings, public, inputs, rule, lines))

    written = write_release(out, save=save, info=info, statement=composed, overwrite=overwrite)
    return MergeReport(
        operator=chosen.name,
        parameters=settings,
        base=public,
        models=tuple(item.tasks for item in inputs),
        facts=rule.facts,
        tensors=tuple(lines),
        info=info,
        statement=written,
    )


def _read(path: Path) -> Input:
    info = format.read(path)
    # A statement that is there but wrong is an error; only its absence is "nothing is claimed".
    statement = verify(path) if (path / statements.FILE_NAME).exists() else None
    if statement:
        check(statement)
    checkpoint = Checkpoint.open(path)
    own = [name for head in info.heads for name in head.tensors] if info.kind == "model" else []
    for name in checkpoint.names:
        if name not in own and not name.startswith(info.weights_prefix):
            raise MergeError(f"tensor {name} of {path} is neither the encoder's nor a declared head's")
    heads = []
    for head in info.heads:
        source = checkpoint
        if info.kind == "merged":
            source = Checkpoint.open(path / "heads" / head.task / format.WEIGHTS)
        for name in head.tensors:
            if name not in source:
                raise MergeError(f"tensor {name} of the head for task {head.task!r} is missing from {path}")
        heads.append((head, source))
    stored = encoder_tensors(checkpoint, info.weights_prefix, own)
    return Input(path, info, statement, Encoder(str(path), checkpoint, stored), tuple(heads))


def _check_tasks(inputs: Sequence[Input]) -> None:
    owner: dict[str, Path] = {}
    for item in inputs:
        for head in item.info.heads:
            if head.task in owner:
                raise MergeError(
                    f"two heads for task {head.task!r}, in {owner[head.task]} and {item.path}; a merge has "
                    "one head a task"
                )
            owner[head.task] = item.path
    prefixes = {item.info.encoder_prefix: item.path for item in inputs}
    if len(prefixes) > 1:
        raise MergeError(f"the models are of different families: {_pairs(prefixes)}")


def _same_base(inputs: Sequence[Input], base: Path) -> Base:
    """The base of every input, after comparing hashes: task vectors from another base mean nothing."""
    ours = base_hash(base)
    for item in inputs:
        if item.statement is None or item.statement.base.hash == ours:
            continue
        theirs = item.statement.base
        raise MergeError(
            f"{item.path} was trained from base {theirs.name} ({theirs.hash}), but the base of this merge is "
            f"{base} ({ours}); models of different bases can't be merged"
        )
    names = [item.statement.base.name for item in inputs if item.statement]
    return Base(name=names[0] if names else base.name, hash=ours)


def _same_vocabulary(inputs: Sequence[Input], base: Path) -> None:
    expected = _vocabulary(base)
    for item in inputs:
        theirs = _vocabulary(item.path)
        if expected is None or theirs is None or theirs == expected:
            continue
        odd = sorted(set(expected.items()) ^ set(theirs.items()))[0][0]
        raise MergeError(
            f"the tokenizer of {item.path} ({len(theirs)} tokens) isn't that of base {base} "
            f"({len(expected)} tokens): {odd!r} differs, so their embeddings can't be merged"
        )


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Token → id, where the tokenizer is in a form that tells; None otherwise."""
    file = folder / "tokenizer.json"
    if not file.exists():
        return None
    try:
        vocabulary = json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
    except (ValueError, KeyError, TypeError):
        raise MergeError(f"{file} can't be read as a tokenizer") from None
    if isinstance(vocabulary, list):
        return {str(token[0]): number for number, token in enumerate(vocabulary)}
    return dict(vocabulary)


def _statistics(inputs: Sequence[Input], paths: Sequence[Path]) -> list[StatisticsFile]:
    """Those of each input, told by the encoder that they were computed on."""
    if not paths:
        return []
    covered = {hash for item in inputs if item.statement for hash in item.statement.weights.values()}
    models = {}
    for item in inputs:
        own = [name for head in item.info.heads for name in head.tensors] if item.info.kind == "model" else []
        models[encoder_hash(item.weights.checkpoint, item.info.weights_prefix, own)] = item.tasks
    return match_statistics([StatisticsFile(Path(path), covered) for path in paths], models)


def _without_claim(item: Input, base: Base) -> Statement:
    return Statement(
        kind="training",
        confide=version("confide"),
        claim=None,
        no_claim=f"the model for {item.tasks} came without a statement",
        base=base,
        weights={},
        spendings=(),
        assumptions=(),
    )


def _write_encoder(
    folder: Path,
    vectors: TaskVectors,
    rule: Rule,
    operator: Operator,
    lines: list[TensorLine],
    progress: Callable[[int, int], None] | None,
) -> None:
    names = sorted(vectors.base.names)

    def note(line: TensorLine) -> None:
        lines.append(line)
        if progress:
            progress(len(lines), len(names))

    write_tensors(
        folder / format.WEIGHTS,
        {
            name: (
                vectors.base.dtype(name),
                vectors.base.shape(name),
                merge_tensor(vectors, name, rule, operator.name, note),
            )
            for name in names
        },
    )


def _write_heads(folder: Path, item: Input) -> None:
    for head, source in item.heads:
        for name in head.tensors:
            _check_finite(name, source)
        place = folder / "heads" / head.task
        place.mkdir(parents=True)
        write_tensors(
            place / format.WEIGHTS,
            {name: (source.dtype(name), source.shape(name), [source.stored(name)]) for name in head.tensors},
        )


def _check_finite(name: str, source: Checkpoint) -> None:
    import numpy as np

    if not np.isfinite(source.numpy(name)).all():
        raise MergeError(f"tensor {name} of {source.path} holds values that aren't finite (NaN or ∞)")


def _copy_base(folder: Path, base: Path) -> None:
    for name in ("config.json", *TOKENIZER_FILES):
        if (base / name).exists():
            shutil.copyfile(base / name, folder / name)


def _report(
    operator: Operator,
    settings: Mapping[str, Setting],
    base: Base,
    inputs: Sequence[Input],
    rule: Rule,
    lines: Sequence[TensorLine],
) -> dict[str, Any]:
    return {
        "format": "confide.merge-report/1",
        "operator": operator.name,
        "paper": operator.paper,
        "parameters": dict(settings),
        "base": base.model_dump(mode="json"),
        "models": [
            {"tasks": item.tasks, "weights": item.statement.weights if item.statement else None}
            for item in inputs
        ],
        "facts": dict(rule.facts),
        "tensors": [asdict(line) for line in lines],
    }


def _pairs(owners: Mapping[str, Path]) -> str:
    return ", ".join(f"{name!r} in {path}" for name, path in owners.items())
