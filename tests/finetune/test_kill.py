"""kill -9 at random instants of training, settling, releasing and merging; then going on.

The release must be the one of a run that nobody stopped, byte for byte; the ledger must hold one charge, as
after such a run; and no half-written file may be left.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from confide.finetune.checkpoint import Unfinished
from confide.privacy.ledger import Ledger
from confide.privacy.statement import Spending
from confide.release.write import verify

MakeBase = Callable[..., Path]
STEPS = 12
TRAINING = ("prepare", "train", "settle", "release", "finish")
MERGING = ("merge", "write")


@dataclass(frozen=True)
class Outcome:
    """One kill: where, what it left, and how the run went on."""

    phase: str
    left: str


class Bench:
    """A server of warm processes, and the runs that nobody stops."""

    def __init__(self, folder: Path, base: Path, data: Path) -> None:
        self.folder, self.base, self.data = folder, base, data
        server = Path(__file__).with_name("kill_server.py")
        self.server = subprocess.Popen(
            [sys.executable, str(server)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_CONFIG_HOME": str(folder / "config")},  # no key of its user's
        )
        whole = self.ask(self.train("whole"), "whole", warm=True)
        other = self.ask(self.train("other", "--dataset", "others"), "other")
        self.pair = [folder / "whole" / "release", folder / "other" / "release"]
        merged = self.ask(self.merge("merged"), "merged")
        assert (whole["code"], other["code"], merged["code"]) == (0, 0, 0), (whole, other, merged)
        times = [*whole["begun"].items(), ("end", whole["end"])]
        times += [(name, merged["begun"][name]) for name in MERGING] + [("end", merged["end"])]
        self.lasts = {name: later - begun for (name, begun), (_, later) in pairwise(times)}
        self.number = 0

    def ask(self, arguments: list[str], ledger: str, **request: Any) -> Any:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        request |= {"argv": arguments, "ledger": str(self.folder / f"{ledger}.ledger" / "ledger.sqlite")}
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def train(self, out: str, *arguments: str) -> list[str]:
        given = ["--base", self.base, "--data", self.data, "--out", self.folder / out, "--dataset", "reviews"]
        given += ["--steps", STEPS, "--expected-batch", 16, "--max-length", 20, "--rank", 2]
        return ["train", *map(str, given), "--checkpoint-every", "0", *arguments]

    def merge(self, out: str) -> list[str]:
        return ["merge", *map(str, self.pair), "--base", str(self.base), "--out", str(self.folder / out)]

    def resume(self, out: str) -> list[str]:
        return ["train", "--resume", str(self.folder / out)]

    def ledger(self, out: str) -> Ledger:
        return Ledger.open(str(self.folder / f"{out}.ledger" / "ledger.sqlite"))

    def spent(self, out: str) -> list[tuple[str, Spending]]:
        ledger = self.ledger(out)
        ledger.verify()
        return [(charge.state, charge.spending) for charge in ledger.account("reviews").charges]

    def stop(self, phase: str, delay: float, number: int = signal.SIGKILL) -> tuple[str, Any]:
        """Begin a run or a merge, and stop it; returns its name and how it ended."""
        self.number += 1
        out = f"{'merge' if phase in MERGING else 'run'}-{self.number}"
        arguments = self.merge(out) if phase in MERGING else self.train(out)
        return out, self.ask(arguments, out, phase=phase, delay=delay, signal=number)

    def kill(self, phase: str, chance: random.Random) -> Outcome:
        """Kill at a random instant of a phase, go on, and compare."""
        while True:
            out, ended = self.stop(phase, chance.uniform(0, self.lasts[phase]))
            if ended["code"] == -signal.SIGKILL:
                break
            assert ended["code"] == 0, ended["said"]  # it was quicker
        left = self.left(out)
        arguments = self.merge(out) if phase in MERGING else self.train(out)
        if phase in MERGING:
            # What was only not cleaned up goes with the next command that writes there.
            again = self.ask(self.merge(f"{out}-again") if left == "finished" else arguments, out)
            assert again["code"] == 0, again["said"]
            assert self.same(out, "merged", "")
        else:
            again = self.ask(arguments if left == "before its keys" else self.resume(out), out)
            assert again["code"] == 0, again["said"]
            self.compare(out)
        assert self.litter(out) == []
        return Outcome(phase, left)

    def left(self, out: str) -> str:
        """What a kill left."""
        side = self.folder / f"{out}.unfinished"
        if (self.folder / out).exists():
            return "finished"
        if (side / "release").exists():
            return "all but the name"
        if not (side / "private" / "resume" / "run.json").exists():
            return "before its keys" if out.startswith("run") else "nothing"
        steps = [int(path.name[-8:]) for path in (side / "private" / "resume").glob("checkpoint-*")]
        return f"step {max(steps):2}" if steps else "keys alone"

    def compare(self, out: str) -> None:
        """A run is the one that nobody stopped."""
        assert self.same(out, "whole", "release")
        one, two = self.folder / out, self.folder / "whole"
        assert (one / "private" / "steps.jsonl").read_text() == (two / "private" / "steps.jsonl").read_text()
        results = [json.loads((run / "report" / "results.json").read_text()) for run in (one, two)]
        assert results[0] | {"release": ""} == results[1] | {"release": ""}
        assert self.spent(out) == self.spent("whole")
        assert [state for state, _ in self.spent(out)] == ["settled"]
        noted = verify(one / "release").ledger
        reserved, settled = (entry.hash for entry in self.ledger(out).entries())
        assert noted is not None
        assert (noted.entry, noted.head) == (reserved, settled)

    def same(self, one: str, two: str, part: str) -> bool:
        """Whether two releases agree in every byte, but for the ledgers that their statements name."""
        ours, theirs = self.folder / one / part, self.folder / two / part
        names = {path.relative_to(ours).as_posix() for path in ours.rglob("*") if path.is_file()}
        assert names == {path.relative_to(theirs).as_posix() for path in theirs.rglob("*") if path.is_file()}
        for name in names - {"statement.json"}:
            assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
        statements = [json.loads((run / "statement.json").read_text()) for run in (ours, theirs)]
        assert statements[0] | {"ledger": None} == statements[1] | {"ledger": None}
        return True

    def litter(self, out: str) -> list[str]:
        """Everything that a finished run has no place for."""
        paths = [*self.folder.iterdir()]
        paths += [path for name in (f"{out}.ledger", out) for path in (self.folder / name).rglob("*")]
        odd = (".partial", ".unfinished", "journal")
        return [str(path) for path in paths if any(part in path.name for part in odd)]


@pytest.fixture(scope="module")
def bench(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_base: Path,
    sentences: Callable[[int, int], list[tuple[str, str]]],
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("kills")
    data = folder / "reviews.csv"
    data.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in sentences(80, 1)))
    bench = Bench(folder, tiny_base, data)
    try:
        yield bench
    finally:
        assert bench.server.stdin is not None
        bench.server.stdin.close()
        bench.server.wait(timeout=30)


@pytest.mark.parametrize("phase", ["train", "settle", "release", "finish", "write"])
def test_a_killed_run_goes_on(bench: Bench, phase: str) -> None:
    bench.kill(phase, random.Random())


@pytest.mark.slow
def test_fifty_kills(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    shares = {"prepare": 4, "train": 18, "settle": 8, "release": 6, "finish": 4, "merge": 4, "write": 6}
    seed = random.SystemRandom().randrange(2**32)
    chance = random.Random(seed)
    phases = [phase for phase, share in shares.items() for _ in range(share)]
    assert len(phases) == 50
    chance.shuffle(phases)
    outcomes = [bench.kill(phase, chance) for phase in phases]
    with capsys.disabled():
        print(f"\n50 kills -9 at random instants (seed {seed}); each run or merge went on to the same end:")
        for phase in shares:
            found = Counter(outcome.left for outcome in outcomes if outcome.phase == phase)
            where = ", ".join(f"{left} ({count})" for left, count in sorted(found.items()))
            lasts = 1000 * bench.lasts[phase]
            print(f"  in {phase:8} {sum(found.values()):2}, of {lasts:5.0f} ms; it left: {where}")
        print("50 of 50: release byte for byte, statement, losses, score and ledger account the same; one")
        print("charge each, none lost or doubled; no half-written file.")


# What can be caught is told, and leaves what the run needs.


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_a_stopped_run_says_how_to_go_on(bench: Bench, number: int, code: int) -> None:
    for share in (0.7, 0.5, 0.3, 0.1, 0.0):  # a machine that got faster may finish training first
        out, ended = bench.stop("train", share * bench.lasts["train"], number)
        if ended["code"] != 0 and [state for state, _ in bench.spent(out)] == ["reserved"]:
            break
        shutil.rmtree(bench.folder / f"{out}.unfinished", ignore_errors=True)
    assert ended["code"] == code, ended["said"]
    assert f"confide train --resume {bench.folder / out}" in ended["said"]
    assert "interrupted" in ended["said"]
    assert "Traceback" not in ended["said"]
    left = [path.name for path in bench.folder.rglob("*") if path.name.endswith(".partial")]
    assert left == []
    assert [state for state, _ in bench.spent(out)] == ["reserved"]
    resume = bench.folder / f"{out}.unfinished" / "private" / "resume"
    assert resume.stat().st_mode & 0o777 == 0o700
    assert resume.parent.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in resume.rglob("*") if path.is_file())

    held = Unfinished.open(resume)
    try:
        refused = bench.ask(bench.resume(out), out)
    finally:
        held.close()
    assert refused["code"] == 2
    assert "another process is at work on the run" in refused["said"]

    assert bench.ask(bench.resume(out), out)["code"] == 0
    bench.compare(out)
    assert bench.litter(out) == []
    again = bench.ask(bench.resume(out), out)
    assert again["code"] == 0
    assert "is finished" in again["said"]


def test_stopped_before_it_asked_anything(bench: Bench) -> None:
    for share in (0.3, 0.1, 0.03, 0.0):  # a machine that got faster may train already
        out, ended = bench.stop("prepare", share * bench.lasts["prepare"], signal.SIGTERM)
        if "train" not in ended["begun"]:
            break
        shutil.rmtree(bench.folder / f"{out}.unfinished", ignore_errors=True)
    assert ended["code"] in (143, -signal.SIGTERM), ended["said"]  # the latter before anything is set up
    assert "--resume" not in ended["said"]
    assert bench.litter(out) == []
    assert not (bench.folder / out).exists()
    assert [state for state, _ in bench.spent(out)] in ([], ["refunded"])
