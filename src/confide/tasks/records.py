"""Labelled texts, and a task made of two sets of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from confide.errors import DataError
from confide.privacy.units import UnitMap

LabelsFrom = Literal["declared", "file"]
Metric = Literal["accuracy", "macro-f1"]


@dataclass(frozen=True, eq=False)
class Records:
    """Texts with their labels. All of it is private when the records train a model.

    Attributes:
        texts: one text per row.
        labels: (rows,) int64, the class of each row, an index into the task's label names.
        units: which unit each row belongs to.
    """

    texts: tuple[str, ...]
    labels: npt.NDArray[np.int64]
    units: UnitMap

    def __post_init__(self) -> None:
        rows = len(self.texts)
        if self.labels.shape != (rows,) or self.units.unit_of_row.shape != (rows,):
            raise DataError(
                f"{rows} texts, labels of shape {self.labels.shape} and units of shape "
                f"{self.units.unit_of_row.shape}: every text needs one label and one unit"
            )

    def __len__(self) -> int:
        return len(self.texts)

    @classmethod
    def of(
        cls, texts: Sequence[str], labels: npt.ArrayLike | Sequence[int], units: UnitMap | None = None
    ) -> Records:
        """Records whose units are the rows, unless `units` says otherwise."""
        return cls(
            tuple(texts), np.asarray(labels, dtype=np.int64).reshape(-1), units or UnitMap.records(len(texts))
        )

    def take(self, rows: npt.NDArray[np.int64]) -> Records:
        """The given rows, in the given order; units are renumbered and those without a row are gone."""
        _, unit_of_row = np.unique(self.units.unit_of_row[rows], return_inverse=True)
        count = int(unit_of_row.max()) + 1 if len(rows) else 0
        units = replace(self.units, unit_of_row=unit_of_row.astype(np.int64), count=count)
        return Records(tuple(self.texts[row] for row in rows), self.labels[rows], units)

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


@dataclass(frozen=True, eq=False)
class TaskData:
    """A classification task: what trains a model, and what it is scored on.

    Attributes:
        name: the task, as tables and folders call it.
        labels: class names in the order of the logits. Public when declared; `labels_from="file"` says that
            they were read off the records, which a statement then names as a public assumption.
        metric: how predictions on `test` are scored.
        train, test: disjoint in units. Scores on `test` are not noised.
        source: where the records come from and under which licence, in a sentence.
    """

    name: str
    labels: tuple[str, ...]
    labels_from: LabelsFrom
    metric: Metric
    train: Records
    test: Records
    source: str

    def limit(self, units: int, seed: int) -> TaskData:
        """The same task with at most `units` training units (`Records.limit`); `test` stays."""
        return replace(self, train=self.train.limit(units, seed))
