"""`release.verify`: what is right is found right, and every forgery is found and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from confide.privacy import statement as statements
from confide.privacy.calibration import delta_warning
from confide.privacy.chain import Entry, canonical
from confide.privacy.composition import compose, training_spending, training_statement
from confide.privacy.ledger import Ledger
from confide.privacy.signature import public_text, sign
from confide.privacy.statement import Base, LedgerEntry, Statement
from confide.privacy.streams import Schedule
from confide.release.format import ReleaseInfo
from confide.release.hashes import base_hash
from confide.release.verify import Check, examine
from confide.release.write import write_release

Save = Callable[[Path], None]
OWNER, MERGER, STRANGER = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2, 3))
TRUSTED = {public_text(OWNER): "Clinic North", public_text(MERGER): "Merger"}


@pytest.fixture(scope="module")
def schedule(statement: Statement) -> Schedule:
    found = statement.spendings[0].schedule
    assert found is not None
    return found


@pytest.fixture(scope="module")
def honest(base: Path, schedule: Schedule) -> Statement:
    return _run(base, schedule, "films-2026")


def _run(base: Path, schedule: Schedule, dataset: str, ledger: LedgerEntry | None = None) -> Statement:
    return training_statement(
        schedule,
        delta=1e-6,
        dataset=dataset,
        units=10000,
        run=f"run-{dataset}",
        base=Base(name="someone/encoder", hash=base_hash(base)),
        steps_run={"all": 50},
        ledger=ledger,
    )


@pytest.fixture(scope="module")
def signed(
    tmp_path_factory: pytest.TempPathFactory, save: Save, info: ReleaseInfo, honest: Statement
) -> Path:
    folder = tmp_path_factory.mktemp("signed") / "release"
    write_release(folder, save=save, info=info, statement=honest, key=OWNER)
    return folder


@pytest.fixture
def release(signed: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(signed, tmp_path / "release"))


def results(checks: tuple[Check, ...]) -> dict[str, str]:
    return {check.what: check.result for check in checks}


def details(checks: tuple[Check, ...]) -> dict[str, str]:
    return {check.what: check.detail for check in checks}


def failures(folder: Path, **options: Any) -> list[str]:
    _, checks = examine(folder, **options)
    return [f"{check.what}: {check.detail}" for check in checks if check.result == "failed"]


def alter(folder: Path, *path: str | int, to: Any, key: Ed25519PrivateKey | None = None) -> None:
    """Change a value of the statement; with a key, sign it anew."""
    said = statements.load(folder)
    place: Any = said
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = to
    if key:
        said = sign(Statement.model_validate({**said, "signature": None}), key).to_json()
    (folder / "statement.json").write_text(json.dumps(said))


def test_a_good_release(release: Path, honest: Statement) -> None:
    statement, checks = examine(release, TRUSTED)
    assert statement == statements.read(release)
    parts = ("statement", "files", "weights", "claim", "signature")
    assert results(checks) == {**dict.fromkeys(parts, "ok"), "ledger": "note"}
    assert "Clinic North" in details(checks)["signature"]
    assert honest.claim is not None
    assert f"{honest.claim.epsilon:.3f}"[:4] in details(checks)["claim"]


def test_a_signature_stripped_or_a_strangers(release: Path) -> None:
    alter(release, "signature", to=None)
    _, checks = examine(release)
    assert results(checks)["signature"] == "note"
    assert "nobody asserts that noise was added" in details(checks)["signature"]
    (found,) = failures(release, trusted=TRUSTED)
    assert "was demanded" in found
    alter(release, "signature", to=None, key=STRANGER)
    assert failures(release) == []
    (found,) = failures(release, trusted=TRUSTED)
    assert "none of the given keys" in found
    assert public_text(STRANGER) in found


@pytest.mark.parametrize("key", [None, OWNER], ids=["as found", "signed anew"])
def test_a_forged_claim(release: Path, key: Ed25519PrivateKey | None) -> None:
    alter(release, "claim", "epsilon", to=0.1, key=key)
    found = failures(release)
    assert found[0].startswith("claim: the claim doesn't hold: it says epsilon = 0.1, but its events cost")
    assert len(found) == (2 if key is None else 1)


def test_altered_events_and_schedules(release: Path) -> None:
    stream = ("spendings", 0, "schedule", "streams", 0)
    alter(release, *stream, "noise_multiplier", to=9.0, key=OWNER)
    assert "isn't what its schedule spends" in failures(release)[0]
    alter(release, "spendings", 0, "event", "events", 0, "noise_multipliers", to=[9.0], key=OWNER)
    alter(release, "claim", "epsilon_lower", to=None, key=OWNER)
    assert failures(release) == []  # more noise than there was: who signed lies, and nobody else can know
    alter(release, *stream, "noise_multiplier", to=0.5)
    assert any("changed after it was signed" in found for found in failures(release))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "confide.json", "tokenizer.json"])
def test_altered_files(release: Path, name: str) -> None:
    (release / name).write_bytes((release / name).read_bytes() + b"\n")
    (found,) = [found for found in failures(release) if "changed after its statement" in found]
    assert name in found


def test_files_besides_and_missing(release: Path) -> None:
    (release / "losses.json").write_text("[]")
    assert "no part of a release: losses.json" in failures(release)[0]
    (release / "losses.json").unlink()
    (release / "vocab.txt").write_text("secret")
    assert "says nothing about vocab.txt" in failures(release)[0]
    (release / "vocab.txt").unlink()
    (release / "config.json").unlink()
    assert "config.json, which is missing" in failures(release)[0]
    (release / "model.safetensors").unlink()
    assert any(found.startswith("weights") and "missing" in found for found in failures(release))


def test_people_may_edit_the_card(release: Path) -> None:
    (release / "README.md").write_text("Licence: ours.")
    _, checks = examine(release, TRUSTED)
    assert results(checks)["card"] == "note"
    assert not failures(release)
    (release / "README.md").unlink()
    assert not failures(release)


def test_what_is_no_statement(release: Path) -> None:
    text = (release / "statement.json").read_text()
    for changed, message in (
        (text[:-100], "truncated"),
        (text.replace("confide.statement/1", "confide.statement/9"), "confide.statement/9"),
        ("{}", "not a valid statement"),
    ):
        (release / "statement.json").write_text(changed)
        statement, checks = examine(release)
        assert statement is None
        assert [check.result for check in checks] == ["failed"]
        assert message in checks[0].detail
    (release / "statement.json").unlink()
    assert "no privacy is claimed" in failures(release)[0]


def test_no_claim_is_a_note(tmp_path: Path, save: Save, info: ReleaseInfo, honest: Statement) -> None:
    bare = honest.model_copy(update={"claim": None, "no_claim": "it was a test", "assumptions": ()})
    write_release(tmp_path / "release", save=save, info=info, statement=bare)
    _, checks = examine(tmp_path / "release")
    assert results(checks)["claim"] == "note"
    assert not failures(tmp_path / "release")


def _merged(folder: Path, save: Save, info: ReleaseInfo, *parts: Statement) -> Path:
    """A folder with a merge's statement; that the weights are one model's own doesn't matter here."""
    statement = compose(parts, disjoint=True, base=parts[0].base)
    write_release(folder, save=save, info=info, statement=statement, key=MERGER)
    return folder


