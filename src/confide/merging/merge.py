"""Merging models: one body from many, every head kept, the claim composed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from confide import files
from confide.errors import MergeError, ReleaseError
from confide.merging.inputs import Input
from confide.merging.memory import limited
from confide.merging.operators.specification import Rule
from confide.merging.plan import Plan, plan_models
from confide.merging.recipe import DTYPES
from confide.merging.stream import TensorLine, merge_tensor
from confide.merging.vectors import CHUNK, Encoder
from confide.privacy import words
from confide.privacy.statement import Base, OwnersChecked, Statement
from confide.release import agreement, format
from confide.release.format import ReleaseInfo
from confide.release.names import model_config
from confide.release.shards import SHARD_SIZE, Values, write_shards, write_tensors
from confide.release.tensors import STORAGE
from confide.release.write import COMPANIONS, MERGE_REPORT, write_release

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


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
    parameters: Mapping[str, Any]
    base: Base
    models: tuple[str, ...]
    facts: Mapping[str, Any]
    tensors: tuple[TensorLine, ...]
    info: ReleaseInfo
    statement: Statement

    @property
    def merged(self) -> int:
        """How many tensors were made from the models; the others are the base's."""
        return sum(not line.rule.startswith(("base:", "buffer:")) for line in self.tensors)


def merge(
    models: Sequence[Path],
    *,
    base: Path,
    operator: str,
    out: Path,
    parameters: Mapping[str, Any] | None = None,
    statistics: Sequence[Path] = (),
    disjoint: bool | OwnersChecked = False,
    key: Ed25519PrivateKey | None = None,
    overwrite: bool = False,
    shard_size: int = SHARD_SIZE,
    progress: Callable[[int, int], None] | None = None,
) -> MergeReport:
    """Merge models that were trained from one base, and write the merge as a release.

    An encoder is written under the plain encoder class's names, in the base's dtype, with the base's
    config.json and tokenizer; a head for each task is copied as it is.

    Args:
        models: folders: releases, merges, transformers models, PEFT adapters (`inputs.read_inputs`).
        base: folder of the public base model.
        operator: its name, one of `OPERATORS`.
        out: the folder to make.
        parameters: the operator's; defaults are its paper's.
        statistics: a file for each model, in any order, where the operator needs them
            (`merging.statistics`).
        disjoint: the caller declares that no unit is in data sets of two inputs, or how their owners checked
            it, so the merge costs the largest claim; otherwise what was spent on each is added up.
        key: signs the merge's statement; the inputs' own signatures are carried as they are.
        overwrite: swap out a release that is there.
        shard_size: largest file of weights in bytes.
        progress: called with the number of tensors written, and of all.

    Raises:
        MergeError: unknown operator or parameter; inputs of different bases, shapes or vocabularies; two
            heads for one task; statistics that are missing or of another model; a value that isn't finite.
        ModelError, ReleaseError: an input can't be read, or isn't what its statement says; `out` exists, or
            can't be written.
        PrivacyError: a statement is altered, claims less than its events cost, or is wrongly signed;
            statistics that no claim covers.
    """
    check_free(Path(out), overwrite)
    plan = plan_models(
        [Path(model) for model in models],
        base=Path(base),
        operator=operator,
        parameters=parameters,
        statistics=statistics,
        disjoint=disjoint,
    )
    return write(plan, out, key=key, overwrite=overwrite, shard_size=shard_size, progress=progress)


