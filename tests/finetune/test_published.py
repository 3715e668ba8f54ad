"""A published accuracy: the exact count plus the charged noise, in the statement, paid by the schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from confide.errors import ConfigError, PrivacyError
from confide.finetune.base import PublicBase
from confide.finetune.published import right_units
from confide.finetune.run import finetune, prepare
from confide.finetune.settings import Settings
from confide.finetune.tuned import FineTuned
from confide.privacy.accountant import epsilon
from confide.privacy.composition import check
from confide.privacy.events import Composed, PoissonGaussian
from confide.privacy.statement import read
from confide.privacy.units import UnitMap
from confide.tasks.records import TaskData

MakeTask = Callable[..., TaskData]
SMALL: dict[str, Any] = {"steps": 2, "expected_batch": 15, "max_length": 16, "method": "dp-adamw"}


def tune(base: Path, task: TaskData, simulate: int | None = None, **settings: Any) -> FineTuned:
    chosen, public = Settings.of(SMALL | settings), PublicBase.of(str(base))
    return finetune(prepare(task, public, chosen.max_length), public, chosen, simulate=simulate)


def test_it_is_charged_with_the_training_and_stated(
    tiny_base: Path, make_task: MakeTask, tmp_path: Path
) -> None:
    tuned = tune(tiny_base, make_task(), publish_accuracy=3.0)
    statement = tuned.release(tmp_path / "release")
    check(read(tmp_path / "release"))
    (number,) = statement.published
    assert (number.metric, number.units, number.noise) == ("accuracy", 20, 3.0)
    assert 0 < abs(number.value - tuned.score()) < 6 * 3.0 / 20
    (spending,) = statement.spendings
    assert spending.event is not None
    assert PoissonGaussian(1.0, (3.0,), 1) in spending.event.events
    assert statement.claim is not None
    gradients = Composed(spending.event.events[:1])
    assert epsilon(gradients, 1e-6).epsilon < statement.claim.epsilon <= 4
    assert "is a public constant" in " ".join(statement.assumptions)
    card = (tmp_path / "release" / "README.md").read_text(encoding="utf-8")
    assert f"Accuracy on 20 test units, with noise: {100 * number.value:.1f} %" in card


def test_it_is_the_count_of_right_test_units(tiny_base: Path, make_task: MakeTask) -> None:
    """Without a claim, so little noise may be asked for that the count shows."""
    exact = tune(tiny_base, make_task(), 1, method="non-private", publish_accuracy=1e-6)
    (precise,) = exact.statement.published
    assert precise.value == pytest.approx(exact.score(), abs=1e-5)
    assert precise.value != exact.score()
    with pytest.raises(PrivacyError, match=r"accuracy.* alone cost"):
        tune(tiny_base, make_task(), 1, publish_accuracy=1e-6)


@pytest.mark.parametrize("change", ["noise", "query", "twice"])
def test_a_number_that_no_query_paid_for(tiny_base: Path, make_task: MakeTask, change: str) -> None:
    statement = tune(tiny_base, make_task(), 1, publish_accuracy=3.0).statement
    check(statement)
    (number,) = statement.published
    published = {
        "noise": (number.model_copy(update={"noise": 5.0}),),
        "query": (number.model_copy(update={"query": "gram"}),),
        "twice": (number, number),
    }[change]
    with pytest.raises(PrivacyError, match="no query of its schedule paid"):
        check(statement.model_copy(update={"published": published}))


def test_only_accuracy(tiny_base: Path, make_task: MakeTask) -> None:
    task = dataclasses.replace(make_task(), metric="macro-f1")
    with pytest.raises(ConfigError, match="the metric is macro-f1"):
        tune(tiny_base, task, publish_accuracy=3.0)


def test_nothing_is_published_unasked(tiny_base: Path, make_task: MakeTask) -> None:
    assert tune(tiny_base, make_task(), 1).statement.published == ()


def test_a_unit_counts_its_mean() -> None:
    right = np.array([True, False, True, True, False, False])
    units = UnitMap.column("user", ["a", "a", "b", "a", "c", "c"], rows_per_unit=2)
    assert right_units(right, units) == pytest.approx(2 / 3 + 1 + 0)
    for row in range(6):  # whatever happens to one unit, the count moves by at most 1
        flipped = right.copy()
        mine = units.unit_of_row == units.unit_of_row[row]
        flipped[mine] = ~flipped[mine]
        assert abs(right_units(flipped, units) - right_units(right, units)) <= 1
