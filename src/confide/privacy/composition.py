"""Statements: of one training run, of a merge, and whether one holds."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Literal

from confide.errors import PrivacyError
from confide.privacy import words
from confide.privacy.accountant import epsilon
from confide.privacy.calibration import delta_warning
from confide.privacy.disjointness import Pairs, apart, check_dataset_name, groups
from confide.privacy.disjointness import canonical as canonical
from confide.privacy.events import Composed, leaves
from confide.privacy.statement import (
    Base,
    Claim,
    LedgerEntry,
    OwnersChecked,
    Published,
    Said,
    Spending,
    Statement,
)
from confide.privacy.statement import common_adjacency as common_adjacency
from confide.privacy.streams import Schedule

_TOLERANCE = 1e-6  # relative; what another machine's floating point may change


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
    claim, no_claim = _claim((spending,))
    sentences = words.assumptions(
        dataset=dataset,
        units=units,
        unit=schedule.unit,
        delta=spending.delta,
        labels_from=labels_from,
        label_range=label_range,
    )
    sentences += words.test_units(dataset, published)
    return Statement(
        kind="training",
        confide=version("confide"),
        claim=claim,
        no_claim=no_claim,
        base=base,
        weights=dict(weights or {}),
        spendings=(spending,),
        assumptions=sentences if claim else (),
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
        PrivacyError: two inputs disagree about what one run spent.
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
    spendings = _united(known)
    claim, no_claim = None, "; ".join(dict.fromkeys(reasons)) or None
    if no_claim is None:
        claim, no_claim = _claim(spendings, apart(known, disjoint=bool(disjoint)))
    sentences = dict.fromkeys(line for statement in known for line in statement.assumptions)
    if claim:
        warnings = {s.dataset: delta_warning(claim.delta, s.units) for s in spendings}
        sentences.update({f"{name}: {warning}.": None for name, warning in warnings.items() if warning})
    if disjoint and len({spending.dataset for spending in spendings}) > 1:
        owners = [tuple(dict.fromkeys(s.dataset for s in part.spendings)) for part in known]
        checked = disjoint if isinstance(disjoint, OwnersChecked) else None
        sentences[words.disjointness(owners, checked)] = None
    agreements = {statement.agreement if statement else None for statement in statements}
    return Statement(
        kind="merge",
        confide=version("confide"),
        claim=claim,
        no_claim=no_claim,
        base=base,
        weights=dict(weights or {}),
        spendings=spendings,
        disjoint=disjoint if isinstance(disjoint, OwnersChecked) else "declared" if disjoint else None,
        assumptions=tuple(sentences) if claim else (),
        agreement=agreements.pop() if len(agreements) == 1 else None,
        inputs=tuple(said) if said is not None else tuple(statement.to_json() for statement in known),
    )


def recompute(statement: Statement) -> Claim | None:
    """The claim that the statement's events give at its δ; None where they give none."""
    return _honest(statement)[0]


def check(statement: Statement) -> None:
    """Recompute the claim from the events, the events from the schedules, and a merge from its inputs.

    Raises:
        PrivacyError: the printed claim is smaller than the recomputed one, an event isn't what its schedule
            spends, a run that claims nothing is covered by a claim, or a merge says less than its inputs.
    """
    keys = [(spending.run, spending.dataset) for spending in statement.spendings]
    if len(set(keys)) != len(keys):
        raise PrivacyError("the statement lists a run twice")
    for spending in statement.spendings:
        check_spending(spending)
    _check_published(statement)
    if statement.kind == "merge":
        _check_inputs(statement)
    elif len(statement.spendings) != 1 or statement.inputs or statement.disjoint:
        raise PrivacyError(
            f"a training statement holds one spending, not {len(statement.spendings)}, and no inputs of a "
            "merge"
        )
    claim = statement.claim
    if claim is None:
        if not statement.no_claim:
            raise PrivacyError("the statement makes no claim and doesn't say why")
        return
    if statement.no_claim:
        raise PrivacyError(f"the statement claims something, and says that it doesn't: {statement.no_claim}")
    honest, reason = _honest(statement)
    if honest is None:
        raise PrivacyError(f"the statement claims epsilon = {claim.epsilon:.6g}, but {reason}")
    for name, printed, real in (
        ("epsilon", claim.epsilon, honest.epsilon),
        ("epsilon by RDP", claim.epsilon_rdp, honest.epsilon_rdp),
    ):
        if printed is None:
            continue
        if real is None:
            raise PrivacyError(f"the claim doesn't hold: it says {name} = {printed:.6g}, but RDP has no rule")
        if printed < real * (1 - _TOLERANCE):
            raise PrivacyError(
                f"the claim doesn't hold: it says {name} = {printed:.6g}, but its events cost {real:.6g} at "
                f"delta = {claim.delta:.3g} ({honest.accountant})"
            )
    if claim.epsilon_lower is not None and claim.epsilon_lower > honest.epsilon * (1 + _TOLERANCE):
        raise PrivacyError(
            f"the claim doesn't hold: it says epsilon is certainly above {claim.epsilon_lower:.6g}, but its "
            f"events cost at most {honest.epsilon:.6g}"
        )


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


