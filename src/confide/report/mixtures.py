"""What a study says about a mixture of experts: routing on public text, streams, and who does best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from confide.report.scores import INDIVIDUAL, Spread, label, score_table
from confide.report.study import MixtureFacts, MixtureRun, PrivateRun, RecordFacts, Row
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
            *("divided by", "share of μ²"),
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
            )
            for run in first
            for stream in run.streams
        ),
        words=2,
    )


def clipped_text(runs: Sequence[PrivateRun]) -> Table | None:
    """Private: the share of records that each stream of the first seed clipped; None where none clips."""
    first = [run for run in runs if run.seed == runs[0].seed]
    rows = tuple(
        (label(run.method), run.task, stream, f"{100 * share:.0f} %")
        for run in first
        for stream, share in run.clipped.items()
    )
    return Table(("method", "task", "stream", "records clipped in a step"), rows, words=3) if rows else None


def diagnostics_text(runs: Sequence[PrivateRun]) -> Table | None:
    """Private diagnostics, a column per run of the first seed that has them; None where none has."""
    shown = [run for run in runs if run.diagnostics and run.seed == runs[0].seed]
    if not shown:
        return None
    facts = [run.diagnostics for run in shown if run.diagnostics]
    return Table(
        ("", *(label(run.method) for run in shown)),
        (
            ("signal over noise of a step, shared", *(_signal(f, "shared") for f in facts)),
            ("the same of an expert, mean", *(_signal(f, "experts") for f in facts)),
            ("its variation over experts", *(_variation(f) for f in facts)),
            ("M_role, ratio of the two", *(_number(f.mismatch) for f in facts)),
            (
                "experts' share of squared norms, first → last quarter",
                *(_arrow(f.experts_share) for f in facts),
            ),
            ("scale of an expert's gradient (theorem 1)", *(_range(f.scales) for f in facts)),
            ("largest gap to simulation, standard errors", *(_number(f.scale_gap) for f in facts)),
            ("mean relative bias ≤ by entropy (theorem 2)", *(_at_most(f.bias, f.bias_bound) for f in facts)),
            ("owners changed by training (theorem 3)", *(_percent(f.changed) for f in facts)),
            ("owners that could not have", *(_percent(f.kept) for f in facts)),
            (
                "relative error by stale owners (theorem 4)",
                *(_at_most(f.stale, f.stale_bound) for f in facts),
            ),
            (
                "H/log E of owners, public text → records",
                *(_arrow(_pair(f.public_evenness, f.private_evenness)) for f in facts),
            ),
            (
                "most even block, public text → records",
                *(
                    NOTHING if f.public_choice is None else f"{f.public_choice} → {f.private_choice}"
                    for f in facts
                ),
            ),
        ),
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


def _signal(facts: RecordFacts, role: str) -> str:
    return _number(facts.signals[role][0]) if role in facts.signals else NOTHING


def _variation(facts: RecordFacts) -> str:
    return _number(facts.signals["experts"][1]) if "experts" in facts.signals else NOTHING


def _pair(one: float | None, other: float | None) -> tuple[float, float] | None:
    return None if one is None or other is None else (one, other)


def _arrow(pair: tuple[float, float] | None) -> str:
    return f"{pair[0]:.2f} → {pair[1]:.2f}" if pair else NOTHING


def _range(pair: tuple[float, float] | None) -> str:
    return f"{pair[0]:.2f} to {pair[1]:.2f}" if pair else NOTHING


def _at_most(value: float | None, bound: float | None) -> str:
    return _number(value) if bound is None else f"{_number(value)} ≤ {_number(bound)}"


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2g}"


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.1f} %"
