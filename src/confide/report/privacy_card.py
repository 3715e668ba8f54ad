"""The privacy card of a release: one claim for a privacy officer, in the terminal or on paper."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from confide.privacy import meaning, words
from confide.privacy.chain import canonical
from confide.privacy.composition import per_dataset, worst_case
from confide.privacy.lineage import trace
from confide.privacy.signature import fingerprint
from confide.privacy.statement import Claim, Spending, Statement, common_adjacency
from confide.privacy.streams import Stream
from confide.privacy.words import round_down, round_up
from confide.release.verify import UNSIGNED, Check
from confide.report.page import page
from confide.report.tables import Table

_FALSE_ALARMS = (0.001, 0.01, 0.1)
_GROUPS = (1, 2, 5)


@dataclass(frozen=True)
class Section:
    """A heading with sentences, then points (a name and a sentence), then tables."""

    title: str
    paragraphs: tuple[str, ...] = ()
    points: tuple[tuple[str, str], ...] = ()
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Card:
    """Everything that the card says, as text.

    Attributes:
        title: what was released.
        identity: hash of the statement, by which two people know that they read about the same thing.
        headline: the numbers, or that there are none.
        summary: the claim in a sentence, or why there is none.
        sections: in reading order.
    """

    title: str
    identity: str
    headline: str
    summary: str
    sections: tuple[Section, ...]


def card(statement: Statement, checks: Sequence[Check], tasks: Sequence[str]) -> Card:
    """The card of a statement.

    Args:
        statement: of a release that was checked.
        checks: what was looked at, from `release.verify.examine`.
        tasks: names of the release's heads.
    """
    claim = statement.claim
    kind = "Classifier" if statement.kind == "training" else "Merged model"
    explained = [_attacker(claim, statement), _adversary(), _limits(claim, statement)] if claim else []
    sections = [
        *explained,
        _accounting(statement),
        *([_together(claim, statement)] if claim and _several(statement) else []),
        _answers(statement),
        _ledger(statement),
        *(
            [Section("Assumptions", points=tuple(("", line) for line in statement.assumptions))]
            if claim
            else []
        ),
        Section(
            "Checks made for this card",
            tables=(
                Table(("what", "result", "detail"), tuple((c.what, c.result, c.detail) for c in checks), 3),
            ),
        ),
    ]
    return Card(
        title=f"{kind} for {', '.join(tasks)}" if tasks else kind,
        identity=hashlib.sha256(canonical(statement.to_json()).encode()).hexdigest(),
        headline=f"ε = {round_up(claim.epsilon, 4)}, δ = {round_up(claim.delta, 3)}" if claim else "No claim",
        summary=meaning.promise(claim, statement)
        if claim
        else f"Nothing is claimed, so these weights may reveal the records behind them: {statement.no_claim}",
        sections=tuple(sections),
    )


def html(card: Card) -> str:
    """The card as one page that asks nothing of the network and prints on A4; everything is escaped."""
    return page("privacy_card.html.j2", card=card)


def _attacker(claim: Claim, statement: Statement) -> Section:
    unit = meaning.unit_word(statement)
    right = (1 + meaning.advantage(claim)) / 2
    return Section(
        "What an attacker can gain",
        (
            f"Somebody who must tell, of {unit}s of which one half was in the data, which ones were, is "
            f"right at most {_percent(right)} of the time; guessing gives 50 %. These are limits for every "
            f"attack there is or will be, against the {unit} that is easiest to attack.",
        ),
        tables=(
            Table(
                ("if so many outsiders are wrongly accused", "at most so many members are found"),
                tuple((_percent(alarms), _percent(meaning.found(claim, alarms))) for alarms in _FALSE_ALARMS),
            ),
        ),
    )


def _adversary() -> Section:
    return Section("Against whom", (meaning.ADVERSARY, meaning.NO_ADVERSARY))


def _limits(claim: Claim, statement: Statement) -> Section:
    rows = []
    for size in _GROUPS:
        epsilon, delta = meaning.of_group(claim, size)
        rows.append((str(size), round_up(epsilon, 4), round_up(delta, 3) if delta < 1 else "none below 1"))
    table = Table((f"{meaning.unit_word(statement)}s that change together", "ε", "δ"), tuple(rows))
    return Section("What is not protected", points=meaning.not_protected(statement), tables=(table,))


def _accounting(statement: Statement) -> Section:
    alone = per_dataset(statement)
    sets = []
    for spending in statement.spendings:
        claim = alone.get(spending.dataset)
        numbers = _bounds(claim) if claim else ("–", "–", "–")
        delta = round_up(spending.delta, 3) if spending.delta else "–"
        sets.append((spending.dataset, spending.unit, f"{spending.units:,}", delta, *numbers))
    streams = tuple(row for spending in statement.spendings for row in _streams(spending))
    paragraphs = [
        "Every query of the records is listed here, and nothing else of the release was computed from them. "
        "The planned steps are charged, whatever ran. n is the declared number of units.",
        *(f"{spending.dataset}: {words.asked(spending)}." for spending in statement.spendings),
    ]
    if statement.claim:
        adjacency = common_adjacency(statement.spendings).replace("-", " ")
        paragraphs.append(
            f"Neighbouring data sets: {adjacency}. Bounds: {statement.claim.accountant}. ε is the upper "
            "bound from privacy loss distributions; RDP is a second, looser one; “not below” is proven by "
            "an explicit test, so the truth lies between. Each line's figures are for all runs on its data "
            "set."
        )
    return Section(
        "What was asked of the records",
        tuple(paragraphs),
        tables=(
            Table(("data set", "unit", "n", "δ", "ε", "ε by RDP", "ε not below"), tuple(sets), 2),
            Table(
                ("data set", "stream or query", "rate q", "noise σ", "clip C", "planned", "run", "queries"),
                streams,
                2,
            ),
        ),
    )


def _streams(spending: Spending) -> list[tuple[str, ...]]:
    if spending.schedule is None:
        return []
    rows: list[tuple[str, ...]] = [
        (
            spending.dataset,
            stream.name,
            f"{stream.sampling_rate:.4g}",
            ", ".join(f"{sigma:.4g}" for sigma in _sigmas(stream)),
            f"{stream.clipping.bound:g}" if stream.clipping.rule != "none" else "none",
            str(stream.steps),
            str(spending.steps_run.get(stream.name, "–")),
            str(stream.steps * len(_sigmas(stream))),
        )
        for stream in spending.schedule.streams
    ]
    for query in spending.schedule.queries:
        sigmas = ", ".join(f"{sigma:.4g}" for sigma in query.noise_multipliers)
        name = f"{query.name} ({query.purpose})"
        rows.append((spending.dataset, name, "all", sigmas, "–", "1", "–", str(len(query.noise_multipliers))))
    return rows


def _sigmas(stream: Stream) -> list[float]:
    """Noise multipliers of the queries of one step: ascent, gradient, count of unclipped gradients."""
    found = (stream.ascent_noise, stream.noise_multiplier, stream.clipping.count_multiplier)
    return [sigma for sigma in found if sigma is not None]


def _together(claim: Claim, statement: Statement) -> Section:
    paragraphs = [f"{words.apart(statement)}."]
    worst = worst_case(statement)
    if worst and worst.epsilon > claim.epsilon * (1 + 1e-9):
        paragraphs.append(
            f"If all data sets did share units, ε would be {round_up(worst.epsilon, 4)} instead of "
            f"{round_up(claim.epsilon, 4)}. As it is, the claim is the largest over the sets of "
            "data sets that one unit may be in."
        )
    else:
        paragraphs.append("What was spent on all of them is added up.")
    return Section("Several data sets", tuple(paragraphs))


def _answers(statement: Statement) -> Section:
    rows = tuple(_signers(statement))
    asserted = (
        "The key that signed a run's statement asserts it; a merge's key answers for the merge."
        if all(row[-1] != UNSIGNED for row in rows)
        else "Where nobody signed, nobody asserts it."
    )
    said = (
        "Arithmetic and integrity are checked: ε follows from the events, and the files are the ones that "
        f"the statement is about. That noise was added can't be seen from outside. {asserted}"
    )
    return Section("Who answers for it", (said,), tables=(Table(("statement", "on", "signed by"), rows, 3),))


def _signers(
    statement: Statement, name: str = "this release", prefix: str = "input "
) -> list[tuple[str, ...]]:
    datasets = (
        ", ".join(dict.fromkeys(spending.dataset for spending in statement.spendings)) or "nothing stated"
    )
    key = statement.signature.key if statement.signature else None
    rows: list[tuple[str, ...]] = [(name, datasets, f"{fingerprint(key)} ({key})" if key else UNSIGNED)]
    for number, part in enumerate(statement.merged, start=1):
        rows += _signers(part, f"{prefix}{number}", f"{prefix}{number}.")
    return rows


def _ledger(statement: Statement) -> Section:
    rows = tuple(_entries(statement))
    if not rows:
        return Section(
            "Ledger", ("No ledger was charged, so nobody adds this up with other runs on the same data.",)
        )
    return Section(
        "Ledger",
        (
            "Each owner's ledger adds up all runs on a data set. A ledger that lacks a head below was cut "
            "or rewritten.",
        ),
        tables=(Table(("run", "entry", "head when it ended"), rows, 3),),
    )


def _entries(statement: Statement) -> list[tuple[str, ...]]:
    parts = [part.statement for part in trace(statement).every()]
    rows = [
        (part.spendings[0].run, part.ledger.entry, part.ledger.head)
        for part in parts
        if part.ledger and part.spendings
    ]
    return list(dict.fromkeys(rows))


def _bounds(claim: Claim) -> tuple[str, str, str]:
    return (
        round_up(claim.epsilon, 4),
        "no rule" if claim.epsilon_rdp is None else round_up(claim.epsilon_rdp, 4),
        "–" if claim.epsilon_lower is None else round_down(claim.epsilon_lower, 4),
    )


def _several(statement: Statement) -> bool:
    return statement.kind == "merge" and len({spending.dataset for spending in statement.spendings}) > 1


def _percent(share: float) -> str:
    """Rounded up, with as many digits as it takes to differ from 100 where it does."""
    for digits in range(1, 6):
        value = math.ceil(share * 10 ** (digits + 2) - 1e-9) / 10**digits
        if value < 100:
            return f"{value:g} %"
    return "100 %"
