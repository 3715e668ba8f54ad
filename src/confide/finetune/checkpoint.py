"""An unfinished run on disk: its keys, what it began with, its charge, and where it stood.

Noise and draws are addressed by (stream, step, query), so a run that goes on from an earlier step asks the
same queries again and gets the same answers, bit for bit, provided that records, model and arithmetic are the
same. That is checked first. Everything here is private: with the keys noise could be subtracted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from confide import files
from confide.errors import ReleaseError, ResumeError
from confide.finetune.fingerprint import difference
from confide.finetune.history import History, State, StepRecord
from confide.gradients.keys import Key, Keys
from confide.release.hashes import file_hash

SCHEMA = "confide.checkpoint/1"
EVERY = 300.0
"""Seconds between two checkpoints: how much work may have to be done twice."""

_KEYS, _CHARGE, _STATE, _TENSORS = "run.json", "charge.json", "state.json", "state.safetensors"
_OWNERS = "owners.json"
_CHECKPOINT = "checkpoint-"
_OWN = re.compile(r"lock|run\.json|charge\.json|owners\.json|options\.json|checkpoint-\d+|\..+\.partial")


@dataclass(frozen=True)
class Begun:
    """What a run began with, written before its charge and its first noisy query.

    Attributes:
        run: its identifier in the ledger and the statement.
        keys: its master keys.
        fingerprint: name → value of everything that must be the same when it goes on
            (`fingerprint.fingerprint`).
    """

    run: str
    keys: Keys
    fingerprint: Mapping[str, str]

    def check(self, now: Mapping[str, str]) -> None:
        """Whether the run may go on here.

        Raises:
            ResumeError: something isn't what the run began with; names it.
        """
        found = difference(self.fingerprint, now)
        if found is not None:
            raise ResumeError(
                f"the run can't go on: {found}. Restore what it began with, or start a new run, which is "
                "charged anew"
            )


class Unfinished:
    """The folder of one unfinished run, locked for as long as this process works on it.

    Attributes:
        folder: the folder, readable by its owner alone.
        every: seconds between two checkpoints; 0 for one after each step.
        asked: whether a noisy query may have been answered, or work would be lost: then it is kept.
    """

    def __init__(self, folder: Path, descriptor: int, every: float) -> None:
        self.folder = folder
        self.asked = (folder / _KEYS).exists()
        self._descriptor = descriptor
        self.every = every
        self._saved = time.monotonic()

    @classmethod
    def open(cls, folder: Path, *, every: float = EVERY) -> Unfinished:
        """Open an unfinished run, or make the folder for a new one.

        What a killed process left half-written in it is removed.

        Args:
            every: seconds between two checkpoints; 0 for one after each step.

        Raises:
            ResumeError: another process is at work on it, or the folder holds something else: it is removed
                in the end.
            ReleaseError: the folder can't be written.
        """
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            odd = sorted(path.name for path in folder.iterdir() if not _OWN.fullmatch(path.name))
            if odd:
                raise ResumeError(f"{folder} holds {odd[0]}, which is no part of a run; name an empty folder")
            folder.chmod(0o700)
            file = folder / "lock"
            os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
            descriptor = files.lock(file)
            if descriptor is None:
                raise ResumeError(f"another process is at work on the run in {folder}")
            files.sweep(folder)
            found = cls(folder, descriptor, every)
            # Without keys nothing was asked, and what else is there belongs to no run.
            found._remove_checkpoints(all_but=found._latest() if found.asked else None)
            if not found.asked:
                (folder / _CHARGE).unlink(missing_ok=True)
                (folder / _OWNERS).unlink(missing_ok=True)
        except OSError as error:
            raise ReleaseError(f"can't write {folder}: {error.strerror or error}") from error
        return found

    def close(self) -> None:
        """Let others work on it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def read(self) -> Begun | None:
        """What the run began with; None for one that hasn't begun.

        Raises:
            ResumeError: the file is damaged, or of a newer schema.
        """
        file = self.folder / _KEYS
        if not file.exists():
            return None
        value = _json(file)
        try:
            keys = {
                name: Key(bytes.fromhex(value["keys"][name]), bool(value["keys"]["simulated"]))
                for name in ("noise", "sampling")
            }
            return Begun(str(value["run"]), Keys(**keys), dict(value["fingerprint"]))
        except (KeyError, TypeError, ValueError):
            raise ResumeError(f"{file} is damaged, so the run can't go on") from None

    def begin(self, begun: Begun) -> None:
        """Put a new run's keys on disk."""
        keys = {
            "noise": begun.keys.noise.secret.hex(),
            "sampling": begun.keys.sampling.secret.hex(),
            "simulated": begun.keys.simulated,
        }
        value = {"run": begun.run, "keys": keys, "fingerprint": dict(begun.fingerprint)}
        files.write_json(self.folder / _KEYS, {"schema": SCHEMA, **value}, private=True)

    def charge(self) -> tuple[str, str] | None:
        """The ledger that the run was charged to, and the hash of its entry there; None before it was."""
        file = self.folder / _CHARGE
        if not file.exists():
            return None
        value = _json(file)
        return str(value.get("ledger")), str(value.get("entry"))

    def note_charge(self, ledger: str, entry: str) -> None:
        """Put the reservation on disk, before the first noisy query."""
        value = {"schema": SCHEMA, "ledger": ledger, "entry": entry}
        files.write_json(self.folder / _CHARGE, value, private=True)

    def owners(self, layer: str) -> npt.NDArray[np.int64] | None:
        """(rows,) the records' owners that `note_owners` kept; None before.

        Raises:
            ResumeError: the file is damaged, or another layer's.
        """
        file = self.folder / _OWNERS
        if not file.exists():
            return None
        value = _json(file)
        try:
            found = np.array(value["owner"], dtype=np.int64)
            if value["layer"] == layer and value["hash"] == _owners_hash(found):
                return found
        except (KeyError, TypeError, ValueError, OverflowError):
            pass
        raise ResumeError(f"{file} is damaged or belongs to another run, so the run can't go on")

    def note_owners(self, layer: str, owner: npt.NDArray[np.int64]) -> None:
        """Put the records' owners on disk, before the first noisy query.

        A second computation could break a near tie the other way, and the run would meet its own noise with
        another gradient.
        """
        value = {"layer": layer, "owner": owner.tolist(), "hash": _owners_hash(owner)}
        files.write_json(self.folder / _OWNERS, {"schema": SCHEMA, **value}, private=True)

    def latest(self, run: str) -> State | None:
        """The last checkpoint; None if there is none, and the run is replayed from its first step.

        Raises:
            ResumeError: it is damaged, of a newer schema, or another run's.
        """
        folder = self._latest()
        if folder is None:
            return None
        advice = f"remove {folder}, and the run is replayed from its first step, with the same noise"
        try:
            value = _json(folder / _STATE, advice)
            if value["run"] != run:
                raise ResumeError(f"{folder} belongs to another run; {advice}")
            if file_hash(folder / _TENSORS) != value["tensors"]:
                raise ResumeError(f"{folder / _TENSORS} is truncated or was changed; {advice}")
            history = History(dict(value["steps_run"]), [StepRecord(*_nan(row)) for row in value["history"]])
            return State(int(value["step"]), load_file(folder / _TENSORS), history)
        except (KeyError, TypeError, ValueError, SafetensorError, OSError, ReleaseError):
            raise ResumeError(f"{folder} is damaged; {advice}") from None

    def steps_run(self) -> dict[str, int]:
        """Steps of each stream up to the last checkpoint that can be read; more may have run."""
        folder = self._latest()
        try:
            return dict(_json(folder / _STATE)["steps_run"]) if folder else {}
        except (ResumeError, KeyError, TypeError, ValueError):
            return {}

    def after_step(self, run: str, state: Callable[[], State]) -> None:
        """Write a checkpoint if the last one is old enough; the one before goes when the new one is whole.

        Raises:
            ReleaseError: the disk is full, or can't be written. The run can go on from the last one.
        """
        if time.monotonic() - self._saved < self.every:
            return
        now = state()
        folder = self.folder / f"{_CHECKPOINT}{now.step:08d}"
        self.asked = True
        with files.new_folder(folder, overwrite=True) as side:
            save_file({name: tensor.contiguous() for name, tensor in now.tensors.items()}, side / _TENSORS)
            (side / _TENSORS).chmod(0o600)
            value = {
                "run": run,
                "step": now.step,
                "steps_run": now.history.steps_run,
                "tensors": file_hash(side / _TENSORS),
                "history": [_null(dataclasses.astuple(record)) for record in now.history.steps],
            }
            files.write_json(side / _STATE, {"schema": SCHEMA, **value}, private=True)
        self._remove_checkpoints(all_but=folder)
        self._saved = time.monotonic()

    def destroy(self) -> None:
        """Overwrite the keys and remove everything: what was noisy stays so for good.

        Raises:
            ReleaseError: it can't be written.
        """
        try:
            if (self.folder / _KEYS).exists():
                files.destroy(self.folder / _KEYS)
            if self.folder.exists():
                shutil.rmtree(self.folder)
        except OSError as error:
            raise ReleaseError(f"can't remove {self.folder}: {error.strerror or error}") from error
        self.close()

    def _latest(self) -> Path | None:
        return max(self.folder.glob(f"{_CHECKPOINT}*"), default=None)

    def _remove_checkpoints(self, all_but: Path | None) -> None:
        for folder in self.folder.glob(f"{_CHECKPOINT}*"):
            if folder != all_but:
                shutil.rmtree(folder)


def _owners_hash(owner: npt.NDArray[np.int64]) -> str:
    return hashlib.sha256(owner.astype("<i8").tobytes()).hexdigest()


def _json(file: Path, advice: str = "the run can't go on from it") -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        schema = value["schema"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ResumeError(f"{file} is truncated or was changed; {advice}") from None
    if schema != SCHEMA:
        raise ResumeError(
            f"{file} is of schema {schema}, and this confide reads {SCHEMA}; go on with the confide that "
            "wrote it"
        )
    return dict(value)


def _null(row: tuple[Any, ...]) -> list[Any]:
    """JSON has no NaN; a loss that isn't finite is written as null."""
    return [None if isinstance(value, float) and not math.isfinite(value) else value for value in row]


def _nan(row: list[Any]) -> list[Any]:
    return [math.nan if value is None else value for value in row]
