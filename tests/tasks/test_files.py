"""One's own data: what is read, and the one message for everything that can't be."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from confide.errors import DataError
from confide.tasks.files import read_task, read_texts
from confide.tasks.records import TaskData
from confide.tasks.tables import read_columns

ROWS = [(f"text number {row}", ("neg", "pos")[row % 2], f"user {row // 4}") for row in range(40)]
COLUMNS = ("text", "label", "user")


def write(path: Path, rows: Sequence[Sequence[Any]], columns: Sequence[str] = COLUMNS) -> Path:
    if path.suffix in (".csv", ".tsv"):
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="," if path.suffix == ".csv" else "\t")
            writer.writerows([columns, *rows])
    elif path.suffix == ".jsonl":
        records = [dict(zip(columns, row, strict=True)) for row in rows]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        parquet.write_table(
            pa.table({name: [row[place] for row in rows] for place, name in enumerate(columns)}), path
        )
    return path


def read(path: Path, **options: Any) -> TaskData:
    return read_task(path, **{"text": "text", "label": "label", "seed": 3, **options})


def everything(task: TaskData) -> dict[str, str]:
    return {
        text: task.labels[label]
        for records in (task.train, task.test)
        for text, label in zip(records.texts, records.labels, strict=True)
    }


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_every_format_gives_the_same_task(tmp_path: Path, suffix: str) -> None:
    task = read(write(tmp_path / f"reviews{suffix}", ROWS), labels=["pos", "neg"])
    assert (task.name, task.labels, task.labels_from) == ("reviews", ("pos", "neg"), "declared")
    assert (len(task.train), len(task.test)) == (32, 8)
    assert everything(task) == {text: label for text, label, _ in ROWS}
    assert task.train.units.name == "record"
    assert task.test.texts == read(write(tmp_path / "same.csv", ROWS)).test.texts
    assert task.test.texts != read(tmp_path / f"reviews{suffix}", seed=4).test.texts
    assert read_texts(tmp_path / f"reviews{suffix}", "text") == tuple(text for text, _, _ in ROWS)


def test_labels_of_the_file_are_sorted_and_said_to_be_so(tmp_path: Path) -> None:
    task = read(write(tmp_path / "a.csv", ROWS))
    assert (task.labels, task.labels_from) == (("neg", "pos"), "file")
    stars = [(f"text {row}", row % 11, "u") for row in range(44)]
    assert read(write(tmp_path / "b.csv", stars)).labels == tuple(map(str, range(11)))


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("declared", [["1", "2"], ["1.0", "2.0"]])
def test_whole_numbers_are_one_label_however_written(
    tmp_path: Path, suffix: str, declared: list[str]
) -> None:
    rows = [(f"text {row}", float(1 + row % 2)) for row in range(20)]
    task = read(write(tmp_path / f"a{suffix}", rows, ("text", "label")), labels=declared)
    assert task.labels == tuple(declared)
    assert sorted(everything(task).values()) == [declared[0]] * 10 + [declared[1]] * 10
    assert read(tmp_path / f"a{suffix}").labels == ("1", "2")
    halves = [(f"text {row}", 0.5 * (row % 3)) for row in range(20)]
    assert read(write(tmp_path / f"b{suffix}", halves, ("text", "label"))).labels == ("0", "0.5", "1")


def test_json_values_are_not_guessed_at(tmp_path: Path) -> None:
    rows = [(f"text {row}", f"2020-01-0{1 + row % 2}") for row in range(20)]
    assert read(write(tmp_path / "a.jsonl", rows, ("text", "label"))).labels == ("2020-01-01", "2020-01-02")
    mixed = [(f"text {row}", "other" if row == 19 else row % 2) for row in range(20)]
    assert read(write(tmp_path / "b.jsonl", mixed, ("text", "label"))).labels == ("0", "1", "other")


def test_truth_values_are_labels(tmp_path: Path) -> None:
    rows = [(f"text {row}", row % 2 == 0) for row in range(20)]
    task = read(write(tmp_path / "a.jsonl", rows, ("text", "label")), labels=["true", "false"])
    assert everything(task)["text 0"] == "true"


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_nobody_is_on_both_sides(tmp_path: Path, suffix: str) -> None:
    owner = {text: user for text, _, user in ROWS}
    task = read(write(tmp_path / f"a{suffix}", ROWS), unit="user", rows_per_unit=3, test_size=0.3)
    sides = [{owner[text] for text in side.texts} for side in (task.train, task.test)]
    assert not sides[0] & sides[1]
    assert (len(sides[0]), len(sides[1])) == (7, 3)
    units = task.train.units
    assert (units.name, units.count, units.rows_per_unit) == ("user", 7, 3)
    for text, unit in zip(task.train.texts, units.unit_of_row, strict=True):
        together = {owner[task.train.texts[row]] for row in np.flatnonzero(units.unit_of_row == unit)}
        assert together == {owner[text]}


def test_own_test_file(tmp_path: Path) -> None:
    train, test = write(tmp_path / "a.csv", ROWS[:32]), write(tmp_path / "b.parquet", ROWS[32:])
    task = read(train, test_file=test, unit="user")
    assert task.train.texts == tuple(text for text, _, _ in ROWS[:32])
    assert task.test.texts == tuple(text for text, _, _ in ROWS[32:])
    with pytest.raises(DataError, match=r"b\.csv, column 'user', row 3: this unit also has rows in .*2 such"):
        read(train, test_file=write(tmp_path / "b.csv", ROWS[34:36] + ROWS[:2]), unit="user")
    with pytest.raises(
        DataError, match=r"c\.csv, column 'label', row 2: label 'neutral' is none of 'neg', 'pos'"
    ):
        read(train, test_file=write(tmp_path / "c.csv", [ROWS[0], ("x", "neutral", "u")]))


def with_row(row: Sequence[Any]) -> list[Sequence[Any]]:
    return [*ROWS[:4], row, *ROWS[5:]]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (with_row(("", "pos", "u")), {}, r"column 'text', row 5: an empty text; fill or drop it"),
        (with_row((" \t", "pos", "u")), {}, r"column 'text', row 5: an empty text"),
        ([*with_row((" ", "pos", "u")), ("", "neg", "v")], {}, r"row 5 \(and 1 more\): an empty text"),
        (with_row(("x", "", "u")), {}, r"column 'label', row 5: no label"),
        (with_row(("x", "NaN", "u")), {}, r"column 'label', row 5: no label"),
        (with_row(("x", "nan", "u")), {"labels": ["neg", "pos"]}, r"column 'label', row 5: no label"),
        (
            with_row(("x", "posi", "u")),
            {"labels": ["neg", "pos"]},
            r"row 5: label 'posi' is none of 'neg', 'pos' \(did you mean 'pos'\?\); correct it or declare it",
        ),
        (with_row(("x", "pos", "")), {"unit": "user"}, r"column 'user', row 5: no unit; say whose"),
        (
            ROWS,
            {"text": "txt"},
            r"no column 'txt'; did you mean 'text'\? Its columns: 'text', 'label', 'user'",
        ),
        (ROWS, {"label": "zzz"}, r"no column 'zzz'\. Its columns"),
        (ROWS, {"label": "Label"}, r"no column 'Label'; did you mean 'label'\?"),
        (ROWS, {"unit": "usr"}, r"no column 'usr'; did you mean 'user'"),
        (ROWS, {"label": "text"}, "must be different columns"),
        (ROWS[::2], {}, r"column 'label': all 20 records have the label 'neg'; .* at least 2 classes"),
        (ROWS[::2], {"labels": ["pos", "neg"]}, r"all 20 records have the label 'neg'"),
        (ROWS[:2], {}, r"all 1 training records have the label"),
        (ROWS[:1] * 5 + ROWS[1:2] * 5, {"test_size": 0.1}, r"1 test record\(s\), at least 2 are needed"),
        (ROWS[:2], {"test_size": 0.9}, r"2 unit\(s\), too few to keep some for training"),
        ([], {}, "has no rows"),
        (ROWS, {"labels": ["pos", "neg", "pos"]}, "label 'pos' is declared twice"),
        (ROWS, {"labels": ["1", "1.0"]}, r"label '1\.0' is declared twice"),
        (ROWS, {"labels": ["pos"]}, r"1 label\(s\) declared; a classification needs at least 2"),
        (ROWS, {"labels": ["pos", " "]}, "declared label is empty"),
        (ROWS, {"test_size": 0.0}, r"test size is 0\.0"),
        (ROWS, {"test_size": float("nan")}, "test size is nan"),
        (ROWS, {"test_size": 1}, "test size is 1;"),
        (ROWS, {"unit": "user", "rows_per_unit": 0}, "0 rows per unit"),
    ],
)
def test_unusable_rows_and_settings(
    tmp_path: Path, rows: Sequence[Sequence[Any]], options: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "own.csv", rows)
    with pytest.raises(DataError, match=message) as caught:
        read(path, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("text", None, "column 'text', row 5: no text"),
        ("label", None, "column 'label', row 5: no label"),
        ("user", None, "column 'user', row 5: no unit"),
    ],
)
def test_missing_values(tmp_path: Path, suffix: str, column: str, value: Any, message: str) -> None:
    rows = with_row([value if name == column else "x" for name in COLUMNS])
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / f"own{suffix}", rows), unit="user", labels=["neg", "pos", "x"])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_values_of_another_type(tmp_path: Path, suffix: str) -> None:
    numbers = [(row, "neg" if row % 2 else "pos") for row in range(20)]
    with pytest.raises(DataError, match=r"column 'text', row 1 \(and 19 more\): a value that isn't text"):
        read(write(tmp_path / f"own{suffix}", numbers, ("text", "label")))
    floats = [(f"text {row}", float("nan") if row == 7 else float(row % 2)) for row in range(20)]
    with pytest.raises(DataError, match=r"column 'label', row 8: no label"):
        read(write(tmp_path / f"own{suffix}", floats, ("text", "label")))


def test_one_wrong_type_among_json_texts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"own\.jsonl.*row 5: a value that isn't text"):
        read(write(tmp_path / "own.jsonl", with_row((7, "pos", "u"))))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "is empty"),
        ("a.csv", b"\n\n", "is empty"),
        ("a.jsonl", b"\n", "is empty"),
        ("a.csv", b"text,label\n", "has no rows"),
        ("a.csv", b"text,label\na,b\na,b,c\n", "row 2: 3 fields under 2 columns; put a field"),
        ("a.csv", b"text,label\na,b,c\n", "row 1: 3 fields under 2 columns"),
        ("a.csv", b"text,label\na,b\nc\n", "row 2: 1 fields under 2 columns"),
        ("a.csv", b'text,label\na,b\n"open,b\nc,d\n', "row 2: not valid CSV"),
        ("a.csv", b'text,label\n"a"b,c\n', "row 1: not valid CSV"),
        (
            "a.csv",
            b"text,label\na,b\nc\xe9,d\n",
            r"row 2, column 'text': not UTF-8 text; save the file as UTF-8",
        ),
        ("a.csv", "text,label\na,b\n".encode("utf-16"), "line of column names: not UTF-8"),
        ("a.csv", b"text,label,text\na,b,c\n", "2 columns 'text'; rename all but one"),
        ("a.jsonl", b'{"text": "a", "label": "b"}\n{"text": \n', "row 2: not valid JSON"),
        ("a.jsonl", b'{"text": "a", "label": "b"}\n["a", "b"]\n', "row 2: not a JSON object"),
        ("a.jsonl", b'{"text": "a", "label": "b"}\n{"text": "\xe9"}\n', "row 2: not UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800", "label": "b"}\n', r"row 1, column 'text': half a character"),
        ("a.jsonl", b'{"text": "a", "label": ' + b"[" * 100_000 + b"\n", "row 1: not valid JSON"),
        ("a.parquet", b"PAR1 no", "a.parquet can't be read: "),
        ("a.xlsx", b"", r"can't read '\.xlsx'; use \.csv, \.tsv, \.jsonl, \.ndjson, \.parquet"),
        ("a", b"", "can't read 'a file without suffix'"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file .*none\.csv"):
        read(tmp_path / "none.csv")
    with pytest.raises(DataError, match="is a folder"):
        read_texts(tmp_path, "text")


cells = st.text(
    st.characters(codec="utf-8", exclude_characters="\x00") | st.sampled_from(" \",\t\n\r'\\NAnull"),
    max_size=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=6),
    suffix=st.sampled_from([".csv", ".tsv"]),
)
@example(rows=[("NA", "null", "None"), ("", "1.0", "nan"), ('"', "''", "\\")], suffix=".csv")
@example(rows=[("a\r\nb", "c\rd", "e\nf"), ("\r", "\n", "\ufeff")], suffix=".tsv")
def test_cells_are_read_as_they_were_written(
    tmp_path: Path, rows: list[tuple[str, str, str]], suffix: str
) -> None:
    path = tmp_path / f"cells[1] *{suffix}"
    write(path, rows)
    values = read_columns(path, ["user", "text"])
    assert values == {"user": [row[2] for row in rows], "text": [row[0] for row in rows]}


def test_a_saved_index_and_a_byte_order_mark_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_bytes(b"\xef\xbb\xbf,text,label\r\n0,good,pos\r\n\r\n1,bad,neg\r\n")
    assert read_columns(path, ["text", "label"]) == {"text": ["good", "bad"], "label": ["pos", "neg"]}
    assert read_columns(path, ["column 1"]) == {"column 1": ["0", "1"]}


def test_a_very_long_text_is_read(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    rows = [("long " * 100_000, "pos", "u"), ("short", "neg", "v")]
    assert read_texts(write(tmp_path / "own.csv", rows), "text")[0] == rows[0][0]
    assert csv.field_size_limit() == limit


def test_nothing_private_stays_behind(tmp_path: Path) -> None:
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()
    paths = [str(write(tmp_path / f"own{suffix}", ROWS)) for suffix in (".csv", ".jsonl", ".parquet")]
    code = (
        "import sys; from confide.tasks.files import read_task\n"
        "for path in sys.argv[1:]: read_task(path, text='text', label='label')"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_"))}
    environment = {**clean, "HOME": str(home), "TMPDIR": str(temporary), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code, *paths], env=environment, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert [file for folder in (home, temporary) for file in folder.rglob("*") if file.is_file()] == []
