"""Statements: of one training run, and of a merge."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Literal

from confide.errors import PrivacyError
from confide.privacy import assumptions
from confide.privacy.checks import check as check
from confide.privacy.checks import check_spending as check_spending
from confide.privacy.claims import claim_of, united
from confide.privacy.claims import per_dataset as per_dataset
from confide.privacy.claims import recompute as recompute
from confide.privacy.claims import worst_case as worst_case
from confide.privacy.disjointness import canonical as canonical
from confide.privacy.lineage import Reader, apart_in, merged
from confide.privacy.statement import (
    Base,
    LedgerEntry,
    OwnersChecked,
    Published,
    Said,
    Spending,
    Statement,
)
from confide.privacy.statement import common_adjacency as common_adjacency
from confide.privacy.streams import Schedule


def new_run() -> str:
    """A random identifier for a training run, so that what it spent is counted once."""
    return secrets.token_hex(8)


def training_spending(
    schedule: Schedule,
    *,
    delta: float | None,
    dataset: str,
    units: int,
    run: str,
    steps_run: Mapping[str, int],
    simulated: bool = False,
) -> Spending:
    """What one training run spends: the planned schedule, whatever runs.

    A run without noise, or with a fixed noise or sampling key (`simulated`), claims nothing and says why.

    Args:
        schedule: the schedule that is executed.
        delta: δ; may be None only when nothing is claimed.
        dataset: the name its owner gave the data set.
        units: n, declared public.
        run: random identifier.
        steps_run: steps that ran, per stream; nothing before the run.
        simulated: whether the noise or the sampling can be replayed by others.

    Raises:
        PrivacyError: a private run without δ, or more steps run than planned.
    """
    reason = None
    if not schedule.private:
        reason = f"the run on {dataset} added no noise"
    elif simulated:
        reason = (
            f"the run on {dataset} is a simulation: its noise comes from a fixed key, so it hides nothing"
        )
    elif delta is None:
        raise PrivacyError(f"the private run on {dataset} has no delta")
    spending = Spending(
        run=run,
        dataset=dataset,
        units=units,
        unit=schedule.unit,
        adjacency=schedule.adjacency,
        event=None if reason else schedule.event(),
        no_claim=reason,
        delta=None if reason else delta,
        schedule=schedule,
        steps_run=dict(steps_run),
    )
    check_spending(spending)
    return spending


def training_statement(
    schedule: Schedule,
    *,
    delta: float | None,
    dataset: str,
    units: int,
    run: str,
    base: Base,
    steps_run: Mapping[str, int],
    labels_from: Literal["declared", "file"] = "declared",
    label_range: tuple[float, float] | None = None,
    routed_text: bool = False,
    simulated: bool = False,
    weights: Mapping[str, str] | None = None,
    published: Sequence[Published] = (),
    ledger: LedgerEntry | None = None,
    agreement: str | None = None,
) -> Statement:
    """What one training run claims.

    Args:
        schedule, delta, dataset, units, run, steps_run, simulated: as in `training_spending`.
        base: the public model that was fine-tuned.
        labels_from: whether the labels were declared or read from the data.
        label_range: declared bounds of labels that are numbers.
        routed_text: whether text that was declared public went through a mixture's routers.
        weights: SHA-256 by path; writing the release fills them in.
        published: noisy numbers that the schedule's queries paid for.
        ledger: where the run was charged.
        agreement: hash of what was agreed with others before training.

    Raises:
        PrivacyError: a private run without δ, more steps run than planned, or no finite bound.
    """
    spending = training_spending(
        schedule,
        delta=delta,
        dataset=dataset,
        units=units,
        run=run,
        steps_run=steps_run,
        simulated=simulated,
    )
    claim, no_claim = claim_of((spending,))
    assumed: tuple[str, ...] = ()
    if claim:
        assumed = assumptions.of_training(spending, published, labels_from, label_range, routed_text)
    return Statement(
        kind="training",
        confide=version("confide"),
        claim=claim,
        no_claim=no_claim,
        base=base,
        weights=dict(weights or {}),
        spendings=(spending,),
        assumptions=assumed,
        published=tuple(published),
        ledger=ledger,
        agreement=agreement,
    )


def compose(
    statements: Sequence[Statement | None],
    *,
    disjoint: bool | OwnersChecked,
    base: Base,
    weights: Mapping[str, str] | None = None,
    said: Sequence[Said] | None = None,
) -> Statement:
    """What a function of several releases claims: a merge, or a merge of merges.

    Spendings are united, and a run that several inputs depend on counts once. All data sets compose, except
    those that are declared to share no unit, here or in an input (`disjointness`): the claim is that of the
    costliest set of data sets that one unit may be in. Runs on one data set always compose. δ is the largest
    of the inputs'. The base and the arithmetic of merging are public.

    Args:
        statements: of the inputs; None for an input without one.
        disjoint: whether no unit is in data sets of two inputs: declared, or how the owners checked it.
        base: the common base; that all inputs have it is the merge's business.
        weights: SHA-256 by path; writing the release fills them in.
        said: the statements that there are, as they were written, so that their signatures stay valid;
            None for statements that were made here.

    Raises:
        PrivacyError: two inputs disagree about what one run spent, or merges are nested too deeply.
    """
    if not statements:
        raise PrivacyError("nothing to compose")
    reasons = [
        f"input {position} carries no statement"
        if statement is None
        else statement.no_claim or f"input {position} makes no claim"
        for position, statement in enumerate(statements, start=1)
        if statement is None or statement.claim is None
    ]
    known = [statement for statement in statements if statement is not None]
    spendings = united(known)
    reader = Reader()
    inputs = tuple(reader.trace(statement) for statement in known)
    claim, no_claim = None, "; ".join(dict.fromkeys(reasons)) or None
    if no_claim is None:
        claim, no_claim = claim_of(spendings, apart_in(inputs, disjoint=bool(disjoint)))
    declared: Literal["declared"] | OwnersChecked | None = None
    if disjoint:
        declared = disjoint if isinstance(disjoint, OwnersChecked) else "declared"
    agreements = {statement.agreement if statement else None for statement in statements}
    made = Statement(
        kind="merge",
        confide=version("confide"),
        claim=claim,
        no_claim=no_claim,
        base=base,
        weights=dict(weights or {}),
        spendings=spendings,
        disjoint=declared,
        assumptions=assumptions.of_merge(known, spendings, claim.delta, declared) if claim else (),
        agreement=agreements.pop() if len(agreements) == 1 else None,
        inputs=tuple(said) if said is not None else tuple(statement.to_json() for statement in known),
    )
    return merged(made, inputs).statement  # refuses what nobody would read
