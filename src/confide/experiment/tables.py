"""The tables of a study, from its rows: means and spreads over seeds, gains, gaps, and what they say."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal

from confide.errors import ConfigError
from confide.experiment.study import MethodFacts, Row, Study
from confide.geometry.gap import merge_gap

PRETRAINED, NON_PRIVATE, DP_ADAMW, DP_MERGING = "pretrained", "non-private", "dp-adamw", "dp-merging"
INDIVIDUAL = "individual"
LABELS = {DP_ADAMW: "DP-AdamW", DP_MERGING: "DP-Merging"}
"""How people write methods whose name in files is in lower case."""
NOTHING = "–"


@dataclass(frozen=True)
class Spread:
    """Mean over seeds, and sample standard deviation (None with one seed)."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of one or more values."""
        numbers = list(values)
        return cls(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None)

    def percent(self, *, signed: bool = False) -> str:
        """In percent with one decimal: `72.9`, `72.9 ± 0.4`, signed `+0.3`."""
        return self._text(100, 1, signed)

    def plain(self, digits: int = 3) -> str:
        """As it is: `0.071`, `0.071 ± 0.002`."""
        return self._text(1, digits, False)

    def _text(self, factor: int, digits: int, signed: bool) -> str:
        text = f"{self.mean * factor:{'+' if signed else ''}.{digits}f}".replace("-", "−")
        if float(text.replace("−", "-")) == 0:
            text = text.lstrip("+−")
        return text if self.deviation is None else f"{text} ± {self.deviation * factor:.{digits}f}"


@dataclass(frozen=True)
class ScoreLine:
    """One line of the score table.

    Attributes:
        scores: by task, in [0, 1].
        average: over tasks.
        gain: average minus that of DP-AdamW under the same operator and seed; only on DP-Merging's lines.
        epsilon, delta: the claim; the largest of several seeds, None if one of them claims nothing.
    """

    method: str
    operator: str
    scores: dict[str, Spread]
    average: Spread
    gain: Spread | None
    epsilon: float | None
    delta: float | None


@dataclass(frozen=True)
class MethodLine:
    """How one method trained, and what merging cost it.

    Attributes:
        drift: mean over tasks of ‖w − w₀‖ / ‖w₀‖.
        merge_gap: by operator, mean over tasks of individual − merged score.
        noise_multiplier: smallest and largest σ over tasks and seeds; (0, 0) without privacy.
        trained: smallest and largest number of trained parameters.
        seconds: training time of all tasks together.
        claims: (ε, δ) by operator, `individual` first; None where nothing is claimed.
    """

    method: str
    drift: Spread
    merge_gap: dict[str, Spread]
    noise_multiplier: tuple[float, float]
    trained: tuple[int, int]
    seconds: Spread
    claims: dict[str, tuple[float, float] | None]


@dataclass(frozen=True)
class Table:
    """Text, ready to be set: the first two columns of a score table are words, the rest numbers."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def score_table(rows: Sequence[Row]) -> list[ScoreLine]:
    """Lines in the papers' order: pretrained, every method before merging, then merges by operator.

    Raises:
        ConfigError: no rows; two rows of one method, operator and seed; rows with different tasks; a score
            or average that isn't finite, not in [0, 1], or an average that isn't the mean of its scores;
            seeds of DP-Merging that DP-AdamW lacks.
    """
    _check(rows)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.method, row.operator), []).append(row)
    methods = sorted(dict.fromkeys(row.method for row in rows), key=lambda method: method != PRETRAINED)
    operators = sorted(dict.fromkeys(row.operator for row in rows), key=lambda name: name != INDIVIDUAL)
    order = [(method, operator) for operator in operators for method in methods]
    return [_line(key, groups[key], groups) for key in order if key in groups]


def score_text(lines: Sequence[ScoreLine]) -> Table:
    """The score table as text, in percent."""
    tasks = tuple(lines[0].scores)
    return Table(
        ("method", "operator", *tasks, "average", "gain"),
        tuple(
            (
                label(line.method),
                line.operator,
                *(line.scores[task].percent() for task in tasks),
                line.average.percent(),
                line.gain.percent(signed=True) if line.gain else NOTHING,
            )
            for line in lines
        ),
    )


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
                {name: _claim(lines[method, name]) for name in operators if (method, name) in lines},
            )
        )
    return table


def method_text(lines: Sequence[MethodLine]) -> Table:
    """The method table as text: drift as a share, merge gaps in points, ε and δ rounded up."""
    operators = tuple(dict.fromkeys(name for line in lines for name in line.merge_gap))
    header = ("method", "drift", *(f"gap {name}" for name in operators), "σ", "ε", "δ", "trained", "seconds")
    return Table(
        header,
        tuple(
            (
                label(line.method),
                line.drift.plain(),
                *(
                    line.merge_gap[name].percent(signed=True) if name in line.merge_gap else NOTHING
                    for name in operators
                ),
                _between(*(f"{sigma:.3g}" for sigma in line.noise_multiplier))
                if any(line.noise_multiplier)
                else NOTHING,
                _claims(line, 0),
                _claims(line, 1),
                _between(*(f"{number:,}" for number in line.trained)),
                f"{line.seconds.mean:.0f}",
            )
            for line in lines
        ),
    )


def print_study(study: Study) -> None:
    """Print findings, scores and methods to the terminal."""
    from rich.console import Console
    from rich.table import Table as Grid

    console = Console()
    tables = (
        ("Scores in percent, on test records and without noise", score_text(score_table(study.rows))),
        ("Drift, merge gap in points, and privacy", method_text(method_table(study.methods, study.rows))),
    )
    for title, table in tables:
        words = 2 if table.header[1] == "operator" else 1
        grid = Grid(title=title, title_justify="left", header_style="bold")
        for position, name in enumerate(table.header):
            grid.add_column(name, justify="left" if position < words else "right", no_wrap=position < words)
        for row in table.rows:
            grid.add_row(*row)
        console.print(grid)
    for finding in study.findings:
        console.print(f"• {finding}", markup=False, highlight=False)


def label(method: str) -> str:
    """A method's name as people write it."""
    return LABELS.get(method, method)


