"""`confide merge`: one encoder from several releases, a head for each task, and the claim composed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from confide.cli.output import print_json, print_table
from confide.cli.progress import progress_bars

if TYPE_CHECKING:
    from confide.merging.merge import MergeReport


def merge(
    models: Annotated[list[Path], typer.Argument(help="Release folders, all trained from one base.")],
    base: Annotated[str, typer.Option(help="The public base: a folder, a Hugging Face id or package:NAME.")],
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist.")],
    operator: Annotated[str, typer.Option(help="average, task-arithmetic or ties.")] = "ties",
    density: Annotated[
        float | None, typer.Option(help="ties: part of each task vector that is kept (0.2).")
    ] = None,
    scale: Annotated[
        float | None, typer.Option(help="λ of task-arithmetic (0.3) and ties (1): how far to go.")
    ] = None,
    disjoint: Annotated[
        bool,
        typer.Option(
            "--disjoint",
            help="I declare that nobody's data is in two of the data sets: the largest claim holds for all.",
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Merge releases into one encoder that serves every task."""
    from confide.merging.merge import merge as merge_releases
    from confide.models.backbones import resolve

    parameters = {
        name: value for name, value in (("density", density), ("scale", scale)) if value is not None
    }
    with progress_bars(show=not json) as progress:
        report = merge_releases(
            models,
            base=resolve(base),
            operator=operator,
            parameters=parameters,
            out=out,
            disjoint=disjoint,
            progress=lambda done, total: progress(f"Merging {len(models)} models", done, total),
        )
    if json:
        print_json(_as_json(report, out))
    else:
        _print(report, out)


def _as_json(report: MergeReport, out: Path) -> dict[str, Any]:
    return {
        "out": str(out),
        "operator": report.operator,
        "parameters": dict(report.parameters),
        "base": report.base.model_dump(mode="json"),
        "models": list(report.models),
        "heads": [head.model_dump(mode="json") for head in report.info.heads],
        "facts": dict(report.facts),
        "claim": report.statement.claim.model_dump(mode="json") if report.statement.claim else None,
        "no_claim": report.statement.no_claim,
    }


def _print(report: MergeReport, out: Path) -> None:
    from confide.privacy.words import round_up

    settings = "".join(f", {name} {value:g}" for name, value in report.parameters.items())
    merged = sum(line.rule == report.operator for line in report.tensors)
    print_table(
        f"{report.operator}{settings}: {merged} of {len(report.tensors)} tensors merged, the rest the base's",
        ("head", "labels", "max length"),
        [(head.task, str(len(head.labels)), str(head.max_length)) for head in report.info.heads],
    )
    claim = report.statement.claim
    if claim:
        print(f"Claim: ({round_up(claim.epsilon)}, {round_up(claim.delta, 3)})-DP, {_how(report)}.")
    else:
        print(f"No claim: {report.statement.no_claim}")
    print(f"Written to {out}; `confide privacy show {out}` recomputes the claim.")


def _how(report: MergeReport) -> str:
    if len(report.statement.spendings) < 2:
        return "of the one run it rests on"
    if report.statement.disjoint:
        return "because the data sets were declared to share no unit"
    return "composed, because nobody declared that the data sets share no unit"
