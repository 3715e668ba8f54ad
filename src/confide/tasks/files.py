"""A task from one's own file. Everything is checked when it is read: a row that can't be used stops the run
before any budget is spent, with its number and what to do.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Container, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from confide.errors import DataError
from confide.privacy.units import UnitMap
from confide.tasks.records import Metric, Records, TaskData
from confide.tasks.tables import read_columns

_WHOLE = re.compile(r"([+-]?\d+)\.0+")
_LEAST_TEST = 2


def read_task(
    path: str | Path,
    *,
    text: str,
    label: str,
    labels: Sequence[str] | None = None,
    name: str | None = None,
    unit: str | None = None,
    rows_per_unit: int = 8,
    test_size: float = 0.2,
    test_file: str | Path | None = None,
    seed: int = 0,
    metric: Metric = "accuracy",
) -> TaskData:
    """Read a classification task from a CSV, TSV, JSON Lines or Parquet file.

    Args:
        path: the file with the records.
        text, label: its columns. A label is compared as a string; 1, 1.0 and "1" are the same label.
        labels: class names in the order of the logits. Without them they are read off the file and sorted,
            which makes the set of labels itself a public assumption (`labels_from="file"`).
        name: name of the task; by default that of the file.
        unit: column whose values say whose row it is. All rows of a unit are on one side of the split, and
            the privacy claim is per unit. Without it every row is a unit.
        rows_per_unit: at most this many rows of a unit are used (public).
        test_size: share of the units that are for test, picked at random with `seed` (public).
        test_file: a file with the test records, with the same columns, instead of `test_size`.
        seed: of the split.
        metric: how predictions are scored.

    Raises:
        DataError: anything that would stop training later; one message that names file, column, row (from 1,
            without the header) and what to do.
    """
    path = Path(path)
    declared = _declared(labels) if labels is not None else None
    if not 0 < test_size < 1:
        raise DataError(f"the test size is {test_size}; it is a share of the units, above 0 and below 1")
    if rows_per_unit < 1:
        raise DataError(f"{rows_per_unit} rows per unit; use at least 1")
    columns = [text, label, *([unit] if unit else [])]
    if len(set(columns)) < len(columns):
        raise DataError(
            f"text, label and unit must be different columns, not {', '.join(map(repr, columns))}"
        )

    values = read_columns(path, columns)
    names = declared or _in_order(_label_keys(path, label, values[label], ()))
    records = _records(path, values, text, label, names, unit, rows_per_unit)
    _check_classes(path, label, records, names)
    if test_file is None:
        train, test = _split(path, records, test_size, seed)
        _check_classes(path, label, train, names, "training ")
    else:
        test_path = Path(test_file)
        test_values = read_columns(test_path, columns)
        train, test = records, _records(test_path, test_values, text, label, names, unit, rows_per_unit)
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
        labels_from="file" if declared is None else "declared",
        metric=metric,
        train=train,
        test=test,
        source="Records of whoever trained the model.",
    )


def read_records(path: str | Path, *, text: str, label: str, labels: Sequence[str]) -> Records:
    """Labelled records of a file, all of them, to score a model whose `labels` are known.

    Raises:
        DataError: as `read_task`.
    """
    path = Path(path)
    return _records(path, read_columns(path, [text, label]), text, label, _declared(labels), None, 1)


def read_texts(path: str | Path, text: str) -> tuple[str, ...]:
    """The texts of a file, in the order of its rows, for prediction.

    Raises:
        DataError: as `read_task` for the file and its text column.
    """
    path = Path(path)
    return _texts(path, text, read_columns(path, [text])[text])


def _declared(labels: Sequence[str]) -> dict[str, str]:
    names: dict[str, str] = {}
    for label in labels:
        key = _key(label)
        if key is None:
            raise DataError("a declared label is empty; name every label")
        if key in names:
            raise DataError(f"label {label!r} is declared twice; name every label once")
        names[key] = str(label).strip()
    if len(names) < 2:
        raise DataError(f"{len(names)} label(s) declared; a classification needs at least 2")
    return names


def _in_order(keys: Sequence[str]) -> dict[str, str]:
    found = sorted(set(keys))
    with contextlib.suppress(ValueError):
        found.sort(key=float)
    return {key: key for key in found}


def _label_keys(path: Path, column: str, values: Sequence[Any], declared: Container[str]) -> list[str]:
    keys = [_key(value) for value in values]
    _refuse(
        path,
        column,
        keys,
        lambda key: _is_missing(key) and key not in declared,
        "no label",
        "label or drop it",
    )
    return [str(key) for key in keys]


def _records(
    path: Path,
    values: dict[str, list[Any]],
    text: str,
    label: str,
    names: dict[str, str],
    unit: str | None,
    rows_per_unit: int,
) -> Records:
    texts = _texts(path, text, values[text])
    classes = {key: position for position, key in enumerate(names)}
    labels = []
    for row, key in enumerate(_label_keys(path, label, values[label], names), start=1):
        if key not in classes:
            near = get_close_matches(key, names, n=1)
            hint = f" (did you mean {names[near[0]]!r}?)" if near else ""
            raise DataError(
                f"{path}, column {label!r}, row {row}: label {key!r} is none of "
                f"{', '.join(map(repr, names.values()))}{hint}; correct it or declare it"
            )
        labels.append(classes[key])
    if not unit:
        return Records.of(texts, labels)
    owners = [_key(value) for value in values[unit]]
    _refuse(path, unit, owners, _is_missing, "no unit", "say whose row it is, or drop it")
    return Records.of(texts, labels, UnitMap.column(unit, owners, rows_per_unit))


def _texts(path: Path, text: str, values: Sequence[Any]) -> tuple[str, ...]:
    _refuse(path, text, values, lambda value: value is None or value != value, "no text", "fill or drop it")
    _refuse(
        path,
        text,
        values,
        lambda value: not isinstance(value, str),
        "a value that isn't text",
        "choose a column of texts, or write it as a string",
    )
    _refuse(path, text, values, lambda value: not value.strip(), "an empty text", "fill or drop it")
    return tuple(values)


def _refuse(
    path: Path, column: str, values: Sequence[Any], bad: Callable[[Any], bool], what: str, remedy: str
) -> None:
    rows = [row for row, value in enumerate(values, start=1) if bad(value)]
    if rows:
        more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
        raise DataError(f"{path}, column {column!r}, row {rows[0]}{more}: {what}; {remedy}")


def _key(value: Any) -> str | None:
    if value is None or value != value:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    key = str(value).strip()
    whole = _WHOLE.fullmatch(key)
    return (whole[1] if whole else key) or None


def _is_missing(key: str | None) -> bool:
    return key is None or key in ("nan", "NaN")


def _check_classes(path: Path, label: str, records: Records, names: dict[str, str], which: str = "") -> None:
    found = np.unique(records.labels)
    if len(found) < 2:
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
    known = {_key(value) for value in train}
    both = [row for row, value in enumerate(test, start=1) if _key(value) in known]
    if both:
        raise DataError(
            f"{test_path}, column {unit!r}, row {both[0]}: this unit also has rows in {path} "
            f"({len(both)} such row(s)); keep each unit on one side"
        )
