"""The scores of a study: means and spreads over seeds, and the gain of DP-Merging."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from confide.errors import ConfigError
from confide.report.study import Row

PRETRAINED, NON_PRIVATE, DP_ADAMW, DP_MERGING = "pretrained", "non-private", "dp-adamw", "dp-merging"
INDIVIDUAL = "individual"
LABELS = {DP_ADAMW: "DP-AdamW", DP_MERGING: "DP-Merging", "raptor": "RAPTOR"}
"""How people write methods whose name in files is in lower case."""


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


def label(method: str) -> str:
    """A method's name as people write it."""
    return LABELS.get(method, method)


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
