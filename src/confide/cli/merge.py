"""`confide merge`: one encoder from several releases, a head for each task, and the claim composed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from confide.cli.output import print_json, print_table
from confide.cli.progress import progress_bars

_OPERATORS = "average, linear, task-arithmetic, ties, pcb, wudi, actmat, regmean, fisher"

if TYPE_CHECKING:
    from confide.merging.merge import MergeReport


def merge(
    models: Annotated[list[Path], typer.Argument(help="Release folders, all trained from one base.")],
    base: Annotated[str, typer.Option(help="The public base: a folder, a Hugging Face id or package:NAME.")],
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist.")],
    operator: Annotated[str, typer.Option(help=f"One of: {_OPERATORS}.")] = "ties",
    density: Annotated[
        float | None, typer.Option(help="ties and pcb: part of each task vector that is kept.")
    ] = None,
    scale: Annotated[
        float | None, typer.Option(help="λ of task-arithmetic, ties, pcb and wudi: how far to go.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE, any parameter of the operator; values per model by commas."),
    ] = None,
    statistics: Annotated[
        list[Path] | None,
        typer.Option(help="regmean and fisher: a statistics file for each model, in any order."),
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

    parameters = _parameters(set_ or [])
    parameters |= {
        name: value for name, value in (("density", density), ("scale", scale)) if value is not None
    }
    with progress_bars(show=not json) as progress:
        report = merge_releases(
            models,
            base=resolve(base),
            operator=operator,
            parameters=parameters,
            statistics=statistics or [],
            out=out,
            disjoint=disjoint,
            progress=lambda done, total: progress(f"Merging {len(models)} models", done, total),
        )
    if json:
        print_json(_as_json(report, out))
    else:
        _print(report, out)


def _parameters(settings: list[str]) -> dict[str, Any]:
    from confide.errors import MergeError

    found: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or not name or name in found:
            raise MergeError(f"--set takes NAME=VALUE, each name once, not {text!r}")
        found[name] = value
    return found


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

    settings = "".join(f", {name} {_words(value)}" for name, value in report.parameters.items())
    merged = sum(line.rule == report.operator for line in report.tensors)
    averaged = sum(line.rule.startswith("mean:") for line in report.tensors)
    others = f"{averaged} averaged, the rest the base's" if averaged else "the rest the base's"
    print_table(
        f"{report.operator}{settings}: {merged} of {len(report.tensors)} tensors merged, {others}",
        ("head", "labels", "max length"),
        [(head.task, str(len(head.labels)), str(head.max_length)) for head in report.info.heads],
    )
    claim = report.statement.claim
    if claim:
        print(f"Claim: ({round_up(claim.epsilon)}, {round_up(claim.delta, 3)})-DP, {_how(report)}.")
    else:
        print(f"No claim: {report.statement.no_claim}")
    print(f"Written to {out}; `confide privacy show {out}` recomputes the claim.")


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        return "/".join(f"{each:g}" for each in value)
    return str(value).lower() if isinstance(value, bool | str) else f"{value:g}"


def _how(report: MergeReport) -> str:
    if len(report.statement.spendings) < 2:
        return "of the one run it rests on"
    if report.statement.disjoint:
        return "because the data sets were declared to share no unit"
    return "composed, because nobody declared that the data sets share no unit"
