"""Bar charts of a study as SVG text: every bar has its name and its number beside it."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confide.report.scores import INDIVIDUAL, NON_PRIVATE, PRETRAINED, ScoreLine, Spread, label
from confide.report.study import MixtureRun
from confide.report.tables import MethodLine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from confide.models.moe.selection import Selection

_OURS = "#d55e00"
_COLOURS = {PRETRAINED: "#8c8c8c", NON_PRIVATE: "#009e73", "dp-adamw": "#56b4e9"}
_COLOURS |= {"dp-merging": _OURS, "raptor": _OURS}
_MORE_COLOURS = ("#cc79a7", "#0072b2", "#e69f00", "#f0e442")
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""
_INK, _FAINT = "#010203", "#040506"
"""Stand-ins for the page's own text colours, so that a figure suits a light and a dark page."""
_WIDTH, _ROW, _BELOW, _CHARACTER = 4.1, 0.235, 0.52, 0.083
"""Inches: of the figure, from bar to bar, for the axis, and of a character at most."""


@dataclass(frozen=True)
class Chart:
    """A figure.

    Attributes:
        title: says what to read from it.
        note: says what bars, marks and lines are.
        svg: an `<svg>` element whose ids begin with the chart's name; colours of text are CSS variables
            `--ink` and `--faint`.
    """

    title: str
    note: str
    svg: str


@dataclass(frozen=True)
class _Bar:
    """A method's value in the unit of the axis, how it is written, and where a second value is ticked."""

    method: str
    value: Spread
    text: str
    tick: float | None = None


_Group = tuple[str, list[_Bar]]


def task_scores(lines: Sequence[ScoreLine]) -> Chart:
    """Scores of every task's own model, a group of bars per task."""
    own = [line for line in lines if line.operator == INDIVIDUAL]
    groups = [(task, [_percent(line.method, line.scores[task]) for line in own]) for task in lines[0].scores]
    return Chart(
        "Before merging: how well does each task's own model do?",
        "Longer is better." + _spread_note(own),
        _draw("task-scores", groups, _score_axis(groups)),
    )


def merged_scores(lines: Sequence[ScoreLine]) -> Chart | None:
    """Average score of every merge, a group of bars per operator; None if nothing was merged."""
    before = {line.method: line.average.mean for line in lines if line.operator == INDIVIDUAL}
    merges = [line for line in lines if line.operator != INDIVIDUAL]
    groups: dict[str, list[_Bar]] = {}
    for line in merges:
        bar = _percent(line.method, line.average, before.get(line.method))
        groups.setdefault(line.operator, []).append(bar)
    if not groups:
        return None
    note = "Longer is better. Thick tick: average of the method's own models before merging."
    if PRETRAINED in before:
        note += " Dashed line: the untouched encoder with a private head."
    return Chart(
        "After merging: how well does the one model do on all tasks?",
        note + _spread_note(merges),
        _draw(
            "merged-scores", list(groups.items()), _score_axis(list(groups.items()), before.get(PRETRAINED))
        ),
    )


def variants(lines: Sequence[ScoreLine], runs: Sequence[MixtureRun]) -> Chart | None:
    """Scores of the schedules of a mixture of experts, a group of bars per ε; None if there is only one."""
    own = {run.method: run for run in runs}
    shown = [line for line in lines if line.operator == INDIVIDUAL and line.method in own]
    if len(shown) < 2:
        return None
    told_apart = len({(run.variant, run.epsilon) for run in own.values()}) == len(own)
    groups: dict[str, list[_Bar]] = {}
    for line in shown:
        run = own[line.method]
        title = "without privacy" if run.epsilon is None else f"ε = {run.epsilon:g}"
        name = run.variant if told_apart else line.method
        groups.setdefault(title, []).append(_percent(name, line.average))
    return Chart(
        "RAPTOR and what it is compared with, by ε",
        "Longer is better." + _spread_note(shown),
        _draw("variants", list(groups.items()), _score_axis(list(groups.items()))),
    )