def test_every_input_must_be_signed(
    tmp_path: Path, base: Path, save: Save, info: ReleaseInfo, schedule: Schedule
) -> None:
    one, two, three = (_run(base, schedule, name) for name in ("one", "two", "three"))
    inner = sign(compose([sign(one, OWNER), sign(two, OWNER)], disjoint=True, base=one.base), MERGER)
    good = _merged(tmp_path / "good", save, info, inner, sign(three, OWNER))
    _, checks = examine(good, TRUSTED)
    assert not failures(good, trusted=TRUSTED)
    inputs = [what for what in results(checks) if what.startswith("input")]
    assert inputs == ["input 1", "input 1.1", "input 1.2", "input 2"]
    only = {public_text(MERGER): "Merger"}
    assert [f.split(":")[0] for f in failures(good, trusted=only)] == ["input 1.1", "input 1.2", "input 2"]
    unsigned = _merged(tmp_path / "unsigned", save, info, sign(one, OWNER), two)
    assert results(examine(unsigned)[1])["input 2"] == "note"
    (failure,) = failures(unsigned, trusted=TRUSTED)
    assert failure.startswith("input 2: not signed")
    quieter = sign(one, OWNER).model_copy(update={"confide": "9"})
    changed = _merged(tmp_path / "changed", save, info, quieter)
    (failure,) = failures(changed, trusted=TRUSTED)
    assert failure.startswith("input 1: input 1 was changed after it was signed")


