"""The charge of one run: reserved before anything is asked, refunded only if nothing was answered."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from confide.errors import PrivacyError
from confide.privacy.statement import LedgerEntry, Spending

if TYPE_CHECKING:
    from confide.privacy.chain import Entry
    from confide.privacy.ledger import Ledger


class Charge:
    """A reservation in a ledger, or none: a run without a ledger, without noise, or with fixed keys."""

    def __init__(self, ledger: Ledger | None, entry: Entry | None) -> None:
        self.ledger = ledger
        self.entry = entry
        self.asked = False

    def first_query(self) -> None:
        """The first noise is about to be drawn: from here on nothing is refunded."""
        self.asked = True

    def settle(self, steps_run: Mapping[str, int]) -> LedgerEntry | None:
        """Note what ran; returns what the statement says about the charge.

        A ledger that has become unreachable costs no trained model: the run is charged in full already.
        """
        if self.ledger is None or self.entry is None:
            return None
        try:
            head = self.ledger.settle(self.entry, steps_run).hash
        except PrivacyError as error:
            warnings.warn(f"the run stays charged, but what ran was not noted: {error}", stacklevel=2)
            head = self.entry.hash
        return LedgerEntry(entry=self.entry.hash, head=head)


@contextmanager
def charged(ledger: Ledger | None, spending: Spending) -> Iterator[Charge]:
    """Reserve a run's spending, and refund it if the block fails before `first_query`.

    Raises:
        PrivacyError: the ledger refuses; nothing may be asked.
    """
    if ledger is None or spending.event is None:
        yield Charge(None, None)
        return
    charge = Charge(ledger, ledger.reserve(spending))
    try:
        yield charge
    except BaseException as error:
        if charge.entry is not None and not charge.asked:
            try:
                ledger.refund(charge.entry)
            except PrivacyError as second:
                error.add_note(f"the run asked nothing, but could not be refunded: {second}")
        raise
