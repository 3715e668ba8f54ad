"""What spendings cost together: the claim of a run, of a merge, and of each data set."""

from __future__ import annotations

from collections.abc import Sequence

from confide.errors import PrivacyError
from confide.privacy.accountant import epsilon
from confide.privacy.disjointness import Pairs, canonical, groups
from confide.privacy.events import Composed
from confide.privacy.lineage import Lineage, trace
from confide.privacy.statement import Claim, Spending, Statement, common_adjacency


def recompute(statement: Statement) -> Claim | None:
    """The claim that the statement's events give at its δ; None where they give none."""
    return honest(trace(statement))[0]


def honest(lineage: Lineage) -> tuple[Claim | None, str | None]:
    """The claim that the events give at the statement's δ, or None and why."""
    statement = lineage.statement
    return claim_of(statement.spendings, lineage.pairs, statement.claim.delta if statement.claim else None)


def per_dataset(statement: Statement) -> dict[str, Claim]:
    """What each data set's own units may lose, at the statement's δ; empty without a claim."""
    if statement.claim is None:
        return {}
    adjacency = common_adjacency(statement.spendings)
    return {
        dataset: epsilon(event, statement.claim.delta, adjacency)
        for dataset, event in by_dataset(statement.spendings).items()
    }


def worst_case(statement: Statement) -> Claim | None:
    """The claim if the data sets did share units, whatever was declared; None where there is none."""
    delta = statement.claim.delta if statement.claim else None
    return claim_of(statement.spendings, delta=delta)[0] if delta else None


def claim_of(
    spendings: Sequence[Spending], pairs: Pairs = frozenset(), delta: float | None = None
) -> tuple[Claim | None, str | None]:
    """The claim of everything together, or None and why.

    Args:
        spendings: what was spent.
        pairs: data sets that share no unit.
        delta: at which ε is wanted; the largest of the runs' if None.
    """
    if not spendings:
        return None, "nothing states what was spent"
    for spending in spendings:
        if spending.event is None:
            reason = spending.no_claim or "no reason is given"
            return None, f"run {spending.run} on {spending.dataset} claims nothing: {reason}"
    adjacency = common_adjacency(spendings)
    events = {canonical(name): event for name, event in by_dataset(spendings).items()}
    for group in groups(events, pairs, "add-or-remove-one"):
        units = {s.unit: s.dataset for s in spendings if canonical(s.dataset) in group}
        if len(units) > 1:
            listed = ", ".join(f"{dataset}: {unit}" for unit, dataset in units.items())
            return None, f"the data sets protect different units ({listed}), which have no common claim"
    if delta is None:
        stated = [spending.delta for spending in spendings if spending.delta is not None]
        if not stated:
            return None, "no run states a delta"
        delta = max(stated)
    claims = [
        epsilon(Composed(tuple(events[name] for name in sorted(group))), delta, adjacency)
        for group in groups(events, pairs, adjacency)
    ]
    worst = max(claims, key=lambda claim: claim.epsilon)
    renyi = [claim.epsilon_rdp for claim in claims]
    lower = [claim.epsilon_lower for claim in claims if claim.epsilon_lower is not None]
    together = {
        "epsilon_rdp": None if None in renyi else max(value for value in renyi if value is not None),
        "epsilon_lower": max(lower, default=None),
    }
    return worst.model_copy(update=together), None


def by_dataset(spendings: Sequence[Spending]) -> dict[str, Composed]:
    """Everything that looked at each data set: two runs on one data set are never disjoint."""
    names: dict[str, str] = {}
    events: dict[str, list[Composed]] = {}
    for spending in spendings:
        if spending.event is not None:
            name = names.setdefault(canonical(spending.dataset), spending.dataset)
            events.setdefault(name, []).append(spending.event)
    return {dataset: Composed(tuple(parts)) for dataset, parts in events.items()}


def united(statements: Sequence[Statement]) -> tuple[Spending, ...]:
    """What several statements spent together, each run once.

    Raises:
        PrivacyError: two of them disagree about what one run spent.
    """
    united: dict[tuple[str, str], Spending] = {}
    for statement in statements:
        for key, spending in by_key(statement.spendings).items():
            if united.setdefault(key, spending) != spending:
                raise PrivacyError(
                    f"two inputs state different spendings for run {spending.run} on {spending.dataset}; one "
                    "of them was altered"
                )
    return tuple(united.values())


def by_key(spendings: Sequence[Spending]) -> dict[tuple[str, str], Spending]:
    """Spendings by what tells them apart: run and data set."""
    return {(spending.run, spending.dataset): spending for spending in spendings}
