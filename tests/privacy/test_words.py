from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from confide.privacy.composition import compose, training_statement
from confide.privacy.statement import Base, Statement
from confide.privacy.streams import Schedule
from confide.privacy.words import describe, round_up

BASE = Base(name="some-base", hash="0" * 64)


def _statement(schedule: Schedule, dataset: str) -> Statement:
    return training_statement(
        schedule, delta=1e-6, dataset=dataset, units=10, run=f"run-{dataset}", base=BASE, steps_run={"all": 7}
    )


def test_one_run(schedule: Callable[..., Schedule]) -> None:
    text = "\n".join(describe(_statement(schedule(noise_multiplier=4.0), "reviews-2026")))
    assert "adding or removing any one record of reviews-2026" in text
    assert "δ = 1e-06" in text
    assert "50 draws at sampling rate 0.02, noise multiplier 4" in text
    assert "Steps run: all 7" in text


def test_units_and_replacement(schedule: Callable[..., Schedule]) -> None:
    spent = schedule(noise_multiplier=4.0, unit="user", adjacency="replace-one")
    text = "\n".join(describe(_statement(spent, "a")))
    assert "replacing any one unit of a" in text
    assert "a unit is one value of user" in text


def test_merge_and_no_claim(schedule: Callable[..., Schedule]) -> None:
    parts = [_statement(schedule(noise_multiplier=4.0), name) for name in "abc"]
    text = "\n".join(describe(compose(parts, disjoint=True, base=BASE)))
    assert "a, b and c" in text
    assert "costs most" in text
    assert "costs most" not in "\n".join(describe(compose(parts, disjoint=False, base=BASE)))
    nothing = describe(compose([*parts, None], disjoint=True, base=BASE))
    assert nothing[0].startswith("No privacy is claimed: input 4")


def test_printed_epsilon_never_promises_more(schedule: Callable[..., Schedule]) -> None:
    statement = _statement(schedule(noise_multiplier=4.0), "a")
    assert statement.claim is not None
    printed = float(describe(statement)[0].split("ε = ")[1].split(",")[0])
    assert statement.claim.epsilon <= printed <= statement.claim.epsilon * 1.001


@given(st.floats(1e-12, 1e6), st.integers(2, 8))
def test_round_up(value: float, digits: int) -> None:
    printed = float(round_up(value, digits))
    assert value <= printed <= value * (1 + 10 ** (1 - digits) * 1.001)
