"""`confide train --resume` and `confide purge`: what a stopped run offers, and what remains of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from confide.gradients import losses
from confide.privacy.ledger import Ledger

from .conftest import Answer, Interrupted, listing

Confide = Callable[..., Answer]


@pytest.fixture
def stopped(train: Callable[..., Answer], reviews: Path, tmp_path: Path, interrupted: Interrupted) -> Path:
    """A run that Ctrl-C stopped in its second step, with a checkpoint of the first."""
    with interrupted(4):
        assert train(reviews, "--checkpoint-every", 0, "--steps", 3).code == 130
    return tmp_path / "run"


def charges() -> list[tuple[str, dict[str, int]]]:
    return [(c.state, dict(c.spending.steps_run)) for c in Ledger.open().account("reviews-2026").charges]


def test_it_goes_on_from_elsewhere(
    confide: Confide, stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = confide("train", "--resume", f"{stopped}.unfinished", "--json").json()
    assert found["release"] == str(stopped / "release")
    assert charges() == [("settled", {"all": 3})]
    assert len((stopped / "private" / "steps.jsonl").read_text().splitlines()) == 3
    assert confide("train", "--resume", stopped, "--json").json() == found
    assert confide("train", "--resume", stopped).out.startswith(f"{stopped} is finished")


def test_it_takes_its_options_from_the_run(confide: Confide, stopped: Path) -> None:
    message = confide("train", "--resume", stopped, "--epsilon", 5).message()
    assert "takes every option from the run itself; leave out --epsilon" in message
    assert "leave out --dry-run" in confide("train", "--resume", stopped, "--dry-run").message()
    assert "no unfinished run" in confide("train", "--resume", stopped.with_name("other")).message()


def test_one_letter_of_the_file(confide: Confide, stopped: Path, reviews: Path) -> None:
    text = reviews.read_text(encoding="utf-8")
    reviews.write_text(text.replace(" 1003,", " 1903,"), encoding="utf-8")
    answer = confide("train", "--resume", stopped)
    assert "the records are not those it began with" in answer.message()
    assert "can go on where it stopped" not in answer.err
    reviews.unlink()
    assert "reviews.csv" in confide("train", "--resume", stopped).message()
    reviews.write_text(text, encoding="utf-8")
    assert confide("train", "--resume", stopped).code == 0


def test_a_new_run_in_its_place(train: Callable[..., Answer], reviews: Path, stopped: Path) -> None:
    before = listing(stopped.parent)
    message = train(reviews).message()
    assert f"go on with `confide train --resume {stopped}`, or give it up with `confide purge" in message
    assert listing(stopped.parent) == before
    assert charges() == [("reserved", {})]


def test_somebody_elses_folder_is_left_alone(train: Callable[..., Answer], reviews: Path) -> None:
    side = reviews.with_name("run.unfinished")
    side.mkdir()
    (side / "mine.txt").touch()
    assert "exists already and is no run" in train(reviews).message()
    assert listing(reviews.parent) == {reviews.name, "run.unfinished", "run.unfinished/mine.txt"}


def test_damaged_options(confide: Confide, stopped: Path) -> None:
    file = stopped.with_name("run.unfinished") / "private" / "resume" / "options.json"
    file.write_text(file.read_text()[:-20])
    assert "options.json is missing or damaged" in confide("train", "--resume", stopped).message()


def test_a_run_is_given_up(confide: Confide, stopped: Path, reviews: Path) -> None:
    assert "--yes gives it up" in confide("purge", stopped, "--json").message()
    assert confide("purge", stopped).code == 1  # nobody answers
    assert charges() == [("reserved", {})]
    answer = confide("purge", stopped, "--yes")
    assert answer.code == 0, answer.err
    assert "all that was planned stays charged" in answer.out
    assert listing(stopped.parent) == {reviews.name}
    assert charges() == [("settled", {"all": 1})]
    assert "there is no run" in confide("purge", stopped, "--yes").message()


def test_a_ledger_that_is_named_must_know_the_run(confide: Confide, stopped: Path, tmp_path: Path) -> None:
    Ledger.open(str(tmp_path / "other.sqlite"))
    message = confide("purge", stopped, "--yes", "--ledger", tmp_path / "other.sqlite").message()
    assert "doesn't know it" in message
    assert confide("train", "--resume", stopped).code == 0


def test_keys_are_destroyed_while_the_ledger_is_away(
    confide: Confide, stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The charge stays, and what ran is noted by the next command that meets the ledger, elsewhere too."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    place = Path(os.environ["CONFIDE_LEDGER"])
    place.rename(tmp_path / "moved.sqlite")
    found = confide("purge", stopped, "--yes", "--json").json()
    assert found["destroyed"] == ["keys and checkpoints"]
    assert not found["settled"]
    assert "isn't there" in found["unsettled"]
    assert not stopped.with_name("run.unfinished").exists()
    assert not place.exists()  # no new, empty ledger in its place
    (note,) = (tmp_path / "data" / "confide" / "unsettled").iterdir()
    Ledger.open(str(tmp_path / "other.sqlite"))  # not the one
    assert note.exists()
    monkeypatch.setenv("CONFIDE_LEDGER", str(tmp_path / "moved.sqlite"))
    assert confide("ledger", "verify").code == 0
    assert charges() == [("settled", {"all": 1})]
    assert not note.exists()


def test_a_damaged_charge_keeps_no_keys(confide: Confide, stopped: Path) -> None:
    (stopped.with_name("run.unfinished") / "private" / "resume" / "charge.json").write_text("{")
    answer = confide("purge", stopped, "--yes")
    assert answer.code == 0, answer.err
    assert "could not be noted" in answer.out
    assert charges() == [("reserved", {})]


def test_a_finished_run_keeps_what_is_no_key(
    train: Callable[..., Answer], confide: Confide, reviews: Path
) -> None:
    assert train(reviews).code == 0
    out = reviews.with_name("run")
    answer = confide("purge", out)
    assert "nothing; a finished run has no keys left" in answer.out
    assert f"Remains: {out / 'private'} (losses without noise: never share)" in answer.out
    assert "overwritten" not in answer.out
    found = confide("purge", out, "--all", "--json").json()
    assert found == {
        "destroyed": ["private/"],
        "settled": False,
        "unsettled": None,
        "remains": ["release", "report"],
    }
    assert not (out / "private").exists()


def test_a_simulation_goes_on_without_a_charge(
    train: Callable[..., Answer], confide: Confide, reviews: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = reviews.with_name("run")
    given = ("--simulate", 3, "--steps", 4, "--checkpoint-every", 0)
    whole = train(reviews, *given, out="whole")
    assert whole.code == 0
    plain = losses.functional.cross_entropy
    calls: list[int] = []

    def loss(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return plain(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(losses.functional, "cross_entropy", loss)
        assert train(reviews, *given).code == 130
    assert confide("train", "--resume", out).code == 0
    files = [reviews.with_name(name) / "release" / "model.safetensors" for name in ("run", "whole")]
    weights = [file.read_bytes() for file in files]
    assert weights[0] == weights[1]
    assert Ledger.open().entries() == ()


def test_damaged_checkpoints_are_named_and_can_be_given_up(confide: Confide, stopped: Path) -> None:
    folder = stopped.with_name("run.unfinished") / "private" / "resume"
    (state,) = folder.glob("checkpoint-*/state.json")
    state.write_text(state.read_text()[:-20])
    assert (
        f"remove {state.parent}, and the run is replayed" in confide("train", "--resume", stopped).message()
    )
    assert confide("purge", stopped, "--yes").code == 0
    assert not folder.exists()
    assert charges() == [("settled", {})]
