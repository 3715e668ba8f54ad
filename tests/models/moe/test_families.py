"""Every family against plain autograd, and the table that the guide prints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests.models.moe.exactness import COLUMNS, KINDS, measure
from tests.models.moe.families import FAMILIES

GUIDE = Path(__file__).parents[3] / "docs" / "moe.md"


def printed() -> dict[tuple[str, str], dict[str, float]]:
    rows = {}
    for line in GUIDE.read_text(encoding="utf-8").splitlines():
        family, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        kind = cells.pop(0) if cells else ""
        if family in FAMILIES and kind in KINDS:
            rows[family, kind] = dict(zip(COLUMNS, map(float, cells), strict=True))
    return rows


def cases() -> list[Any]:
    """One kind per family in the quick suite, both in the whole one."""
    pairs = [(family, kind) for family in FAMILIES for kind in KINDS]
    quick = [(family, list(KINDS)[number % 2]) for number, family in enumerate(FAMILIES)]
    return [pytest.param(*pair, marks=[] if pair in quick else [pytest.mark.slow]) for pair in pairs]


@pytest.mark.parametrize(("family", "kind"), cases())
def test_owner_gradients_are_autograds(family: str, kind: str) -> None:
    found = measure(family, KINDS[kind])
    assert found.output == 0.0
    assert max(found.right, found.left, found.everyone) <= 1e-9
    # Tables of rotary positions and some routers are float32 whatever the model is.
    single = family in ("DeepSeek-V2", "DeepSeek-V3", "Llama-4")
    assert found.alone_right <= (1e-6 if single else 1e-9)
    assert found.alone_left <= (1e-9 if family == "Switch" else 1e-6)
    for name, bound in printed()[family, kind].items():
        assert getattr(found, name) <= bound, name


def test_the_guide_names_every_family_with_finite_bounds() -> None:
    rows = printed()
    assert rows.keys() == {(family, kind) for family in FAMILIES for kind in KINDS}
    assert all(math.isfinite(value) for row in rows.values() for value in row.values())
    assert all(max(row["right"], row["left"], row["everyone"]) <= 1e-9 for row in rows.values())
