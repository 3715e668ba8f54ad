"""The charged sensitivities: what a unit may change, what the noise hides, what the ledger holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as chosen
from hypothesis import strategies as st

from confide.errors import ConfigError, ModelError, PrivacyError
from confide.finetune import private_sensitivity
from confide.finetune.base import PublicBase
from confide.finetune.prepare import Prepared
from confide.finetune.private_sensitivity import (
    PrivateSensitivities,
    bounded_sum,
    check_alone,
    passes,
    planned,
    private_sensitivities,
    unit_rises,
)
from confide.finetune.run import prepare
from confide.finetune.sensitivity import TwoStreams, stream_sensitivities
from confide.finetune.settings import Settings
from confide.models.backbones import load_classifier
from confide.privacy.accountant import epsilon
from confide.privacy.events import PoissonGaussian
from confide.privacy.ledger import Ledger
from confide.privacy.statement import Spending
from confide.privacy.units import UnitMap
from confide.tasks.records import TaskData
from confide.tasks.text import encode

MakeTask = Callable[..., TaskData]
DELTA = 1e-5
ASKED: dict[str, Any] = {"dataset": "clinic", "expected": 10_000, "noise": 0.3, "draws": 2}


def settings(**own: Any) -> Settings:
    given = {"epsilon": 1.0, "delta": DELTA, "max_length": 20, "trainable": {"rank": 2}}
    return Settings.of(
        {"method": "raptor", "experts": {"layer": "last", "rank": 2}, **given, **own},
    )


@pytest.fixture(scope="module")
def base(sparse_base: Path) -> PublicBase:
    return PublicBase.of(str(sparse_base))


@pytest.fixture(scope="module")
def prepared(base: PublicBase, make_task: MakeTask) -> Prepared:
    return prepare(make_task(train=12), base, 20)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.open(str(tmp_path / "ledger.sqlite"))


def ask(
    prepared: Prepared, base: PublicBase, ledger: Ledger | None = None, n: int | None = None, **own: Any
) -> Any:
    asked = {**ASKED, **own}
    return private_sensitivities(prepared, base, settings(declared_units=n), **asked, ledger=ledger)


def test_without_noise_it_is_the_public_mean(
    prepared: Prepared, base: PublicBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same records, one at a time, uncut and without noise: what `stream_sensitivities` says of them."""
    stds = []

    def no_noise(sums: Any, std: float, stream: Any) -> Any:
        stds.append(std)
        return sums

    monkeypatch.setattr(private_sensitivity, "add_noise", no_noise)
    found = ask(prepared, base, bounds=(1e4, 1e4))
    plain = load_classifier(base.folder, prepared.task.labels, 0)
    wanted = stream_sensitivities(plain, settings(), prepared.task, noise=0.3, draws=2)
    assert found.shared.value == pytest.approx(wanted.shared.value, rel=1e-3)
    assert found.own.value == pytest.approx(wanted.own.value, rel=1e-2, abs=1e-4)
    assert (found.layer, found.experts) == (wanted.layer, wanted.experts) == (2, 4)
    (query,) = found.spending.schedule.queries
    assert stds == [query.noise_multipliers[0]]
    assert found.shared.noise == pytest.approx(stds[0] * 1e4 / 12)


def test_a_unit_more_changes_nothing_but_its_own_part(base: PublicBase, make_task: MakeTask) -> None:
    """Bit for bit, whatever the others are, where they lie and how long they are."""
    task = make_task(train=9)
    classifier = load_classifier(base.folder, task.labels, 0)
    streams = TwoStreams.of(classifier, settings(), task)
    encoded = encode(classifier.tokenizer, task.train.texts, 20)

    def of(rows: list[int]) -> tuple[Any, Any]:
        return unit_rises(
            streams,
            encoded,
            task.train.labels,
            UnitMap.records(9),
            np.array(rows, dtype=np.int64),
            noise=0.3,
            draws=2,
            seed=0,
        )

    all_of_them = of(list(range(9)))
    for rows in ([0], [0, 1, 2, 3, 5, 6, 7, 8], [4, 8], []):
        for whole, part in zip(all_of_them, of(rows), strict=True):
            np.testing.assert_array_equal(part, whole[rows])


