"""What a study says about a mixture of experts: routing on public text, streams, and who does best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from confide.report.scores import INDIVIDUAL, Spread, label, score_table
from confide.report.study import MixtureFacts, MixtureRun, Row
from confide.report.tables import NOTHING, Table

if TYPE_CHECKING:
    from confide.models.moe.selection import Selection


def routing_text(selection: Selection, block: int) -> Table:
    """How evenly each layer's experts own public texts.

    Args:
        block: number of the layer that is trained; it is marked.
    """
    return Table(
        ("block", "experts", "H/log E", "deficit (nats)", "χ²", "variation", "largest share"),
        tuple(
            (
                f"{found.block}{' *' if found.block == block else ''}",
                f"{len(found.counts)}",
                f"{found.evenness:.3f}",
                f"{found.deficit:.3f}",
                f"{found.chi_square:.0f}",
                f"{found.variation:.2f}",
                f"{100 * max(found.counts) / selection.texts:.0f} %",
            )
            for found in selection.layers
        ),
    )


def routing_words(selection: Selection) -> tuple[str, ...]:
    """Sentences: how sure the choice of the most even layer is, and warnings."""
    least = selection.stable_from
    return (
        "The choice by entropy is not certain with this corpus."
        if least is None
        else f"The choice by entropy is certain (95 % of redrawn corpora) from {least} texts.",
        *(f"Warning: {warning}." for warning in selection.warnings),
    )


def streams_text(runs: Sequence[MixtureRun]) -> Table:
    """The streams of every run of the first seed: what each trained, and how much noise it got."""
    first = [run for run in runs if run.seed == runs[0].seed]
    tasks = len({run.task for run in first})
    return Table(
        (
            *("method", "stream", "trained", "steps", "expected draw", "noise σ", "clipping C"),
            *("divided by", "share of μ²", "clipped"),
        ),
        tuple(
            (
                label(run.method) + (f", {run.task}" if tasks > 1 else ""),
                _stream(run, stream.name),
                f"{stream.trained:,}",
                f"{stream.steps}",
                f"{stream.expected:.0f}",
                f"{stream.noise_multiplier:.3g}" if stream.noise_multiplier else NOTHING,
                f"{stream.bound:g} {stream.rule}" if stream.rule != "none" else NOTHING,
                f"{stream.denominator:g}",
                NOTHING if stream.share is None else f"{stream.share:.3f}",
                f"{100 * stream.clipped:.0f} %" if stream.rule != "none" else NOTHING,
            )
            for run in first
            for stream in run.streams
        ),
        words=2,
    )


def mixture_findings(rows: Sequence[Row], mixture: MixtureFacts) -> tuple[str, ...]:
    """For every ε, how RAPTOR does beside what it is compared with."""
    scores = {line.method: line.average for line in score_table(rows) if line.operator == INDIVIDUAL}
    methods = {run.method: run for run in mixture.runs}
    found = []
    for method, run in methods.items():
        if run.variant != "raptor":
            continue
        others = [
            f"{_apart(scores[method], scores[other])} {other} ({scores[other].percent()} %)"
            for other, against in methods.items()
            if other != method and (against.epsilon, run.epsilon) == (run.epsilon, against.epsilon)
        ]
        if others:
            found.append(
                f"At ε = {run.epsilon:g} {method} has {scores[method].percent()} %: {'; '.join(others)}."
            )
    return tuple(found)


def _stream(run: MixtureRun, name: str) -> str:
    if name == "shared" or not run.layers:
        return name
    blocks = ", ".join(map(str, run.layers))
    return f"{name} (block{'s' if len(run.layers) > 1 else ''} {blocks})"


def _apart(score: Spread, other: Spread) -> str:
    points = round(100 * (score.mean - other.mean), 1)
    if points == 0:
        return "level with"
    return f"{abs(points):.1f} points {'above' if points > 0 else 'below'}"
