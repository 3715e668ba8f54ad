"""Labelled records, and a task made of two sets of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from confide.errors import DataError
from confide.privacy.units import UnitMap
from confide.release.format import TEXT_CLASSES, Problem
from confide.release.format import Metric as Metric
from confide.tasks.images import Images

LabelsFrom = Literal["declared", "file"]
Text = str | tuple[str, ...]
"""A text; a pair of texts (a prompt and its answer, say); or the words of a text, where each has a label."""


@dataclass(frozen=True, eq=False)
class Records:
    """Inputs with their labels. All of it is private when the records train a model.

    Attributes:
        inputs: one per row: texts, pairs of texts, the words of texts, or images.
        labels: (rows,). Int64: the class of each row, an index into the task's label names. Float64: its
            number. Object: an int64 array with the class of each of its words. Of a language model they say
            nothing: texts are all there is.
        units: which unit each row belongs to.
    """

    inputs: tuple[Text, ...] | Images
    labels: npt.NDArray[Any]
    units: UnitMap

    def __post_init__(self) -> None:
        rows = len(self.inputs)
        if self.labels.shape != (rows,) or self.units.unit_of_row.shape != (rows,):
            raise DataError(
                f"{rows} {'images' if isinstance(self.inputs, Images) else 'texts'}, labels of shape "
                f"{self.labels.shape} and units of shape {self.units.unit_of_row.shape}: every one needs one "
                "label and one unit"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    @classmethod
    def of(
        cls, texts: Sequence[Text], labels: npt.ArrayLike | Sequence[int], units: UnitMap | None = None
    ) -> Records:
        """Records with a class each, whose units are the rows, unless `units` says otherwise."""
        return cls(
            tuple(texts), np.asarray(labels, dtype=np.int64).reshape(-1), units or UnitMap.records(len(texts))
        )

    @property
    def texts(self) -> tuple[Text, ...]:
        """The inputs of a task about texts.

        Raises:
            DataError: they are images.
        """
        if isinstance(self.inputs, Images):
            raise DataError("these records are images, not texts")
        return self.inputs

    def take(self, rows: npt.NDArray[np.int64]) -> Records:
        """The given rows, in the given order; units are renumbered and those without a row are gone."""
        _, unit_of_row = np.unique(self.units.unit_of_row[rows], return_inverse=True)
        count = int(unit_of_row.max()) + 1 if len(rows) else 0
        units = replace(self.units, unit_of_row=unit_of_row.astype(np.int64), count=count)
        inputs = (
            self.inputs.take(rows)
            if isinstance(self.inputs, Images)
            else tuple(self.inputs[row] for row in rows)
        )
        return Records(inputs, self.labels[rows], units)

    def limit(self, units: int, seed: int) -> Records:
        """At most `units` units, picked at random with a public seed; all rows of each, in their old order.

        The data set that a claim speaks of is then what is kept, and its n is the number kept.

        Raises:
            DataError: `units` is less than one.
        """
        if units < 1:
            raise DataError(f"can't keep {units} records; ask for at least 1")
        if units >= self.units.count:
            return self
        kept = np.random.default_rng(seed).permutation(self.units.count)[:units]
        return self.take(np.flatnonzero(np.isin(self.units.unit_of_row, kept)).astype(np.int64))

    def content(self) -> Iterator[bytes]:
        """Labels, units and inputs, to be hashed."""
        yield from (np.asarray(label).tobytes() for label in self.labels)
        yield self.units.unit_of_row.tobytes()
        if isinstance(self.inputs, Images):
            for row in range(len(self)):
                yield self.inputs.read(np.array([row])).tobytes()
            return
        for text in self.inputs:
            for part in (text,) if isinstance(text, str) else text:
                yield part.encode(errors="surrogatepass")
            yield b""


@dataclass(frozen=True, eq=False)
class TaskData:
    """A task: what trains a model, and what it is scored on.

    Attributes:
        name: the task, as tables and folders call it.
        labels: class names in the order of the logits; none for a number or a text. Public when declared;
            `labels_from="file"` says that they were read off the records, which a statement then names as a
            public assumption.
        metric: how predictions on `test` are scored.
        train, test: disjoint in units. Scores on `test` are not noised.
        source: where the records come from and under which licence, in a sentence.
        problem: what a record is and what is said about it.
    """

    name: str
    labels: tuple[str, ...]
    labels_from: LabelsFrom
    metric: Metric
    train: Records
    test: Records
    source: str
    problem: Problem = TEXT_CLASSES

    def limit(self, units: int, seed: int) -> TaskData:
        """The same task with at most `units` training units (`Records.limit`); `test` stays."""
        return replace(self, train=self.train.limit(units, seed))
