"""A run is charged before it asks, refunded only if nothing was answered, and its statement says where."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from confide.errors import PrivacyError
from confide.finetune import loop, run
from confide.finetune.base import PublicBase
from confide.finetune.run import finetune, prepare
from confide.finetune.settings import Settings
from confide.finetune.tuned import FineTuned
from confide.privacy.account import Charge
from confide.privacy.composition import check
from confide.privacy.ledger import Ledger
from confide.release.write import verify
from confide.tasks.records import TaskData

MakeTask = Callable[..., TaskData]
SMALL = {
    "expected_batch": 15,
    "steps": 3,
    "max_length": 20,
    "trainable": {"kind": "lora", "blocks": 1, "rank": 2},
}


@pytest.fixture(scope="module")
def base(tiny_base: Path) -> PublicBase:
    return PublicBase.of(str(tiny_base))


@pytest.fixture
def ledger() -> Ledger:
    return Ledger.open()


@pytest.fixture
def tune(base: PublicBase, make_task: MakeTask, ledger: Ledger) -> Callable[..., FineTuned]:
    def tune(simulate: int | None = None, **settings: Any) -> FineTuned:
        chosen = Settings.model_validate(SMALL | settings)
        prepared = prepare(make_task(), base, chosen.max_length)
        return finetune(prepared, base, chosen, dataset="clinic", simulate=simulate, ledger=ledger)

    return tune


def charges(ledger: Ledger) -> tuple[Charge, ...]:
    return ledger.account("clinic").charges


def test_what_is_charged_is_what_the_statement_says(
    tune: Callable[..., FineTuned], ledger: Ledger, tmp_path: Path
) -> None:
    tuned = tune()
    (charge,) = charges(ledger)
    assert charge.state == "settled"
    assert (charge.spending,) == tuned.statement.spendings
    noted = tuned.statement.ledger
    assert noted is not None
    assert noted.entry == charge.entry
    ledger.verify(noted.head)
    statement = tuned.release(tmp_path / "release")
    assert statement.ledger == noted
    assert verify(tmp_path / "release") == statement
    check(statement)


def test_the_reservation_is_on_disk_before_the_first_draw(
    tune: Callable[..., FineTuned], ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    plain = loop.poisson_draw

    def draw(*arguments: Any) -> Any:
        seen.append(charges(Ledger.open(str(os.environ["CONFIDE_LEDGER"]))))
        return plain(*arguments)

    monkeypatch.setattr(loop, "poisson_draw", draw)
    tune(method="dp-adamw")
    assert len(seen) == 3
    assert all([charge.state for charge in found] == ["reserved"] for found in seen)
    assert seen[0][0].spending.schedule == charges(ledger)[0].spending.schedule


def test_what_claims_nothing_is_not_charged(tune: Callable[..., FineTuned], ledger: Ledger) -> None:
    assert tune(method="non-private").statement.ledger is None
    assert tune(1).statement.ledger is None
    assert ledger.entries() == ()


@pytest.mark.parametrize("method", ["dp-adamw", "dp-merging"])
@pytest.mark.parametrize("problem", [RuntimeError, KeyboardInterrupt])
def test_failing_before_the_first_noise_is_refunded(
    tune: Callable[..., FineTuned],
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    problem: type[BaseException],
) -> None:
    """The first draw was made and its gradients computed, but no noisy sum existed."""

    def fail(*_: Any) -> None:
        raise problem("here")

    monkeypatch.setattr(loop.Engine, "take", fail)
    with pytest.raises(problem, match="here"):
        tune(method=method)
    assert [charge.state for charge in charges(ledger)] == ["refunded"]
    assert ledger.account("clinic").filtered() in (None, 0)


@pytest.mark.parametrize("call", [1, 2, 4])
def test_failing_later_stays_spent(
    tune: Callable[..., FineTuned], ledger: Ledger, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """From the moment that noise is asked for; DP-Merging's first query is its ascent."""
    calls = 0
    plain = loop.add_noise

    def noise(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("here")
        return plain(*arguments)

    monkeypatch.setattr(loop, "add_noise", noise)
    with pytest.raises(RuntimeError, match="here"):
        tune(method="dp-merging")
    (charge,) = charges(ledger)
    assert charge.state == "reserved"
    assert ledger.account("clinic").filtered() > 0


def test_a_run_beyond_the_cap_looks_at_no_record(
    tune: Callable[..., FineTuned], ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.cap("clinic", 6, 1e-6)
    tune(epsilon=2.0)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a record was looked at")

    monkeypatch.setattr(run.Prepared, "inputs", never)
    monkeypatch.setattr(run, "train", never)
    head = ledger.head()
    with pytest.raises(PrivacyError, match=r"the cap on clinic is epsilon = 6 .* is left"):
        tune(epsilon=5.0)
    assert ledger.head() == head


def test_a_refund_that_fails_hides_no_error(
    tune: Callable[..., FineTuned], ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any) -> None:
        raise PrivacyError("the database is gone")

    monkeypatch.setattr(Ledger, "refund", gone)
    monkeypatch.setattr(run, "forward_of", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as error:
        tune()
    assert error.value.__notes__ == ["the run asked nothing, but could not be refunded: the database is gone"]
    assert [charge.state for charge in charges(ledger)] == ["reserved"]


def test_a_ledger_that_is_gone_at_the_end_costs_no_model(
    tune: Callable[..., FineTuned], ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any) -> None:
        raise PrivacyError("the database is gone")

    monkeypatch.setattr(Ledger, "settle", gone)
    with pytest.warns(UserWarning, match="what ran was not noted: the database is gone"):
        tuned = tune()
    (charge,) = charges(ledger)
    assert charge.state == "reserved"
    assert tuned.statement.ledger is not None
    assert tuned.statement.ledger.head == tuned.statement.ledger.entry == charge.entry


KILLED = """
import os, signal, sys
from pathlib import Path
from confide.finetune import loop
from confide.finetune.base import PublicBase
from confide.finetune.run import finetune, prepare
from confide.finetune.settings import Settings
from confide.privacy.ledger import Ledger
from confide.tasks.files import read_task

plain, calls = loop.add_noise, []

def noise(*arguments):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*arguments)

loop.add_noise = noise
settings = Settings.model_validate({"steps": 3, "expected_batch": 15, "max_length": 20})
task = read_task(Path(sys.argv[2]), text="text", label="label", name="t")
base = PublicBase.of(sys.argv[1])
finetune(prepare(task, base, 20), base, settings, dataset="clinic", ledger=Ledger.open())
"""


def test_kill_9_in_training_leaves_it_spent(
    tiny_base: Path,
    ledger: Ledger,
    write_csv: Callable[..., Path],
    sentences: Callable[[int, int], list[tuple[str, str]]],
) -> None:
    data = write_csv("reviews.csv", sentences(80, 1))
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tiny_base), str(data)], capture_output=True, text=True, timeout=300
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    ledger.verify()
    assert [charge.state for charge in charges(ledger)] == ["reserved"]
    assert ledger.account("clinic").filtered() > 0
