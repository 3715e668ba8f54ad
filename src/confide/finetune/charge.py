"""The charge of one run: reserved before anything is asked, refunded only if nothing was answered."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from confide.errors import PrivacyError
from confide.privacy.statement import LedgerEntry, Spending

if TYPE_CHECKING:
    from confide.finetune.checkpoint import Unfinished
    from confide.privacy.chain import Entry
    from confide.privacy.ledger import Ledger


class Charge:
    """A reservation in a ledger, or none: a run without a ledger, without noise, or with fixed keys.

    Attributes:
        entry: the reservation.
        settled: the entry that noted what ran, if an earlier process got as far.
        asked: whether a noisy query may have been answered.
        refunded: whether it was taken back.
    """

    def __init__(
        self,
        ledger: Ledger | None,
        entry: Entry | None,
        settled: Entry | None = None,
        asked: bool = False,
        refunded: bool = False,
    ) -> None:
        self.ledger = ledger
        self.entry = entry
        self.settled = settled
        self.asked = asked
        self.refunded = refunded

    def first_query(self) -> None:
        """The first noise is about to be drawn: from here on nothing is refunded."""
        self.asked = True

    def settle(self, steps_run: Mapping[str, int]) -> LedgerEntry | None:
        """Note what ran, once; returns what the statement says about the charge.

        A ledger that has become unreachable costs no trained model: the run is charged in full already.
        """
        if self.ledger is None or self.entry is None:
            return None
        try:
            self.settled = self.settled or self.ledger.settle(self.entry, steps_run)
        except PrivacyError as error:
            warnings.warn(f"the run stays charged, but what ran was not noted: {error}", stacklevel=2)
        return LedgerEntry(entry=self.entry.hash, head=(self.settled or self.entry).hash)


@contextmanager
def charged(
    ledger: Ledger | None, spending: Spending, unfinished: Unfinished | None = None
) -> Iterator[Charge]:
    """Reserve a run's spending, and refund it if the block fails before `first_query`.

    Args:
        unfinished: where the reservation is noted. A run that goes on has its reservation already, and
            gets no refund: what its earlier processes asked isn't known.

    Raises:
        PrivacyError: the ledger refuses; nothing may be asked.
    """
    if ledger is None or spending.event is None:
        if unfinished and unfinished.charge():
            raise PrivacyError(f"run {spending.run} was charged to a ledger; name that one to go on")
        yield Charge(None, None)
        return
    charge = _earlier(ledger, spending, unfinished) if unfinished else None
    charge = charge or Charge(ledger, ledger.reserve(spending))
    try:
        if unfinished and charge.entry:
            unfinished.note_charge(ledger.name, charge.entry.hash)
        yield charge
    except BaseException as error:
        if charge.entry is not None and not charge.asked:
            try:
                ledger.refund(charge.entry)
            except PrivacyError as second:
                error.add_note(f"the run asked nothing, but could not be refunded: {second}")
        raise


def _earlier(ledger: Ledger, spending: Spending, unfinished: Unfinished) -> Charge | None:
    """The charge that an earlier process of this run left in the ledger."""
    noted = unfinished.charge()
    charge = find(ledger, lambda entry: _run(entry) == spending.run)
    if charge is None or charge.entry is None:
        if noted:
            raise PrivacyError(
                f"run {spending.run} was charged to the ledger {noted[0]}, but {ledger.name} doesn't know "
                "it: name that one, or restore it"
            )
        return None
    if noted and noted[1] != charge.entry.hash:
        raise PrivacyError(f"the ledger {ledger.name} holds another charge for run {spending.run}")
    if charge.entry.value["spending"] != spending.model_dump(mode="json"):
        raise PrivacyError(f"the ledger {ledger.name} holds another charge for run {spending.run}")
    if charge.refunded:
        raise PrivacyError(
            f"run {spending.run} was refunded, so it may ask nothing; give it up with `confide purge` and "
            "start a new one"
        )
    return charge


def find(ledger: Ledger, wanted: Callable[[Entry], bool]) -> Charge | None:
    """A reservation that an earlier process made, and what became of it."""
    entries = ledger.entries()
    entry = next((entry for entry in entries if wanted(entry)), None)
    if entry is None:
        return None
    ends = {later.value.get("kind"): later for later in entries if later.value.get("entry") == entry.hash}
    return Charge(ledger, entry, ends.get("settle"), asked=True, refunded="refund" in ends)


def _run(entry: Entry) -> str | None:
    """Which run an entry reserves for."""
    value = entry.value
    return str(value["spending"]["run"]) if value.get("kind") == "reserve" else None
