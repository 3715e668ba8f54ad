"""Labels of records as a file has them: names of classes, numbers, or a name for each word."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from confide.errors import DataError

_WHOLE = re.compile(r"([+-]?\d+)\.0+")


def declared_names(labels: Sequence[str]) -> dict[str, str]:
    """Key → name of declared labels, in their order.

    Raises:
        DataError: an empty label, one that is declared twice, or fewer than 2.
    """
    names: dict[str, str] = {}
    for label in labels:
        name = key(label)
        if name is None:
            raise DataError("a declared label is empty; name every label")
        if name in names:
            raise DataError(f"label {label!r} is declared twice; name every label once")
        names[name] = str(label).strip()
    if len(names) < 2:
        raise DataError(f"{len(names)} label(s) declared; a classification needs at least 2")
    return names


def names_in_order(keys: Iterable[str]) -> dict[str, str]:
    """Key → name of the labels that a file has, sorted; by value if all are numbers."""
    found = sorted(set(keys))
    with contextlib.suppress(ValueError):
        found.sort(key=float)
    return {key: key for key in found}


def keys(path: Path, column: str, values: Sequence[Any], declared: Container[str]) -> list[str]:
    """What labels are compared by, one per row.

    Raises:
        DataError: a row without one.
    """
    found = [key(value) for value in values]
    refuse(
        path,
        column,
        found,
        lambda name: is_missing(name) and name not in declared,
        "no label",
        "label or drop it",
    )
    return [str(name) for name in found]


def classes(
    path: Path, column: str, values: Sequence[Any], names: Mapping[str, str]
) -> npt.NDArray[np.int64]:
    """(rows,) place of each row's label among the names.

    Raises:
        DataError: a row without a label, or with one that is none of the names.
    """
    place = {name: position for position, name in enumerate(names)}
    found = keys(path, column, values, names)
    for row, name in enumerate(found, start=1):
        if name not in place:
            raise _unknown(path, column, row, name, names)
    return np.array([place[name] for name in found], dtype=np.int64)


def numbers(
    path: Path, column: str, values: Sequence[Any], label_range: tuple[float, float] | None
) -> npt.NDArray[np.float64]:
    """(rows,) labels that are numbers.

    Args:
        label_range: what was declared for training; None where models are only scored.

    Raises:
        DataError: a row without a finite number, or with one outside the range.
    """
    found = [_number(value) for value in values]
    refuse(
        path,
        column,
        found,
        lambda number: number is None,
        "a label that is no number",
        "write it with digits and a point, or drop the row; for classes, declare no label range",
    )
    if label_range is not None:
        low, high = label_range
        refuse(
            path,
            column,
            found,
            lambda number: not low <= number <= high,
            f"a label outside the declared range, {low:g} to {high:g}",
            "correct it, or declare the range that every label can have",
        )
    return np.array(found, dtype=np.float64)


def of_words(
    path: Path,
    column: str,
    values: Sequence[Any],
    texts: Sequence[tuple[str, ...]],
    names: Mapping[str, str] | None,
) -> tuple[npt.NDArray[Any], dict[str, str]]:
    """The classes of each text's words, (texts,) arrays, and the names that they count in.

    Args:
        names: key → name; None reads them off the labels.

    Raises:
        DataError: not a list, not as many labels as words, or a label that is none of the names.
    """
    refuse(
        path,
        column,
        values,
        lambda value: not isinstance(value, list | tuple),
        "not a list of labels",
        "write one label for each word; JSON Lines and Parquet can hold lists",
    )
    for row, (own, words) in enumerate(zip(values, texts, strict=True), start=1):
        if len(own) != len(words):
            raise DataError(
                f"{path}, column {column!r}, row {row}: "
                f"{len(own)} labels for {len(words)} words; write one for each"
            )
    found = [[key(value) for value in own] for own in values]
    refuse(
        path,
        column,
        found,
        lambda own: any(is_missing(name) and name not in (names or {}) for name in own),
        "a word without a label",
        "label it (by `O`, say) or drop the row",
    )
    names = names if names is not None else names_in_order(str(name) for own in found for name in own)
    place: dict[Any, int] = {name: position for position, name in enumerate(names)}
    result = np.empty(len(found), dtype=object)
    for row, own in enumerate(found):
        for name in own:
            if name not in place:
                raise _unknown(path, column, row + 1, str(name), names)
        result[row] = np.array([place[name] for name in own], dtype=np.int64)
    return result, dict(names)


def refuse(
    path: Path, column: str, values: Sequence[Any], bad: Callable[[Any], bool], what: str, remedy: str
) -> None:
    """Stop at values that can't be used; the message names the first row and counts the others.

    Raises:
        DataError: a value is bad.
    """
    rows = [row for row, value in enumerate(values, start=1) if bad(value)]
    if rows:
        more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
        raise DataError(f"{path}, column {column!r}, row {rows[0]}{more}: {what}; {remedy}")


def key(value: Any) -> str | None:
    """What a value is compared by: 1, 1.0 and "1" are the same; None for no value."""
    if value is None or value != value:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    name = str(value).strip()
    whole = _WHOLE.fullmatch(name)
    return (whole[1] if whole else name) or None


def is_missing(name: str | None) -> bool:
    """Whether a key says that there is no value."""
    return name is None or name in ("nan", "NaN")


def _number(value: Any) -> float | None:
    if value is None or isinstance(value, bool | list | dict):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _unknown(path: Path, column: str, row: int, name: str, names: Mapping[str, str]) -> DataError:
    near = get_close_matches(name, names, n=1)
    hint = f" (did you mean {names[near[0]]!r}?)" if near else ""
    return DataError(
        f"{path}, column {column!r}, row {row}: label {name!r} is none of "
        f"{', '.join(map(repr, names.values()))}{hint}; correct it or declare it"
    )
