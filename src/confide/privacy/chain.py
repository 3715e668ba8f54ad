"""Entries in a row, each of whose hash covers the one before: what was written can't be changed unseen."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from confide.errors import PrivacyError

SCHEMA = "confide.ledger/1"
GENESIS = "0" * 64
"""What the first entry follows, and the head of an empty chain."""


@dataclass(frozen=True)
class Entry:
    """One line of the chain.

    Attributes:
        position: 1, 2, …: the only order there is; clocks don't matter.
        dataset: the name of the data set that it is about.
        content: canonical JSON (sorted keys, no spaces).
        hash: SHA-256 of the canonical JSON of [position, hash before, dataset, content].
    """

    position: int
    dataset: str
    content: str
    hash: str

    @cached_property
    def value(self) -> dict[str, Any]:
        """The content, parsed.

        Raises:
            PrivacyError: it isn't a JSON object.
        """
        try:
            value = json.loads(self.content)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise PrivacyError(f"entry {self.position} of the ledger holds no JSON object")
        return value


def canonical(value: Any) -> str:
    """The one JSON text of a value that is hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def following(entries: Sequence[Entry], dataset: str, value: Mapping[str, Any]) -> Entry:
    """The next entry after `entries`; the time in it is for readers and orders nothing."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    content = canonical({**value, "time": now})
    position = len(entries) + 1
    return Entry(position, dataset, content, _hash(position, head(entries), dataset, content))


def head(entries: Sequence[Entry]) -> str:
    """The hash of the last entry: it covers all of them."""
    return entries[-1].hash if entries else GENESIS


def check(entries: Sequence[Entry], known_head: str | None = None) -> None:
    """Recompute every hash.

    Args:
        entries: the whole chain in the order of positions.
        known_head: a head noted earlier, as statements do; without one, a chain whose last entries were
            cut off, or which was rewritten from some entry on with new hashes, looks whole.

    Raises:
        PrivacyError: an entry was edited, removed or inserted, or the known head is not in the chain.
    """
    previous = GENESIS
    for number, entry in enumerate(entries, start=1):
        if entry.position != number:
            raise PrivacyError(
                f"the ledger was altered: entry {number} is missing (entry {entry.position} comes next)"
            )
        if entry.hash != _hash(number, previous, entry.dataset, entry.content):
            raise PrivacyError(
                f"the ledger was altered at entry {number}: its hash is not that of its content and the "
                "entries before it; restore the ledger from a copy"
            )
        previous = entry.hash
    if known_head is not None and known_head not in {GENESIS, *(entry.hash for entry in entries)}:
        raise PrivacyError(
            f"the head {known_head} is not in the ledger: entries were cut off or rewritten since it was "
            "noted, or it belongs to another ledger"
        )


def read_export(file: Path) -> tuple[Entry, ...]:
    """The entries of a file that `confide ledger export` wrote, with every hash checked.

    Raises:
        PrivacyError: the file is truncated, altered, or of a newer schema.
    """
    try:
        exported = json.loads(file.read_text(encoding="utf-8"))
        schema, known_head, listed = exported["schema"], exported["head"], exported["entries"]
        if schema != SCHEMA:
            raise PrivacyError(f"{file} is of schema {schema!r}, and this confide reads {SCHEMA!r}")
        entries = tuple(
            Entry(int(line["position"]), str(line["dataset"]), canonical(line["content"]), str(line["hash"]))
            for line in listed
        )
    except OSError as error:
        raise PrivacyError(f"can't read {file}: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise PrivacyError(f"{file} is no export of a ledger, or is truncated; export it again") from None
    check(entries, known_head)
    if head(entries) != known_head:
        raise PrivacyError(f"{file} was altered: its head isn't its last entry")
    return entries


def _hash(position: int, previous: str, dataset: str, content: str) -> str:
    return hashlib.sha256(canonical([position, previous, dataset, content]).encode()).hexdigest()
