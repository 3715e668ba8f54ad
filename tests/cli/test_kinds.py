"""Every kind of task from a file to a release that plain transformers reads, and to a merge."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoTokenizer, Dinov2Config, Dinov2Model, ViTConfig, ViTModel

import confide as library
from confide.privacy.statement import read as read_statement
from confide.release.write import verify

from .conftest import QUICK, Answer, WriteCsv

Confide = Callable[..., Answer]
Train = Callable[..., Answer]
Sentences = Callable[[int, int], list[tuple[str, str]]]


@pytest.fixture
def pairs(write_csv: WriteCsv, sentences: Sentences) -> Path:
    rows = sentences(60, 3)
    return write_csv(
        "pairs.csv",
        [(a, b, label) for (a, label), (b, _) in zip(rows, rows[::-1], strict=True)],
        ("one", "two", "label"),
    )


@pytest.fixture
def numbers(write_csv: WriteCsv, sentences: Sentences) -> Path:
    return write_csv("numbers.csv", [(text, 10 + 20 * (label == "pos")) for text, label in sentences(60, 4)])


@pytest.fixture
def words(tmp_path: Path, sentences: Sentences) -> Path:
    rows = [text.split() for text, _ in sentences(60, 5)]
    lines = [{"tokens": row, "tags": ["N" if word.isdigit() else "O" for word in row]} for row in rows]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "words.jsonl"


@pytest.fixture
def shades(tmp_path: Path) -> Path:
    """A folder of dark and of bright images."""
    random = np.random.default_rng(0)
    for name, low in (("bright", 150), ("dark", 0)):
        (tmp_path / "shades" / name).mkdir(parents=True)
        for number in range(30):
            pixels = random.integers(low, low + 100, (9, 7, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "shades" / name / f"{number}.png")
    return tmp_path / "shades"


@pytest.fixture(scope="session")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny ViT for images of 28 pixels, or DINOv2 for any multiple of 7."""

    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        config, model = {"vit": (ViTConfig, ViTModel), "dinov2": (Dinov2Config, Dinov2Model)}[family]
        sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = model(
                config(**sizes, intermediate_size=24, image_size=28, patch_size=7, initializer_range=0.3)
            )
        made.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(
            json.dumps({"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4], "size": {"height": 224}})
        )
        return folder

    return make


def plain(release: Path, kind: str, *inputs: Any, **options: Any) -> np.ndarray[Any, Any]:
    """What transformers alone makes of some inputs."""
    reader = transformers.AutoImageProcessor if kind == "Image" else AutoTokenizer
    model = getattr(transformers, f"AutoModelFor{kind}Classification").from_pretrained(release)
    with torch.inference_mode():
        return model(
            **reader.from_pretrained(release)(*inputs, return_tensors="pt", **options)
        ).logits.numpy()


def test_pairs(confide: Confide, train: Train, pairs: Path, tmp_path: Path) -> None:
    columns = ("--text", "one", "--text-pair", "two")
    assert train(pairs, *columns).code == 0
    release = tmp_path / "run" / "release"
    texts = [("the film was fine", "a dull plot"), ("warm", "very very cold here")]
    theirs = plain(release, "Sequence", *map(list, zip(*texts, strict=True)), padding=True)
    np.testing.assert_allclose(library.load(release).logits(texts), theirs, rtol=1e-4, atol=1e-5)
    assert confide("evaluate", release, "--data", pairs, *columns, "--json").json()["records"] == 60
    assert len(confide("predict", release, "--data", pairs, *columns, "--json").json()) == 60
    assert "second ones" in confide("predict", release, "--data", pairs, "--text", "one").message()
    assert "'three'" in train(pairs, "--text", "one", "--text-pair", "three", out="no").message()


def test_numbers(confide: Confide, train: Train, numbers: Path, tmp_path: Path) -> None:
    """The released model answers in the labels' own unit; what it learned in [-1, 1] is scaled back."""
    options = (
        "--label-range",
        "10,30",
        "--method",
        "non-private",
        "--steps",
        60,
        "--head-learning-rate",
        0.2,
    )
    answer = train(numbers, *options, "--metric", "rmse")
    assert "rmse" in answer.out
    release = tmp_path / "run" / "release"
    model = library.load(release)
    texts = ["the film was fine and lovely", "a very dull plot here today"]
    theirs = plain(release, "Sequence", texts, padding=True)
    np.testing.assert_allclose(model.logits(texts), theirs, rtol=1e-4, atol=1e-4)
    assert [one["number"] for one in model.predict(texts)] == pytest.approx(theirs[:, 0].tolist(), rel=1e-4)
    found = confide("evaluate", release, "--data", numbers, "--json").json()
    rows = list(csv.DictReader(numbers.read_text(encoding="utf-8").splitlines()))
    predicted = np.array([one["number"] for one in model.predict([row["text"] for row in rows])])
    expected = np.sqrt(np.mean((predicted - np.array([float(row["label"]) for row in rows])) ** 2))
    assert found["metric"] == "rmse"
    assert found["score"] == pytest.approx(expected, rel=1e-5)
    assert found["score"] < 10  # that of always answering the middle
    shown = list(csv.DictReader(confide("predict", release, "--data", numbers).out.splitlines()))
    assert [float(row["number"]) for row in shown] == pytest.approx(predicted.tolist(), rel=1e-4)
    assert "outside the declared range, 0 to 5" in train(numbers, "--label-range", "0,5", out="b").message()
    assert "two numbers" in train(numbers, "--label-range", "0-5", out="b").message()


def test_a_declared_range_is_an_assumption(train: Train, numbers: Path, tmp_path: Path) -> None:
    assert train(numbers, "--label-range", "10,30").code == 0
    statement = verify(tmp_path / "run" / "release")
    assert statement.claim is not None
    assert any("numbers from 10 to 30; this range was declared" in line for line in statement.assumptions)
    assert not any("were read from its file" in line for line in statement.assumptions)
    assert "a number; labels were declared" in (tmp_path / "run" / "release" / "README.md").read_text()


@pytest.mark.parametrize(
    "trainable",
    ["lora", pytest.param("head", marks=pytest.mark.slow), pytest.param("all", marks=pytest.mark.slow)],
)
def test_words(confide: Confide, train: Train, words: Path, tmp_path: Path, trainable: str) -> None:
    columns = ("--tokens", "tokens", "--label", "tags")
    answer = train(words, *columns, "--trainable", trainable, "--metric", "macro-f1")
    assert answer.code == 0, answer.err
    release = tmp_path / "run" / "release"
    model = library.load(release)
    assert model.head.labels == ("N", "O")
    text = ("the", "finely", "film", "12", "was", "dull")
    tokens = AutoTokenizer.from_pretrained(release)([list(text)], is_split_into_words=True)
    theirs = plain(release, "Token", [list(text)], is_split_into_words=True)[0]
    first = [tokens.word_ids(0).index(word) for word in range(len(text))]
    np.testing.assert_allclose(model.logits([text])[0], theirs, rtol=1e-4, atol=1e-5)
    assert model.predict([text]) == [{"labels": [("N", "O")[n] for n in theirs[first].argmax(1)]}]
    lines = list(csv.DictReader(confide("predict", release, "--data", words).out.splitlines()))
    rows = [json.loads(line) for line in words.read_text().splitlines()]
    assert [line["word"] for line in lines] == [word for row in rows for word in row["tokens"]]
    found = confide("evaluate", release, "--data", words, "--label", "tags", "--json").json()
    assert (found["metric"], found["records"]) == ("macro-f1", 60)
    # The base's pooler, which this head doesn't read, is released as it was.
    from safetensors.torch import load_file

    assert {"bert.pooler.dense.weight", "bert.pooler.dense.bias"} <= load_file(
        release / "model.safetensors"
    ).keys()


@pytest.mark.parametrize(
    ("family", "size", "trainable"),
    [("vit", 28, "lora"), ("dinov2", 14, "lora"), pytest.param("dinov2", 28, "all", marks=pytest.mark.slow)],
)
def test_images(
    confide: Confide,
    vision: Callable[[str], Path],
    shades: Path,
    tmp_path: Path,
    family: str,
    size: int,
    trainable: str,
) -> None:
    options = ("--base", vision(family), "--data", shades, "--dataset", "shades", "--image-size", size)
    given = (*options, *QUICK, "--trainable", trainable)
    answer = confide("train", *given, "--out", tmp_path / "run")
    assert answer.code == 0, answer.err
    release = tmp_path / "run" / "release"
    verify(release)
    (spending,) = read_statement(release).spendings
    assert spending.units == 48
    file = shades / "dark" / "3.png"
    theirs = plain(release, "Image", Image.open(file))
    model = library.load(release)
    np.testing.assert_allclose(model.logits(library.Images.open([file], size)), theirs, rtol=1e-4, atol=1e-5)
    found = confide("evaluate", release, "--data", shades, "--json").json()
    assert (found["metric"], found["records"]) == ("accuracy", 60)
    assert len(confide("predict", release, "--data", shades / "dark", "--json").json()) == 30
    assert "no multiple" in confide("train", *given, "--image-size", 15, "--out", tmp_path / "b").message()
    if family == "vit":
        assert (
            "28 pixels only"
            in confide("train", *given, "--image-size", 35, "--out", tmp_path / "b").message()
        )
        assert confide("train", *given, "--out", tmp_path / "b", "--dry-run", "--json").json()["units"] == 48


def test_what_the_base_can_not_do(
    confide: Confide, train: Train, vision: Callable[[str], Path], shades: Path, reviews: Path
) -> None:
    assert "which does not read images" in train(shades, "--image-size", 28).message()
    assert "not an encoder" in train(reviews, "--base", vision("vit")).message()
    (shades / "dark" / "3.png").write_bytes(b"")
    assert "3.png can't be read as an image" in train(shades, "--image-size", 28).message()


def test_heads_of_all_kinds_in_one_merge(
    confide: Confide,
    train: Train,
    tiny_base: Path,
    reviews: Path,
    pairs: Path,
    numbers: Path,
    words: Path,
    tmp_path: Path,
) -> None:
    quick = ("--blocks", 2, "--method", "dp-adamw")
    runs = {
        "plain": (reviews,),
        "pair": (pairs, "--text", "one", "--text-pair", "two"),
        "number": (numbers, "--label-range", "10,30"),
        "word": (words, "--tokens", "tokens", "--label", "tags"),
    }
    for name, options in runs.items():
        assert train(*options, "--dataset", name, *quick, out=name).code == 0
    releases = [tmp_path / name / "release" for name in runs]
    merged = tmp_path / "merged"
    answer = confide(
        "merge", *releases, "--base", tiny_base, "--operator", "average", "--disjoint", "--out", merged
    )
    assert answer.code == 0, answer.err
    words_of = [("the", "film", "12"), ("dull",)]
    inputs = {"plain": ["fine"], "pair": [("fine", "dull")], "number": ["fine"], "word": words_of}
    for name, records in inputs.items():
        one = tmp_path / f"{name}-alone"
        assert confide("export", merged, "--task", name, "--out", one).code == 0
        found = library.load(merged, task=name).logits(records)  # type: ignore[arg-type]
        np.testing.assert_allclose(found, library.load(one).logits(records), rtol=1e-5)  # type: ignore[arg-type]
        kind = "Token" if name == "word" else "Sequence"
        theirs = {
            "plain": lambda one, kind: plain(one, kind, ["fine"]),
            "pair": lambda one, kind: plain(one, kind, ["fine"], ["dull"]),
            "number": lambda one, kind: plain(one, kind, ["fine"]),
            "word": lambda one, kind: plain(
                one, kind, [list(w) for w in words_of], is_split_into_words=True, padding=True
            ),
        }[name](one, kind)
        rows = 1 if name == "word" else len(found)  # padding's outputs are nobody's
        np.testing.assert_allclose(found[:rows], theirs[:rows], rtol=1e-4, atol=1e-4)
