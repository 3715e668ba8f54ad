from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from confide.errors import DataError
from confide.privacy.units import UnitMap


def test_records() -> None:
    units = UnitMap.records(5)
    rows, position = units.rows_of(np.array([3, 1]))
    assert rows.tolist() == [3, 1]
    assert position.tolist() == [0, 1]
    assert units.count == 5


def test_empty_draw() -> None:
    rows, position = UnitMap.records(5).rows_of(np.empty(0, np.int64))
    assert rows.shape == position.shape == (0,)


@pytest.mark.parametrize("missing", [None, "", float("nan")])
def test_rows_without_a_unit(missing: object) -> None:
    with pytest.raises(DataError, match="row 2"):
        UnitMap.column("user", ["a", missing, "b"], 1)


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=60), st.integers(1, 4), st.data())
def test_rows_of_drawn_units(values: list[str], most: int, data: st.DataObject) -> None:
    units = UnitMap.column("user", values, most)
    names = list(dict.fromkeys(values))
    assert units.count == len(names)
    drawn = data.draw(st.lists(st.sampled_from(range(units.count)), unique=True))
    rows, position = units.rows_of(np.array(drawn, dtype=np.int64))
    expected = [[i for i, v in enumerate(values) if v == names[u]][:most] for u in drawn]
    assert rows.tolist() == [row for part in expected for row in part]
    assert position.tolist() == [i for i, part in enumerate(expected) for _ in part]
    assert all(np.count_nonzero(position == i) <= most for i in range(len(drawn)))
