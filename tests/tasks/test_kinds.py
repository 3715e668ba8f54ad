"""Pairs, numbers, labels of words and folders of images as tasks; and what can be wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from confide.errors import DataError
from confide.gradients.losses import IGNORED
from confide.release.format import TEXT_CLASSES, Problem
from confide.tasks.columns import Columns
from confide.tasks.files import read_inputs, read_records, read_task
from confide.tasks.images import Images
from confide.tasks.overlap import check_disjoint
from confide.tasks.text import encode

WriteCsv = Callable[..., Path]
PAIR = Problem(inputs="pair")
WORDS = Problem(target="tokens")


def pairs(count: int = 10) -> list[tuple[object, ...]]:
    return [(f"first {n}", f"second {n}", ("no", "yes")[n % 2]) for n in range(count)]


def write_words(path: Path, rows: list[tuple[Any, Any]]) -> Path:
    path.write_text("".join(json.dumps({"words": words, "tags": tags}) + "\n" for words, tags in rows))
    return path


WORD_ROWS = [([f"w{n}", "in", "Oslo"][: n % 3 + 1], ["O", "O", "PLACE"][: n % 3 + 1]) for n in range(12)]


def write_images(folder: Path, classes: dict[str, int]) -> Path:
    for place, (name, count) in enumerate(classes.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("L", (5, 4), 20 * place + number).save(folder / name / f"{number}.png")
    return folder


def test_pairs(write_csv: WriteCsv) -> None:
    path = write_csv("pairs.csv", pairs(), ("one", "two", "label"))
    task = read_task(path, text="one", text_pair="two")
    assert task.problem == PAIR
    assert {*task.train.texts, *task.test.texts} == {(one, two) for one, two, _ in pairs()}
    for text, label in zip(task.train.texts, task.train.labels, strict=True):
        assert task.labels[label] == ("no", "yes")[int(text[0].split()[1]) % 2]
    with pytest.raises(DataError, match="no column 'three'"):
        read_task(path, text="one", text_pair="three")
    with pytest.raises(DataError, match="different columns"):
        read_task(path, text="one", text_pair="one")
    with pytest.raises(DataError, match="column of the second ones"):
        read_inputs(path, PAIR, Columns(text="one"))
    with pytest.raises(DataError, match="text_pair and tokens don't go together"):
        read_task(path, text="one", text_pair="two", tokens="two")
    empty = write_csv("empty.csv", [*pairs(), ("a", "", "no")], ("one", "two", "label"))
    with pytest.raises(DataError, match="'two', row 11: an empty text"):
        read_task(empty, text="one", text_pair="two")


def test_numbers(write_csv: WriteCsv) -> None:
    rows: list[tuple[object, ...]] = [(f"text {n}", n / 2) for n in range(11)]
    path = write_csv("numbers.csv", rows)
    task = read_task(path, label_range=(0, 5))
    assert (task.labels, task.labels_from, task.metric) == ((), "declared", "pearson")
    assert task.problem == Problem(target="number", label_range=(0, 5))
    for text, label in zip(task.train.texts, task.train.labels, strict=True):
        assert label == int(str(text).split()[1]) / 2
    for label, said in (
        ("much", "no number"),
        ("nan", "no number"),
        ("inf", "no number"),
        ("", "no number"),
        (5.5, "outside"),
    ):
        bad = write_csv("bad.csv", [*rows, ("new", label)])
        with pytest.raises(DataError, match=f"'label', row 12: a label .*{said}"):
            read_task(bad, label_range=(0, 5))
    # A model may be scored on labels outside the range that it was trained for.
    problem = Problem(target="number", label_range=(0, 1))
    assert read_records(path, problem=problem).labels.max() == 5
    with pytest.raises(DataError, match="all 11 records have the label 1;"):
        read_task(write_csv("same.csv", [(text, 1) for text, _ in rows]), label_range=(0, 5))
    for wrong in ((1, 1), (2, 1), (0, float("inf")), (float("nan"), 1)):
        with pytest.raises(DataError, match="lower to a higher"):
            read_task(path, label_range=wrong)
    with pytest.raises(DataError, match="not both"):
        read_task(path, labels=["a", "b"], label_range=(0, 5))
    with pytest.raises(DataError, match="accuracy doesn't score these labels; use pearson"):
        read_task(path, label_range=(0, 5), metric="accuracy")
    with pytest.raises(DataError, match="rmse doesn't score these labels; use accuracy"):
        read_task(write_csv("pairs.csv", pairs(), ("text", "two", "label")), metric="rmse")


def test_words(tmp_path: Path) -> None:
    path = write_words(tmp_path / "words.jsonl", WORD_ROWS)
    task = read_task(path, tokens="words", label="tags")
    assert (task.problem, task.labels, task.labels_from) == (WORDS, ("O", "PLACE"), "file")
    wanted = {words[0]: tags for words, tags in ((tuple(w), t) for w, t in WORD_ROWS)}
    for words, labels in zip(task.train.texts, task.train.labels, strict=True):
        assert [task.labels[label] for label in labels] == wanted[words[0]]
    declared = read_task(path, tokens="words", label="tags", labels=["PLACE", "O"])
    assert declared.labels == ("PLACE", "O")
    bad: list[tuple[tuple[Any, Any], str]] = [
        ((["a", "b"], ["O"]), "row 13: 1 labels for 2 words"),
        ((["a"], ["PERSON"]), "row 13: label 'PERSON' is none of"),
        ((["a"], [None]), "row 13: a word without a label"),
        (([], []), "row 13: no words"),
        ((["a", " "], ["O", "O"]), "row 13: no words, or one that is empty"),
        (("a b", ["O", "O"]), "row 13: not a list of words"),
        ((["a"], "O"), "row 13: not a list of labels"),
    ]
    for row, said in bad:
        with pytest.raises(DataError, match=said):
            read_task(
                write_words(tmp_path / "bad.jsonl", [*WORD_ROWS, row]),
                tokens="words",
                label="tags",
                labels=["O", "PLACE"],
            )


def test_a_folder_of_images(tmp_path: Path, write_csv: WriteCsv) -> None:
    folder = write_images(tmp_path / "animals", {"cat": 6, "dog": 5})
    task = read_task(folder, image_size=4)
    assert (task.name, task.labels, task.labels_from) == ("animals", ("cat", "dog"), "file")
    assert task.problem == Problem(inputs="image", image_size=4)
    assert isinstance(task.train.inputs, Images)
    for row, label in enumerate(task.train.labels):
        assert task.train.inputs.files[row].parent.name == task.labels[label]
        assert (task.train.inputs.read(np.array([row])) // 20 == label).all()
    rows = [(f"animals/{name}/{n}.png", name) for name in ("cat", "dog") for n in range(5)]
    listed = read_task(write_csv("list.csv", rows, ("file", "label")), image="file", image_size=4)
    assert isinstance(listed.test.inputs, Images)
    with pytest.raises(DataError, match=r"no file .*animals/cow/1\.png"):
        read_task(
            write_csv("bad.csv", [*rows, ("animals/cow/1.png", "cat")], ("file", "label")), image="file"
        )
    with pytest.raises(DataError, match="share 10 record"):
        check_disjoint([task, listed])
    assert len(read_inputs(folder / "cat", task.problem, Columns())) == 6
    with pytest.raises(DataError, match="images, not texts"):
        _ = task.train.texts
    with pytest.raises(DataError, match="can't say whose"):
        read_task(folder, unit="owner")
    (folder / "cow").mkdir()
    with pytest.raises(DataError, match="cow holds no image"):
        read_task(folder)
    (folder / "cow").rmdir()
    (folder / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"notes\.txt lies beside the classes"):
        read_task(folder)


def test_pairs_are_tokenised_as_the_tokenizer_does(tiny_base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    texts = [("the film was fine", "dull plot"), ("a", "the book is very quite lovely here today and warm")]
    encoded = encode(tokenizer, texts, 10, PAIR)
    batch = encoded.batch(np.array([1, 0]))
    expected = tokenizer(
        *map(list, zip(*texts[::-1], strict=True)),
        truncation="longest_first",
        max_length=10,
        padding=True,
        return_tensors="pt",
    )
    assert batch.keys() == expected.keys()
    for name, values in expected.items():
        assert batch[name].tolist() == values.tolist()
    assert "token_type_ids" not in encode(tokenizer, ["fine"], 10, TEXT_CLASSES).batch(np.array([0]))


def test_the_first_token_of_a_word_has_its_label(tiny_base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    texts = [("finely", "12", "book"), ("a", "dull", "dull", "plot", "films")]
    encoded = encode(tokenizer, texts, 6, WORDS)
    # [CLS] fine ##ly 1 ##2 [SEP] cuts `book` off; [CLS] a dull dull plot [SEP] cuts off `films`.
    placed = encoded.word_labels([np.array([3, 4, 5]), np.array([6, 7, 8, 9, 10])])
    none = IGNORED
    assert placed.tolist() == [[none, 3, none, 4, none, none], [none, 6, 7, 8, 9, none]]
    found = encoded.of_words(np.arange(12).reshape(2, 6), [3, 5])
    assert found == [[1, 3, None], [7, 8, 9, 10, None]]
