"""Files that are no statements: each is refused with one clear message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from confide.errors import PrivacyError
from confide.privacy import statement as statements
from confide.privacy.composition import training_statement
from confide.privacy.statement import FILE_NAME, Base, OwnersChecked, Statement
from confide.privacy.streams import Schedule


@pytest.fixture
def text(schedule: Callable[..., Schedule]) -> str:
    made = training_statement(
        schedule(noise_multiplier=4.0),
        delta=1e-6,
        dataset="d",
        units=10,
        run="r",
        base=Base(name="base", hash="0" * 64),
        steps_run={"all": 7},
    )
    return json.dumps(made.to_json())


def _read(folder: Path, text: str | bytes) -> Statement:
    content = text.encode() if isinstance(text, str) else text
    (folder / FILE_NAME).write_bytes(content)
    return statements.read(folder)


def test_every_truncation_is_refused(tmp_path: Path, text: str) -> None:
    for kept in range(0, len(text), 97):
        with pytest.raises(PrivacyError, match="truncated, or no JSON"):
            _read(tmp_path, text[:kept])


def test_other_contents(tmp_path: Path, text: str) -> None:
    cases: list[tuple[str | bytes, str]] = [
        ("[]", "no JSON object"),
        ("null", "no JSON object"),
        (b"\xff\xfe", "no JSON"),
        ('{"kind": "training", "kind": "merge"}', "a key stands twice"),
        ('{"claim": NaN}', "no JSON"),
        ('{"claim": 1e999}', "no JSON"),
        ('{"confide": "\\ud800"}', "no JSON"),
        ("[" * 100_000, "no JSON"),
        ('{"n": ' + "9" * 10_000 + "}", "no JSON"),
    ]
    for content, message in cases:
        with pytest.raises(PrivacyError, match=message):
            _read(tmp_path, content)


def test_newer_ones_say_so(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        PrivacyError, match=r"schema 'confide\.statement/2'.*install the confide that wrote it"
    ):
        _read(tmp_path, text.replace("confide.statement/1", "confide.statement/2"))
    with pytest.raises(PrivacyError, match=r"shadow: .*written by a newer confide\?"):
        _read(tmp_path, json.dumps({**json.loads(text), "shadow": 1}))
    with pytest.raises(PrivacyError, match="claim: Field required"):
        _read(tmp_path, json.dumps({k: v for k, v in json.loads(text).items() if k != "claim"}))


def test_statements_from_before_signatures_are_read(tmp_path: Path, text: str) -> None:
    older = {k: v for k, v in json.loads(text).items() if k not in ("files", "inputs", "signature")}
    older["claim"].pop("epsilon_lower")
    found = _read(tmp_path, json.dumps(older))
    assert (found.files, found.inputs, found.signature) == ({}, (), None)


def test_an_unreadable_file(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(PrivacyError, match="can't read"):
        statements.read(tmp_path)


def test_how_owners_checked_needs_words_and_a_day() -> None:
    found = OwnersChecked.model_validate({"how": "hashed ids compared", "when": "2026-11-30"})
    assert found.model_dump(mode="json") == {
        "by": "owners-checked",
        "how": "hashed ids compared",
        "when": "2026-11-30",
    }
    for bad in (
        {"how": "", "when": "2026-11-30"},
        {"how": " ", "when": "2026-11-30"},
        {"how": "x", "when": "soon"},
    ):
        with pytest.raises(ValueError, match=r"how|when"):
            OwnersChecked.model_validate(bad)


def test_a_file_without_end_is_not_read(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / statements.FILE_NAME).write_text(text, encoding="utf-8")
    monkeypatch.setattr(statements, "_LARGEST", len(text) // 2)
    with pytest.raises(PrivacyError, match="is larger than"):
        statements.read(tmp_path)
