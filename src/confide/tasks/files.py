"""A task from one's own file, or folder of images. Everything is checked when it is read: a record that can't
be used stops the run before any budget is spent, with its row or file and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from confide.errors import DataError
from confide.privacy.units import UnitMap
from confide.release.format import TEXT_CLASSES, Problem
from confide.tasks import labels as label_values
from confide.tasks.columns import Columns, problem_of
from confide.tasks.images import SIZE, Images
from confide.tasks.labels import refuse
from confide.tasks.metrics import METRICS
from confide.tasks.records import Metric, Records, TaskData, Text
from confide.tasks.tables import read_columns

_LEAST_TEST = 2


def read_task(
    path: str | Path,
    *,
    text: str = "text",
    label: str = "label",
    text_pair: str | None = None,
    tokens: str | None = None,
    image: str | None = None,
    target: str | None = None,
    language_model: bool = False,
    labels: Sequence[str] | None = None,
    label_range: tuple[float, float] | None = None,
    image_size: int = SIZE,
    name: str | None = None,
    unit: str | None = None,
    rows_per_unit: int = 8,
    test_size: float = 0.2,
    test_file: str | Path | None = None,
    seed: int = 0,
    metric: Metric | None = None,
) -> TaskData:
    """Read a task from a CSV, TSV, JSON Lines or Parquet file, or from a folder of images.

    Args:
        path: the file with the records; or a folder with a folder of images for each class.
        text, label: columns. A class is compared as a string; 1, 1.0 and "1" are the same label.
        text_pair: column of second texts; a record is then a pair.
        tokens: column of lists of words; the labels are then lists of classes, one for each word.
        image: column of paths of images.
        target: column of texts that a language model is to write for those in `text`; instead of labels.
        language_model: a language model learns the texts themselves; there are no labels.
        labels: class names in the order of the logits. Without them they are read off the file and sorted,
            which makes the set of labels itself a public assumption (`labels_from="file"`).
        label_range: lowest and highest label; declares that labels are numbers. Public, so it may not be
            chosen by looking at the records.
        image_size: side in pixels that images are resized to.
        name: name of the task; by default that of the file.
        unit: column whose values say whose row it is. All rows of a unit are on one side of the split, and
            the privacy claim is per unit. Without it every row is a unit.
        rows_per_unit: at most this many rows of a unit are used (public).
        test_size: share of the units that are for test, picked at random with `seed` (public).
        test_file: a file (or folder) with the test records, like the other one, instead of `test_size`.
        seed: of the split.
        metric: how predictions are scored; by default `accuracy` for classes, `pearson` for numbers and
            `perplexity` for language models.

    Raises:
        DataError: anything that would stop training later; one message that names file, column, row (from 1,
            without the header) and what to do.
    """
    path = Path(path)
    writes = language_model or target is not None
    folder = "image" if path.is_dir() and not writes else None
    columns = Columns(text, label, text_pair, tokens, image or folder, unit, target)
    problem = problem_of(path, columns, label_range, image_size, writes)
    if writes and (labels is not None or label != "label"):
        raise DataError("a language model learns texts, which have no labels; leave out label and labels")
    if labels is not None and label_range is not None:
        raise DataError("labels are either classes or numbers; declare labels or a label range, not both")
    declared = label_values.declared_names(labels) if labels is not None else None
    metric = metric or METRICS[problem.target][0]
    if metric not in METRICS[problem.target]:
        raise DataError(f"{metric} doesn't score these labels; use {' or '.join(METRICS[problem.target])}")
    if not 0 < test_size < 1:
        raise DataError(f"the test size is {test_size}; it is a share of the units, above 0 and below 1")
    if rows_per_unit < 1:
        raise DataError(f"{rows_per_unit} rows per unit; use at least 1")
    used = [*columns.inputs, *([] if writes else [label]), *([unit] if unit else [])]
    if len(set(used)) < len(used):
        raise DataError(f"text, label and unit must be different columns, not {', '.join(map(repr, used))}")

    values = _read(path, used, columns)
    records, names = _records(path, values, columns, problem, declared, rows_per_unit)
    if not writes:
        _check_classes(path, label, records, names)
    if test_file is None:
        train, test = _split(path, records, test_size, seed)
        if not writes:
            _check_classes(path, label, train, names, "training ")
    else:
        test_path = Path(test_file)
        test_values = _read(test_path, used, columns)
        train, (test, _) = (
            records,
            _records(test_path, test_values, columns, problem, names or None, rows_per_unit),
        )
        if unit:
            _check_units(path, values[unit], test_path, test_values[unit], unit)
    if len(test) < _LEAST_TEST:
        raise DataError(
            f"{test_file or path} gives {len(test)} test record(s), at least {_LEAST_TEST} are needed; "
            f"use more records or a larger test size"
        )
    return TaskData(
        name=name or path.stem,
        labels=tuple(names.values()),
        labels_from="file" if declared is None and names else "declared",
        metric=metric,
        train=train,
        test=test,
        source="Records of whoever trained the model.",
        problem=problem,
    )


def read_records(
    path: str | Path,
    *,
    text: str = "text",
    label: str = "label",
    labels: Sequence[str] = (),
    text_pair: str | None = None,
    tokens: str | None = None,
    image: str | None = None,
    target: str | None = None,
    problem: Problem | None = None,
) -> Records:
    """Labelled records of a file, all of them, to score a model whose `labels` and `problem` are known.

    Raises:
        DataError: as `read_task`.
    """
    path, problem = Path(path), problem or TEXT_CLASSES
    columns = Columns(text, label, text_pair, tokens, image, target=target).fitting(problem)
    writes = problem.target == "text"
    declared = label_values.declared_names(labels) if problem.target != "number" and not writes else None
    values = _read(path, [*columns.inputs, *([] if writes else [label])], columns)
    # Only for training does the range matter.
    return _records(path, values, columns, problem, declared, 1, in_range=False)[0]


def read_inputs(path: str | Path, problem: Problem, columns: Columns) -> tuple[Text, ...] | Images:
    """What a model reads of a file, in the order of its rows; of a folder, all its images by name.

    What it should write isn't read.

    Raises:
        DataError: as `read_task` for the file and its columns.
    """
    path = Path(path)
    if problem.target == "text":
        return read_texts(path, columns.text)
    columns = columns.fitting(problem)
    if path.is_dir() and columns.image:
        files = [str(file) for file in _files(path) if not file.is_dir()]
        return _inputs(path, {columns.image: files}, columns, problem)
    return _inputs(path, read_columns(path, columns.inputs), columns, problem)


def read_texts(path: str | Path, text: str) -> tuple[str, ...]:
    """The texts of a file, in the order of its rows.

    Raises:
        DataError: as `read_task` for the file and its text column.
    """
    path = Path(path)
    return _texts(path, text, read_columns(path, [text])[text])


def _read(path: Path, used: Sequence[str], columns: Columns) -> dict[str, list[Any]]:
    if not path.is_dir() or columns.image is None:
        return read_columns(path, used)
    found: list[tuple[str, str]] = []
    for folder in _files(path):
        if not folder.is_dir():
            raise DataError(
                f"{folder} lies beside the classes; {path} must hold a folder of images for each class"
            )
        files = _files(folder)
        if not files:
            raise DataError(f"{folder} holds no image; a class needs some, or must not be there")
        found += [(str(file), folder.name) for file in files]
    if not found:
        raise DataError(f"{path} is empty; it must hold a folder of images for each class")
    return {columns.image: [file for file, _ in found], columns.label: [name for _, name in found]}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _records(
    path: Path,
    values: dict[str, list[Any]],
    columns: Columns,
    problem: Problem,
    names: dict[str, str] | None,
    rows_per_unit: int,
    *,
    in_range: bool = True,
) -> tuple[Records, dict[str, str]]:
    """The records, and the names of their classes; those of the file where none are given."""
    label, unit = columns.label, columns.unit
    units = UnitMap.records(len(values[columns.inputs[0]]))
    if unit:
        owners = [label_values.key(value) for value in values[unit]]
        refuse(path, unit, owners, label_values.is_missing, "no unit", "say whose row it is, or drop it")
        units = UnitMap.column(unit, owners, rows_per_unit)
    if columns.tokens:
        texts = _words(path, columns.tokens, values[columns.tokens])
        own, found = label_values.of_words(path, label, values[label], texts, names)
        return Records(texts, own, units), found
    if problem.target == "text":
        written = _inputs(path, values, columns, problem)
        return Records(written, np.zeros(len(written), np.int64), units), {}
    # Labels first: they are cheaper to check than images.
    if problem.target == "number":
        bounds = problem.label_range if in_range else None
        own, found = label_values.numbers(path, label, values[label], bounds), {}
    else:
        found = names or label_values.names_in_order(label_values.keys(path, label, values[label], ()))
        own = label_values.classes(path, label, values[label], found)
    return Records(_inputs(path, values, columns, problem), own, units), found


def _inputs(
    path: Path, values: Mapping[str, list[Any]], columns: Columns, problem: Problem
) -> tuple[Text, ...] | Images:
    if columns.image:
        assert problem.image_size is not None
        folder = Path() if path.is_dir() else path.parent
        return Images.open(
            [folder / file for file in _texts(path, columns.image, values[columns.image])], problem.image_size
        )
    if columns.tokens:
        return _words(path, columns.tokens, values[columns.tokens])
    texts = [_texts(path, column, values[column]) for column in columns.inputs]
    return tuple(zip(*texts, strict=True)) if len(texts) == 2 else texts[0]


def _texts(path: Path, text: str, values: Sequence[Any]) -> tuple[str, ...]:
    refuse(path, text, values, lambda value: value is None or value != value, "no text", "fill or drop it")
    refuse(
        path,
        text,
        values,
        lambda value: not isinstance(value, str),
        "a value that isn't text",
        "choose a column of texts, or write it as a string",
    )
    refuse(path, text, values, lambda value: not value.strip(), "an empty text", "fill or drop it")
    return tuple(values)


def _words(path: Path, column: str, values: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
    refuse(
        path,
        column,
        values,
        lambda value: not isinstance(value, list | tuple),
        "not a list of words",
        "JSON Lines and Parquet can hold lists",
    )
    refuse(
        path,
        column,
        values,
        lambda value: not value or not all(isinstance(word, str) and word.strip() for word in value),
        "no words, or one that is empty or isn't text",
        "correct or drop it",
    )
    return tuple(tuple(value) for value in values)


def _check_classes(path: Path, label: str, records: Records, names: dict[str, str], which: str = "") -> None:
    every = np.concatenate([np.atleast_1d(own) for own in records.labels])
    found = np.unique(every)
    if len(found) > 1:
        return
    if not names:
        raise DataError(
            f"{path}, column {label!r}: all {len(records)} {which}records have the label {found[0]:g}; "
            "there is nothing to learn"
        )
    only = list(names.values())[int(found[0])]
    raise DataError(
        f"{path}, column {label!r}: all {len(records)} {which}records have the label {only!r}; "
        f"a classifier needs records of at least 2 classes"
    )


def _split(path: Path, records: Records, test_size: float, seed: int) -> tuple[Records, Records]:
    count = records.units.count
    held = max(1, round(test_size * count))
    if held >= count:
        raise DataError(f"{path} has {count} unit(s), too few to keep some for training; use more records")
    test_units = np.random.default_rng(seed).permutation(count)[:held]
    in_test = np.isin(records.units.unit_of_row, test_units)
    train, test = (records.take(np.flatnonzero(side).astype(np.int64)) for side in (~in_test, in_test))
    return train, test


def _check_units(path: Path, train: Sequence[Any], test_path: Path, test: Sequence[Any], unit: str) -> None:
    known = {label_values.key(value) for value in train}
    both = [row for row, value in enumerate(test, start=1) if label_values.key(value) in known]
    if both:
        raise DataError(
            f"{test_path}, column {unit!r}, row {both[0]}: this unit also has rows in {path} "
            f"({len(both)} such row(s)); keep each unit on one side"
        )
