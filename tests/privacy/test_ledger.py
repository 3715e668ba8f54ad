"""The ledger: nothing is asked uncharged, no cap is passed, and nothing that was written changes unseen."""

from __future__ import annotations

import datetime
import glob
import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy

from confide.errors import PrivacyError
from confide.privacy import chain, ledger
from confide.privacy.accountant import epsilon
from confide.privacy.composition import training_spending, training_statement
from confide.privacy.events import PoissonGaussian
from confide.privacy.ledger import Ledger
from confide.privacy.statement import Base, LedgerEntry, Statement
from confide.privacy.streams import Schedule

from .ledger_process import spending

PROCESS = Path(__file__).with_name("ledger_process.py")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Callable[[], str]]:
    """Starts a PostgreSQL server of our own; each call gives the URL of a fresh database in it."""
    psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")
    found = next(iter(sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"))), None) or shutil.which("initdb")
    if found is None:
        pytest.skip("PostgreSQL's programs are not installed")
    programs = Path(found).parent
    folder = Path(tempfile.mkdtemp(prefix="pg"))  # a short path: sockets allow a hundred characters
    as_user: list[str] = []
    if os.geteuid() == 0:  # the server refuses to run as root
        if shutil.which("runuser") is None or not _user_exists("postgres"):
            pytest.skip("PostgreSQL doesn't run as root, and there is no user postgres")
        shutil.chown(folder, "postgres")
        as_user = ["runuser", "-u", "postgres", "--"]

    def call(program: str, *arguments: str) -> None:
        command = [*as_user, str(programs / program), *arguments]
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, timeout=120)

    data = str(folder / "data")
    call("initdb", "-D", data, "-U", "confide", "-A", "trust", "--no-sync")
    options = f"-k {folder} -c listen_addresses='' -c fsync=off"
    call("pg_ctl", "-D", data, "-w", "-l", str(folder / "log"), "-o", options, "start")
    count = 0

    def fresh() -> str:
        nonlocal count
        count += 1
        with psycopg.connect(host=str(folder), user="confide", dbname="postgres", autocommit=True) as server:
            server.execute(f"CREATE DATABASE ledger{count}")
        return f"postgresql://confide@/ledger{count}?host={folder}"

    try:
        yield fresh
    finally:
        call("pg_ctl", "-D", data, "-m", "fast", "-w", "stop")
        shutil.rmtree(folder, ignore_errors=True)


def _user_exists(name: str) -> bool:
    import pwd

    return any(entry.pw_name == name for entry in pwd.getpwall())


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    return str(request.getfixturevalue("postgres")())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def filled(file: Path) -> Path:
    """A SQLite ledger of seven entries."""
    book = Ledger.open(str(file))
    book.cap("clinic", 6, 1e-6)
    first = book.reserve(spending("a"))
    book.settle(first, {})
    book.reserve(spending("b"))
    third = book.reserve(spending("c", dataset="ward"))
    book.refund(third)
    book.reserve(spending("d", dataset="ward"))
    return file


# ------------------------------------------------------------------ what is written


def test_a_reservation_is_there_for_others_before_anything_runs(url: str) -> None:
    entry = Ledger.open(url).reserve(spending("a"))
    account = Ledger.open(url).account("clinic")
    (charge,) = account.charges
    assert (charge.entry, charge.state) == (entry.hash, "reserved")
    assert charge.spending == spending("a")


def test_settling_notes_what_ran_and_changes_no_price(url: str, schedule: Callable[..., Schedule]) -> None:
    book = Ledger.open(url)
    planned = training_spending(schedule(), delta=1e-6, dataset="clinic", units=1000, run="a", steps_run={})
    entry = book.reserve(planned)
    before = book.account("clinic").filtered()
    settled = book.settle(entry, {"all": 3})
    account = book.account("clinic")
    assert account.filtered() == before
    assert account.charges[0].state == "settled"
    assert account.charges[0].spending == planned.model_copy(update={"steps_run": {"all": 3}})
    assert book.head() == settled.hash
    with pytest.raises(PrivacyError, match="settled already"):
        book.settle(entry, {"all": 4})
    with pytest.raises(PrivacyError, match="settled already"):
        book.refund(entry)
    assert book.head() == settled.hash


def test_more_steps_than_planned_are_refused(file: Path, schedule: Callable[..., Schedule]) -> None:
    book = Ledger.open(str(file))
    entry = book.reserve(
        training_spending(schedule(), delta=1e-6, dataset="clinic", units=1000, run="a", steps_run={})
    )
    with pytest.raises(PrivacyError, match="ran 51 steps, but 50 were planned"):
        book.settle(entry, {"all": 51})
    assert book.account("clinic").charges[0].state == "reserved"


def test_a_refund_gives_back_everything_once(url: str) -> None:
    book = Ledger.open(url)
    book.cap("clinic", 1, 1e-6)
    entry = book.reserve(spending("a"))
    assert book.account("clinic").filtered() > 0
    book.refund(entry)
    assert book.account("clinic").filtered() == 0
    with pytest.raises(PrivacyError, match="refunded already"):
        book.refund(entry)
    with pytest.raises(PrivacyError, match="refunded already"):
        book.settle(entry, {})
    with pytest.raises(PrivacyError, match="charged to clinic already"):
        book.reserve(spending("a"))  # one run, one identifier


def test_what_charges_nothing_is_refused(file: Path) -> None:
    book = Ledger.open(str(file))
    with pytest.raises(PrivacyError, match="nothing to charge"):
        book.reserve(spending().model_copy(update={"event": None, "no_claim": "a simulation"}))
    with pytest.raises(PrivacyError, match="no delta"):
        book.reserve(spending().model_copy(update={"delta": None}))
    with pytest.raises(PrivacyError, match="can't name a data set"):
        book.reserve(spending(dataset="a\nb"))
    with pytest.raises(PrivacyError, match="epsilon must be a positive number"):
        book.cap("clinic", float("nan"), 1e-6)
    assert book.entries() == ()


def test_an_event_that_is_not_its_schedules_is_refused(file: Path, schedule: Callable[..., Schedule]) -> None:
    real = training_spending(schedule(), delta=1e-6, dataset="d", units=9, run="a", steps_run={})
    with pytest.raises(PrivacyError, match="isn't what its schedule spends"):
        Ledger.open(str(file)).reserve(real.model_copy(update={"event": spending().event}))


# ------------------------------------------------------------------ the cap


def test_a_refusal_says_what_is_left(url: str) -> None:
    book = Ledger.open(url)
    one = book.account("clinic").filtered(spending())
    assert one is not None
    book.cap("clinic", 1.2 * one, 1e-6)
    book.reserve(spending("a"))
    head = book.head()
    with pytest.raises(PrivacyError) as refusal:
        book.reserve(spending("b"))
    message = str(refusal.value)
    assert "clinic" in message
    left = float(message.split("so ")[1].split(" is left")[0])
    assert 0.2 * one * 0.999 < left <= 0.2 * one
    assert book.head() == head  # nothing was written
    book.reserve(spending("c", dataset="ward"))  # another data set has its own account
    book.cap("clinic", 3 * one, 1e-6)
    book.reserve(spending("b"))


def test_a_first_run_may_use_the_whole_cap(file: Path) -> None:
    """Nothing was seen before it, so its own bound by PLD counts; then the filter lets nothing follow."""
    book = Ledger.open(str(file))
    alone = epsilon(spending().event, 1e-6).epsilon  # type: ignore[arg-type]
    filtered = book.account("clinic").filtered(spending())
    assert filtered is not None
    assert alone < filtered
    for dataset, cap, fits in (("clinic", alone * 1.001, True), ("ward", alone * 0.999, False)):
        book.cap(dataset, cap, 1e-6)
        sigma = book.account(dataset).least_noise(0.05, 100, 1, "add-or-remove-one")
        assert (sigma < 4) == fits
        assert sigma == pytest.approx(4, rel=2e-3)
        if not fits:
            with pytest.raises(PrivacyError, match="the cap on ward"):
                book.reserve(spending(dataset=dataset))
    entry = book.reserve(spending("a"))
    with pytest.raises(PrivacyError, match="so 0 is left"):
        book.reserve(spending("b", sigma=1000))
    book.refund(entry)
    book.reserve(spending("c"))


def test_case_and_blanks_name_no_other_data_set(file: Path) -> None:
    book = Ledger.open(str(file))
    book.cap("Ward  A", 0.1, 1e-6)
    with pytest.raises(PrivacyError, match="the cap on ward a"):
        book.reserve(spending(dataset=" ward a"))
    book.cap("WARD A", 5, 1e-6)
    book.reserve(spending("a", dataset="ward A"))
    assert list(book.accounts()) == ["ward a"]
    assert book.account("wArd a").charges[0].spending.dataset == "ward A"


def test_no_unit_no_sum(file: Path) -> None:
    book = Ledger.open(str(file))
    book.cap("clinic", 8, 1e-6)
    book.reserve(spending("a"))
    with pytest.raises(PrivacyError, match="different units \\(patient, record\\)"):
        book.reserve(spending("b", unit="patient"))


def test_a_wider_adjacency_prices_everything(file: Path) -> None:
    book = Ledger.open(str(file))
    book.reserve(spending("a"))
    book.reserve(spending("b", adjacency="replace-one"))
    mixed = book.account("clinic").filtered()
    book.reserve(spending("x", dataset="ward", adjacency="replace-one"))
    book.reserve(spending("y", dataset="ward", adjacency="replace-one"))
    assert mixed == pytest.approx(book.account("ward").filtered(), rel=1e-12)


def test_fixed_schedules_compose_tighter_than_the_filter(file: Path) -> None:
    book = Ledger.open(str(file))
    for run in "abc":
        book.reserve(spending(run))
    account = book.account("clinic")
    composed = account.composed()
    assert composed is not None
    assert composed.epsilon == epsilon(PoissonGaussian(0.05, (4.0,), 300), 1e-6).epsilon
    assert composed.epsilon < account.filtered()


def test_least_noise_just_fits(file: Path) -> None:
    book = Ledger.open(str(file))
    with pytest.raises(PrivacyError, match="has no cap"):
        book.account("clinic").least_noise(0.05, 100, 1, "add-or-remove-one")
    book.cap("clinic", 2, 1e-6)
    book.reserve(spending())
    sigma = book.account("clinic").least_noise(0.05, 100, 1, "add-or-remove-one")
    with pytest.raises(PrivacyError, match="the cap on clinic"):
        book.reserve(spending(sigma=sigma * 0.999))
    book.reserve(spending(sigma=sigma))
    book.cap("clinic", 1, 1e-6)
    with pytest.raises(PrivacyError, match="nothing is left"):
        book.account("clinic").least_noise(0.05, 100, 1, "add-or-remove-one")


def test_clocks_order_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(datetime.datetime(2030 - year, 1, 1, tzinfo=datetime.UTC) for year in range(10))

    class Backwards(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
            return next(times)

    monkeypatch.setattr(chain.datetime, "datetime", Backwards)
    book = Ledger.open(str(file))
    book.cap("clinic", 1, 1e-6)
    entry = book.reserve(spending("a"))
    book.settle(entry, {})
    book.cap("clinic", 5, 1e-6)
    assert [e.value["time"][:4] for e in book.verify()] == ["2030", "2029", "2028", "2027"]
    cap = book.account("clinic").cap
    assert cap is not None
    assert cap.epsilon == 5


# ------------------------------------------------------------------ crashes and crowds


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROCESS), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_a_killed_run_stays_spent(url: str) -> None:
    Ledger.open(url)
    process = start("reserve", url, "killed")
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    book = Ledger.open(url)
    (charge,) = book.account("clinic").charges
    assert (charge.spending.run, charge.state) == ("killed", "reserved")
    assert book.account("clinic").filtered() > 0
    book.verify()


@pytest.mark.slow
def test_eight_processes_never_pass_a_cap(url: str, tmp_path: Path) -> None:
    """What they spend together is what one process alone could have spent."""
    fits = 20
    book = Ledger.open(url)
    limit = book.account("clinic").filtered(*[spending() for _ in range(fits)])
    more = book.account("clinic").filtered(*[spending() for _ in range(fits + 1)])
    assert limit is not None
    assert more is not None
    assert more > limit
    book.cap("clinic", (limit + more) / 2, 1e-6)
    processes = [start("charge", url, str(tmp_path)) for _ in range(8)]
    while len(list(tmp_path.glob("ready-*"))) < 8 and all(process.poll() is None for process in processes):
        time.sleep(0.05)
    (tmp_path / "start").touch()
    admitted = []
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        admitted.append(int(out))
    assert sum(admitted) == fits
    account = book.account("clinic")
    assert len(account.charges) == fits
    assert account.filtered() == pytest.approx(limit, rel=1e-12)
    book.verify()


def test_many_may_start_one_ledger_at_once(file: Path) -> None:
    processes = [start("reserve", str(file), f"run{number}") for number in range(3)]
    for process in processes:
        process.communicate(timeout=120)
    charges = Ledger.open(str(file)).account("clinic").charges
    assert {charge.spending.run for charge in charges} == {"run0", "run1", "run2"}
    assert {path.name for path in file.parent.iterdir()} == {"ledger.sqlite"}


# ------------------------------------------------------------------ tampering


def change(file: Path, *statements: str) -> None:
    with sqlite3.connect(file) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE confide_entries SET content = replace(content, '4.0', '9.0') WHERE position = 2",
        "UPDATE confide_entries SET content = replace(content, ':6', ':8') WHERE position = 1",
        "UPDATE confide_entries SET dataset = 'other' WHERE position = 4",
        "UPDATE confide_entries SET hash = (SELECT hash FROM confide_entries WHERE position = 1) "
        "WHERE position = 7",
        "DELETE FROM confide_entries WHERE position = 4",
        "DELETE FROM confide_entries WHERE position = 1",
        "INSERT INTO confide_entries SELECT 8, dataset, content, hash FROM confide_entries "
        "WHERE position = 6",
        "UPDATE confide_entries SET position = CASE position WHEN 4 THEN -5 WHEN 5 THEN -4 END "
        "WHERE position IN (4, 5)",
    ],
)
def test_edits_show(filled: Path, statement: str) -> None:
    book = Ledger.open(str(filled))
    book.verify()
    change(filled, statement, "UPDATE confide_entries SET position = -position WHERE position < 0")
    for look in (book.verify, book.head, lambda: book.reserve(spending("z"))):
        with pytest.raises(PrivacyError, match="the ledger was altered"):
            look()


