"""`confide predict` on releases and merges, against plain transformers."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from .conftest import Answer, WriteCsv, listing

Confide = Callable[..., Answer]
Sentences = Callable[[int, int], list[tuple[str, str]]]


@pytest.fixture
def release(train: Confide, reviews: Path, tmp_path: Path) -> Path:
    fast = ("--method", "non-private", "--head-learning-rate", 0.5, "--labels", "neg,pos", "--task", "stars")
    assert train(reviews, *fast).code == 0
    return tmp_path / "run" / "release"


@pytest.fixture
def new(write_csv: WriteCsv, sentences: Sentences) -> Path:
    return write_csv("new.csv", [(text,) for text, _ in sentences(9, 5)], ("text",))


def expected(release: Path, data: Path) -> list[tuple[str, float]]:
    with open(data, encoding="utf-8") as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    model = AutoModelForSequenceClassification.from_pretrained(release)
    tokens = AutoTokenizer.from_pretrained(release)(texts, padding=True, truncation=True, max_length=20)
    with torch.inference_mode():
        odds = model(**tokens.convert_to_tensors("pt")).logits.softmax(1)
    return [(model.config.id2label[int(row.argmax())], float(row.max())) for row in odds]


def test_rows_are_labelled_in_their_order(confide: Confide, release: Path, new: Path, tmp_path: Path) -> None:
    wanted = expected(release, new)
    assert len({label for label, _ in wanted}) == 2 or len(wanted) == 9
    found = confide("predict", release, "--data", new, "--json").json()
    assert [one["row"] for one in found] == list(range(1, 10))
    assert [one["label"] for one in found] == [label for label, _ in wanted]
    assert [one["probability"] for one in found] == pytest.approx([odds for _, odds in wanted], rel=1e-5)

    shown = list(csv.DictReader(io.StringIO(confide("predict", release, "--data", new).out)))
    assert [row["label"] for row in shown] == [label for label, _ in wanted]
    answer = confide("predict", release, "--data", new, "--out", tmp_path / "labels.csv")
    assert "9 rows" in answer.out
    with open(tmp_path / "labels.csv", encoding="utf-8") as file:
        assert list(csv.DictReader(file)) == shown


def test_refusals(confide: Confide, release: Path, new: Path, write_csv: WriteCsv, tmp_path: Path) -> None:
    before = listing(tmp_path)
    out = ("--out", tmp_path / "labels.csv")
    assert "not a confide release" in confide("predict", tmp_path, "--data", new, *out).message()
    assert "review" in confide("predict", release, "--data", new, "--text", "review", *out).message()
    assert "songs" in confide("predict", release, "--data", new, "--task", "songs", *out).message()
    assert "missing.csv" in confide("predict", release, "--data", tmp_path / "missing.csv", *out).message()
    assert listing(tmp_path) == before
    write_csv("empty.csv", [("fine",), ("",)], ("text",))
    assert "row 2" in confide("predict", release, "--data", tmp_path / "empty.csv", *out).message()
    weights = release / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "changed after its statement" in confide("predict", release, "--data", new, *out).message()
    assert not (tmp_path / "labels.csv").exists()
