"""What a study shows, in sentences computed from its rows, whichever way it came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from confide.report.scores import (
    DP_ADAMW,
    DP_MERGING,
    INDIVIDUAL,
    NON_PRIVATE,
    PRETRAINED,
    ScoreLine,
    Spread,
    label,
    score_table,
)
from confide.report.study import Row

ENOUGH = 0.5
"""Points that fine-tuning gains over a head on the untouched encoder where it pays."""
Lines = Mapping[tuple[str, str], ScoreLine]


def findings(rows: Sequence[Row]) -> tuple[str, ...]:
    """Sentences about what pays, what wins, what privacy costs, and how sure that is.

    A comparison whose rows the study lacks is left out. Only rows with a claim count as private.

    Raises:
        ConfigError: rows that don't make a table (`scores.score_table`).
    """
    lines = {(line.method, line.operator): line for line in score_table(rows)}
    return (
        *_fine_tuning(lines),
        *_against_dp_adamw(lines),
        *_best_merge(lines),
        *_cost_of_privacy(lines),
        *_unclaimed(lines),
        _certainty(len({row.seed for row in rows})),
    )


def _fine_tuning(lines: Lines) -> list[str]:
    """Does private fine-tuning of the encoder beat a private head on the public one?"""
    head, best = _private_head(lines), _best(lines, merged=False)
    if head is None or best is None:
        return []
    name = label(best.method)
    difference = best.average.mean - head.average.mean
    numbers = (
        f"{head.average.percent()} % on average, against {best.average.percent()} % of {name}, the best "
        f"private fine-tuning before merging ({_points(difference)})"
    )
    if _rounded(difference) > ENOUGH:
        first = f"Private fine-tuning pays here: a private head on the public encoder has {numbers}."
    elif _rounded(difference) < -ENOUGH:
        first = f"A private head on the public encoder does as well here, and better: {numbers}."
    else:
        first = f"A private head on the public encoder does as well here: {numbers}."
    gains = {task: best.scores[task].mean - head.scores[task].mean for task in best.scores}
    pays = [f"{task} ({_points(gain)})" for task, gain in gains.items() if _rounded(gain) > ENOUGH]
    rest = [f"{task} ({_points(gain)})" for task, gain in gains.items() if _rounded(gain) <= ENOUGH]
    if not rest:
        second = f"Task by task, fine-tuning with {name} pays on every one: {_list(pays)}."
    elif not pays:
        second = (
            f"Task by task, fine-tuning with {name} pays on none by more than half a point: {_list(rest)}."
        )
    else:
        second = f"Task by task, fine-tuning with {name} pays on {_list(pays)}, but not on {_list(rest)}."
    return [first, second]


def _against_dp_adamw(lines: Lines) -> list[str]:
    """Does DP-Merging beat DP-AdamW, operator by operator?"""
    better: list[str] = []
    level: list[str] = []
    worse: list[str] = []
    for (method, operator), line in lines.items():
        if method != DP_MERGING or line.gain is None:
            continue
        other = lines[DP_ADAMW, operator]
        item = (
            f"{_with(operator)} ({line.gain.percent(signed=True)} points: {line.average.percent()} % "
            f"against {other.average.percent()} %)"
        )
        gain = _rounded(line.gain.mean) if abs(line.gain.mean) > (line.gain.deviation or 0) else 0
        (better if gain > 0 else worse if gain < 0 else level).append(item)
    if not better + level + worse:
        return []
    if not worse + level:
        return [f"DP-Merging does better than DP-AdamW in every row: {_list(better)}."]
    if not better:
        return [f"DP-Merging doesn't beat DP-AdamW in any row: {_list(worse + level)}."]
    parts = [f"DP-Merging does better than DP-AdamW {_list(better)}"]
    parts += [f"worse {_list(worse)}"] if worse else []
    parts += [f"no clear difference {_list(level)}"] if level else []
    return ["; ".join(parts) + "."]


def _best_merge(lines: Lines) -> list[str]:
    best = _best(lines, merged=True)
    if best is None:
        return []
    text = (
        f"The best private merge is {label(best.method)} {_with(best.operator)}, with "
        f"{best.average.percent()} % on average"
    )
    others = []
    if (best.method, INDIVIDUAL) in lines:
        others.append(f"{_apart(best, lines[best.method, INDIVIDUAL])} its models before merging")
    head = _private_head(lines)
    if head is not None:
        others.append(f"{_apart(best, head)} a private head on the public encoder")
    return [f"{text}: {_list(others)}." if others else f"{text}."]


def _cost_of_privacy(lines: Lines) -> list[str]:
    parts = []
    merges = any(operator != INDIVIDUAL for _, operator in lines)
    for merged, when in ((False, " before merging" if merges else ""), (True, " after merging")):
        free, private = _best(lines, merged=merged, private=False), _best(lines, merged=merged)
        if free is None or private is None:
            continue
        cost = _rounded(free.average.mean - private.average.mean)
        with_operator = [f" {_with(line.operator)}" if merged else "" for line in (free, private)]
        parts.append(
            f"{f'{cost:.1f} points' if cost > 0 else 'nothing'}{when} ({free.average.percent()} % "
            f"without it{with_operator[0]}, {private.average.percent()} % for {label(private.method)}"
            f"{with_operator[1]})"
        )
    return [f"Privacy costs {_list(parts)}."] if parts else []


def _unclaimed(lines: Lines) -> list[str]:
    names = [
        f"{label(method)} {_with(operator)}"
        for (method, operator), line in lines.items()
        if method != NON_PRIVATE and line.epsilon is None
    ]
    return [f"No privacy is claimed for {_list(names)}."] if names else []


def _certainty(seeds: int) -> str:
    if seeds == 1:
        return (
            "All numbers come from one seed, and another one, with its own noise, can move them by points: "
            "run several seeds before ranking what is close."
        )
    return (
        f"± is the sample standard deviation over {seeds} seeds; a difference that isn't larger than it is "
        "within what another seed would change."
    )


def _private_head(lines: Lines) -> ScoreLine | None:
    line = lines.get((PRETRAINED, INDIVIDUAL))
    return line if line is not None and line.epsilon is not None else None


def _best(lines: Lines, *, merged: bool, private: bool = True) -> ScoreLine | None:
    """The fine-tuned line with the highest average, among those with a claim or those without privacy."""
    chosen = [
        line
        for (method, operator), line in lines.items()
        if method != PRETRAINED
        and (operator != INDIVIDUAL) == merged
        and (method != NON_PRIVATE and line.epsilon is not None if private else method == NON_PRIVATE)
    ]
    return max(chosen, key=lambda line: line.average.mean, default=None)


def _apart(line: ScoreLine, other: ScoreLine) -> str:
    difference = _rounded(line.average.mean - other.average.mean)
    if difference == 0:
        return "level with"
    return f"{abs(difference):.1f} points {'above' if difference > 0 else 'below'}"


def _with(operator: str) -> str:
    return "before merging" if operator == INDIVIDUAL else f"with {operator}"


def _points(difference: float) -> str:
    return f"{Spread(difference, None).percent(signed=True)} points"


def _rounded(difference: float) -> float:
    """In points, as precisely as it is shown."""
    return round(difference * 100, 1)


def _list(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
