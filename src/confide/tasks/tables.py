"""Columns of a CSV, TSV, JSON Lines or Parquet file, or one message about what is wrong with it.

CSV, TSV and Parquet are read by `datasets`. Its CSV reader gives no row numbers, and shifts or cuts rows that
have a field too many, so the shape is checked first; it caches what it reads in the home folder, so here the
cache is a temporary folder that is gone when the columns are returned. JSON Lines are read here: `datasets`
guesses types from the first part of a file, turns labels like 2020-01-01 into times, and refuses a value of
another type that comes late.
"""

from __future__ import annotations

import csv
import glob
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from confide.errors import DataError

SEPARATORS = {".csv": ",", ".tsv": "\t"}
JSON_LINES = (".jsonl", ".ndjson")
SUFFIXES = (*SEPARATORS, *JSON_LINES, ".parquet")

_UNDECODED = re.compile("[\udc80-\udcff]")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def read_columns(path: Path, wanted: Sequence[str]) -> dict[str, list[Any]]:
    """The wanted columns of a file, each as a list with one value per row.

    CSV and TSV values are strings exactly as written (no value is taken for "missing" but an empty one).

    Raises:
        DataError: no such file, an unknown suffix, a missing column, no rows, or a row that can't be read.
    """
    if not path.exists():
        raise DataError(f"there is no file {path}; check the path")
    if not path.is_file():
        raise DataError(f"{path} is a folder, not a file of records")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(
            f"{path}: can't read {suffix or 'a file without suffix'!r}; use {', '.join(SUFFIXES)}"
        )
    wanted = list(dict.fromkeys(wanted))
    try:
        if suffix in JSON_LINES:
            return _read_json_lines(path, wanted)
        if suffix in SEPARATORS:
            columns, rows = _check_csv(path, SEPARATORS[suffix])
        else:
            columns, rows = _check_parquet(path)
        _check_columns(path, columns, wanted)
        if not rows:
            raise DataError(f"{path} has no rows; nothing can be learned from an empty file")
        values = _read(path, suffix, columns, wanted)
    except DataError:
        raise
    except Exception as error:  # datasets and pyarrow raise many kinds, none of which names the file
        reason = str(error.__cause__ or error).strip().splitlines()
        raise DataError(f"{path} can't be read: {reason[0] if reason else type(error).__name__}") from error
    if any(len(column) != rows for column in values.values()):
        raise DataError(
            f"{path} can't be read reliably: its {rows} rows were not all found; save it again as Parquet"
        )
    return values


def _read(path: Path, suffix: str, columns: list[str], wanted: list[str]) -> dict[str, list[Any]]:
    import datasets

    datasets.disable_progress_bars()
    source = glob.escape(str(path.resolve()))
    with tempfile.TemporaryDirectory(prefix="confide-") as cache:
        where = {"cache_dir": cache, "keep_in_memory": True}
        if suffix in SEPARATORS:
            strings = datasets.Features({name: datasets.Value("string") for name in wanted})
            table = datasets.Dataset.from_csv(
                source,
                features=strings,
                names=columns,
                header=0,
                usecols=wanted,
                sep=SEPARATORS[suffix],
                encoding="utf-8-sig",
                keep_default_na=False,
                **where,
            )
        else:
            table = datasets.Dataset.from_parquet(source, columns=wanted, **where)
        values: dict[str, list[Any]] = table[:]
    return values


def _check_csv(path: Path, separator: str) -> tuple[list[str], int]:
    limit = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    rows = -1
    columns: list[str] = []
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            for fields in csv.reader(file, delimiter=separator, strict=True):
                if not fields:
                    continue
                rows += 1
                _check_decoded(path, fields, columns, rows)
                if not columns:
                    columns = [name.strip() or f"column {n}" for n, name in enumerate(fields, start=1)]
                elif len(fields) != len(columns):
                    raise DataError(
                        f"{path}, row {rows}: {len(fields)} fields under {len(columns)} columns; "
                        f"put a field that contains the separator or a line break in double quotes"
                    )
    except csv.Error as error:
        raise DataError(
            f"{path}, row {rows + 1}: not valid CSV ({error}); put such a field in double quotes, "
            f"and double each quote inside it"
        ) from error
    finally:
        csv.field_size_limit(limit)
    if not columns:
        raise DataError(f"{path} is empty; it needs a line of column names and rows")
    return columns, rows


def _check_decoded(path: Path, fields: list[str], columns: list[str], row: int) -> None:
    for position, field in enumerate(fields):
        if _UNDECODED.search(field):
            named = f", column {columns[position]!r}" if position < len(columns) else ""
            place = f"row {row}{named}" if row else "the line of column names"
            raise DataError(f"{path}, {place}: not UTF-8 text; save the file as UTF-8")


def _read_json_lines(path: Path, wanted: list[str]) -> dict[str, list[Any]]:
    columns: dict[str, None] = {}
    values: dict[str, list[Any]] = {name: [] for name in wanted}
    rows = 0
    with open(path, "rb") as file:
        for line in file:
            if not line.strip():
                continue
            rows += 1
            try:
                record = json.loads(line.decode("utf-8-sig" if rows == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, row {rows}: not UTF-8 text; save the file as UTF-8") from error
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{path}, row {rows}: not valid JSON ({error}); write one object per line"
                ) from error
            if not isinstance(record, dict):
                raise DataError(f"{path}, row {rows}: not a JSON object; write one object per line")
            columns.update(dict.fromkeys(record))
            for name in wanted:
                value = record.get(name)
                if isinstance(value, str) and _HALF_CHARACTER.search(value):
                    raise DataError(
                        f"{path}, row {rows}, column {name!r}: half a character (a lone surrogate); drop it"
                    )
                values[name].append(value)
    if not rows:
        raise DataError(f"{path} is empty; it needs one JSON object per line")
    _check_columns(path, list(columns), wanted)
    return values


def _check_parquet(path: Path) -> tuple[list[str], int]:
    from pyarrow import parquet  # type: ignore[import-untyped]

    metadata = parquet.read_metadata(path)
    return list(metadata.schema.to_arrow_schema().names), int(metadata.num_rows)


def _check_columns(path: Path, columns: list[str], wanted: list[str]) -> None:
    for name in wanted:
        if columns.count(name) > 1:
            raise DataError(f"{path} has {columns.count(name)} columns {name!r}; rename all but one")
        if name not in columns:
            by_lower = {column.lower(): column for column in columns}
            near = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.7)
            hint = f"; did you mean {by_lower[near[0]]!r}?" if near else "."
            raise DataError(
                f"{path} has no column {name!r}{hint} Its columns: {', '.join(map(repr, columns))}"
            )