def round_up(value: float, digits: int) -> str:
    """An upper bound stays one when it is shown: `digits` decimals, rounded up."""
    return str(Decimal(repr(value)).quantize(Decimal(1).scaleb(-digits), ROUND_CEILING))


def _line(key: tuple[str, str], rows: list[Row], groups: Mapping[tuple[str, str], list[Row]]) -> ScoreLine:
    method, operator = key
    return ScoreLine(
        method,
        operator,
        {task: Spread.of(row.scores[task] for row in rows) for task in rows[0].scores},
        Spread.of(row.average for row in rows),
        _gain(rows, groups.get((DP_ADAMW, operator), [])) if method == DP_MERGING else None,
        None if any(row.epsilon is None for row in rows) else max(row.epsilon or 0 for row in rows),
        None if any(row.delta is None for row in rows) else max(row.delta or 0 for row in rows),
    )


def _gain(rows: Sequence[Row], others: Sequence[Row]) -> Spread | None:
    """Spread over seeds of the difference within each seed."""
    if not others:
        return None
    base = {row.seed: row.average for row in others}
    if base.keys() != {row.seed for row in rows}:
        raise ConfigError(
            f"gain compares the same seeds, but {rows[0].method} with {rows[0].operator} has "
            f"{sorted(row.seed for row in rows)} and {others[0].method} {sorted(base)}"
        )
    return Spread.of(row.average - base[row.seed] for row in rows)


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
    """ε (0) or δ (1) of a method; merges that cost more than the models say so."""
    texts = {name: _bound(claim[which], which) if claim else "none" for name, claim in line.claims.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{text} {name}" for name, text in texts.items())


def _bound(value: float, which: int) -> str:
    if which == 0:
        return round_up(value, 2)
    exponent = Decimal(repr(value)).adjusted()
    mantissa = Decimal(repr(value)).scaleb(-exponent).quantize(Decimal("0.1"), ROUND_CEILING)
    return f"{mantissa.normalize():f}e{exponent}"


def _between(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _check(rows: Sequence[Row]) -> None:
    if not rows:
        raise ConfigError("the study has no rows, so there is nothing to put in a table")
    seen: set[tuple[str, str, int]] = set()
    for row in rows:
        where = f"the row of {row.method} with {row.operator}, seed {row.seed},"
        if (row.method, row.operator, row.seed) in seen:
            raise ConfigError(f"{where} is there twice")
        seen.add((row.method, row.operator, row.seed))
        if row.scores.keys() != rows[0].scores.keys() or not row.scores:
            raise ConfigError(f"{where} scores {sorted(row.scores)}, the first row {sorted(rows[0].scores)}")
        for task, score in row.scores.items():
            if not 0 <= score <= 1:
                raise ConfigError(f"{where} has score {score} for {task!r}; a score is a number from 0 to 1")
        if not abs(row.average - statistics.fmean(row.scores.values())) < 1e-9:
            raise ConfigError(f"{where} has average {row.average}, which isn't the mean of its scores")
        for name, bound in (("epsilon", row.epsilon), ("delta", row.delta)):
            if bound is not None and not (math.isfinite(bound) and bound >= 0):
                raise ConfigError(f"{where} has {name} {bound}, which claims nothing; None says so")


def _check_facts(fact: MethodFacts) -> None:
    for name, values in (
        ("drift", fact.drift),
        ("noise multiplier", fact.noise_multiplier),
        ("time", fact.seconds),
    ):
        for task, value in values.items():
            if not math.isfinite(value):
                raise ConfigError(f"{fact.method}, seed {fact.seed}: {name} of {task!r} is not finite")
