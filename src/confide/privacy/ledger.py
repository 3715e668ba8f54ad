"""What has been spent on each named data set, over all runs and people.

A run is charged before its first noisy query: the reservation, with the whole planned schedule, is
committed to disk first. What ran is noted afterwards and changes no price. Only a run that asked nothing is
refunded, so a crash leaves its reservation spent. Entries are only ever added, each covered by the hashes
that follow it (`chain`), and their order is their position: clocks don't matter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    insert,
    select,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from confide import files
from confide.errors import PrivacyError
from confide.privacy import chain, unsettled
from confide.privacy.account import Account, accounts
from confide.privacy.chain import SCHEMA as SCHEMA
from confide.privacy.chain import Entry
from confide.privacy.composition import check_spending
from confide.privacy.disjointness import canonical, check_dataset_name
from confide.privacy.statement import Spending
from confide.privacy.streams import Budget

VARIABLE = "CONFIDE_LEDGER"
_WAIT = 120  # seconds for others to finish writing
_LOCK = 0x636F6E66696465  # a number of our own among PostgreSQL's advisory locks

_tables = MetaData()
_schema = Table("confide_ledger", _tables, Column("schema", String(64), primary_key=True))
_entries = Table(
    "confide_entries",
    _tables,
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("dataset", Text, nullable=False),
    Column("content", Text, nullable=False),
    Column("hash", String(64), nullable=False),
)


class Ledger:
    """A ledger in a SQLite file or a PostgreSQL database. Safe for many processes at once.

    Writers take turns (SQLite's write lock, an advisory lock in PostgreSQL), and each reads the whole chain
    and checks it before it adds an entry, so no two can spend the same rest of a cap.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self.name = name
        self._engine = engine

    @classmethod
    def open(cls, url: str | None = None, *, start: bool = True) -> Ledger:
        """Open a ledger, and start one where none is.

        Runs that were given up while it couldn't be reached (`unsettled`) are settled now.

        Args:
            url: a database (`sqlite:///FILE`, `postgresql+psycopg://…`) or the path of a SQLite file; None
                for $CONFIDE_LEDGER, or else `confide/ledger.sqlite` in the user's data folder.
            start: whether a file that isn't there is made.

        Raises:
            PrivacyError: it can't be reached or written, is of a newer schema, truncated or altered.
        """
        text = url or os.environ.get(VARIABLE) or str(unsettled.data_folder() / "ledger.sqlite")
        place = _place(text)
        name = place.render_as_string(hide_password=True)
        with _explained(name):
            if place.get_backend_name() == "sqlite" and not (place.database or "").startswith("file:"):
                if not start and not Path(place.database or "").exists():
                    raise PrivacyError(f"the ledger {name} isn't there; name the one that was charged")
                _start_file(place, name)
            ledger = cls(_engine(place), name)
            ledger._check_schema()
        ledger._settle_noted()
        return ledger

    def reserve(self, spending: Spending) -> Entry:
        """Charge a run for everything it plans to ask, on disk when this returns.

        Args:
            spending: from `composition.training_spending`, with no steps run.

        Returns:
            The reservation, to be settled or refunded.

        Raises:
            PrivacyError: it would pass the data set's cap (the message says what is left), there is nothing
                to charge, or the ledger can't be trusted or written: nothing may be asked then.
        """
        check_spending(spending)
        if spending.event is None or spending.steps_run:
            raise PrivacyError(f"run {spending.run} has nothing to charge, or ran before it was charged")
        dataset = _checked_name(spending.dataset)

        def admitted(account: Account) -> None:
            account.admit(spending)

        value = {"kind": "reserve", "spending": spending.model_dump(mode="json")}
        return self._append(dataset, value, admitted)

    def settle(self, entry: Entry, steps_run: Mapping[str, int]) -> Entry:
        """Note which steps ran, per stream; the planned ones stay charged.

        Returns:
            The new last entry; its hash is the head that a statement carries.
        """
        value = {"kind": "settle", "entry": entry.hash, "steps_run": dict(steps_run)}
        return self._append(entry.dataset, value)

    def refund(self, entry: Entry) -> Entry:
        """Take a reservation back. Only for a run of which no noisy query was answered."""
        return self._append(entry.dataset, {"kind": "refund", "entry": entry.hash})

    def cap(self, dataset: str, epsilon: float, delta: float) -> Entry:
        """Limit what all runs on a data set may spend together, from now on; replaces an earlier cap."""
        budget = Budget(epsilon, delta)
        value = {"kind": "cap", "epsilon": budget.epsilon, "delta": budget.delta}
        return self._append(_checked_name(dataset), value)

    def entries(self) -> tuple[Entry, ...]:
        """Every entry, with all hashes checked."""
        with _explained(self.name), self._engine.connect() as connection:
            return _read(connection)

    def accounts(self) -> dict[str, Account]:
        """What was spent on each data set."""
        return accounts(self.entries())

    def account(self, dataset: str) -> Account:
        """What was spent on one data set, which may be unknown yet."""
        name = canonical(dataset)
        return self.accounts().get(name, Account(name))

    def head(self) -> str:
        """The hash that covers all entries."""
        return chain.head(self.entries())

    def verify(self, head: str | None = None) -> tuple[Entry, ...]:
        """Check every hash and that the entries make sense; with a head noted earlier, that no tail was cut.

        Raises:
            PrivacyError: where the ledger was altered.
        """
        entries = self.entries()
        chain.check(entries, head)
        accounts(entries)
        return entries

    def _append(
        self, dataset: str, value: Mapping[str, Any], check: Callable[[Account], None] | None = None
    ) -> Entry:
        with _explained(self.name), self._writing() as connection:
            before = _read(connection)
            own = tuple(entry for entry in before if entry.dataset == dataset)
            if check:
                check(accounts(own).get(dataset, Account(dataset)))
            entry = chain.following(before, dataset, value)
            accounts((*own, entry))  # refuses what makes no sense
            connection.execute(
                insert(_entries).values(
                    position=entry.position, dataset=dataset, content=entry.content, hash=entry.hash
                )
            )
        return entry

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """A transaction that nobody else writes beside; committed durably when the block succeeds."""
        with self._engine.begin() as connection:
            if self._engine.dialect.name == "sqlite":
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            else:
                connection.exec_driver_sql("SET LOCAL synchronous_commit = on")
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
            yield connection

    def _settle_noted(self) -> None:
        """Settle the runs of this ledger that were given up without it; what fails is tried another time."""
        notes = list(unsettled.noted())
        if not notes:
            return
        try:
            entries = {entry.hash: entry for entry in self.entries()}
            charges = {charge.entry: charge for one in self.accounts().values() for charge in one.charges}
        except PrivacyError:  # whoever asks the ledger for something is told
            return
        for note in notes:
            if note.entry in charges:
                with suppress(PrivacyError, OSError):
                    if charges[note.entry].state == "reserved":
                        self.settle(entries[note.entry], note.steps_run)
                    note.file.unlink(missing_ok=True)

    def _check_schema(self) -> None:
        with self._engine.connect() as connection:
            present = sqlalchemy.inspect(connection).has_table(_schema.name)
        if not present:
            if self._engine.dialect.name == "sqlite":
                raise PrivacyError(
                    f"{self.name} is no ledger of confide; name another file, or restore it if it was one"
                )
            with self._writing() as connection:
                _create(connection)
        with self._engine.connect() as connection:
            found = connection.scalars(select(_schema.c.schema)).all()
        if found != [SCHEMA]:
            raise PrivacyError(
                f"the ledger {self.name} is of schema {', '.join(found) or 'none'}, and this confide writes "
                f"{SCHEMA}; install the confide that wrote it"
            )


def _read(connection: Connection) -> tuple[Entry, ...]:
    rows = connection.execute(select(_entries).order_by(_entries.c.position))
    entries = tuple(Entry(row.position, row.dataset, row.content, row.hash) for row in rows)
    chain.check(entries)
    return entries


def _create(connection: Connection) -> None:
    """Make the tables unless another process just did."""
    if not sqlalchemy.inspect(connection).has_table(_schema.name):
        _tables.create_all(connection)
        connection.execute(insert(_schema).values(schema=SCHEMA))


def _checked_name(dataset: str) -> str:
    check_dataset_name(dataset)
    return canonical(dataset)


def _place(text: str) -> sqlalchemy.URL:
    """The database that a URL or a path means."""
    if "://" not in text:
        return sqlalchemy.URL.create("sqlite", database=str(Path(text).expanduser().absolute()))
    try:
        url = sqlalchemy.make_url(text)
    except ArgumentError:
        raise PrivacyError("the ledger's URL can't be read; use sqlite:///FILE or postgresql://…") from None
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    if url.drivername not in ("sqlite", "sqlite+pysqlite", "postgresql+psycopg"):
        raise PrivacyError(f"a ledger lives in SQLite or PostgreSQL (with psycopg), not {url.drivername}")
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise PrivacyError("a ledger in memory forgets what was spent; name a file")
    return url


def _engine(url: sqlalchemy.URL) -> Engine:
    sqlite = url.get_backend_name() == "sqlite"
    try:
        if not sqlite:
            return sqlalchemy.create_engine(url, poolclass=NullPool, isolation_level="READ COMMITTED")
        engine = sqlalchemy.create_engine(url, poolclass=NullPool, connect_args={"timeout": _WAIT})
    except ImportError:
        raise PrivacyError("a ledger in PostgreSQL needs psycopg: pip install 'confide[postgres]'") from None

    @sqlalchemy.event.listens_for(engine, "connect")
    def _connected(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # transactions begin where `_writing` begins them
        connection.execute("PRAGMA synchronous = EXTRA")  # a commit survives a power cut

    return engine


def _start_file(url: sqlalchemy.URL, name: str) -> None:
    """Make the file, complete or not at all: an empty file is then never a new ledger, but a cut one."""
    path = Path(url.database or "")
    if path.exists():
        if path.stat().st_size == 0:
            raise PrivacyError(
                f"the ledger {name} is empty, which no ledger ever is, so what was spent is not known: "
                "restore it from a copy"
            )
        return
    with files.aside(path) as side:
        with _engine(url.set(database=str(side / "new"))).begin() as connection:
            _create(connection)
        with suppress(FileExistsError):  # somebody else started it meanwhile
            os.link(side / "new", path)
        files.sync(path.parent)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn what a database or disk says into one clear message; a ledger that fails lets nothing run."""
    try:
        yield
    except DBAPIError as error:
        said = str(error.orig).strip().splitlines()
        reason = said[0] if said else type(error).__name__
        advice = "; restore it from a copy" if "malformed" in reason or "not a database" in reason else ""
        raise PrivacyError(f"the ledger {name} can't be used: {reason}{advice}") from None
    except (SQLAlchemyError, OSError) as error:
        raise PrivacyError(f"the ledger {name} can't be used: {error}") from None
