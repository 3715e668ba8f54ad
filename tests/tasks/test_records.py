import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from confide.errors import DataError
from confide.privacy.units import UnitMap
from confide.tasks.records import Records, TaskData


def of_owners(owners: list[int]) -> Records:
    units = UnitMap.column("user", owners, 2)
    return Records.of([f"text {row}" for row in range(len(owners))], np.arange(len(owners)) % 3, units)


def test_every_text_needs_a_label_and_a_unit() -> None:
    with pytest.raises(DataError, match="2 texts, labels of shape"):
        Records.of(["a", "b"], [0])
    with pytest.raises(DataError, match="units of shape"):
        Records.of(["a", "b"], [0, 1], UnitMap.records(3))


@given(
    owners=st.lists(st.integers(0, 12), min_size=1, max_size=40),
    keep=st.integers(1, 15),
    seed=st.integers(0, 99),
)
def test_limit_keeps_whole_units_in_their_order(owners: list[int], keep: int, seed: int) -> None:
    records = of_owners(owners)
    kept = records.limit(keep, seed)
    assert kept.units.count == min(keep, len(set(owners)))
    assert (kept.units.name, kept.units.rows_per_unit) == ("user", 2)
    rows = [int(text.split()[1]) for text in kept.texts]
    assert rows == sorted(rows)
    chosen = {owners[row] for row in rows}
    assert rows == [row for row, owner in enumerate(owners) if owner in chosen]
    assert kept.labels.tolist() == [row % 3 for row in rows]
    # Two kept rows share a unit exactly if they shared an owner.
    for a, row in enumerate(rows):
        for b, other in enumerate(rows):
            same = kept.units.unit_of_row[a] == kept.units.unit_of_row[b]
            assert same == (owners[row] == owners[other])
    again = records.limit(keep, seed)
    assert again.texts == kept.texts


def test_limit_depends_on_the_seed_and_leaves_the_test_set() -> None:
    records = Records.of([str(row) for row in range(200)], np.zeros(200))
    assert records.limit(50, 0).texts != records.limit(50, 1).texts
    task = TaskData("t", ("a", "b"), "declared", "accuracy", records, records, "made up")
    assert len(task.limit(50, 0).train) == 50
    assert task.limit(50, 0).test is records
    with pytest.raises(DataError, match="at least 1"):
        records.limit(0, 0)


def test_taking_nothing_leaves_no_unit() -> None:
    nothing = of_owners([1, 1, 2]).take(np.empty(0, np.int64))
    assert len(nothing) == 0
    assert nothing.units.count == 0
