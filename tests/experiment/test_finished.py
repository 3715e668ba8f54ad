"""A study that is killed goes on: finished runs are used, a broken-off one continues under its charge."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from confide.errors import ConfigError, ResumeError
from confide.experiment import run as module
from confide.experiment.finished import desk
from confide.experiment.plan import Plan, read
from confide.experiment.run import run
from confide.privacy.ledger import Ledger
from confide.release.write import verify

Sentences = Callable[[int, int], list[tuple[str, str]]]


def silent(*_: Any) -> None:
    pass


@pytest.fixture
def study(tiny_base: Path, sentences: Sentences, tmp_path: Path) -> Path:
    """A study of two tasks and one private method, as a file."""
    tasks = []
    for number, name in enumerate(("films", "plays"), start=1):
        rows = "".join(f"{text},{label}\n" for text, label in sentences(60, number))
        (tmp_path / f"{name}.csv").write_text("text,label\n" + rows, encoding="utf-8")
        file = str(tmp_path / f"{name}.csv")
        tasks.append({"name": name, "data": file, "text": "text", "label": "label", "labels": ["neg", "pos"]})
    values = {
        "title": "Tiny",
        "base": str(tiny_base),
        "disjoint": "declared",
        "tasks": tasks,
        "settings": {
            "steps": 6,
            "expected_batch": 12,
            "max_length": 20,
            "trainable": {"kind": "lora", "blocks": 1, "rank": 2},
        },
        "methods": {"dp-merging": {}},
        "merges": [{"operator": "average"}],
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return tmp_path / "study.yaml"


@pytest.fixture
def plan(study: Path) -> Plan:
    return read(study)


@pytest.fixture
def stopped(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study that Ctrl-C stopped when its first run was released and its second one about to begin."""
    plain, calls = module.finetune, []

    def finetune(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(module, "finetune", finetune)
        with pytest.raises(KeyboardInterrupt):
            run(plan, tmp_path / "out", silent, Ledger.open())
    return tmp_path / "out"


def states() -> list[str]:
    return [charge.state for one in Ledger.open().accounts().values() for charge in one.charges]


def test_finished_runs_are_used(plan: Plan, stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="go on with it by --resume"):
        run(plan, stopped, silent, Ledger.open())
    first = verify(stopped / "models" / "dp-merging" / "seed-0" / "films")
    plain, trained = module.finetune, []

    def finetune(prepared: Any, *arguments: Any, **named: Any) -> Any:
        trained.append(prepared.task.name)
        return plain(prepared, *arguments, **named)

    monkeypatch.setattr(module, "finetune", finetune)
    found = run(plan, stopped, silent, Ledger.open(), resume=True)
    assert trained == ["plays"]
    assert states() == ["settled", "settled"]
    assert verify(stopped / "models" / "dp-merging" / "seed-0" / "films") == first
    assert [row.operator for row in found.rows] == ["individual", "average"]
    assert set(found.rows[0].scores) == {"films", "plays"}
    assert set(found.methods[0].drift) == {"films", "plays"}
    assert not list((stopped / "private").rglob("run.json"))  # no key is left
    verify(stopped / "merged" / "dp-merging-average-seed-0")


def test_other_records_or_settings_are_named(plan: Plan, stopped: Path, tmp_path: Path) -> None:
    other = plan.model_copy(update={"settings": {**plan.settings, "steps": 7}})
    with pytest.raises(ResumeError, match="steps was 6 when it began and is 7 now"):
        run(other, stopped, silent, Ledger.open(), resume=True)
    file = tmp_path / "films.csv"
    file.write_text(file.read_text(encoding="utf-8").replace("film", "Film", 1), encoding="utf-8")
    with pytest.raises(ResumeError, match="the records are not those it began with"):
        run(plan, stopped, silent, Ledger.open(), resume=True)
    assert states() == ["settled"]


def test_what_is_no_unfinished_study(plan: Plan, stopped: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no unfinished study"):
        run(plan, tmp_path / "new", silent, resume=True)
    with desk(stopped), pytest.raises(ResumeError, match="another process"):
        run(plan, stopped, silent, Ledger.open(), resume=True)
    kept = stopped / "private" / "runs" / "dp-merging" / "seed-0" / "films.json"
    kept.write_text(kept.read_text(encoding="utf-8")[:50], encoding="utf-8")
    with pytest.raises(ResumeError, match=r"films\.json is missing or damaged"):
        run(plan, stopped, silent, Ledger.open(), resume=True)


def test_a_mixture_is_made_again_bit_for_bit(
    study: Path, sentences: Sentences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is public is made anew when a study goes on, and must be the base that its runs began with."""
    corpus = tmp_path / "public.txt"
    corpus.write_text("\n".join(text for text, _ in sentences(60, 9)), encoding="utf-8")
    values = yaml.safe_load(study.read_text(encoding="utf-8"))
    values["upcycle"] = {"corpus": str(corpus), "experts": 4, "blocks": [0, 2]}
    values["settings"]["trainable"] = {"rank": 2}
    values["methods"] = {"roles": {"method": "raptor", "experts": {"layer": "last", "rank": 2}}}
    study.write_text(yaml.safe_dump(values), encoding="utf-8")
    plan, plain, calls = read(study), module.finetune, []

    def finetune(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(*arguments, **named)

    monkeypatch.setattr(module, "finetune", finetune)
    with pytest.raises(KeyboardInterrupt):
        run(plan, tmp_path / "out", silent, Ledger.open())
    found = run(plan, tmp_path / "out", silent, Ledger.open(), resume=True)
    assert found.mixture is not None
    assert [line.task for line in found.mixture.runs] == [line.task for line in found.private]
    assert {line.task for line in found.private} == {"films", "plays"}
    assert len(calls) == 3


@pytest.mark.slow
def test_a_killed_study_goes_on(study: Path, tmp_path: Path) -> None:
    """kill -9 while the second task trains: the first release stays, and each run is charged once."""
    out = tmp_path / "out"
    values = yaml.safe_load(study.read_text(encoding="utf-8"))
    values["settings"]["steps"] = 60
    study.write_text(yaml.safe_dump(values), encoding="utf-8")
    command = [sys.executable, "-m", "confide.cli.main", "run", str(study), "--out", str(out), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    charge = out / "private" / "unfinished" / "dp-merging" / "seed-0" / "plays" / "charge.json"
    last = time.monotonic() + 300
    while not charge.exists():
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < last
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert states() == ["settled", "reserved"]
    run_before = json.loads((charge.parent / "run.json").read_text(encoding="utf-8"))["run"]
    films = (out / "models" / "dp-merging" / "seed-0" / "films" / "statement.json").read_bytes()
    done = subprocess.run([*command, "--resume"], capture_output=True, env=os.environ, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    assert states() == ["settled", "settled"]
    models = out / "models" / "dp-merging" / "seed-0"
    assert (models / "films" / "statement.json").read_bytes() == films
    assert verify(models / "plays").spendings[0].run == run_before
    assert {row["operator"] for row in json.loads(done.stdout)} == {"individual", "average"}
    assert (out / "report" / "report.html").exists()
    assert not list((out / "private").rglob("run.json"))
