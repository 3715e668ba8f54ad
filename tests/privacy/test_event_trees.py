"""Trees of events through statements, words and accounts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from confide.errors import PrivacyError
from confide.privacy import assumptions, claims, composition, statement, words
from confide.privacy.account import Account
from confide.privacy.events import (
    Composed,
    PoissonGaussian,
    RandomSelection,
    RepeatAndSelect,
    TruncatedPoissonGaussian,
)
from confide.privacy.queries import Query
from confide.privacy.statement import FILE_NAME, Base, Spending, Statement
from confide.privacy.streams import Clipping, Schedule, Stream

BASE = Base(name="some-base", hash="0" * 64)
LIGHT, HEAVY = PoissonGaussian(0.05, (3.0,), 20), PoissonGaussian(0.05, (1.0,), 20)
TRUNCATED = TruncatedPoissonGaussian(0.01, 1.0, 5, 1000, 30)


def _spending(*events: object, schedule: Schedule | None = None) -> Spending:
    return Spending(
        run="r",
        dataset="clinic",
        units=1000,
        unit="record",
        adjacency="add-or-remove-one",
        event=schedule.event() if schedule else Composed(events),  # type: ignore[arg-type]
        delta=1e-6,
        schedule=schedule,
        steps_run={},
    )


def _statement(spending: Spending) -> Statement:
    claim, reason = claims.claim_of((spending,))
    return Statement(
        kind="training",
        confide="0",
        claim=claim,
        no_claim=reason,
        base=BASE,
        weights={},
        spendings=(spending,),
        assumptions=assumptions.of_training(spending, ()) if claim else (),
    )


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (RandomSelection((0.9, 0.1), (LIGHT, Composed((HEAVY, HEAVY)))), "with probability 0.1"),
        (RepeatAndSelect(LIGHT, 3.0, 1.0), "the best of 3 runs on average, each: 20 draws"),
        (TRUNCATED, "cut to 30 of 1000 units"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_a_statement_of_a_tree_round_trips_and_is_checked(
    event: object, sentence: str, tmp_path: Path
) -> None:
    made = _statement(_spending(event, LIGHT))
    (tmp_path / FILE_NAME).write_text(json.dumps(made.to_json()), encoding="utf-8")
    found = statement.read(tmp_path)
    assert found == made
    composition.check(found)
    assert found.claim is not None
    assert (found.claim.epsilon_rdp is None) == (event is TRUNCATED)
    assert any(sentence in line for line in words.describe(found))
    forged = found.claim.model_copy(update={"epsilon": found.claim.epsilon / 2})
    with pytest.raises(PrivacyError, match="doesn't hold"):
        composition.check(found.model_copy(update={"claim": forged}))
    bolder = found.claim.model_copy(update={"epsilon_lower": found.claim.epsilon * 2})
    with pytest.raises(PrivacyError, match="certainly above"):
        composition.check(found.model_copy(update={"claim": bolder}))


def test_a_rdp_figure_without_a_rule_is_refused() -> None:
    made = _statement(_spending(TRUNCATED))
    assert made.claim is not None
    forged = made.claim.model_copy(update={"epsilon_rdp": 1.0})
    with pytest.raises(PrivacyError, match="RDP has no rule"):
        composition.check(made.model_copy(update={"claim": forged}))


def test_a_schedule_with_queries_and_adaptive_clipping_round_trips(stream: Callable[..., Stream]) -> None:
    one = stream(clipping=Clipping("adaptive", 1.0, count_noise=10.0), noise_multiplier=2.0)
    schedule = Schedule((one,), queries=(Query("grams", "gram", (20.0, 30.0)),))
    made = _statement(_spending(schedule=schedule))
    found = Statement.model_validate_json(json.dumps(made.to_json()))
    assert found == made
    composition.check(found)
    (spending,) = found.spendings
    cheaper = dataclasses.replace(schedule, queries=(Query("grams", "gram", (200.0, 300.0)),))
    altered = spending.model_copy(update={"schedule": cheaper})
    with pytest.raises(PrivacyError, match="altered"):
        composition.check(found.model_copy(update={"spendings": (altered,)}))


@pytest.mark.parametrize("kind", ["shuffled", "fixed-size"])
def test_a_statement_of_another_sampler_is_refused_with_the_number(kind: str, tmp_path: Path) -> None:
    content = _statement(_spending(LIGHT)).to_json()
    content["spendings"][0]["event"]["events"][0]["kind"] = kind
    (tmp_path / FILE_NAME).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(PrivacyError, match=r"not a valid statement.*22\.8"):
        statement.read(tmp_path)


def test_an_account_takes_what_its_filter_can_add_up() -> None:
    account = Account("clinic")
    account.admit(_spending(RandomSelection((0.5, 0.5), (LIGHT, HEAVY))))
    account.admit(_spending(RepeatAndSelect(LIGHT, 3.0, 1.0)))
    with pytest.raises(PrivacyError, match="no rule for truncated"):
        account.admit(_spending(TRUNCATED))
