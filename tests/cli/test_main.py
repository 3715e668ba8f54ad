"""The command itself: quick, and one message for whatever goes wrong."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from confide.cli import main as module

from .conftest import Answer

Confide = Callable[..., Answer]
COMMANDS = ("train", "merge", "predict", "evaluate", "run", "verify", "privacy", "keys")


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    program = (
        "import sys; sys.argv = ['confide', '--help']\n"
        "from confide.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'peft', 'scipy', 'pandas', 'dp_accounting', 'numpy'}\n"
        "heavy |= {'cryptography'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)\n"
    )
    seconds = []
    for _ in range(3):
        started = _cpu_of_children()
        found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        seconds.append(_cpu_of_children() - started)
        assert found.returncode == 0, found.stderr
    assert all(name in found.stdout for name in COMMANDS)
    assert statistics.median(seconds) < 0.5


def _cpu_of_children() -> float:
    """Processor seconds, which a busy machine doesn't stretch as it does a clock."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(confide: Confide, command: str) -> None:
    answer = confide(command, "--help")
    assert answer.code == 0
    assert f"confide {command} [OPTIONS]" in " ".join(answer.out.split())


@pytest.mark.parametrize(
    "arguments", [("frobnicate",), ("train",), ("train", "--epsilon", "much"), ("--what",)]
)
def test_wrong_usage(confide: Confide, arguments: tuple[str, ...]) -> None:
    answer = confide(*arguments)
    assert answer.code == 2
    assert "Traceback" not in answer.err
    assert "Usage" in answer.err


def test_an_unexpected_error_is_one_line_too(confide: Confide, monkeypatch: pytest.MonkeyPatch) -> None:
    def surprise(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("confide.experiment.plan.read", surprise)
    answer = confide("run", "study.yaml", "--out", "out")
    assert answer.code == 1
    assert (
        answer.err
        == "confide: unexpected ZeroDivisionError: division by zero; `confide --debug` shows where\n"
    )
    with pytest.raises(ZeroDivisionError):
        confide("--debug", "run", "study.yaml", "--out", "out")


def test_ctrl_c(confide: Confide, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("confide.experiment.plan.read", interrupted)
    answer = confide("run", "study.yaml", "--out", "out")
    assert answer.code == 130
    assert answer.err.strip() == (
        "confide: interrupted; no half-written release was left, and noisy steps stay charged"
    )


def test_a_closed_pipe_is_no_error() -> None:
    program = f"{sys.executable} -m confide.cli.main --help | head -c 1"
    found = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 0
    assert "Traceback" not in found.stderr


def test_the_entry_point_is_this() -> None:
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="confide")
    assert script.load() is module.main