def test_a_statement_that_comes_in_twice_is_looked_at_once(
    tmp_path: Path, base: Path, save: Save, info: ReleaseInfo, schedule: Schedule
) -> None:
    one = sign(_run(base, schedule, "one"), OWNER)
    inner = compose([one, one], disjoint=False, base=one.base)
    _, checks = examine(_merged(tmp_path / "twice", save, info, inner, inner))
    told = {check.what: check.detail for check in checks if check.what.startswith("input")}
    assert list(told) == ["input 1", "input 1.1", "input 1.2", "input 2"]
    assert told["input 1.2"] == "the same statement as input 1.1"
    assert told["input 2"] == "the same statement as input 1"


def test_the_ledger(tmp_path: Path, base: Path, save: Save, info: ReleaseInfo, schedule: Schedule) -> None:
    book, other = (Ledger.open(str(tmp_path / f"{name}.sqlite")) for name in ("book", "other"))
    planned = training_spending(
        schedule, delta=1e-6, dataset="films-2026", units=10000, run="run-films-2026", steps_run={}
    )
    entry = book.reserve(planned)
    noted = LedgerEntry(entry=entry.hash, head=book.settle(entry, {"all": 50}).hash)
    folder = tmp_path / "release"
    run = _run(base, schedule, "films-2026", noted)
    write_release(folder, save=save, info=info, statement=run, key=OWNER)
    assert results(examine(folder, ledger=book.verify())[1])["ledger"] == "ok"
    assert "or was cut" in failures(folder, ledger=book.entries()[:-1])[0]
    assert "or was cut" in failures(folder, ledger=())[0]

    cheaper = planned.model_copy(update={"units": 9}).model_dump(mode="json")
    charge = Entry(1, "films-2026", canonical({"kind": "reserve", "spending": cheaper}), noted.entry)
    assert "for something else" in failures(folder, ledger=(charge, book.entries()[1]))[0]
    refunded = other.refund(other.reserve(planned))
    again = LedgerEntry(entry=other.entries()[0].hash, head=refunded.hash)
    alter(folder, "ledger", to=again.model_dump(), key=OWNER)
    assert "refunded run" in failures(folder, ledger=other.verify())[0]
    alter(folder, "ledger", to=None, key=OWNER)
    assert "names no ledger entry" in failures(folder, ledger=other.verify())[0]


def test_what_a_link_hides(release: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in ("extra", "heads"):
        (release / name).symlink_to(tmp_path / "elsewhere", target_is_directory=True)
        assert failures(release) == [f"files: {release} holds what is no part of a release: {name}"]
        (release / name).unlink()
    (release / "vocab.txt").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert failures(release) == [f"files: {release} holds what is no part of a release: vocab.txt"]
    (release / "vocab.txt").unlink()
    weights = release / "model.safetensors"
    weights.rename(tmp_path / "blob")  # as in the hub's cache
    weights.symlink_to(tmp_path / "blob")
    assert failures(release) == []


def test_a_delta_that_protects_nobody_is_told(release: Path) -> None:
    (spending,) = statements.read(release).spendings
    weak = f"{spending.dataset}: {delta_warning(0.5, spending.units)}."
    alter(release, "assumptions", to=[*statements.read(release).assumptions, weak])
    alter(release, "claim", "epsilon_lower", to=None)
    alter(release, "spendings", 0, "delta", to=0.5)
    alter(release, "claim", "delta", to=0.5, key=OWNER)
    _, checks = examine(release)
    assert results(checks)["claim"] == "note"
    assert "hardly protects anyone" in details(checks)["claim"]