def test_a_cut_tail_shows_against_a_head(filled: Path) -> None:
    book = Ledger.open(str(filled))
    head = book.head()
    early = book.entries()[3].hash
    book.verify(head)
    book.reserve(spending("e"))
    book.verify(head)  # later entries are fine
    change(filled, "DELETE FROM confide_entries WHERE position >= 7")
    book.verify()
    book.verify(early)
    with pytest.raises(PrivacyError, match="cut off or rewritten"):
        book.verify(head)


def test_a_rewritten_history_shows_against_a_head(filled: Path) -> None:
    """Who can write the file can compute new hashes, but not make an old head cover them."""
    book = Ledger.open(str(filled))
    head, entries = book.head(), book.entries()
    cheaper = {**entries[6].value, "spending": spending("d", "ward", sigma=90).model_dump(mode="json")}
    forged = chain.following(entries[:6], "ward", cheaper)
    with sqlite3.connect(filled) as connection:
        connection.execute(
            "UPDATE confide_entries SET content = ?, hash = ? WHERE position = 7",
            (forged.content, forged.hash),
        )
    connection.close()
    book.verify()
    with pytest.raises(PrivacyError, match="cut off or rewritten"):
        book.verify(head)


def test_hashes_are_what_the_guide_says(filled: Path) -> None:
    previous = "0" * 64
    for entry in Ledger.open(str(filled)).entries():
        text = json.dumps(
            [entry.position, previous, entry.dataset, entry.content],
            separators=(",", ":"),
            ensure_ascii=False,
        )
        assert entry.hash == hashlib.sha256(text.encode()).hexdigest()
        previous = entry.hash


