"""What commands print: a table for people, or JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def print_json(value: Any) -> None:
    """One JSON document on stdout, and nothing else."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table in the terminal; the first column is text, the others are numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold")
    for position, name in enumerate(header):
        table.add_column(name, justify="left" if position == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