def owner_shares(selection: Selection, trained: Sequence[int]) -> Chart:
    """How the experts of each layer share public texts: a bar of E pieces per block.

    Args:
        trained: numbers of the blocks whose experts are trained; they are drawn in colour.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows = len(selection.layers)
    height = rows * 2 * _ROW + _BELOW + 0.1
    left, right = 9 * _CHARACTER, 7 * _CHARACTER
    with matplotlib.rc_context(_style("owner-shares")):
        figure = Figure(figsize=(_WIDTH, height))
        place = (left / _WIDTH, _BELOW / height, 1 - (left + right) / _WIDTH, rows * 2 * _ROW / height)
        axes = figure.add_axes(place, facecolor="none")
        axes.set_ylim(rows - 0.5, -0.5)
        axes.set_xlim(0, 100)
        axes.set_yticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_xlabel("percent of the public texts")
        for row, layer in enumerate(selection.layers):
            shares = sorted((100 * count / selection.texts for count in layer.counts), reverse=True)
            start, colour = 0.0, _OURS if layer.block in trained else _COLOURS[PRETRAINED]
            for piece, share in enumerate(shares):
                axes.barh(row, share, 0.7, left=start, color=colour, alpha=1 - 0.75 * piece / len(shares))
                start += share
            _write(axes, f"block {layer.block}", row, 0, -5, "right")
            _write(axes, f"H {layer.evenness:.2f}", row, 1, right * 72 - 1, "right")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Chart(
        "Routing on public text: how evenly do experts own texts?",
        "Pieces are experts, from the one that owns most texts. H: owner entropy over its largest value, 1 "
        "is even. In colour: the block whose experts are trained.",
        _embedded(buffer.getvalue(), "owner-shares"),
    )


def drifts(lines: Sequence[MethodLine]) -> Chart | None:
    """Drift of every method that trained the encoder; None if none did."""
    bars = [_Bar(line.method, line.drift, line.drift.plain()) for line in lines if line.method != PRETRAINED]
    if not bars:
        return None
    return Chart(
        "Drift: how far did training move the encoder?",
        "Length of the change over the length of the public encoder, mean over tasks. Shorter moved less.",
        _draw("drifts", [("", bars)], _zero_axis([("", bars)], "drift")),
    )


def merge_gaps(lines: Sequence[MethodLine]) -> Chart | None:
    """Points that merging costs, a group of bars per operator; None if nothing was merged."""
    groups: dict[str, list[_Bar]] = {}
    for line in lines:
        for operator, gap in line.merge_gap.items():
            bar = _Bar(line.method, _scaled(gap), gap.percent(signed=True))
            groups.setdefault(operator, []).append(bar)
    if not groups:
        return None
    return Chart(
        "Merge gap: how many points does merging cost?",
        "Average score before merging minus after. Shorter is better; left of 0, the merge does better.",
        _draw("merge-gaps", list(groups.items()), _zero_axis(list(groups.items()), "points lost by merging")),
    )


def _percent(method: str, value: Spread, tick: float | None = None) -> _Bar:
    return _Bar(method, _scaled(value), value.percent(), None if tick is None else tick * 100)


def _scaled(value: Spread) -> Spread:
    return Spread(value.mean * 100, None if value.deviation is None else value.deviation * 100)


def _spread_note(lines: Sequence[ScoreLine]) -> str:
    several = any(line.average.deviation is not None for line in lines)
    return " Whiskers: one standard deviation over seeds." if several else ""


def _draw(name: str, groups: Sequence[_Group], scale: Callable[[Axes], None]) -> str:
    """Horizontal bars under the titles of their groups, names on the left, values on the right."""
    import matplotlib
    from matplotlib.figure import Figure

    bars = [bar for _, group in groups for bar in group]
    rows = len(bars) + sum(1.3 for title, _ in groups if title)
    height = rows * _ROW + _BELOW + 0.2
    left = max(len(label(bar.method)) for bar in bars) * _CHARACTER + 0.12
    right = max(len(bar.text) for bar in bars) * _CHARACTER + 0.12
    with matplotlib.rc_context(_style(name)):
        figure = Figure(figsize=(_WIDTH, height))
        axes = figure.add_axes(
            (left / _WIDTH, _BELOW / height, 1 - (left + right) / _WIDTH, rows * _ROW / height),
            facecolor="none",
        )
        axes.set_ylim(rows - 0.5, -0.5)
        axes.set_yticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
        scale(axes)
        colours = _colours(bars)
        row = 0.0
        for title, group in groups:
            if title:
                _write(axes, title, row + 0.25, 0, -left * 72 + 1, "left", weight="bold")
                row += 1.3
            for bar in group:
                _draw_bar(axes, bar, row, colours[bar.method])
                _write(axes, label(bar.method), row, 0, -5, "right")
                _write(axes, bar.text, row, 1, right * 72 - 1, "right")
                row += 1
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _embedded(buffer.getvalue(), name)


def _draw_bar(axes: Axes, bar: _Bar, row: float, colour: str) -> None:
    axes.barh(row, bar.value.mean, 0.78, color=colour, zorder=2)
    if bar.value.deviation is not None:
        axes.errorbar(
            bar.value.mean, row, xerr=bar.value.deviation, color=_INK, elinewidth=1, capsize=2.5, zorder=4
        )
    if bar.tick is not None:
        axes.plot([bar.tick, bar.tick], [row - 0.39, row + 0.39], color=_INK, linewidth=2, zorder=4)


def _write(
    axes: Axes, text: str, row: float, edge: int, points: float, align: str, weight: str = "normal"
) -> None:
    """Text beside a row, `points` to the right of the left (0) or right (1) edge of the axes."""
    axes.annotate(
        text,
        (edge, row),
        (points, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha=align,
        va="center_baseline",
        weight=weight,
    )


def _score_axis(groups: Sequence[_Group], line: float | None = None) -> Callable[[Axes], None]:
    """From a ten somewhat below the lowest score, which the axis says; `line` is a score to draw through."""
    marks = [] if line is None else [line * 100]
    bars = [bar for _, group in groups for bar in group]
    low = min([*(bar.value.mean - (bar.value.deviation or 0) for bar in bars), *marks, *_ticks(bars)])
    high = max([*(bar.value.mean + (bar.value.deviation or 0) for bar in bars), *marks, *_ticks(bars)])
    start = max(0, math.floor((low - 5) / 10) * 10)

    def scale(axes: Axes) -> None:
        axes.set_xlim(start, high + (high - start) * 0.02)
        _grid(axes)
        axes.set_xlabel("score in percent" + (f" (the axis starts at {start})" if start else ""))
        if line is not None:
            axes.axvline(line * 100, color=_INK, linestyle=(0, (3, 2)), linewidth=1, zorder=3)
            axes.annotate(
                f"{PRETRAINED} {line * 100:.1f}",
                (line * 100, 1),
                (0, 3),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="center",
            )

    return scale


def _zero_axis(groups: Sequence[_Group], unit: str) -> Callable[[Axes], None]:
    bars = [bar for _, group in groups for bar in group]
    low = min(0.0, *(bar.value.mean - (bar.value.deviation or 0) for bar in bars))
    high = max(0.0, *(bar.value.mean + (bar.value.deviation or 0) for bar in bars))
    room = (high - low) * 0.02 or 1.0

    def scale(axes: Axes) -> None:
        axes.set_xlim(low - room if low else 0, high + room)
        _grid(axes)
        axes.axvline(0, color=_INK, linewidth=1, zorder=3)
        axes.set_xlabel(unit)

    return scale


def _ticks(bars: Sequence[_Bar]) -> list[float]:
    return [bar.tick for bar in bars if bar.tick is not None]


def _grid(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.grid(axis="x", color=_FAINT, alpha=0.35, linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)


def _colours(bars: Sequence[_Bar]) -> dict[str, str]:
    others = [method for method in dict.fromkeys(bar.method for bar in bars) if method not in _COLOURS]
    return _COLOURS | {
        method: _MORE_COLOURS[number % len(_MORE_COLOURS)] for number, method in enumerate(others)
    }


def _style(name: str) -> Any:
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "text.parse_math": False,
        "font.family": ["DejaVu Sans"],
        "font.size": 9.5,
        "axes.edgecolor": _FAINT,
        "xtick.color": _FAINT,
        "xtick.labelcolor": _INK,
        "axes.labelcolor": _INK,
        "text.color": _INK,
    }


def _embedded(svg: str, name: str) -> str:
    """An element for a page: no prologue or metadata, its own ids, the page's text colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\b(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r' width="[^"]*"| height="[^"]*"', "", svg.split(">", 1)[0]) + ">" + svg.split(">", 1)[1]
    svg = svg.replace("<svg ", '<svg role="img" ', 1)
    return svg.replace(_INK, "var(--ink)").replace(_FAINT, "var(--faint)")
