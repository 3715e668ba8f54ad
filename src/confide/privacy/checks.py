"""Whether a statement holds: recomputed from what it says was asked, and from its inputs' statements."""

from __future__ import annotations

import re

from confide.errors import PrivacyError
from confide.privacy import assumptions
from confide.privacy.claims import by_key, honest, united
from confide.privacy.disjointness import check_dataset_name
from confide.privacy.events import leaves
from confide.privacy.lineage import Lineage, trace
from confide.privacy.statement import Spending, Statement

_TOLERANCE = 1e-6  # relative; what another machine's floating point may change
_ACCOUNTANT = re.compile(
    r"dp-accounting [\w.+]{1,40} "
    r"(PLD, connect-the-dots, interval [\d.e+-]{1,20}|RDP alone: [\w ,.()+-]{1,150})"
)


def check(statement: Statement) -> None:
    """Recompute the claim from the events, the events from the schedules, and a merge from its inputs.

    Raises:
        PrivacyError: the printed claim is smaller than the recomputed one, an event isn't what its schedule
            spends, a run that claims nothing is covered by a claim, an assumption doesn't follow or is left
            out, or a merge says less than its inputs.
    """
    _check(trace(statement), set())


def _check(lineage: Lineage, done: set[Lineage]) -> None:
    """Check a statement and those of its inputs, each once."""
    if lineage in done:
        return
    statement = lineage.statement
    keys = [(spending.run, spending.dataset) for spending in statement.spendings]
    if len(set(keys)) != len(keys):
        raise PrivacyError("the statement lists a run twice")
    for spending in statement.spendings:
        check_spending(spending)
    _check_published(statement)
    if statement.kind == "merge":
        _check_inputs(lineage, done)
    elif len(statement.spendings) != 1 or statement.inputs or statement.disjoint:
        raise PrivacyError(
            f"a training statement holds one spending, not {len(statement.spendings)}, and no inputs of a "
            "merge"
        )
    _check_claim(lineage)
    assumptions.check(statement, [part.statement for part in lineage.inputs])
    done.add(lineage)


def _check_claim(lineage: Lineage) -> None:
    statement = lineage.statement
    claim = statement.claim
    if claim is None:
        if not statement.no_claim:
            raise PrivacyError("the statement makes no claim and doesn't say why")
        return
    if statement.no_claim:
        raise PrivacyError(f"the statement claims something, and says that it doesn't: {statement.no_claim}")
    largest = max((s.delta for s in statement.spendings if s.delta is not None), default=None)
    if claim.delta != largest:
        raise PrivacyError(
            f"the statement claims something at delta = {claim.delta:.3g}, but the largest of its runs' is "
            f"{largest}"
        )
    real, reason = honest(lineage)
    if real is None:
        raise PrivacyError(f"the statement claims epsilon = {claim.epsilon:.6g}, but {reason}")
    for name, printed, cost in (
        ("epsilon", claim.epsilon, real.epsilon),
        ("epsilon by RDP", claim.epsilon_rdp, real.epsilon_rdp),
    ):
        if printed is None:
            continue
        if cost is None:
            raise PrivacyError(f"the claim doesn't hold: it says {name} = {printed:.6g}, but RDP has no rule")
        if printed < cost * (1 - _TOLERANCE):
            raise PrivacyError(
                f"the claim doesn't hold: it says {name} = {printed:.6g}, but its events cost {cost:.6g} at "
                f"delta = {claim.delta:.3g} ({real.accountant})"
            )
    if claim.epsilon_lower is not None and claim.epsilon_lower > real.epsilon * (1 + _TOLERANCE):
        raise PrivacyError(
            f"the claim doesn't hold: it says epsilon is certainly above {claim.epsilon_lower:.6g}, but its "
            f"events cost at most {real.epsilon:.6g}"
        )
    if not _ACCOUNTANT.fullmatch(claim.accountant):
        raise PrivacyError(f"the statement names no accountant that there is: {claim.accountant[:200]!r}")


def _check_published(statement: Statement) -> None:
    """Whether a query of the schedule paid for every number that is published, each for one."""
    paid = {
        query.name: query
        for spending in statement.spendings
        if statement.kind == "training" and spending.schedule
        for query in spending.schedule.queries
        if query.purpose == "accuracy"
    }
    for number in statement.published:
        query = paid.pop(number.query, None)
        if query is None or query.noise_multipliers != (number.noise,):
            raise PrivacyError(
                f"the statement publishes {number.metric} = {number.value:.4g} with noise {number.noise:g}, "
                "but no query of its schedule paid for that"
            )


def _check_inputs(lineage: Lineage, done: set[Lineage]) -> None:
    """Whether a merge says of its inputs what they say themselves.

    Raises:
        PrivacyError: it doesn't, or an input's own statement doesn't hold.
    """
    statement = lineage.statement
    if statement.claim and not statement.inputs:
        raise PrivacyError(
            "the merge claims something, but doesn't carry its inputs' statements; merge them again"
        )
    for position, below in enumerate(lineage.inputs, start=1):
        part = below.statement
        try:
            _check(below, done)
        except PrivacyError as error:
            raise PrivacyError(f"input {position}: {error}") from None
        if statement.claim and part.claim is None:
            raise PrivacyError(f"the merge claims something, but its input {position} claims nothing")
        if part.base.hash != statement.base.hash:
            raise PrivacyError(f"input {position} is of another base than the merge")
    inputs = [part.statement for part in lineage.inputs]
    if inputs and by_key(united(inputs)) != by_key(statement.spendings):
        raise PrivacyError("the merge's spendings aren't those of its inputs; one of them was altered")


def check_spending(spending: Spending) -> None:
    """Whether a spending agrees with itself.

    Raises:
        PrivacyError: a name with unseen characters, an event beside a reason why there is none, or one that
            isn't what the schedule spends, no δ, or more ran than was planned.
    """
    check_dataset_name(spending.dataset)
    where = f"run {spending.run} on {spending.dataset}"
    if spending.event is None:
        if not spending.no_claim:
            raise PrivacyError(f"{where} has no event and doesn't say why")
        return
    if spending.no_claim:
        raise PrivacyError(f"{where} has an event, but says that it claims nothing: {spending.no_claim}")
    if not leaves(spending.event):
        raise PrivacyError(f"{where} has an event in which nothing was asked; it says nothing about the run")
    if spending.delta is None or not 0 < spending.delta < 1:
        raise PrivacyError(f"{where} has no delta between 0 and 1")
    schedule = spending.schedule
    if schedule is None:
        return
    if spending.event != schedule.event():
        raise PrivacyError(f"{where}: the event isn't what its schedule spends; one of them was altered")
    if (spending.unit, spending.adjacency) != (schedule.unit, schedule.adjacency):
        raise PrivacyError(f"{where}: unit or adjacency differ from the schedule's; one of them was altered")
    planned = {stream.name: stream.steps for stream in schedule.streams}
    for name, steps in spending.steps_run.items():
        if not 0 <= steps <= planned.get(name, -1):
            raise PrivacyError(
                f"{where}: stream {name!r} ran {steps} steps, but {planned.get(name, 0)} were planned and "
                "charged"
            )
