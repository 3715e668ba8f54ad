"""Do tasks share a record? Merging takes the maximum of their ε only if they don't."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from confide.errors import DataError
from confide.tasks.images import Images
from confide.tasks.records import Records, TaskData

_SEPARATORS = re.compile(r"[\W_]+")


def normalise(text: str) -> str:
    """The form in which two texts count as the same: NFKC, casefolded, words and digits only.

    A text without any letter or digit (an emoji, a dash) keeps its symbols, so that such texts differ.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    return _SEPARATORS.sub(" ", folded).strip() or " ".join(folded.split())


def check_disjoint(tasks: Sequence[TaskData]) -> None:
    """Make sure that no normalised text (or image) occurs in two tasks, in training or in test records.

    Texts are compared, so what this establishes is that the tasks share no record. That the same person
    doesn't stand behind records of two tasks can't be seen in texts; their owners declare it.

    Raises:
        DataError: two tasks share a text; names both, how many, and the rows of the first one.
    """
    where = [_places(task) for task in tasks]
    for (one, left), (other, right) in combinations(zip(tasks, where, strict=True), 2):
        shared = [text for text in left if text in right]
        if shared:
            raise DataError(
                f"tasks {one.name!r} and {other.name!r} share {len(shared)} record(s), the first at "
                f"{left[shared[0]]} and {right[shared[0]]}; drop them from one task, or let the merge "
                f"compose the two claims instead of taking their maximum"
            )


def _places(task: TaskData) -> dict[str, str]:
    places: dict[str, str] = {}
    for side, records in (("train", task.train), ("test", task.test)):
        for row, form in enumerate(_forms(records)):
            places.setdefault(form, f"{side} row {row + 1} of {task.name}")
    return places


def _forms(records: Records) -> Iterator[str]:
    """What makes two records count as the same: the words of a text or pair, the pixels of an image."""
    if isinstance(records.inputs, Images):
        for row in range(len(records)):
            yield hashlib.sha256(records.inputs.read(np.array([row])).tobytes()).hexdigest()
    else:
        yield from (normalise(text if isinstance(text, str) else " ".join(text)) for text in records.inputs)
