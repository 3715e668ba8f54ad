from __future__ import annotations

from pathlib import Path

import pytest

from confide.errors import DataError
from confide.tasks.corpus import check_public, read_corpus, sample


def test_lines_are_texts(tmp_path: Path) -> None:
    path = tmp_path / "public.txt"
    path.write_text("one\n\n  two  \r\nça\n", encoding="utf-8")
    assert read_corpus(path) == ("one", "two", "ça")


def test_files_that_hold_no_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="can't read the corpus"):
        read_corpus(tmp_path / "none.txt")
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n\n")
    with pytest.raises(DataError, match="holds no text"):
        read_corpus(empty)
    latin = tmp_path / "latin.txt"
    latin.write_bytes("ça".encode("latin-1"))
    with pytest.raises(DataError, match="is not UTF-8"):
        read_corpus(latin)


def test_a_sample_is_distinct_ordered_and_reproducible() -> None:
    texts = [f"text {n % 50}" for n in range(100)]
    found = sample(texts, 20, seed=3)
    assert found == sample(texts, 20, seed=3)
    assert found != sample(texts, 20, seed=4)
    assert len(set(found)) == 20
    assert [texts.index(text) for text in found] == sorted(texts.index(text) for text in found)
    assert sample(texts, 1000, seed=0) == tuple(texts[:50])
    with pytest.raises(DataError, match="at least 1"):
        sample(texts, 0, seed=0)


def test_a_shared_text_is_refused_without_showing_it() -> None:
    check_public(["A fine day."], ["another day"], "records.csv")
    with pytest.raises(
        DataError, match=r"2 text\(s\) of the public corpus are also records of r\.csv"
    ) as error:
        check_public(["new", "A fine  DAY!", "a fine day"], ["a fine day."], "r.csv")
    assert "the first at text 2" in str(error.value)
    assert "fine" not in str(error.value)


def test_a_line_of_a_record_is_shared_too() -> None:
    """Notes of several lines that were written to a file are lines there."""
    note = "Patient has a rash.\n\nSees Dr Smith"
    with pytest.raises(DataError, match="the first at text 2"):
        check_public(["new", "sees dr smith"], [note], "notes.csv")
    check_public(["patient has a", "--"], [note], "notes.csv")


def test_brown_is_a_corpus_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("confide.tasks.corpus.other_sentences", lambda: ("a sentence",))
    assert read_corpus("brown") == read_corpus(Path("brown")) == ("a sentence",)
