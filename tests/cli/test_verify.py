"""`confide verify` and `confide privacy card`, on releases that the command line made and somebody spoilt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Answer, WriteCsv

Confide = Callable[..., Answer]
Sentences = Callable[[int, int], list[tuple[str, str]]]


@pytest.fixture
def key(confide: Confide, tmp_path: Path) -> str:
    return str(confide("keys", "new", "--out", tmp_path / "key.pem", "--json").json()["public"])


@pytest.fixture
def release(train: Confide, key: str, reviews: Path, tmp_path: Path) -> Path:
    assert train(reviews, "--key", tmp_path / "key.pem").code == 0
    return tmp_path / "run" / "release"


def refused(answer: Answer, *parts: str) -> None:
    """A table that shows the failure, one message, and exit code 2."""
    assert answer.code == 2
    assert "failed" in answer.out
    (line,) = answer.err.strip().splitlines()
    assert line.startswith("confide: ")
    assert all(part in line for part in parts), line


def test_a_release_through_all_its_checks(confide: Confide, release: Path, key: str, tmp_path: Path) -> None:
    good = confide("verify", release)
    assert good.code == 0
    assert "asserted by who signed" in good.out
    (tmp_path / "trusted").write_text(f"{key} Clinic North\n")
    assert "Clinic North" in confide("verify", release, "--trusted", tmp_path / "trusted").out
    confide("ledger", "export", tmp_path / "book.json")
    for ledger in (tmp_path / "book.json", None):
        options = ("--ledger", ledger) if ledger else ()
        found = confide("verify", release, "--key", key, "--json", *options).json()
        assert found["verified"] is True
        assert found["signed_by"] == key
        wanted = "ok" if ledger else "note"
        assert {check["what"]: check["result"] for check in found["checks"]}["ledger"] == wanted

    stranger = confide("keys", "new", "--out", tmp_path / "other.pem", "--json").json()["public"]
    refused(confide("verify", release, "--key", stranger), "signature", "none of the given keys")
    assert "no public key" in confide("verify", release, "--key", "me").message()
    assert "no ledger" in confide("verify", release, "--ledger", tmp_path / "none.sqlite").message()
    assert not (tmp_path / "none.sqlite").exists()

    said = json.loads((release / "statement.json").read_text())
    forged = {**said, "claim": {**said["claim"], "epsilon": 0.5}}
    (release / "statement.json").write_text(json.dumps(forged))
    refused(confide("verify", release), "the claim doesn't hold: it says epsilon = 0.5", "its events cost")
    answer = confide("verify", release, "--json")
    assert answer.code == 2
    assert json.loads(answer.out)["verified"] is False
    assert "gets no card" in confide("privacy", "card", release).message()

    (release / "statement.json").write_text(json.dumps({**said, "signature": None}))
    bare = confide("verify", release)
    assert "nobody signed, so nobody asserts it" in bare.out
    refused(confide("verify", release, "--key", key), "not signed", "was demanded")
    (release / "statement.json").write_text(json.dumps(said)[:500])
    refused(confide("verify", release), "truncated")


def test_a_card_is_printed_and_written(confide: Confide, release: Path, key: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    answer = confide("privacy", "card", release, "--out", page)
    assert answer.code == 0
    for part in ("What is not protected", "Against whom", "Who answers for it", "at most", key):
        assert part in answer.out, part
    assert "What is not protected" in page.read_text()
    assert str(tmp_path) not in page.read_text()
    found = confide("privacy", "card", release, "--json").json()
    assert found["headline"] in page.read_text()
    assert "exists already" in confide("privacy", "card", release, "--out", page).message()


def test_a_merge_that_owners_checked(
    confide: Confide,
    train: Confide,
    release: Path,
    key: str,
    tiny_base: Path,
    write_csv: WriteCsv,
    sentences: Sentences,
    tmp_path: Path,
) -> None:
    data = write_csv("north.csv", sentences(80, 2))
    assert train(data, "--dataset", "north-2026", "--key", tmp_path / "key.pem", out="north").code == 0
    inputs = (release, tmp_path / "north" / "release", "--base", tiny_base, "--operator", "average")
    how = ("--disjoint-checked", "hashed ids compared", "--disjoint-date", "2026-11-29")
    for bad, message in (
        (how[:2], "give both"),
        (how[2:], "give both"),
        ((*how[:3], "yesterday"), "a day like"),
        ((*how[:3], "2999-01-01"), "future"),
    ):
        assert message in confide("merge", *inputs, *bad, "--out", tmp_path / "bad").message()
    merged = tmp_path / "merged"
    answer = confide("merge", *inputs, *how, "--out", merged, "--key", tmp_path / "key.pem")
    assert "owners checked" in answer.out
    assert "the inputs' keys answer for the noise" in answer.out
    disjoint = json.loads((merged / "statement.json").read_text())["disjoint"]
    assert disjoint == {"by": "owners-checked", "how": "hashed ids compared", "when": "2026-11-29"}
    found = confide("verify", merged, "--key", key, "--json").json()
    assert [check["what"] for check in found["checks"] if check["what"].startswith("input")] == [
        "input 1",
        "input 2",
    ]
    assert "hashed ids compared, 2026-11-29" in confide("privacy", "card", merged).out

    confide("ledger", "export", tmp_path / "book.json")
    found = confide("verify", merged, "--ledger", tmp_path / "book.json", "--json").json()
    assert [check["result"] for check in found["checks"] if check["what"] == "ledger"] == ["ok", "ok"]
    assert train(data, "--dataset", "x", "--ledger", tmp_path / "other.sqlite", out="x").code == 0
    strange = confide("verify", merged, "--ledger", tmp_path / "other.sqlite")
    assert strange.code == 0
    assert "isn't in this ledger" in strange.out

    spoilt = shutil.copytree(merged, tmp_path / "spoilt")
    said = json.loads((spoilt / "statement.json").read_text())
    said["inputs"][1]["spendings"][0]["steps_run"] = {}
    (spoilt / "statement.json").write_text(json.dumps(said))
    refused(confide("verify", spoilt), "spendings aren't those of its inputs")
