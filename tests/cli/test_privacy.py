from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from confide.privacy.composition import compose, training_statement
from confide.privacy.statement import FILE_NAME, Base, Statement
from confide.privacy.streams import Clipping, ParameterGroup, Schedule, Stream

BASE = Base(name="some-base", hash="0" * 64)


def _confide(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "confide.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def _json(*arguments: str) -> dict[str, object]:
    done = _confide(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


EPSILON = ("privacy", "epsilon", "--sampling-rate", "0.01", "--noise-multiplier", "1", "--steps", "1000")
NOISE = ("privacy", "noise", "--epsilon", "4", "--delta", "1/n", "--records", "3680", "--batch", "16")
PLAN = ("privacy", "plan", "--records", "1000")


def test_epsilon() -> None:
    done = _confide(*EPSILON, "--delta", "1e-5")
    assert done.returncode == 0
    assert "1.828" in done.stdout
    assert "2.101" in done.stdout
    found = _json(*EPSILON, "--delta", "1e-5", "--queries", "2")
    assert found["epsilon"] == pytest.approx(4.48, abs=0.005)
    assert found["delta"] == 1e-5
    assert found["epsilon_lower"] <= found["epsilon"] <= found["epsilon_rdp"]  # type: ignore[operator]


def test_noise() -> None:
    found = _json(*NOISE, "--epochs", "10")
    assert found["noise_multiplier"] == pytest.approx(0.5813, abs=2e-4)
    assert found["steps"] == 2300
    assert found["epsilon"] <= 4  # type: ignore[operator]
    pair = _json(*NOISE, "--steps", "2300", "--queries", "2")
    assert pair["noise_multiplier"] == pytest.approx(0.8220, abs=2e-4)


def test_plan() -> None:
    found = _json(*PLAN, "--epsilon", "2", "--batch", "100", "--steps", "40", "--queries", "2")
    (stream,) = found["streams"]  # type: ignore[misc]
    noise = ("--noise-multiplier", str(stream["noise_multiplier"]))
    again = _json(*PLAN, "--epsilon", "2", "--batch", "100", "--queries", "2", *noise)
    assert again["streams"][0]["steps"] == 40  # type: ignore[index]
    assert found["claim"]["epsilon_lower"] <= found["claim"]["epsilon"] <= 2  # type: ignore[index]
    assert found["queries"] == 80


def test_plan_with_a_base(tiny_base: Path) -> None:
    arguments = (*PLAN, "--epsilon", "2", "--batch", "100", "--steps", "40", "--max-length", "20")
    done = _confide(*arguments, "--base", str(tiny_base), "--rank", "2")
    assert done.returncode == 0, done.stderr
    assert "nothing has been" in done.stdout
    assert "noise to signal" in done.stdout
    assert "s per step" in done.stdout
    assert "The setting looks sensible." in done.stdout


@pytest.mark.slow
def test_noise_of_the_paper() -> None:
    paper = ("privacy", "noise", "--epsilon", "4", "--delta", "1/n", "--records", "60000", "--batch", "16")
    done = _confide(*paper, "--epochs", "10")
    assert "0.467" in done.stdout
    assert "random record" in done.stderr
    found = _json(*paper, "--epochs", "10", "--queries", "2")
    assert found["noise_multiplier"] == pytest.approx(0.661, abs=5e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*EPSILON, "--delta", "1"), "delta"),
        ((*EPSILON, "--delta", "auto"), "--records"),
        ((*EPSILON, "--delta", "small"), "delta"),
        ((*EPSILON, "--delta", "1e-5", "--queries", "0"), "--queries"),
        ((*EPSILON[:2], "--sampling-rate", "0", *EPSILON[4:], "--delta", "1e-5"), "sampling rate"),
        ((*EPSILON[:4], "--noise-multiplier", "0", *EPSILON[6:], "--delta", "1e-5"), "no noise"),
        ((*NOISE[:2], "--epsilon", "0", *NOISE[4:], "--epochs", "10"), "epsilon"),
        ((*NOISE[:2], "--epsilon", "nan", *NOISE[4:], "--epochs", "10"), "epsilon"),
        ((*NOISE[:-1], "4000", "--epochs", "10"), "expected batch"),
        ((*NOISE, "--epochs", "-1"), "epochs must be"),
        ((*NOISE, "--epochs", "1", "--steps", "1"), "--epochs or --steps"),
        (NOISE, "--epochs or --steps"),
        (("privacy", "show", "nowhere"), "no privacy is claimed"),
        ((*EPSILON, "--delta", "1e-5", "--sampling", "shuffled"), "22.8"),
        ((*PLAN, "--epsilon", "2", "--batch", "100", "--steps", "10", "--sampling", "fixed-size"), "Poisson"),
        (PLAN, "leave out exactly one"),
        ((*PLAN, "--epsilon", "2", "--batch", "2000", "--steps", "10"), "expected batch"),
        (
            (*PLAN, "--epsilon", "2", "--batch", "100", "--steps", "10", "--base", "b", "--parameters", "5"),
            "--base",
        ),
    ],
)
def test_bad_input_is_one_message(arguments: tuple[str, ...], message: str) -> None:
    done = _confide(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def _release(folder: Path, statement: Statement) -> Path:
    folder.mkdir()
    (folder / FILE_NAME).write_text(json.dumps(statement.to_json()))
    return folder


def _training(dataset: str, sigma: float = 4.0) -> Statement:
    stream = Stream(
        name="all",
        groups=(ParameterGroup("encoder", ("w",), 1e-3, anchored=False),),
        steps=50,
        draw="all",
        sampling_rate=0.1,
        clipping=Clipping("flat", 1.0),
        noise_multiplier=sigma,
        denominator=20.0,
    )
    return training_statement(
        Schedule((stream,)),
        delta=1e-6,
        dataset=dataset,
        units=500,
        run=f"run-{dataset}",
        base=BASE,
        steps_run={"all": 50},
    )


def test_show(tmp_path: Path) -> None:
    statement = _training("reviews-2026")
    folder = _release(tmp_path / "release", statement)
    done = _confide("privacy", "show", str(folder))
    assert done.returncode == 0, done.stderr
    assert "reviews-2026" in done.stdout
    assert "The claim holds" in done.stdout
    assert "Hyper-parameters" in done.stdout
    found = _json("privacy", "show", str(folder))
    assert found["claim"] == found["recomputed"]
    assert found["weights"] == "not checked"


def test_show_merge(tmp_path: Path) -> None:
    merged = compose([_training("a"), _training("b", 5.0)], disjoint=True, base=BASE)
    folder = _release(tmp_path / "merged", merged)
    found = _json("privacy", "show", str(folder))
    assert set(found["datasets"]) == {"a", "b"}  # type: ignore[call-overload]
    assert found["if_not_disjoint"]["epsilon"] > found["claim"]["epsilon"]  # type: ignore[index]
    assert "b alone" in _confide("privacy", "show", str(folder)).stdout


def test_show_refuses_a_forged_claim(tmp_path: Path) -> None:
    statement = _training("a")
    assert statement.claim is not None
    smaller = statement.claim.model_copy(update={"epsilon": statement.claim.epsilon / 2})
    folder = _release(tmp_path / "release", statement.model_copy(update={"claim": smaller}))
    done = _confide("privacy", "show", str(folder))
    assert done.returncode == 2
    assert "doesn't hold" in done.stderr
    assert done.stdout == ""


def test_show_says_when_nothing_is_claimed(tmp_path: Path) -> None:
    folder = _release(tmp_path / "release", compose([_training("a"), None], disjoint=True, base=BASE))
    done = _confide("privacy", "show", str(folder))
    assert done.returncode == 0
    assert "No privacy is claimed" in done.stdout
    assert "holds." not in done.stdout
    found = _json("privacy", "show", str(folder))
    assert found["claim"] is None
    assert found["recomputed"] is None


def test_help_is_quick() -> None:
    quickest = min(_timed_help() for _ in range(3))
    assert quickest < 1.0  # half a second on a quiet machine


def _timed_help() -> float:
    started = time.monotonic()
    assert _confide("--help").returncode == 0
    return time.monotonic() - started
