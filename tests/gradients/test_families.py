"""Every architecture in docs/architectures.md, exact to the digits that the page states."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gradients.families import FAMILIES, Family
from tests.gradients.matrix import KINDS, Finding, measure, table

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
FOUND: dict[tuple[str, str], Finding] = {}


@pytest.mark.parametrize("trained", KINDS)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_norms_and_sums_equal_autograd_one_record_at_a_time(family: Family, trained: str) -> None:
    finding = FOUND[str(family), trained] = measure(family, trained)
    assert finding.error <= family.tolerance


def test_the_page_states_what_was_measured() -> None:
    missing = [(str(f), trained) for f in FAMILIES for trained in KINDS if (str(f), trained) not in FOUND]
    if missing:
        pytest.skip(f"only with the whole matrix; {missing[0]} was not run, or failed")
    assert table(FOUND) in PAGE.read_text(encoding="utf-8"), (
        "regenerate the table: python -m tests.gradients.matrix docs/architectures.md"
    )
