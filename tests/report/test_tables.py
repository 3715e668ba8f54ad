"""Method tables by hand, and what reaches the terminal."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from confide.errors import ConfigError
from confide.report.study import MethodFacts, Row, Study
from confide.report.tables import method_table, method_text
from confide.report.terminal import print_study

FACTS = [
    MethodFacts(
        "dp-adamw", 0, {"a": 0.04, "b": 0.06}, {"a": 0.6612, "b": 0.7}, {"a": 9, "b": 9}, {"a": 5, "b": 6}
    ),
    MethodFacts(
        "pretrained", 0, {"a": 0, "b": 0}, {"a": 0.5, "b": 0.5}, {"a": 3, "b": 1500}, {"a": 1, "b": 1}
    ),
]


def rows(merged_epsilon: float | None = 3.9991, delta: float = 1e-6) -> list[Row]:
    return [
        Row("pretrained", "individual", 0, {"a": 0.5, "b": 0.5}, 0.5, 2.0, 1e-6),
        Row("dp-adamw", "individual", 0, {"a": 0.8, "b": 0.7}, 0.75, 3.9991, delta),
        Row("dp-adamw", "ties", 0, {"a": 0.7, "b": 0.72}, 0.71, merged_epsilon, delta),
    ]


def text(facts: list[MethodFacts], table_rows: list[Row]) -> dict[str, tuple[str, ...]]:
    table = method_text(method_table(facts, table_rows))
    return {name: cells for name, *cells in (table.header, *table.rows)}  # type: ignore[misc]


def test_the_method_table() -> None:
    assert text(FACTS, rows()) == {
        "": ["pretrained", "DP-AdamW"],
        "drift": ["0.000", "0.050"],
        "merge gap, ties": ["–", "+4.0"],
        "noise multiplier σ": ["0.5", "0.661 to 0.7"],
        "ε": ["2.00", "4.00"],
        "δ": ["1e-6", "1e-6"],
        "trained parameters": ["3 to 1,500", "9"],
        "training seconds": ["2", "11"],
    }


@pytest.mark.parametrize(
    ("epsilon", "shown"),
    [
        (3.9991, "4.00"),
        (4.0001, "4.00, merged 4.01"),
        (16.0, "4.00, merged 16.00"),
        (None, "4.00, merged none"),
    ],
)
def test_a_bound_is_rounded_up_and_a_merge_that_costs_more_says_so(epsilon: float | None, shown: str) -> None:
    assert text(FACTS, rows(epsilon))["ε"][1] == shown


@pytest.mark.parametrize(("delta", "shown"), [(1e-6, "1e-6"), (1.01e-6, "1.1e-6"), (9.96e-7, "1e-6")])
def test_delta_is_rounded_up(delta: float, shown: str) -> None:
    assert text(FACTS, rows(delta=delta))["δ"][1] == shown


def test_without_noise_there_is_no_sigma() -> None:
    facts = [replace(FACTS[0], noise_multiplier={"a": 0.0, "b": 0.0})]
    assert text(facts, rows())["noise multiplier σ"] == ["–"]


def test_drift_spreads_over_seeds() -> None:
    facts = [replace(FACTS[0], drift={"a": x, "b": x}, seed=seed) for seed, x in enumerate((0.02, 0.04))]
    assert text(facts, rows())["drift"] == ["0.030 ± 0.014"]


def test_refuses_numbers_that_are_not_finite_and_gaps_across_seeds() -> None:
    with pytest.raises(ConfigError, match="drift of 'b' is not finite"):
        method_table([replace(FACTS[0], drift={"a": 0.1, "b": math.nan})], rows())
    with pytest.raises(ConfigError, match="same seeds"):
        method_table(FACTS, [*rows(), replace(rows()[2], seed=1)])


def long_study(seeds: tuple[int, ...]) -> Study:
    tasks = ("rotten-tomatoes", "tweets", "brown-genre", "icd10-chapter")
    table = [
        Row(method, operator, seed, dict.fromkeys(tasks, value), value, 4.0, 1e-6)
        for number, operator in enumerate(("individual", "average", "task-arithmetic", "ties"))
        for place, method in enumerate(("dp-adamw", "dp-merging"))
        for seed in seeds
        for value in [0.5 + number / 10 + place / 50 + seed / 250]
    ]
    facts = tuple(
        MethodFacts(
            method,
            seed,
            dict.fromkeys(tasks, 0.0123),
            dict(zip(tasks, (0.661, 0.662, 0.67, 0.68), strict=True)),
            dict(zip(tasks, (51_202, 51_203, 51_204, 52_354), strict=True)),
            dict.fromkeys(tasks, 1.0),
        )
        for method in ("dp-adamw", "dp-merging")
        for seed in seeds
    )
    return Study("t", "base", (), tuple(table), facts, (), ("A finding [of one] study.",), {}, {}, 1.0)


@pytest.mark.parametrize("columns", [140, 80, 50])
@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
def test_no_number_is_cut_however_narrow_the_terminal(
    seeds: tuple[int, ...], columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    print_study(long_study(seeds))
    printed = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert "…" not in printed
    assert "A finding [of one] study." in printed
    means = [
        50 + 10 * number + 2 * place + 0.4 * (len(seeds) // 2) for number in range(4) for place in (0, 1)
    ]
    lines = [line.split() for line in printed.splitlines() if re.match("DP-(AdamW|Merging) ", line)]
    assert [line[2] for line in lines] == [f"{mean:.1f}" for mean in means]
    assert [line.count(line[2]) for line in lines] == [5] * 8
    for line in lines:
        gain = line[line.index(line[2]) + (5 if "±" not in line else 15) :]
        assert gain[0] == ("–" if line[0] == "DP-AdamW" else "+2.0")
    assert "51,202 to" in printed
    assert printed.count("52,354") == 2
    if len(seeds) == 3:
        assert printed.count("± 0.4") == 40