def write(
    plan: Plan,
    out: Path,
    *,
    key: Ed25519PrivateKey | None = None,
    overwrite: bool = False,
    shard_size: int = SHARD_SIZE,
    memory: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> MergeReport:
    """Do what was planned; arguments and errors as in `merge`.

    Args:
        memory: private memory in bytes that the merge may take beside what the process has: chunks are made
            to fit, and the system enforces it (`memory.limited`).

    Raises:
        MergeError: the merge needs more memory, too; nothing is written then.
        ReleaseError: the disk has no room for it.
    """
    check_free(Path(out), overwrite)
    with limited(memory):
        fitting = plan if memory is None else plan.within(memory)
        return _write(fitting, out, key, overwrite, shard_size, progress)


def _write(
    plan: Plan,
    out: Path,
    key: Ed25519PrivateKey | None,
    overwrite: bool,
    shard_size: int,
    progress: Callable[[int, int], None] | None,
) -> MergeReport:
    _check_room(Path(out), plan)
    rule = plan.rule()
    lines: list[TensorLine] = []

    def save(folder: Path) -> dict[str, str]:
        hashes = _write_body(folder, plan, rule, lines, shard_size, progress)
        for item in plan.inputs:
            _write_heads(folder, item)
        _copy_base(folder, plan)
        own = plan.inputs[0].path / agreement.FILE_NAME
        if plan.statement.agreement and own.exists():
            shutil.copyfile(own, folder / agreement.FILE_NAME)
        files.write_json(folder / MERGE_REPORT, _report(plan, rule, lines))
        return hashes

    written = write_release(
        Path(out), save=save, info=plan.info, statement=_stated(plan), key=key, overwrite=overwrite
    )
    return MergeReport(
        operator=plan.operator.name,
        parameters=plan.parameters,
        base=plan.base,
        models=tuple(item.tasks for item in plan.inputs),
        facts=rule.facts,
        tensors=tuple(lines),
        info=plan.info,
        statement=written,
    )


def body(
    plan: Plan, rule: Rule, note: Callable[[TensorLine], None], names: Sequence[str] | None = None
) -> dict[str, Values]:
    """Tensors of the merge, computed when they are read; `note` is given the line of each."""
    vectors, operator = plan.vectors, plan.operator.name
    return {
        name: (
            *plan.output(name),
            merge_tensor(vectors, name, rule, operator, note, plan.output(name)[0]),
        )
        for name in sorted(vectors.base.names if names is None else names)
    }


def check_free(out: Path, overwrite: bool = False) -> None:
    """
    Raises:
        ReleaseError: the folder exists already.
    """
    if out.exists() and not overwrite:
        raise ReleaseError(f"{out} exists already; choose another folder or remove it first")


def _check_room(out: Path, plan: Plan) -> None:
    """A disk that is too small is better known before the hours than after them."""
    needed = sum(
        plan.vectors.size(name) * STORAGE[plan.output(name)[0]].itemsize for name in plan.vectors.base.names
    )
    for item in plan.inputs:
        for _, head in item.heads:
            needed += sum(head.checkpoint.stored(stored).nbytes for stored in head.stored.values())
    place = next(folder for folder in out.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ReleaseError(
            f"the merge takes {needed / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free in {place}; make "
            "room, or write it to another disk"
        )


def _write_body(
    folder: Path,
    plan: Plan,
    rule: Rule,
    lines: list[TensorLine],
    shard_size: int,
    progress: Callable[[int, int], None] | None,
) -> dict[str, str]:
    count = len(plan.vectors.base.names)

    def note(line: TensorLine) -> None:
        lines.append(line)
        if progress:
            progress(len(lines), count)

    return write_shards(folder, body(plan, rule, note), shard_size)


def _write_heads(folder: Path, item: Input) -> None:
    for head, weights in item.heads:
        for name in weights.names:
            _check_finite(name, weights)
        place = folder / "heads" / head.task
        place.mkdir(parents=True)
        source = weights.checkpoint
        write_tensors(
            place / format.WEIGHTS,
            {
                name: (source.dtype(stored), source.shape(stored), [source.stored(stored)])
                for name, stored in weights.stored.items()
            },
        )


def _stated(plan: Plan) -> Statement:
    """The plan's statement, with what its statistics assume."""
    sources = sorted({each.source for each in plan.statistics if each.origin == "public"})
    if not sources or plan.statement.claim is None:
        return plan.statement
    assumed = (*plan.statement.assumptions, words.public_statistics(sources))
    return plan.statement.model_copy(update={"assumptions": assumed})


def _check_finite(name: str, weights: Encoder) -> None:
    size = weights.checkpoint.size(weights.stored[name])
    for start in range(0, size, CHUNK):
        if not np.isfinite(weights.read(name, start, start + CHUNK)).all():
            raise MergeError(f"tensor {name} of {weights.label} holds values that aren't finite (NaN or ∞)")


def _copy_base(folder: Path, plan: Plan) -> None:
    base = plan.public.folder
    for name in COMPANIONS:
        if (base / name).exists():
            shutil.copyfile(base / name, folder / name)
    config = model_config(base)
    if plan.dtype:
        config.pop("torch_dtype", None)
        config["dtype"] = next(word for word, code in DTYPES.items() if code == plan.dtype)
    # As its owner wrote it: a configuration may hold Infinity, which is no JSON, but which Python reads.
    files.write_text(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _report(plan: Plan, rule: Rule, lines: Sequence[TensorLine]) -> dict[str, Any]:
    grouped = len(plan.groups) > 1
    return {
        "format": "confide.merge-report/1",
        "operator": plan.operator.name,
        "paper": plan.operator.paper,
        "parameters": dict(plan.parameters),
        "groups": [{"parameters": dict(g.settings), "tensors": g.names} for g in plan.groups]
        if grouped
        else [],
        "dtype": plan.dtype,
        "heads": plan.heads,
        "base": plan.base.model_dump(mode="json"),
        "models": [
            {
                "tasks": item.tasks,
                "kind": item.kind,
                "weights": item.statement.weights if item.statement else None,
            }
            for item in plan.inputs
        ],
        "agreement": {"hash": plan.statement.agreement, "differences": plan.disagreements()},
        "statistics": [
            {"kind": each.kind, "origin": each.origin, "source": each.source} for each in plan.statistics
        ],
        "facts": dict(rule.facts),
        "tensors": [asdict(line) for line in lines],
    }
