"""The command line as a person meets it: arguments in; exit code, stdout and stderr out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from confide.cli.main import main
from confide.finetune import loop

WriteCsv = Callable[..., Path]
Interrupted = Callable[[int], AbstractContextManager[None]]


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        """stdout, which must be one JSON document and nothing else."""
        assert self.code == 0, self.err
        return json.loads(self.out)

    def message(self) -> str:
        """The one message of a refusal, without a traceback."""
        assert self.code == 2, f"exit code {self.code}: {self.err}"
        assert self.out == ""
        assert "Traceback" not in self.err
        lines = self.err.strip().splitlines()
        assert len([line for line in lines if line.startswith("confide: ")]) == 1, self.err
        return lines[-1]


@pytest.fixture
def confide(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """Runs the command in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Answer:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["confide", *map(str, arguments)])
        monkeypatch.setenv("CONFIDE_DEBUG", "")
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        captured = capfd.readouterr()
        return Answer(code, captured.out, captured.err)

    return run


@pytest.fixture
def reviews(write_csv: WriteCsv, sentences: Callable[[int, int], list[tuple[str, str]]]) -> Path:
    """80 labelled reviews in a CSV file."""
    return write_csv("reviews.csv", sentences(80, 1))


QUICK = ("--steps", 2, "--expected-batch", 16, "--max-length", 20, "--rank", 2)


@pytest.fixture
def train(confide: Callable[..., Answer], tiny_base: Path, tmp_path: Path) -> Callable[..., Answer]:
    """`confide train` with quick settings; arguments given come later, so they win."""

    def run(data: Path, *arguments: object, out: str = "run") -> Answer:
        given = ("--base", tiny_base, "--data", data, "--out", tmp_path / out, "--dataset", "reviews-2026")
        return confide("train", *given, *QUICK, *arguments)

    return run


def listing(folder: Path) -> set[str]:
    """Everything below a folder, hidden files too."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Interrupted:
    """Within the block, Ctrl-C comes when noise is about to be drawn for the n-th time."""

    @contextmanager
    def at(number: int) -> Iterator[None]:
        plain, calls = loop.add_noise, []

        def noise(*arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == number:
                raise KeyboardInterrupt
            return plain(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "add_noise", noise)
            yield

    return at
