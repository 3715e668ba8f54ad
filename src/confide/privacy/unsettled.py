"""What ran of runs that were given up while their ledger couldn't be reached, for when it can be again.

Keys must be destroyable at any time, and a ledger may be gone or offline. The run stays charged in full, so
nothing is claimed too little meanwhile; only what ran is still to be noted. The note waits in the user's data
folder, and the next time anything of this user opens a ledger that holds the entry, it is settled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from confide import files

SCHEMA = "confide.unsettled/1"


@dataclass(frozen=True)
class Note:
    """One run that was given up.

    Attributes:
        file: where the note is.
        entry: hash of its reservation, by which its ledger is known wherever it is.
        steps_run: of each stream, as far as known.
    """

    file: Path
    entry: str
    steps_run: dict[str, int]


def data_folder() -> Path:
    """Where a user's own ledger and notes are."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "confide"


def note(ledger: str, entry: str, steps_run: Mapping[str, int]) -> Path:
    """Put a note on disk.

    Args:
        ledger: its name without a password, for readers.
        entry: hash of the reservation.

    Raises:
        ReleaseError: it can't be written.
    """
    file = data_folder() / "unsettled" / f"{entry}.json"
    value = {"schema": SCHEMA, "ledger": ledger, "entry": entry, "steps_run": dict(steps_run)}
    files.write_json(file, value, private=True)
    return file


def noted() -> Iterator[Note]:
    """Every note that can be read."""
    for file in sorted((data_folder() / "unsettled").glob("*.json")):
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
            if value["schema"] == SCHEMA:
                steps = {str(name): int(count) for name, count in value["steps_run"].items()}
                yield Note(file, str(value["entry"]), steps)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # another version's, or damaged: it stays, and the run stays charged
