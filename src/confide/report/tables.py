"""The tables of a study: scores, and how each method trained, as text for a terminal or a page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal

from confide.errors import ConfigError
from confide.geometry.gap import merge_gap
from confide.report.scores import INDIVIDUAL, PRETRAINED, ScoreLine, Spread, label, score_table
from confide.report.study import MethodFacts, Row

NOTHING = "–"


@dataclass(frozen=True)
class MethodLine:
    """How one method trained, and what merging cost it.

    Attributes:
        drift: mean over tasks of ‖w − w₀‖ / ‖w₀‖.
        merge_gap: by operator, mean over tasks of individual − merged score.
        noise_multiplier: smallest and largest σ over tasks and seeds; (0, 0) without privacy.
        trained: smallest and largest number of trained parameters.
        seconds: training time of all tasks together.
        memory: the most bytes that the process took meanwhile; 0 where that isn't known.
        claims: (ε, δ) by operator, `individual` first; None where nothing is claimed.
    """

    method: str
    drift: Spread
    merge_gap: dict[str, Spread]
    noise_multiplier: tuple[float, float]
    trained: tuple[int, int]
    seconds: Spread
    memory: int
    claims: dict[str, tuple[float, float] | None]


@dataclass(frozen=True)
class Table:
    """Text, ready to be set.

    Attributes:
        words: how many columns are words, from the left; the rest are numbers.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1


def score_text(lines: Sequence[ScoreLine]) -> Table:
    """The score table as text, in percent; a column that says nothing is left out.

    Operators are there if something was merged, ε if methods have several, the average if there are several
    tasks, and the gain if there is one.
    """
    tasks = tuple(lines[0].scores)
    merged = any(line.operator != INDIVIDUAL for line in lines)
    epsilons = {_bound(line.epsilon, 0) if line.epsilon is not None else NOTHING for line in lines}
    columns = [("method", [label(line.method) for line in lines])]
    if merged:
        columns.append(("operator", [line.operator for line in lines]))
    if len(epsilons - {NOTHING}) > 1:
        shown = [NOTHING if line.epsilon is None else _bound(line.epsilon, 0) for line in lines]
        columns.append(("ε", shown))
    columns += [(task, [line.scores[task].percent() for line in lines]) for task in tasks]
    if len(tasks) > 1:
        columns.append(("average", [line.average.percent() for line in lines]))
    if any(line.gain for line in lines):
        gains = [line.gain.percent(signed=True) if line.gain else NOTHING for line in lines]
        columns.append(("gain", gains))
    header, cells = zip(*columns, strict=True)
    return Table(header, tuple(zip(*cells, strict=True)), words=1 + merged)


def method_table(facts: Sequence[MethodFacts], rows: Sequence[Row]) -> list[MethodLine]:
    """One line per method, pretrained first.

    Raises:
        ConfigError: as in `score_table`, or a drift, σ or time that isn't finite.
    """
    lines = {(line.method, line.operator): line for line in score_table(rows)}
    operators = list(dict.fromkeys(operator for _, operator in lines))
    methods = sorted(dict.fromkeys(fact.method for fact in facts), key=lambda method: method != PRETRAINED)
    table = []
    for method in methods:
        own = [fact for fact in facts if fact.method == method]
        for fact in own:
            _check_facts(fact)
        merged = [name for name in operators if name != INDIVIDUAL and (method, name) in lines]
        sigmas = [sigma for fact in own for sigma in fact.noise_multiplier.values()]
        trained = [number for fact in own for number in fact.trained.values()]
        table.append(
            MethodLine(
                method,
                Spread.of(statistics.fmean(fact.drift.values()) for fact in own),
                {name: _gap(rows, method, name) for name in merged},
                (min(sigmas), max(sigmas)),
                (min(trained), max(trained)),
                Spread.of(sum(fact.seconds.values()) for fact in own),
                max((size for fact in own for size in fact.memory.values()), default=0),
                {name: _claim(lines[method, name]) for name in operators if (method, name) in lines},
            )
        )
    return table


def method_text(lines: Sequence[MethodLine]) -> Table:
    """The method table as text, a column per method: gaps in points, ε and δ rounded up."""
    operators = dict.fromkeys(name for line in lines for name in line.merge_gap)
    gaps = tuple(
        (
            f"merge gap, {name}",
            *(
                line.merge_gap[name].percent(signed=True) if name in line.merge_gap else NOTHING
                for line in lines
            ),
        )
        for name in operators
    )
    known = any(line.memory for line in lines)
    memory = [("peak memory, MB", *(f"{line.memory / 1e6:,.0f}" for line in lines))] if known else []
    return Table(
        ("", *(label(line.method) for line in lines)),
        (
            ("drift", *(line.drift.plain() for line in lines)),
            *gaps,
            ("noise multiplier σ", *(_sigma(line.noise_multiplier) for line in lines)),
            ("ε", *(_claims(line, 0) for line in lines)),
            ("δ", *(_claims(line, 1) for line in lines)),
            ("trained parameters", *(_between(*(f"{n:,}" for n in line.trained)) for line in lines)),
            ("training seconds", *(f"{line.seconds.mean:.0f}" for line in lines)),
            *memory,
        ),
    )


def _gap(rows: Sequence[Row], method: str, operator: str) -> Spread:
    own = [row for row in rows if row.method == method]
    individual = {row.seed: row.scores for row in own if row.operator == INDIVIDUAL}
    merged = {row.seed: row.scores for row in own if row.operator == operator}
    if individual.keys() != merged.keys():
        raise ConfigError(
            f"the merge gap of {method} with {operator} compares the same seeds, but the models before "
            f"merging have {sorted(individual)} and the merges {sorted(merged)}"
        )
    return Spread.of(merge_gap(individual[seed], merged[seed]) for seed in sorted(merged))


def _claim(line: ScoreLine) -> tuple[float, float] | None:
    return None if line.epsilon is None or line.delta is None else (line.epsilon, line.delta)


def _claims(line: MethodLine, which: int) -> str:
    """ε (0) or δ (1) of a method; merges that don't claim what the task models claim are told apart."""
    texts = {name: _bound(claim[which], which) if claim else "none" for name, claim in line.claims.items()}
    own = texts.pop(INDIVIDUAL, None)
    merged = set(texts.values())
    if own is None or len(merged) > 1:
        texts = texts if own is None else {INDIVIDUAL: own, **texts}
        return ", ".join(f"{text} {name}" for name, text in texts.items())
    return own if merged <= {own} else f"{own}, merged {merged.pop()}"


def _bound(value: float, which: int) -> str:
    """ε with two decimals, δ with two digits; rounded up, so that what is shown is still a bound."""
    if which == 0:
        return str(Decimal(repr(value)).quantize(Decimal("0.01"), ROUND_CEILING))
    return f"{Context(prec=2, rounding=ROUND_CEILING).create_decimal(repr(value)).normalize():e}"


def _sigma(between: tuple[float, float]) -> str:
    return _between(*(f"{sigma:.3g}" for sigma in between)) if any(between) else NOTHING


def _between(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _check_facts(fact: MethodFacts) -> None:
    for name, values in (
        ("drift", fact.drift),
        ("noise multiplier", fact.noise_multiplier),
        ("time", fact.seconds),
    ):
        for task, value in values.items():
            if not math.isfinite(value):
                raise ConfigError(f"{fact.method}, seed {fact.seed}: {name} of {task!r} is not finite")
