"""What the entries of a ledger say about one data set: its cap, its charges, and what is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import ValidationError

from confide.errors import PrivacyError
from confide.privacy import accountant, calibration, rdp_filter, renyi
from confide.privacy.chain import Entry
from confide.privacy.composition import canonical, check_spending, common_adjacency
from confide.privacy.events import Composed, PoissonGaussian
from confide.privacy.statement import Claim, Spending
from confide.privacy.streams import Adjacency, Budget
from confide.privacy.words import round_down, round_up

_NOISE_TOLERANCE = 1e-4
_MOST_NOISE = 1e6


@dataclass(frozen=True)
class Charge:
    """One reservation and what became of it.

    Attributes:
        entry: hash of the reservation.
        spending: as planned, which is what is charged; `steps_run` once the run was settled.
        state: `reserved` runs or has crashed; `refunded` asked nothing, and alone costs nothing.
    """

    entry: str
    spending: Spending
    state: Literal["reserved", "settled", "refunded"] = "reserved"


@dataclass(frozen=True)
class Account:
    """One data set in a ledger.

    Attributes:
        dataset: its canonical name.
        cap: (ε, δ) that everything together may spend; None for no limit.
        charges: in the order of their reservations.
    """

    dataset: str
    cap: Budget | None = None
    charges: tuple[Charge, ...] = ()

    @property
    def spendings(self) -> tuple[Spending, ...]:
        """What counts: everything that wasn't refunded."""
        return tuple(charge.spending for charge in self.charges if charge.state != "refunded")

    @property
    def delta(self) -> float | None:
        """δ at which costs are told: the cap's, or the largest of the runs'."""
        if self.cap:
            return self.cap.delta
        return max((s.delta for s in self.spendings if s.delta is not None), default=None)

    def filtered(self, *more: Spending, delta: float | None = None) -> float | None:
        """ε by the filter (`rdp_filter`), of `more` runs too; None where nothing has a δ.

        Valid whatever made people choose later runs. Raises PrivacyError where units differ.
        """
        spendings = (*self.spendings, *more)
        delta = delta or self.delta or max((s.delta for s in more if s.delta is not None), default=None)
        if delta is None:
            return None
        self._check_units(spendings)
        return rdp_filter.epsilon(_events(spendings), delta, common_adjacency(spendings))

    def composed(self) -> Claim | None:
        """ε by PLD of everything together: tighter, but only for schedules that were all fixed beforehand."""
        delta = self.delta
        if delta is None or not self.spendings:
            return None
        self._check_units(self.spendings)
        return accountant.epsilon(
            Composed(tuple(_events(self.spendings))), delta, common_adjacency(self.spendings)
        )

    def admit(self, spending: Spending) -> None:
        """Whether a run may be charged.

        Raises:
            PrivacyError: it would pass the cap (the message says what is left), it protects another unit
                than earlier runs under a cap, the filter has no rule for it, or it was charged already.
        """
        if spending.event is not None:
            renyi.require_rule(spending.event)
        if any(charge.spending.run == spending.run for charge in self.charges):
            raise PrivacyError(f"run {spending.run} is charged to {self.dataset} already")
        if self.cap is None or self.fits(spending):
            return
        spent, after = self.filtered(), self.filtered(spending)
        assert spent is not None
        assert after is not None
        left = round_down(max(self.cap.epsilon - spent, 0.0), 4)
        cost = f"bring it to {round_up(after, 4)}" if math.isfinite(after) else "make it infinite"
        raise PrivacyError(
            f"the cap on {self.dataset} is epsilon = {self.cap.epsilon:g} at delta = {self.cap.delta:g}; "
            f"{round_up(spent, 4)} is spent by the filter, so {left} is left, and this run would {cost}. "
            f"Lower its epsilon (`confide ledger plan` says which noise fits), or have the owner of the data "
            "raise the cap"
        )

    def fits(self, spending: Spending) -> bool:
        """Whether the cap leaves room for one more run; always without a cap.

        A first run was chosen before anything was seen, so PLD may speak for it too: where PLD alone lets it
        through, the filter lets nothing follow. Raises PrivacyError where units differ.
        """
        if self.cap is None:
            return True
        after = self.filtered(spending)
        if after is not None and after <= self.cap.epsilon:
            return True
        if self.spendings or spending.event is None:
            return False
        try:
            claim = accountant.epsilon(spending.event, self.cap.delta, spending.adjacency)
        except PrivacyError:  # no finite bound
            return False
        return claim.epsilon <= self.cap.epsilon

    def least_noise(self, sampling_rate: float, steps: int, queries: int, adjacency: Adjacency) -> float:
        """The smallest σ, within 1e-4, of each query on `steps` draws with which a run fits under the cap.

        Raises:
            PrivacyError: there is no cap, or no noise is enough.
        """
        if self.cap is None:
            raise PrivacyError(f"{self.dataset} has no cap; set one with `confide ledger cap`")

        if not self.spendings:
            return calibration.noise_multiplier(
                sampling_rate, steps, self.cap, queries=queries, adjacency=adjacency
            )

        def fits(sigma: float) -> bool:
            event = PoissonGaussian(sampling_rate, (sigma,) * queries, steps)
            return self.fits(self.hypothetical(event, adjacency))

        low, high = 1e-2, 1.0
        while not fits(high):
            low, high = high, high * 2
            if high > _MOST_NOISE:
                raise PrivacyError(f"nothing is left of the cap on {self.dataset}: no noise is enough")
        while high / low > 1 + _NOISE_TOLERANCE:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high

    def hypothetical(self, event: PoissonGaussian, adjacency: Adjacency) -> Spending:
        """A spending that nobody has made, in this account's units, to ask what it would cost."""
        units = [spending.unit for spending in self.spendings]
        return Spending(
            run="",
            dataset=self.dataset,
            units=1,
            unit=units[0] if units else "record",
            adjacency=adjacency,
            event=Composed((event,)),
            delta=self.delta,
            schedule=None,
            steps_run={},
        )

    def _check_units(self, spendings: Sequence[Spending]) -> None:
        units = sorted({spending.unit for spending in spendings})
        if len(units) > 1:
            raise PrivacyError(
                f"runs on {self.dataset} protect different units ({', '.join(units)}), which have no common "
                "claim; give the data set one unit, or another name"
            )


