"""The tables of a study: scores, and how each method trained, as text for a terminal or a page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from typing import TYPE_CHECKING

from confide.errors import ConfigError
from confide.geometry.gap import merge_gap
from confide.report.scores import INDIVIDUAL, PRETRAINED, ScoreLine, Spread, label, score_table
from confide.report.study import MethodFacts, Row, Study

if TYPE_CHECKING:
    from rich.console import Console

NOTHING = "–"


@dataclass(frozen=True)
class MethodLine:
    """How one method trained, and what merging cost it.

    Attributes:
        drift: mean over tasks of ‖w − w₀‖ / ‖w₀‖.
        merge_gap: by operator, mean over tasks of individual − merged score.
        noise_multiplier: smallest and largest σ over tasks and seeds; (0, 0) without privacy.
        trained: smallest and largest number of trained parameters.
        seconds: training time of all tasks together.
        claims: (ε, δ) by operator, `individual` first; None where nothing is claimed.
    """

    method: str
    drift: Spread
    merge_gap: dict[str, Spread]
    noise_multiplier: tuple[float, float]
    trained: tuple[int, int]
    seconds: Spread
    claims: dict[str, tuple[float, float] | None]


@dataclass(frozen=True)
class Table:
    """Text, ready to be set: the first two columns of a score table are words, the rest numbers."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def score_text(lines: Sequence[ScoreLine]) -> Table:
    """The score table as text, in percent."""
    tasks = tuple(lines[0].scores)
    return Table(
        ("method", "operator", *tasks, "average", "gain"),
        tuple(
            (
                label(line.method),
                line.operator,
                *(line.scores[task].percent() for task in tasks),
                line.average.percent(),
                line.gain.percent(signed=True) if line.gain else NOTHING,
            )
            for line in lines
        ),
    )


def method_table(facts: Sequence[MethodFacts], rows: Sequence[Row]) -> list[MethodLine]:
    """One line per method, pretrained first.

    Raises:
        ConfigError: as in `score_table`, or a drift, σ or time that isn't finite.
    """
    lines = {(line.method, line.operator): line for line in score_table(rows)}
    operators = list(dict.fromkeys(operator for _, operator in lines))
    methods = sorted(dict.fromkeys(fact.method for fact in facts), key=lambda method: method != PRETRAINED)
    table = []
    for method in methods:
        own = [fact for fact in facts if fact.method == method]
        for fact in own:
            _check_facts(fact)
        merged = [name for name in operators if name != INDIVIDUAL and (method, name) in lines]
        sigmas = [sigma for fact in own for sigma in fact.noise_multiplier.values()]
        trained = [number for fact in own for number in fact.trained.values()]
        table.append(
            MethodLine(
                method,
                Spread.of(statistics.fmean(fact.drift.values()) for fact in own),
                {name: _gap(rows, method, name) for name in merged},
                (min(sigmas), max(sigmas)),
                (min(trained), max(trained)),
                Spread.of(sum(fact.seconds.values()) for fact in own),
                {name: _claim(lines[method, name]) for name in operators if (method, name) in lines},
            )
        )
    return table


def method_text(lines: Sequence[MethodLine]) -> Table:
    """The method table as text, a column per method: gaps in points, ε and δ rounded up."""
    operators = dict.fromkeys(name for line in lines for name in line.merge_gap)
    gaps = tuple(
        (
            f"merge gap, {name}",
            *(
                line.merge_gap[name].percent(signed=True) if name in line.merge_gap else NOTHING
                for line in lines
            ),
        )
        for name in operators
    )
    return Table(
        ("", *(label(line.method) for line in lines)),
        (
            ("drift", *(line.drift.plain() for line in lines)),
            *gaps,
            ("noise multiplier σ", *(_sigma(line.noise_multiplier) for line in lines)),
            ("ε", *(_claims(line, 0) for line in lines)),
            ("δ", *(_claims(line, 1) for line in lines)),
            ("trained parameters", *(_between(*(f"{n:,}" for n in line.trained)) for line in lines)),
            ("training seconds", *(f"{line.seconds.mean:.0f}" for line in lines)),
        ),
    )