def test_an_entry_of_another_kind_is_refused(filled: Path) -> None:
    book = Ledger.open(str(filled))
    newer = chain.following(book.entries(), "clinic", {"kind": "gift"})
    with sqlite3.connect(filled) as connection:
        connection.execute(
            "INSERT INTO confide_entries VALUES (?, ?, ?, ?)",
            (newer.position, newer.dataset, newer.content, newer.hash),
        )
    connection.close()
    with pytest.raises(PrivacyError, match="unknown kind 'gift'"):
        book.reserve(spending("z"))


# ------------------------------------------------------------------ bad files, disks and URLs


@pytest.mark.parametrize("kept", [0, 10, 100, 2048, 5000])
def test_a_truncated_file_is_no_new_ledger(filled: Path, kept: int) -> None:
    os.truncate(filled, kept)
    with pytest.raises(PrivacyError, match=r"ledger\.sqlite|altered"):
        Ledger.open(str(filled)).reserve(spending("z"))
    assert filled.stat().st_size == kept


def test_other_files_are_refused(file: Path) -> None:
    file.write_text("text,label\nfine,pos\n" * 100)
    with pytest.raises(PrivacyError, match="not a database"):
        Ledger.open(str(file))
    file.unlink()
    change(file, "CREATE TABLE other (a)")
    with pytest.raises(PrivacyError, match="no ledger of confide"):
        Ledger.open(str(file))


