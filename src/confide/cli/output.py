"""What commands print: a table for people, or JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def print_json(value: Any) -> None:
    """One JSON document on stdout, and nothing else."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> None:
    """A table in the terminal; the first `words` columns are text, the others are numbers.

    Names and statements come from others: in a cell no bracket is markup, and no character steers the
    terminal.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(shown(title)), title_justify="left", header_style="bold")
    for position, name in enumerate(header):
        table.add_column(name, justify="left" if position < words else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(shown(cell)) for cell in row))
    Console().print(table)


def shown(text: str) -> str:
    """Text by others with what can't be printed made visible; lines stay lines."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
