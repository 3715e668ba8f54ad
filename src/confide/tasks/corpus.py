"""Public texts, one a line: what may be looked at without any noise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from confide.errors import DataError
from confide.tasks.brown import other_sentences
from confide.tasks.overlap import normalise
from confide.tasks.records import TaskData

BROWN = "brown"


def read_corpus(path: str | Path) -> tuple[str, ...]:
    """The non-empty lines of a text file; whoever names the file declares it public.

    Args:
        path: a file, or `brown`: sentences of the Brown corpus in genres that the task `brown-genre` doesn't
            use.

    Raises:
        DataError: no such file, not UTF-8, or no text in it; or the Brown corpus has not been fetched.
    """
    if str(path) == BROWN:
        return other_sentences()
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"can't read the corpus {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    texts = tuple(line.strip() for line in lines if line.strip())
    if not texts:
        raise DataError(f"{path} holds no text; a corpus is a file with one text a line")
    return texts


def sample(texts: Sequence[str], count: int, seed: int) -> tuple[str, ...]:
    """At most `count` distinct texts, picked at random with a public seed, in their old order.

    Raises:
        DataError: `count` is less than one.
    """
    if count < 1:
        raise DataError(f"can't use {count} texts of a corpus; ask for at least 1")
    distinct = list(dict.fromkeys(texts))
    if count >= len(distinct):
        return tuple(distinct)
    kept = np.sort(np.random.default_rng(seed).permutation(len(distinct))[:count])
    return tuple(distinct[number] for number in kept)


def texts_of(task: TaskData) -> tuple[str, ...]:
    """The texts of all records, as `check_public` compares them: of a pair each one, and both together; of
    words, the text that they make. Private.
    """
    texts = [text for records in (task.train, task.test) for text in records.texts]
    whole = [text if isinstance(text, str) else " ".join(text) for text in texts]
    parts = [part for text in texts if task.problem.inputs == "pair" for part in text]
    return (*whole, *parts)


def check_public(corpus: Sequence[str], records: Sequence[str], where: str) -> None:
    """Make sure that no text of a public corpus is a private record, or a line of one (normalised as
    `check_disjoint` does): a file with one text a line holds a note of several lines in parts.

    Raises:
        DataError: they share a text. Its line is named, not its content.
    """
    private = {normalise(part) for text in records for part in (text, *text.splitlines())}
    shared = [number for number, text in enumerate(corpus, start=1) if normalise(text) in private]
    if shared:
        raise DataError(
            f"{len(shared)} text(s) of the public corpus are also records of {where}, the first at text "
            f"{shared[0]} of the corpus; what is read without noise must be public: take them out of it"
        )
