"""The real tasks by name."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from confide.errors import DataError
from confide.tasks import public
from confide.tasks.brown import brown_genre
from confide.tasks.records import TaskData

TASKS: dict[str, Callable[[], TaskData]] = {
    "rotten-tomatoes": public.rotten_tomatoes,
    "tweets": public.tweets,
    "brown-genre": brown_genre,
    "icd-chapter": public.icd_chapter,
    "sms-spam": public.sms_spam,
    "imdb": public.imdb,
}


def load(name: str) -> TaskData:
    """The task called `name`; splits are fixed, so every run sees the same test records.

    Raises:
        DataError: there is no such task, or its records are not installed (the message says how to).
    """
    if name not in TASKS:
        near = get_close_matches(name, TASKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise DataError(f"there is no task {name!r}{hint} Tasks: {', '.join(TASKS)}")
    return TASKS[name]()