def test_a_unit_of_several_rows_has_their_mean(base: PublicBase, make_task: MakeTask) -> None:
    task = make_task(train=6)
    classifier = load_classifier(base.folder, task.labels, 0)
    streams = TwoStreams.of(classifier, settings(), task)
    encoded = encode(classifier.tokenizer, task.train.texts, 20)

    def of(units: UnitMap, joined: int) -> Any:
        return unit_rises(
            streams, encoded, task.train.labels, units, np.arange(joined), noise=0.3, draws=1, seed=0
        )

    alone = of(UnitMap.records(6), 6)
    patients = UnitMap.column("patient", ["a", "b", "a", "b", "b", "c"], rows_per_unit=2)
    for single, together in zip(alone, of(patients, 3), strict=True):
        wanted = [(single[0] + single[2]) / 2, (single[1] + single[3]) / 2, single[5]]
        np.testing.assert_allclose(together, wanted, rtol=1e-12)


any_float = st.floats(allow_nan=True, allow_infinity=True)


@chosen(deadline=None)
@given(st.lists(any_float, max_size=20), any_float, any_float, st.floats(1e-6, 1e6))
def test_one_unit_moves_a_sum_by_at_most_the_bound(
    others: list[float], one: float, other: float, bound: float
) -> None:
    def total(values: list[float]) -> float:
        return float(bounded_sum(np.array(values, dtype=np.float64), bound))

    room = 1 + 1e-12 * (len(others) + 1)
    assert abs(total([*others, one]) - total(others)) <= room
    assert abs(total([*others, one]) - total([*others, other])) <= 2 * room


def test_values_inside_the_bound_are_whole_and_broken_ones_add_nothing() -> None:
    values = np.array([0.5, -0.25, 9.0, -np.inf, np.nan])
    assert float(bounded_sum(values, 2.0)) == pytest.approx((0.5 - 0.25 + 2.0) / 2.0)


@pytest.mark.parametrize("expected", [50, 400])
def test_the_noise_spends_the_budget(expected: int) -> None:
    schedule, delta = planned(settings(epsilon=0.7), expected, 200, "record")
    (query,) = schedule.queries
    rate = min(1.0, expected / 200)
    sigma = query.noise_multipliers[0]
    assert query.noise_multipliers == (sigma, sigma)
    assert query.sampling_rate == rate
    together = PoissonGaussian(rate, (sigma / math.sqrt(2),), 1)  # both sums as one vector
    assert 0.6995 < epsilon(together, delta).epsilon <= 0.7
    assert epsilon(schedule.event(), delta) == epsilon(together, delta)
    assert epsilon(schedule.event(), delta, "replace-one").epsilon > 1.2 * 0.7


def test_the_answer_has_the_noise_it_says(
    prepared: Prepared, base: PublicBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        private_sensitivity, "unit_rises", lambda *given, **named: (np.zeros(12), np.zeros(12))
    )
    found = [ask(prepared, base, bounds=(2.0, 0.5)) for _ in range(8)]
    drawn = [kind.value / kind.noise for one in found for kind in (one.shared, one.own)]
    assert len(set(drawn)) == 16  # keys of their own, and an address for each stream's part
    assert 0.4 < np.std(drawn) < 1.9
    assert found[0].shared.noise == pytest.approx(4 * found[0].own.noise)


