"""`confide merge`: one encoder from several releases, a head for each task, and the claim composed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from confide.cli.keys import Key, signed, signing_key
from confide.cli.output import print_json, print_table
from confide.cli.progress import progress_bars

_OPERATORS = "average, linear, task-arithmetic, ties, pcb, wudi, actmat, regmean, fisher"

if TYPE_CHECKING:
    from confide.merging.merge import MergeReport
    from confide.privacy.statement import OwnersChecked


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
            help="I declare that nobody's data is in two of the models: the largest claim holds for all.",
        ),
    ] = False,
    disjoint_checked: Annotated[
        str | None,
        typer.Option(help="How the owners checked that, in words for the statement; instead of --disjoint."),
    ] = None,
    disjoint_date: Annotated[
        str | None, typer.Option(help="Day on which they finished checking, as 2026-11-30.")
    ] = None,
    key: Key = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Merge releases into one encoder that serves every task."""
    from confide.merging.merge import merge as merge_releases
    from confide.models.backbones import resolve

    parameters = _parameters(set_ or [])
    parameters |= {
        name: value for name, value in (("density", density), ("scale", scale)) if value is not None
    }
    apart = _checked(disjoint_checked, disjoint_date) or disjoint
    signs = signing_key(key)
    with progress_bars(show=not json) as progress:
        report = merge_releases(
            models,
            base=resolve(base),
            operator=operator,
            parameters=parameters,
            statistics=statistics or [],
            out=out,
            disjoint=apart,
            key=signs,
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
        "signed_by": report.statement.signature.key if report.statement.signature else None,
    }


def _checked(how: str | None, when: str | None) -> OwnersChecked | None:
    import datetime

    from confide.errors import ConfigError
    from confide.privacy.statement import OwnersChecked

    if how is None and when is None:
        return None
    if how is None or when is None or not how.strip():
        raise ConfigError("--disjoint-checked needs words for how, and --disjoint-date for when: give both")
    try:
        day = datetime.date.fromisoformat(when)
    except ValueError:
        raise ConfigError(f"--disjoint-date is a day like 2026-11-30, not {when!r}") from None
    if day > datetime.date.today() + datetime.timedelta(days=1):
        raise ConfigError(f"--disjoint-date {when} lies in the future, so nobody checked anything then")
    return OwnersChecked(how=how.strip(), when=day)


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
    print(signed(report.statement))
    print(
        f"Written to {out}; `confide verify {out}` checks everything, `confide privacy card {out}` explains."
    )


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        return "/".join(f"{each:g}" for each in value)
    return str(value).lower() if isinstance(value, bool | str) else f"{value:g}"


def _how(report: MergeReport) -> str:
    if len(report.statement.spendings) < 2:
        return "of the one run it rests on"
    match report.statement.disjoint:
        case None:
            return "composed, because nobody declared that the data sets share no unit"
        case "declared":
            return "because the data sets were declared to share no unit"
        case _:
            return "because the owners checked that the data sets share no unit"
