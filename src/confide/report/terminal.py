"""A study in the terminal: the same tables and sentences as on its page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from confide.report.mixtures import diagnostics_text, routing_text, routing_words, streams_text
from confide.report.scores import INDIVIDUAL, score_table
from confide.report.study import Study
from confide.report.tables import Table, method_table, method_text, score_text

if TYPE_CHECKING:
    from rich.console import Console


def print_study(study: Study) -> None:
    """Print findings, scores and methods to the terminal."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a file has no edge to wrap at
    mixture = study.mixture
    if mixture:
        for sentence in mixture.upcycled:
            console.print(f"{sentence}.", highlight=False)
        console.print()
        if mixture.routing:
            found = mixture.routing
            title = f"Owners of {found.texts} public texts; * the most even layer, which is trained"
            _print(console, title, routing_text(found, found.chosen))
            for sentence in routing_words(found):
                console.print(sentence, highlight=False)
            console.print()
    lines = score_table(study.rows)
    _print(console, "Scores in percent, on test records and without noise", score_text(lines))
    merged = any(line.operator != INDIVIDUAL for line in lines)
    methods = method_text(method_table(study.methods, study.rows))
    _print(console, "How each method trained" + (", and points lost by merging" if merged else ""), methods)
    if mixture:
        _print(console, "Streams: how the budget was divided, and its noise", streams_text(mixture.runs))
        diagnostics = diagnostics_text(study.private)
        if diagnostics:
            _print(
                console,
                "Private diagnostics: of the records, without noise, and not to be shared",
                diagnostics,
            )
    for finding in study.findings:
        console.print(f"• {finding}", markup=False, highlight=False)


def _print(console: Console, title: str, table: Table) -> None:
    """A table whose cells are never cut; where it is too wide, they break before `±` and after `to`."""
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    words = table.words
    columns = [list(column) for column in zip(table.header, *table.rows, strict=True)]
    for column in columns[words:]:
        column[0] = column[0].replace("-", "-\n") if words == 2 else column[0]
    if _needed(columns) > console.width:
        columns[words:] = [
            [text.replace(" ±", "\n±").replace(" to ", " to\n") for text in column]
            for column in columns[words:]
        ]
    grid = Grid(
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
    console.print(Text(title, style="italic"))
    console.print(grid)
    console.width = width
    console.print()


def _needed(columns: Sequence[Sequence[str]]) -> int:
    """Characters across: the longest line of each column, and two between columns."""
    return sum(max(len(line) for text in column for line in text.split("\n")) + 2 for column in columns)
