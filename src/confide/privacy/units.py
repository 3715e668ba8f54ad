"""Which rows belong to which unit: the thing the claim protects is a record, or a user who has several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from confide.errors import DataError


@dataclass(frozen=True)
class UnitMap:
    """Row → unit. n, q and the denominator count units; a unit is never split across micro-batches.

    Attributes:
        name: `record`, or the column whose values are the units.
        unit_of_row: (rows,) int64, values 0 … count − 1. Private.
        count: n, the number of units; a declared public constant.
        rows_per_unit: at most this many rows of a unit are used (public); its gradient is their mean.
    """

    name: str
    unit_of_row: npt.NDArray[np.int64]
    count: int
    rows_per_unit: int = 1

    @classmethod
    def records(cls, rows: int) -> UnitMap:
        """Every row is its own unit."""
        return cls("record", np.arange(rows, dtype=np.int64), rows, 1)

    @classmethod
    def column(cls, name: str, values: Sequence[Any], rows_per_unit: int) -> UnitMap:
        """Rows with equal values in column `name` are one unit.

        Raises:
            DataError: a row without a value: it would belong to nobody, and be protected as nobody.
        """
        for row, value in enumerate(values):
            if value is None or value != value or value == "":
                raise DataError(f"column {name!r} has no value in row {row + 1}; every row needs its unit")
        keys = {value: unit for unit, value in enumerate(dict.fromkeys(values))}
        units = np.fromiter((keys[value] for value in values), dtype=np.int64, count=len(values))
        return cls(name, units, len(keys), rows_per_unit)

    def rows_of(self, units: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Rows of the drawn units and, for each row, its position in `units`.

        Args:
            units: (m,) distinct unit numbers, as drawn.

        Returns:
            rows: (r,) row numbers, the rows of one unit adjacent, at most `rows_per_unit` of each (the
                first ones in the order of the data).
            position: (r,) index into `units`.
        """
        order, starts = self._index
        picked = [order[starts[u] : starts[u + 1]][: self.rows_per_unit] for u in units]
        if not picked:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        lengths = [len(rows) for rows in picked]
        return np.concatenate(picked), np.repeat(np.arange(len(units), dtype=np.int64), lengths)

    @cached_property
    def _index(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        order = np.argsort(self.unit_of_row, kind="stable").astype(np.int64)
        starts = np.searchsorted(self.unit_of_row[order], np.arange(self.count + 1)).astype(np.int64)
        return order, starts