def test_a_newer_schema_is_refused(filled: Path) -> None:
    change(filled, "UPDATE confide_ledger SET schema = 'confide.ledger/2'")
    with pytest.raises(PrivacyError, match=r"schema confide\.ledger/2, and this confide writes"):
        Ledger.open(str(filled))


def test_a_ledger_that_cant_be_written_lets_nothing_run(filled: Path) -> None:
    book = Ledger.open(f"sqlite:///file:{filled}?mode=ro&uri=true")
    assert len(book.entries()) == 7
    with pytest.raises(PrivacyError, match="readonly"):
        book.reserve(spending("z"))
    with pytest.raises(PrivacyError, match="can't be used"):
        Ledger.open("/proc/nowhere/ledger.sqlite")
    with pytest.raises(PrivacyError, match="can't be used"):
        Ledger.open(str(filled / "below-a-file.sqlite"))
    assert len(Ledger.open(str(filled)).entries()) == 7


def test_a_full_disk_leaves_the_ledger_whole(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = Ledger.open(str(filled))
    head = book.head()
    plain = ledger._engine

    def small(url: sqlalchemy.URL) -> sqlalchemy.Engine:
        engine = plain(url)

        @sqlalchemy.event.listens_for(engine, "connect")
        def _limit(connection: sqlite3.Connection, _record: object) -> None:
            connection.execute("PRAGMA max_page_count = 1")  # no page more than there are

        return engine

    monkeypatch.setattr(ledger, "_engine", small)
    tight = Ledger.open(str(filled))
    with pytest.raises(PrivacyError, match="full"):
        tight.reserve(spending("z", dataset="d" * 10_000))
    book.verify(head)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
        ("mysql://a/b", "SQLite or PostgreSQL"),
        ("://", "can't be read"),
        ("postgresql://user:secret@127.0.0.1:1/none?connect_timeout=2", r"can't be used|psycopg"),
    ],
)
def test_bad_urls(bad: str, said: str) -> None:
    with pytest.raises(PrivacyError, match=said) as refusal:
        Ledger.open(bad)
    assert "secret" not in str(refusal.value)


def test_the_default_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFIDE_LEDGER", str(tmp_path / "a" / "b.sqlite"))
    Ledger.open()
    assert (tmp_path / "a" / "b.sqlite").exists()
    monkeypatch.delenv("CONFIDE_LEDGER")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    Ledger.open().reserve(spending("a"))
    assert (tmp_path / "data" / "confide" / "ledger.sqlite").exists()
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Ledger.open().accounts() == {}
    assert (tmp_path / "home" / ".local" / "share" / "confide" / "ledger.sqlite").exists()


# ------------------------------------------------------------------ statements


def test_statements_without_a_ledger_are_still_read(schedule: Callable[..., Schedule]) -> None:
    made = training_statement(
        schedule(),
        delta=1e-6,
        dataset="clinic",
        units=1000,
        run="a",
        base=Base(name="base", hash="0" * 64),
        steps_run={},
    )
    old = {key: value for key, value in made.to_json().items() if key != "ledger"}
    assert Statement.model_validate(old) == made
    noted = made.model_copy(update={"ledger": LedgerEntry(entry="1" * 64, head="2" * 64)})
    assert Statement.model_validate(noted.to_json()) == noted
