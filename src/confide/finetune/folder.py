"""The folder of a run: `DIR.unfinished` while it is at work, and `DIR` once everything in it is whole.

DIR.unfinished/private/resume   keys, options, checkpoints (`checkpoint.Unfinished`); gone from `DIR`
DIR.unfinished/private          steps.jsonl
DIR.unfinished/report           results.json
DIR.unfinished/release          written last: where it is, nothing is missing
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confide import files
from confide.errors import ConfigError, ReleaseError, ResumeError
from confide.finetune.checkpoint import SCHEMA, Unfinished

_SUFFIX = ".unfinished"
_OPTIONS = "options.json"
_PARTS = ("private", "report", "release")


@dataclass(frozen=True)
class RunFolder:
    """Where one run's outputs go.

    Attributes:
        out: what its owner calls it.
    """

    out: Path

    @classmethod
    def of(cls, path: Path) -> RunFolder:
        """The run that a path names, finished or not."""
        path = Path(path)
        return cls(path.with_name(path.name.removesuffix(_SUFFIX)))

    @property
    def side(self) -> Path:
        """Where it is built."""
        return self.out.with_name(self.out.name + _SUFFIX)

    @property
    def resume(self) -> Path:
        """What it needs to go on."""
        return self.side / "private" / "resume"

    @property
    def whole(self) -> bool:
        """Whether only its name is unfinished."""
        return (self.side / "release").exists()

    def begin(self, options: Mapping[str, Any], every: float) -> Unfinished:
        """Make the folder for a new run; one that can't be written must not cost a budget.

        Args:
            options: JSON values from which the run can be started again.

        Raises:
            ConfigError: a run is there already, finished or not.
            ResumeError: another process is at work there.
            ReleaseError: it can't be written.
        """
        if self.out.exists():
            raise ConfigError(f"{self.out} exists already; choose another --out or remove it first")
        if self.side.exists() and any(path.name not in _PARTS for path in self.side.iterdir()):
            raise ConfigError(f"{self.side} exists already and is no run; remove it or choose another --out")
        unfinished = Unfinished.open(self.resume, every=every)
        if unfinished.asked or self.whole:
            unfinished.close()
            raise ConfigError(
                f"{self.side} holds an unfinished run; go on with `confide train --resume {self.out}`, or "
                f"give it up with `confide purge {self.out}`"
            )
        try:
            self.resume.parent.chmod(0o700)
            value = {"schema": SCHEMA, "options": dict(options)}
            files.write_json(self.resume / _OPTIONS, value, private=True)
        except BaseException:
            unfinished.close()
            self.remove()
            raise
        return unfinished

    def options(self) -> dict[str, Any]:
        """The options that the run was begun with.

        Raises:
            ResumeError: there are none, or they are damaged.
        """
        file = self.resume / _OPTIONS
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
            return dict(value["options"])
        except (OSError, ValueError, KeyError, TypeError):
            raise ResumeError(f"{file} is missing or damaged, so the run can't go on") from None

    def open(self) -> Unfinished:
        """Open an unfinished run.

        Raises:
            ResumeError: there is none, or another process is at work on it.
        """
        if not self.resume.exists():
            raise ResumeError(f"there is no unfinished run in {self.side}")
        return Unfinished.open(self.resume)

    def finish(self) -> None:
        """Give a whole run its name; its keys are destroyed by then, or now."""
        try:
            if self.resume.exists():
                Unfinished.open(self.resume).destroy()
            files.sweep(self.side)
            self.side.rename(self.out)
            files.sync(self.out.parent)
        except OSError as error:
            raise ReleaseError(f"can't write {self.out}: {error.strerror or error}") from error

    def remove(self) -> None:
        """Remove a run of which nothing is worth keeping; never one with a release."""
        if not self.whole:
            shutil.rmtree(self.side, ignore_errors=True)
