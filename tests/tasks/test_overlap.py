import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from confide.errors import DataError
from confide.tasks.overlap import check_disjoint, normalise
from confide.tasks.records import Records, TaskData


def task(name: str, train: list[str], test: list[str]) -> TaskData:
    sides = [Records.of(texts, [0] * len(texts)) for texts in (train, test)]
    return TaskData(name, ("no", "yes"), "declared", "accuracy", sides[0], sides[1], "made up")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Good  film !", "good film"),
        ("STRASSE", "straße"),
        ("ﬁne – really", "fine, REALLY."),
        ("under_score", "under score"),
        (" 😀 ", "😀"),
    ],
)
def test_same_text(one: str, other: str) -> None:
    assert normalise(one) == normalise(other)


def test_different_texts_stay_different() -> None:
    assert normalise("not good") != normalise("good")
    assert normalise("😀") != normalise("😢")
    assert normalise("1.5 mg") != normalise("15 mg")


@given(st.text())
def test_only_words_are_left(text: str) -> None:
    words = normalise(text)
    assert words == words.strip()
    assert not words or words[0].isalnum() or not re.search(r"[^\W_]", words)


def test_shared_record_is_refused_without_printing_it() -> None:
    with pytest.raises(DataError) as caught:
        check_disjoint(
            [
                task("reviews", ["x", "A secret text."], ["y"]),
                task("other", ["z"], ["w"]),
                task("notes", ["u"], ["v", "a  SECRET text", "X!"]),
            ]
        )
    message = str(caught.value)
    assert "'reviews' and 'notes' share 2 record(s)" in message
    assert "train row 1 of reviews" in message
    assert "test row 3 of notes" in message
    assert "secret" not in message.lower()


def test_disjoint_tasks_pass() -> None:
    check_disjoint([task("a", ["x", "x"], ["x"]), task("b", ["y"], ["z"])])
