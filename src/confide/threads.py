"""Work in threads, for numpy, hashes and files, which all let other threads run meanwhile."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

THREADS = int(os.environ.get("FT", "2"))
"""How many work at a time: the processors that this process may use, and no more than a disk keeps busy."""


def in_order(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """The result for each item, in order, computed in threads a little ahead of who asks.

    Args:
        work: called by several threads at a time. Its exceptions are raised where its result is due.
        items: taken one by one; memory holds few of them and of their results.
    """
    rest = iter(items)
    first = list(islice(rest, 2))
    if THREADS == 1 or len(first) < 2:
        yield from map(work, first)
        yield from map(work, rest)
        return
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="confide")
    pending: deque[Future[Result]] = deque()
    try:
        pending.extend(pool.submit(work, item) for item in (*first, *islice(rest, 2 * THREADS - 2)))
        while pending:
            result = pending.popleft().result()
            pending.extend(pool.submit(work, item) for item in islice(rest, 1))
            yield result
    finally:
        pool.shutdown(cancel_futures=True)
