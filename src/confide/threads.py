"""Work in threads, for hashes and files, which let other threads run meanwhile.

Not for numpy on chunks: handing the interpreter's lock over after every short call costs more than it saves.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

THREADS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
"""How many work at a time: the processors that this process may use, and no more than a disk keeps busy."""


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], threads: int = THREADS
) -> Iterator[Result]:
    """The result for each item, in order, worked on by threads while the caller goes on.

    Args:
        work: called by several threads at a time. Its exceptions are raised where its result is due.
        items: taken one by one, by the caller's thread; few of them, and of their results, wait at a time.
        threads: how many.
    """
    waiting: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="confide")
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * threads + 2:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
