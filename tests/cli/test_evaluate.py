"""`confide evaluate` and the way there: two releases, merged by the command line, scored on files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from sklearn.metrics import accuracy_score, f1_score

import confide as library
from confide.privacy.statement import read as read_statement
from confide.release.hashes import file_hash

from .conftest import Answer, WriteCsv, listing

Confide = Callable[..., Answer]
Sentences = Callable[[int, int], list[tuple[str, str]]]


@pytest.fixture
def pair(train: Confide, write_csv: WriteCsv, sentences: Sentences, tmp_path: Path) -> list[Path]:
    """Two private releases on records of two owners."""
    for seed, name in enumerate(("films", "plays"), start=1):
        data = write_csv(f"{name}.csv", sentences(80, seed))
        answer = train(data, "--dataset", name, "--metric", ("accuracy", "macro-f1")[seed - 1], out=name)
        assert answer.code == 0, answer.err
    return [tmp_path / name / "release" for name in ("films", "plays")]


def score(release: Path, task: str | None, rows: list[tuple[str, str]], macro: bool) -> float:
    found = library.load(release, task=task).predict([text for text, _ in rows])
    labels, predicted = [label for _, label in rows], [one["label"] for one in found]
    return float(f1_score(labels, predicted, average="macro") if macro else accuracy_score(labels, predicted))


def test_merge_and_evaluate(
    confide: Confide,
    pair: list[Path],
    tiny_base: Path,
    write_csv: WriteCsv,
    sentences: Sentences,
    tmp_path: Path,
) -> None:
    merged = tmp_path / "merged"
    options = ("--base", tiny_base, "--operator", "ties", "--density", 0.2)
    answer = confide("merge", *pair, *options, "--out", merged, "--disjoint", "--json")
    claims = [read_statement(folder).claim for folder in pair]
    assert answer.json()["claim"]["epsilon"] == max(claim.epsilon for claim in claims if claim)
    statement = read_statement(merged)
    assert statement.disjoint == "declared"
    assert {spending.dataset for spending in statement.spendings} == {"films", "plays"}

    rows = sentences(30, 9)
    data = write_csv("test.csv", rows)
    for name, macro in (("films", False), ("plays", True)):
        found = confide("evaluate", merged, "--task", name, "--data", data, "--json").json()
        assert found == {
            "task": name,
            "metric": "macro-f1" if macro else "accuracy",
            "score": pytest.approx(score(merged, name, rows, macro)),
            "records": 30,
        }
        assert "not noised" in confide("evaluate", merged, "--task", name, "--data", data).out
    found = confide("evaluate", pair[0], "--data", data, "--json").json()
    assert found["score"] == pytest.approx(score(pair[0], None, rows, macro=False))


def test_overlapping_data_sets_compose(
    confide: Confide, pair: list[Path], tiny_base: Path, tmp_path: Path
) -> None:
    confide("merge", *pair, "--base", tiny_base, "--operator", "average", "--out", tmp_path / "merged")
    single = max(claim.epsilon for folder in pair if (claim := read_statement(folder).claim))
    claim = read_statement(tmp_path / "merged").claim
    assert claim is not None
    assert single < claim.epsilon < 2 * single + 1e-6


def test_refused_merges(
    confide: Confide,
    train: Confide,
    reviews: Path,
    pair: list[Path],
    tiny_base: Path,
    make_base: Callable[..., Path],
    tmp_path: Path,
) -> None:
    other, wider = make_base(seed=5), make_base(seed=0, intermediate_size=64)
    quick = ("--method", "non-private", "--dataset")
    assert train(reviews, *quick, "other", "--base", other, out="other").code == 0
    assert train(reviews, *quick, "wider", "--base", wider, out="wider").code == 0
    before = listing(tmp_path)
    rest = ("--base", tiny_base, "--out", tmp_path / "merged")
    message = confide("merge", *pair, *rest, "--operator", "tiez").message()
    assert "unknown operator 'tiez'; did you mean 'ties'?" in message
    assert "density" in confide("merge", *pair, *rest, "--density", 1.5).message()
    message = confide("merge", *pair, tmp_path / "other" / "release", *rest).message()
    assert "base" in message
    assert "other" in message
    message = confide("merge", *pair, tmp_path / "wider" / "release", *rest).message()
    assert "wider" in message
    assert re.search("two heads for task 'films'", confide("merge", pair[0], pair[0], *rest).message())
    assert "holds no weights" in confide("merge", *pair, tmp_path, *rest).message()
    assert listing(tmp_path) == before
    assert "exists already" in confide("merge", *pair, "--base", tiny_base, "--out", pair[0]).message()
    assert listing(tmp_path) == before


def test_refused_evaluations(
    confide: Confide, pair: list[Path], write_csv: WriteCsv, sentences: Sentences
) -> None:
    data = write_csv("test.csv", [*sentences(4, 9), ("the film", "so-so")])
    assert "'so-so'" in confide("evaluate", pair[0], "--data", data).message()
    assert "'songs'" in confide("evaluate", pair[0], "--task", "songs", "--data", data).message()
    assert "'films'" in confide("evaluate", pair[0]).message()
    assert "stars" in confide("evaluate", pair[0], "--data", data, "--label", "stars").message()


def test_a_registered_task_with_other_labels(confide: Confide, pair: list[Path]) -> None:
    """A head may bear the name of a registered task without being for it."""
    info = json.loads((pair[0] / "confide.json").read_text())
    info["heads"][0]["task"] = "sms-spam"
    (pair[0] / "confide.json").write_text(json.dumps(info))
    said = json.loads((pair[0] / "statement.json").read_text())
    said["files"]["confide.json"] = file_hash(pair[0] / "confide.json")
    (pair[0] / "statement.json").write_text(json.dumps(said))
    assert "other labels" in confide("evaluate", pair[0]).message()
