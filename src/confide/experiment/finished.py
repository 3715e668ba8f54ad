"""What a study keeps on disk of its runs, so that one that was killed goes on.

private/study.json                        the key under which records are hashed here
private/runs/METHOD/seed-N/TASK.json      what a run found, and from what: written before its release
private/unfinished/METHOD/seed-N/TASK     keys and checkpoints of a run at work (`finetune.checkpoint`)

A run is finished where its release is. It is used again only if its fingerprint is the one that it would have
now; everything here is private.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from confide import files
from confide.errors import ResumeError
from confide.finetune.checkpoint import EVERY, Unfinished
from confide.finetune.fingerprint import difference
from confide.gradients.keys import Key
from confide.report.study import MixtureRun, PrivateRun

SCHEMA = "confide.study/1"


@dataclass(frozen=True)
class Finished:
    """What reports need of one run, beside its release.

    Attributes:
        fingerprint: of what it was trained from; the names of `finetune.fingerprint`.
        score: on test records, not noised; None where it isn't finite.
        first_block: the lowest block that was trained.
        noise_multiplier, trained, seconds, memory: as in `report.study.MethodFacts`.
        mixture, private: its streams, and what it showed of its records, if it is a run of `raptor`.
    """

    fingerprint: dict[str, str]
    score: float | None
    first_block: int
    noise_multiplier: float
    trained: int
    seconds: float
    memory: int
    mixture: MixtureRun | None = None
    private: PrivateRun | None = None


@dataclass(frozen=True)
class Desk:
    """The private folder of a study that is at work, locked for as long as this process works on it.

    Attributes:
        folder: `private` in the study's folder.
        key: records are hashed under it, so that the hashes say nothing to anybody else.
        every: seconds between two checkpoints of a run.
    """

    folder: Path
    key: Key
    every: float = EVERY

    def unfinished(self, method: str, seed: int, task: str) -> Path:
        """Where the keys and checkpoints of a run are."""
        return self.folder / "unfinished" / method / f"seed-{seed}" / task

    def note(self, method: str, seed: int, task: str, run: Finished) -> None:
        """Keep what a run found, before its release says that it is finished."""
        value = {"schema": SCHEMA, **dataclasses.asdict(run)}
        files.write_json(self._file(method, seed, task), _written(value), private=True)

    def finished(self, method: str, seed: int, task: str, now: Mapping[str, str]) -> Finished:
        """What a run found whose release is there.

        Args:
            now: the fingerprint that it would have now.

        Raises:
            ResumeError: it was trained from something else, which is named, or what is kept is damaged.
        """
        file = self._file(method, seed, task)
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
            if value.pop("schema") != SCHEMA:
                raise ResumeError(f"{file} was written by another confide; go on with that one")
            found = TypeAdapter(Finished).validate_python(value)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ValidationError):
            raise ResumeError(
                f"{file} is missing or damaged, so the study can't use that run; start a new study"
            ) from None
        other = difference(found.fingerprint, now)
        if other is not None:
            raise ResumeError(
                f"the study can't go on with {method}, seed {seed}, of task {task}: {other}. Restore what it "
                "began with, or start a new study, whose runs are charged anew"
            )
        if self.unfinished(method, seed, task).exists():  # killed before its keys were destroyed
            Unfinished.open(self.unfinished(method, seed, task)).destroy()
        return found

    def _file(self, method: str, seed: int, task: str) -> Path:
        return self.folder / "runs" / method / f"seed-{seed}" / f"{task}.json"


def _written(value: Any) -> Any:
    """The same with words for numbers that aren't finite, which JSON hasn't; they are read as numbers."""
    match value:
        case dict():
            return {key: _written(each) for key, each in value.items()}
        case list() | tuple():
            return [_written(each) for each in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value


def is_unfinished(out: Path) -> bool:
    """Whether a study was begun in a folder and not reported."""
    return is_study(out) and not (out / "report").exists()


def is_study(out: Path) -> bool:
    """Whether a folder keeps what a study found, finished or not."""
    return (out / "private" / "study.json").exists()


def unfinished_runs(out: Path) -> list[Path]:
    """Where the keys and checkpoints are of all runs of a study that were broken off."""
    found = (out / "private" / "unfinished").glob("*/seed-*/*")
    return sorted(folder for folder in found if folder.is_dir())


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep every other process from the study in a folder.

    Raises:
        ResumeError: one is at work on it.
    """
    file = out / "private" / "study.json"
    descriptor = files.lock(file)
    try:
        if descriptor is None or not _is(descriptor, file):  # the other one may just have written its own
            raise ResumeError(f"another process is at work on the study in {out}")
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


@contextmanager
def desk(out: Path) -> Iterator[Desk]:
    """The desk of a study, new or as it was left; nothing remains of one that stops before its first run.

    Raises:
        ResumeError: another process is at work on the study, or its file is damaged.
        ReleaseError: it can't be written.
    """
    folder = out / "private"
    file = folder / "study.json"
    if not file.exists():
        files.write_json(file, {"schema": SCHEMA, "key": Key.fresh().secret.hex()}, private=True)
    with locked(out):
        try:
            yield Desk(folder, _key(file))
        finally:
            if not any((folder / name).exists() for name in ("unfinished", "runs")):
                file.unlink(missing_ok=True)
                with suppress(OSError):  # somebody's own files
                    folder.rmdir()
                    out.rmdir()


def _is(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False


def _key(file: Path) -> Key:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        if value["schema"] != SCHEMA:
            raise ResumeError(f"{file} was written by another confide; go on with that one")
        return Key(bytes.fromhex(value["key"]), simulated=False)
    except (OSError, ValueError, KeyError, TypeError):
        raise ResumeError(f"{file} is damaged, so the study can't go on") from None