def accounts(entries: Sequence[Entry]) -> dict[str, Account]:
    """Replay a checked chain: one account for each data set, in order of first appearance.

    Raises:
        PrivacyError: an entry that means nothing to this version, or contradicts earlier ones.
    """
    found: dict[str, Account] = {}
    for entry in entries:
        account = found.get(entry.dataset, Account(entry.dataset))
        try:
            found[entry.dataset] = _after(account, entry)
        except (KeyError, TypeError, ValidationError) as error:
            raise PrivacyError(
                f"entry {entry.position} of the ledger can't be read ({type(error).__name__}); was it "
                "written by a newer confide?"
            ) from None
    return found


def _after(account: Account, entry: Entry) -> Account:
    value: dict[str, Any] = entry.value
    match value["kind"]:
        case "cap":
            return replace(account, cap=Budget(value["epsilon"], value["delta"]))
        case "reserve":
            spending = Spending.model_validate(value["spending"])
            if canonical(spending.dataset) != account.dataset or spending.event is None:
                raise PrivacyError(f"entry {entry.position} of the ledger charges nothing, or others")
            check_spending(spending)
            return replace(account, charges=(*account.charges, Charge(entry.hash, spending)))
        case "settle":
            return _changed(account, entry, "settled", value["steps_run"])
        case "refund":
            return _changed(account, entry, "refunded", {})
        case kind:
            raise PrivacyError(
                f"entry {entry.position} of the ledger is of unknown kind {kind!r}; was it written by "
                "a newer confide?"
            )


def _changed(
    account: Account, entry: Entry, state: Literal["settled", "refunded"], steps_run: dict[str, int]
) -> Account:
    charges = list(account.charges)
    for number, charge in enumerate(charges):
        if charge.entry == entry.value["entry"]:
            if charge.state != "reserved":
                raise PrivacyError(
                    f"run {charge.spending.run} on {account.dataset} is {charge.state} already, so it can't "
                    f"be {state}"
                )
            spending = Spending.model_validate({**charge.spending.model_dump(), "steps_run": steps_run})
            check_spending(spending)
            charges[number] = replace(charge, spending=spending, state=state)
            return replace(account, charges=tuple(charges))
    raise PrivacyError(f"{account.dataset} has no charge {entry.value['entry']} that could be {state}")


def _events(spendings: Sequence[Spending]) -> list[Composed]:
    return [spending.event for spending in spendings if spending.event is not None]
