"""`confide ledger`, and how training and studies are charged."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Answer, listing

Confide = Callable[..., Answer]
Train = Callable[..., Answer]


def own() -> Path:
    return Path(os.environ["CONFIDE_LEDGER"])


def shown(confide: Confide, *arguments: object) -> dict[str, dict[str, object]]:
    return {row["dataset"]: row for row in confide("ledger", "show", "--json", *arguments).json()["datasets"]}


def test_training_charges_the_default_ledger(
    confide: Confide, train: Train, reviews: Path, tmp_path: Path
) -> None:
    assert train(reviews, "--epsilon", 2).code == 0
    (charge,) = shown(confide)["reviews-2026"]["charges"]
    statement = json.loads((tmp_path / "run" / "release" / "statement.json").read_text())
    (spending,) = statement["spendings"]
    assert charge["state"] == "settled"
    assert (charge["run"], charge["event"]) == (spending["run"], spending["event"])
    assert charge["steps_run"] == {"all": 2}
    assert statement["ledger"]["entry"] == charge["entry"]
    answer = confide("ledger", "verify", "--head", statement["ledger"]["head"])
    assert answer.code == 0
    assert statement["ledger"]["head"] in answer.out


def test_a_cap_stops_training(confide: Confide, train: Train, reviews: Path, tmp_path: Path) -> None:
    answer = confide("ledger", "cap", "reviews-2026", "--epsilon", 5, "--delta", 1e-6)
    assert (answer.code, answer.err) == (0, "")
    assert train(reviews, "--epsilon", 2).code == 0
    spent = shown(confide)["reviews-2026"]
    assert spent["epsilon_pld"] < spent["epsilon_filter"] < 5
    assert spent["left"] == 5 - spent["epsilon_filter"]
    message = train(reviews, "--epsilon", 4, out="second").message()
    assert "the cap on reviews-2026 is epsilon = 5" in message
    assert not (tmp_path / "second").exists()
    assert shown(confide)["reviews-2026"] == spent
    assert (
        "runs were charged before this cap"
        in confide("ledger", "cap", "reviews-2026", "--epsilon", 20, "--delta", 1e-6).err
    )
    assert train(reviews, "--epsilon", 4, out="second").code == 0


def test_a_dry_run_asks_the_ledger(confide: Confide, train: Train, reviews: Path) -> None:
    """Whether a run would be admitted is said before it is paid for; asking starts no ledger."""
    assert train(reviews, "--dry-run", "--json").json()["ledger"] is None
    assert confide("ledger", "cap", "reviews-2026", "--epsilon", 5, "--delta", "1e-6").code == 0
    plan = train(reviews, "--dry-run", "--json").json()["ledger"]
    assert (plan["before"], plan["cap"], plan["fits"]) == (0.0, 5, True)
    assert plan["after"] > 4
    said = train(reviews, "--dry-run", "--epsilon", 50).out
    assert "with this run (cap 5)" in said
    assert "this run would be refused" in said
    assert "by the filter" not in train(reviews, "--dry-run", "--ledger", "none").out


def test_looking_starts_no_ledger(confide: Confide, tmp_path: Path) -> None:
    """A slip in a name would be a new, empty ledger in which every hash is right."""
    missing = tmp_path / "mistyped.sqlite"
    for command in (("verify",), ("show",), ("export", tmp_path / "all.json")):
        assert "isn't there" in confide("ledger", *command, "--ledger", missing).message()
    assert not missing.exists()


def test_a_ledger_by_name_and_none(confide: Confide, train: Train, reviews: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    assert train(reviews, "--ledger", other).code == 0
    assert not own().exists()
    assert list(shown(confide, "--ledger", f"sqlite:///{other}")) == ["reviews-2026"]
    answer = train(reviews, "--ledger", "none", out="second")
    assert answer.code == 0
    assert "no ledger is charged" in answer.err
    assert not own().exists()
    statement = json.loads((tmp_path / "second" / "release" / "statement.json").read_text())
    assert statement["ledger"] is None


def test_what_claims_nothing_needs_no_ledger(train: Train, reviews: Path) -> None:
    assert train(reviews, "--simulate", 1).code == 0
    assert train(reviews, "--method", "non-private", out="second").code == 0
    assert train(reviews, "--dry-run", out="third").code == 0
    assert not own().exists()


def test_an_unusable_ledger_trains_nothing(train: Train, reviews: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"")
    before = listing(tmp_path)
    assert "is empty" in train(reviews, "--ledger", broken).message()
    assert "can't be used" in train(reviews, "--ledger", broken / "below").message()
    assert listing(tmp_path) == before


def test_the_python_api_charges_too(
    confide: Confide, make_task: Callable[..., object], tiny_base: Path, tmp_path: Path
) -> None:
    import confide as library

    quick = {"steps": 2, "expected_batch": 10, "max_length": 20}
    library.train(make_task(), base=str(tiny_base), dataset="a", **quick)
    library.train(make_task(), base=str(tiny_base), dataset="b", ledger=str(tmp_path / "l.sqlite"), **quick)
    library.train(make_task(), base=str(tiny_base), dataset="c", ledger="none", **quick)
    assert list(shown(confide)) == ["a"]
    assert list(shown(confide, "--ledger", tmp_path / "l.sqlite")) == ["b"]


def test_plan_says_what_fits(confide: Confide, train: Train, reviews: Path) -> None:
    setting = ("--sampling-rate", 0.1, "--steps", 20)
    assert "neither a cap nor a run" in confide("ledger", "plan", "reviews-2026", *setting).message()
    assert confide("ledger", "cap", "reviews-2026", "--epsilon", 4, "--delta", 1e-6).code == 0
    assert train(reviews, "--epsilon", 1).code == 0
    before = shown(confide)
    found = confide("ledger", "plan", "reviews-2026", *setting, "--json").json()
    assert found["fits"]
    assert found["epsilon_before"] == before["reviews-2026"]["epsilon_filter"]
    assert 3.98 < found["epsilon_after"] <= 4
    less = ("--noise-multiplier", found["noise_multiplier"] / 1.01)
    answer = confide("ledger", "plan", "reviews-2026", *setting, *less)
    assert "would be refused" in answer.out
    pair = confide("ledger", "plan", "reviews-2026", *setting, "--queries", 2, "--json").json()
    assert pair["noise_multiplier"] == pytest.approx(2**0.5 * found["noise_multiplier"], rel=3e-4)
    assert shown(confide) == before  # nothing was charged


def test_tables(confide: Confide, train: Train, reviews: Path) -> None:
    assert train(reviews).code == 0
    confide("ledger", "cap", "wards", "--epsilon", 3, "--delta", 1e-7)
    answer = confide("ledger", "show")
    assert all(word in answer.out for word in ("reviews-2026", "wards", "ε by filter", "ε by PLD", "left"))
    answer = confide("ledger", "show", "reviews-2026")
    assert all(word in answer.out for word in ("settled", "all 2"))
    assert "wards" not in answer.out
    message = confide("ledger", "show", "review").message()
    assert "knows no data set 'review'; it knows reviews-2026, wards" in message


def test_export_can_be_checked_by_anybody(
    confide: Confide, train: Train, reviews: Path, tmp_path: Path
) -> None:
    assert train(reviews).code == 0
    file = tmp_path / "ledger.json"
    told = confide("ledger", "export", file, "--json").json()
    content = json.loads(file.read_text())
    previous = "0" * 64

    def text(value: object) -> str:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    for entry in content["entries"]:
        covered = [entry["position"], previous, entry["dataset"], text(entry["content"])]
        assert entry["hash"] == hashlib.sha256(text(covered).encode()).hexdigest()
        previous = entry["hash"]
    assert content["head"] == told["head"] == previous
    assert [entry["content"]["kind"] for entry in content["entries"]] == ["reserve", "settle"]
    assert "exists already" in confide("ledger", "export", file).message()


def test_verify_finds_tampering(confide: Confide, train: Train, reviews: Path) -> None:
    assert train(reviews).code == 0
    told = confide("ledger", "verify", "--json").json()
    assert told["entries"] == 2
    with sqlite3.connect(own()) as connection:
        connection.execute("DELETE FROM confide_entries WHERE position = 2")
    connection.close()
    assert confide("ledger", "verify").code == 0
    assert "cut off or rewritten" in confide("ledger", "verify", "--head", told["head"]).message()
    with sqlite3.connect(own()) as connection:
        connection.execute("UPDATE confide_entries SET dataset = 'other'")
    connection.close()
    for command in (("verify",), ("show",), ("cap", "d", "--epsilon", 1, "--delta", 1e-6)):
        assert "altered at entry 1" in confide("ledger", *command).message()


def test_units_that_dont_add_up_are_shown(confide: Confide) -> None:
    from confide.privacy.events import Composed, PoissonGaussian
    from confide.privacy.ledger import Ledger
    from confide.privacy.statement import Spending

    for unit in ("record", "patient"):
        spending = Spending(
            run=unit,
            dataset="clinic",
            units=100,
            unit=unit,
            adjacency="add-or-remove-one",
            event=Composed((PoissonGaussian(0.1, (2.0,), 10),)),
            delta=1e-6,
            schedule=None,
            steps_run={},
        )
        Ledger.open().reserve(spending)
    row = shown(confide)["clinic"]
    assert row["epsilon_filter"] is None
    assert "different units" in row["problem"]
    assert "No figure: runs on clinic protect different units" in confide("ledger", "show").out


def test_a_name_in_brackets_is_no_markup(
    confide: Confide, train: Train, reviews: Path, tmp_path: Path
) -> None:
    name = "notes [draft] [/b]"
    message = train(reviews, "--dataset", name).message()
    assert "name the task with --task" in message
    assert train(reviews, "--dataset", name, "--task", "notes").code == 0
    assert name in confide("ledger", "show").out
    assert name in " ".join(confide("verify", tmp_path / "run" / "release").out.split())