def test_a_draw_is_divided_by_its_declared_size(
    prepared: Prepared, base: PublicBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = []

    def ones(streams: Any, rows: Any, labels: Any, units: Any, drawn: Any, **named: Any) -> Any:
        joined.append(len(drawn))
        return np.ones(len(drawn)), np.ones(len(drawn))

    monkeypatch.setattr(private_sensitivity, "unit_rises", ones)
    monkeypatch.setattr(private_sensitivity, "add_noise", lambda sums, std, stream: sums)
    for _ in range(4):
        found = ask(prepared, base, expected=6, n=24, bounds=(1.0, 1.0))
        assert found.spending.units == 24
        assert found.spending.schedule.queries[0].sampling_rate == 6 / 24
        assert found.shared.value == joined[-1] / 6
    assert len(set(joined)) > 1


def test_it_is_charged_before_and_settled_after(
    prepared: Prepared, base: PublicBase, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    ask_units = unit_rises

    def watched(*given: Any, **named: Any) -> Any:
        (charge,) = ledger.account("clinic").charges
        seen.append(charge.state)
        return ask_units(*given, **named)

    monkeypatch.setattr(private_sensitivity, "unit_rises", watched)
    calls: list[int] = []
    found: PrivateSensitivities = ask(prepared, base, ledger, progress=calls.append)
    assert sum(calls) == passes(2) == 10
    assert seen == ["reserved", "reserved"]  # made-up rows, then the records
    (charge,) = ledger.account("clinic").charges
    assert (charge.state, charge.spending) == ("settled", found.spending)
    assert found.entry is not None
    assert found.entry.entry == charge.entry
    assert ledger.account("clinic").composed() == found.claim
    assert 0.999 < found.claim.epsilon <= 1
    again = Spending.model_validate_json(found.spending.model_dump_json())
    assert again == found.spending
    monkeypatch.undo()
    ask(prepared, base, ledger, bounds=(1.0, 1.0))
    both = ledger.account("clinic").composed()
    assert both is not None
    assert both.epsilon > 1.3 * found.claim.epsilon


def test_a_cap_refuses_before_anything_is_computed(
    prepared: Prepared, base: PublicBase, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.cap("clinic", 0.9, DELTA)

    def never(*given: Any, **named: Any) -> Any:
        raise AssertionError("a record was looked at")

    monkeypatch.setattr(private_sensitivity, "unit_rises", never)
    with pytest.raises(PrivacyError, match=r"the cap on clinic is epsilon = 0\.9"):
        ask(prepared, base, ledger)
    assert not ledger.account("clinic").charges


@pytest.mark.parametrize(("when", "state"), [("unit_rises", "refunded"), ("add_noise", "reserved")])
def test_a_failure_costs_only_what_may_have_been_answered(
    prepared: Prepared,
    base: PublicBase,
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    state: str,
) -> None:
    def breaks(*given: Any, **named: Any) -> Any:
        raise RuntimeError("power cut")

    monkeypatch.setattr(private_sensitivity, when, breaks)
    with pytest.raises(RuntimeError, match="power cut"):
        ask(prepared, base, ledger, bounds=(1.0, 1.0))
    (charge,) = ledger.account("clinic").charges
    assert charge.state == state


def test_what_makes_no_sense_is_refused(
    prepared: Prepared, base: PublicBase, tiny_base: Path, ledger: Ledger
) -> None:
    for wrong in ({"bounds": (0.0, 1.0)}, {"bounds": (1.0, math.inf)}, {"draws": 0}, {"noise": 0.0}):
        with pytest.raises(ConfigError, match="positive"):
            ask(prepared, base, ledger, **wrong)
    with pytest.raises(ModelError, match="dense model"):
        ask(prepared, PublicBase.of(str(tiny_base)), ledger)
    with pytest.raises(PrivacyError):
        ask(prepared, base, ledger, dataset="\u200b")
    assert not ledger.accounts()


def test_a_model_that_remembers_rows_is_refused(base: PublicBase, make_task: MakeTask) -> None:
    task = make_task(train=4)
    classifier = load_classifier(base.folder, task.labels, 0)
    streams = TwoStreams.of(classifier, settings(), task)
    encoded = encode(classifier.tokenizer, task.train.texts, 20)
    check_alone(streams, encoded)
    seen = {"rows": 0}

    class Remembering(torch.nn.Module):
        def forward(self, **batch: Any) -> Any:
            seen["rows"] += 1
            found = streams.model(**batch)
            return dataclasses.replace(found, logits=found.logits * (1 + 1e-6 * seen["rows"]))

    with pytest.raises(ModelError, match="depends on what the model read before"):
        check_alone(dataclasses.replace(streams, model=Remembering()), encoded)


def test_an_empty_draw_is_an_answer(
    prepared: Prepared, base: PublicBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_sensitivity, "poisson_draw", lambda *given: np.empty(0, np.int64))
    found = ask(prepared, base, expected=4, bounds=(1.0, 1.0))
    assert 0 < abs(found.shared.value) < 10 * found.shared.noise