def print_study(study: Study) -> None:
    """Print findings, scores and methods to the terminal."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a file has no edge to wrap at
    lines = score_table(study.rows)
    _print(console, "Scores in percent, on test records and without noise", score_text(lines), words=2)
    methods = method_text(method_table(study.methods, study.rows))
    _print(console, "How each method trained, and points lost by merging", methods, words=1)
    for finding in study.findings:
        console.print(f"• {finding}", markup=False, highlight=False)


def _print(console: Console, title: str, table: Table, words: int) -> None:
    """A table whose cells are never cut; where it is too wide, they break before `±` and after `to`."""
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    columns = [list(column) for column in zip(table.header, *table.rows, strict=True)]
    for column in columns[words:]:
        column[0] = column[0].replace("-", "-\n") if words == 2 else column[0]
    if _needed(columns) > console.width:
        columns[words:] = [
            [text.replace(" ±", "\n±").replace(" to ", " to\n") for text in column]
            for column in columns[words:]
        ]
    grid = Grid(
        title=title,
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 0, 0, 1),
    )
    for position, column in enumerate(columns):
        grid.add_column(Text(column[0]), justify="left" if position < words else "right", no_wrap=True)
    for row in list(zip(*columns, strict=True))[1:]:
        grid.add_row(*(Text(cell) for cell in row))
    width, console.width = console.width, max(console.width, _needed(columns))
    console.print(grid)
    console.width = width
    console.print()


def _needed(columns: Sequence[Sequence[str]]) -> int:
    """Characters across: the longest line of each column, and two between columns."""
    return sum(max(len(line) for text in column for line in text.split("\n")) + 2 for column in columns)


def _gap(rows: Sequence[Row], method: str, operator: str) -> Spread:
    own = [row for row in rows if row.method == method]
    individual = {row.seed: row.scores for row in own if row.operator == INDIVIDUAL}
    merged = {row.seed: row.scores for row in own if row.operator == operator}
    if individual.keys() != merged.keys():
        raise ConfigError(
            f"the merge gap of {method} with {operator} compares the same seeds, but the models before "
            f"merging have {sorted(individual)} and the merges {sorted(merged)}"
        )
    return Spread.of(merge_gap(individual[seed], merged[seed]) for seed in sorted(merged))


def _claim(line: ScoreLine) -> tuple[float, float] | None:
    return None if line.epsilon is None or line.delta is None else (line.epsilon, line.delta)


def _claims(line: MethodLine, which: int) -> str:
    """ε (0) or δ (1) of a method; merges that don't claim what the task models claim are told apart."""
    texts = {name: _bound(claim[which], which) if claim else "none" for name, claim in line.claims.items()}
    own = texts.pop(INDIVIDUAL, None)
    merged = set(texts.values())
    if own is None or len(merged) > 1:
        texts = texts if own is None else {INDIVIDUAL: own, **texts}
        return ", ".join(f"{text} {name}" for name, text in texts.items())
    return own if merged <= {own} else f"{own}, merged {merged.pop()}"


def _bound(value: float, which: int) -> str:
    """ε with two decimals, δ with two digits; rounded up, so that what is shown is still a bound."""
    if which == 0:
        return str(Decimal(repr(value)).quantize(Decimal("0.01"), ROUND_CEILING))
    return f"{Context(prec=2, rounding=ROUND_CEILING).create_decimal(repr(value)).normalize():e}"


def _sigma(between: tuple[float, float]) -> str:
    return _between(*(f"{sigma:.3g}" for sigma in between)) if any(between) else NOTHING


def _between(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _check_facts(fact: MethodFacts) -> None:
    for name, values in (
        ("drift", fact.drift),
        ("noise multiplier", fact.noise_multiplier),
        ("time", fact.seconds),
    ):
        for task, value in values.items():
            if not math.isfinite(value):
                raise ConfigError(f"{fact.method}, seed {fact.seed}: {name} of {task!r} is not finite")
