"""What an attacker can gain, against the definition of (ε, δ) and the randomised response that meets it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from confide.privacy.composition import training_statement
from confide.privacy.meaning import advantage, found, not_protected, of_group, promise
from confide.privacy.statement import Base, Claim, Statement
from confide.privacy.streams import Schedule


def _claim(epsilon: float, delta: float) -> Claim:
    return Claim(epsilon=epsilon, delta=delta, epsilon_rdp=None, accountant="x")


CLAIMS = st.builds(_claim, st.floats(0, 12), st.floats(1e-12, 0.1))


def _worst_pair(claim: Claim) -> tuple[np.ndarray, np.ndarray]:
    """Two distributions over four outcomes that are (ε, δ)-close and no closer."""
    e, d = math.exp(claim.epsilon), claim.delta
    p = np.array([d, (1 - d) * e / (1 + e), (1 - d) / (1 + e), 0])
    return p, p[::-1]


@given(CLAIMS, st.floats(0, 1))
def test_the_worst_pair_reaches_the_bounds(claim: Claim, alarms: float) -> None:
    p, q = _worst_pair(claim)
    for one, other in ((p, q), (q, p)):
        assert np.maximum(one - math.exp(claim.epsilon) * other, 0).sum() <= claim.delta + 1e-9
    assert advantage(claim) == pytest.approx(np.abs(p - q).sum() / 2, abs=1e-9)
    best = linprog(-p, A_ub=[q], b_ub=[alarms], bounds=[(0, 1)] * 4)  # Neyman and Pearson's test, by force
    assert found(claim, alarms) == pytest.approx(-best.fun, abs=1e-7)


@given(CLAIMS, st.integers(1, 6))
def test_groups_by_going_through_their_members(claim: Claim, size: int) -> None:
    """Pr ≤ e^ε·Pr′ + δ, put into itself `size` times."""
    factor, rest = 1.0, 0.0
    for _ in range(size):
        factor, rest = factor * math.exp(claim.epsilon), math.exp(claim.epsilon) * rest + claim.delta
    epsilon, delta = of_group(claim, size)
    assert epsilon == pytest.approx(math.log(factor))
    assert delta == pytest.approx(min(1.0, rest))


def test_extremes_stay_probabilities() -> None:
    for claim in (_claim(0, 1e-6), _claim(1e4, 1e-6)):
        assert 0 <= advantage(claim) <= 1
        assert 0 <= found(claim, 0.01) <= 1
        assert 0 < of_group(claim, 5)[1] <= 1
    assert advantage(_claim(0, 1e-6)) == pytest.approx(1e-6)


def _statement(schedule: Schedule, dataset: str = "visits") -> Statement:
    base = Base(name="base", hash="0" * 64)
    return training_statement(
        schedule, delta=1e-6, dataset=dataset, units=10, run="r", base=base, steps_run={}
    )


def test_words_name_the_unit(schedule: Callable[..., Schedule]) -> None:
    statement = _statement(schedule(noise_multiplier=4.0))
    assert statement.claim is not None
    said = promise(statement.claim, statement)
    assert "one record of visits was added or removed" in said
    factor = float(said.split("e^ε = ")[1].split(",")[0])
    assert math.exp(statement.claim.epsilon) <= factor <= math.exp(statement.claim.epsilon) * 1.01
    patients = _statement(schedule(noise_multiplier=4.0, unit="patient", adjacency="replace-one"))
    assert patients.claim is not None
    assert "all that belongs to one patient of visits was replaced" in promise(patients.claim, patients)
    names = " ".join(name for name, _ in not_protected(patients))
    for part in (
        "by hand",
        "base model",
        "Timing",
        "Scores",
        "others' units",
        "population",
        "Floating point",
    ):
        assert part in names
    text = " ".join(line for _, line in not_protected(statement))
    assert all(part in text for part in ("tokenizer", "number of units n", "label names"))
