"""Progress bars with the time left, on stderr, so that stdout stays for results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bars(*, show: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A function to call with (what, done, total); what is new gets a bar, what is complete loses it."""
    if not show:  # rich takes a while to import
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        known: dict[str, TaskID] = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in known:
                known[what] = bars.add_task(what, total=total)
            bars.update(known[what], completed=done, total=total)
            if done >= total:
                bars.remove_task(known.pop(what))

        yield advance