def _check_inputs(statement: Statement) -> None:
    """Whether a merge says of its inputs what they say themselves.

    Raises:
        PrivacyError: it doesn't, or an input's own statement doesn't hold.
    """
    if statement.claim and not statement.inputs:
        raise PrivacyError(
            "the merge claims something, but doesn't carry its inputs' statements; merge them again"
        )
    inputs = statement.merged
    for position, part in enumerate(inputs, start=1):
        try:
            check(part)
        except PrivacyError as error:
            raise PrivacyError(f"input {position}: {error}") from None
        if statement.claim and part.claim is None:
            raise PrivacyError(f"the merge claims something, but its input {position} claims nothing")
        if part.base.hash != statement.base.hash:
            raise PrivacyError(f"input {position} is of another base than the merge")
        if statement.claim and set(part.assumptions) - set(statement.assumptions):
            raise PrivacyError(f"the merge leaves out an assumption of its input {position}")
    if statement.inputs and _by_key(_united(inputs)) != _by_key(statement.spendings):
        raise PrivacyError("the merge's spendings aren't those of its inputs; one of them was altered")


def _united(statements: Sequence[Statement]) -> tuple[Spending, ...]:
    united: dict[tuple[str, str], Spending] = {}
    for statement in statements:
        for key, spending in _by_key(statement.spendings).items():
            if united.setdefault(key, spending) != spending:
                raise PrivacyError(
                    f"two inputs state different spendings for run {spending.run} on {spending.dataset}; one "
                    "of them was altered"
                )
    return tuple(united.values())


def _by_key(spendings: Sequence[Spending]) -> dict[tuple[str, str], Spending]:
    return {(spending.run, spending.dataset): spending for spending in spendings}


def per_dataset(statement: Statement) -> dict[str, Claim]:
    """What each data set's own units may lose, at the statement's δ; empty without a claim."""
    if statement.claim is None:
        return {}
    adjacency = common_adjacency(statement.spendings)
    return {
        dataset: epsilon(event, statement.claim.delta, adjacency)
        for dataset, event in _by_dataset(statement.spendings).items()
    }


def worst_case(statement: Statement) -> Claim | None:
    """The claim if the data sets did share units, whatever was declared; None where there is none."""
    delta = statement.claim.delta if statement.claim else None
    return _claim(statement.spendings, delta=delta)[0] if delta else None


def _honest(statement: Statement) -> tuple[Claim | None, str | None]:
    delta = statement.claim.delta if statement.claim else None
    pairs = apart(statement.merged, disjoint=statement.disjoint is not None)
    return _claim(statement.spendings, pairs, delta)


def _claim(
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
    events = {canonical(name): event for name, event in _by_dataset(spendings).items()}
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


def _by_dataset(spendings: Sequence[Spending]) -> dict[str, Composed]:
    """Everything that looked at each data set: two runs on one data set are never disjoint."""
    names: dict[str, str] = {}
    events: dict[str, list[Composed]] = {}
    for spending in spendings:
        if spending.event is not None:
            name = names.setdefault(canonical(spending.dataset), spending.dataset)
            events.setdefault(name, []).append(spending.event)
    return {dataset: Composed(tuple(parts)) for dataset, parts in events.items()}


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
