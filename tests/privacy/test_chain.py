"""Exports of a ledger: read back whole, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from confide.errors import PrivacyError
from confide.privacy import chain
from confide.privacy.chain import Entry, following, read_export


def _chain(count: int = 3) -> list[Entry]:
    entries: list[Entry] = []
    for number in range(count):
        entries.append(following(entries, "clinic", {"kind": "cap", "epsilon": number + 0.1, "delta": 1e-6}))
    return entries


def _export(file: Path, chained: list[Entry], **changes: Any) -> Path:
    """As `confide ledger export` writes it; tests/cli/test_verify.py reads a real one."""
    listed = [
        {"position": e.position, "dataset": e.dataset, "content": e.value, "hash": e.hash} for e in chained
    ]
    value = {"schema": chain.SCHEMA, "head": chain.head(chained), "entries": listed, **changes}
    file.write_text(json.dumps(value, indent=2))
    return file


def test_an_export_is_read_back(tmp_path: Path) -> None:
    entries = _chain()
    assert read_export(_export(tmp_path / "book.json", entries)) == tuple(entries)
    assert read_export(_export(tmp_path / "empty.json", [])) == ()


def test_exports_that_were_touched(tmp_path: Path) -> None:
    file, entries = tmp_path / "book.json", _chain()
    edited = Entry(2, "clinic", entries[1].content.replace("1.1", "9.1"), entries[1].hash)
    for listed, changes, message in (
        ([entries[0], edited, entries[2]], {}, "altered at entry 2"),
        ([entries[0], entries[2]], {}, "entry 2 is missing"),
        (entries[:2], {"head": entries[2].hash}, "cut off or rewritten"),
        (entries, {"head": entries[1].hash}, "its head isn't its last entry"),
        (entries, {"schema": "confide.ledger/2"}, "confide.ledger/2"),
        (entries, {"entries": None}, "no export of a ledger"),
    ):
        with pytest.raises(PrivacyError, match=message):
            read_export(_export(file, listed, **changes))
    text = _export(file, entries).read_text()
    for kept in range(0, len(text) - 2, 50):
        file.write_text(text[:kept])
        with pytest.raises(PrivacyError, match="or is truncated"):
            read_export(file)
    with pytest.raises(PrivacyError, match="can't read"):
        read_export(tmp_path / "nowhere.json")
