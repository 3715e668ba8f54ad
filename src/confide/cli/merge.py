"""`confide merge`: one model from several, a head for each task, and the claim composed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from confide.cli.keys import Key, signed, signing_key
from confide.cli.output import print_json, print_table
from confide.cli.progress import progress_bars

_OPERATORS = "average, linear, task-arithmetic, ties, pcb, wudi, actmat, regmean, fisher"

if TYPE_CHECKING:
    from confide.merging.merge import MergeReport
    from confide.merging.plan import Plan
    from confide.privacy.statement import OwnersChecked


def merge(
    models: Annotated[
        list[Path],
        typer.Argument(
            help="Folders, all trained from one base: releases, merges, transformers models, PEFT adapters. "
            "Or one recipe, FILE.yaml."
        ),
    ],
    base: Annotated[
        str | None,
        typer.Option(help="The public base: a folder, a Hugging Face id or package:NAME. A recipe names it."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; it must not exist.")] = None,
    operator: Annotated[str | None, typer.Option(help=f"One of: {_OPERATORS}; ties if left out.")] = None,
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
        typer.Option(
            help="regmean and fisher: a statistics file for each model, in any order; or one public text, "
            "on which they are computed first."
        ),
    ] = None,
    heads: Annotated[
        list[str] | None,
        typer.Option(help="Plain folders: tensors that stay per task, as score or lm_head, or a pattern."),
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
    shard_size: Annotated[
        str, typer.Option(help="Largest file of weights; larger models are written in shards.")
    ] = "5GB",
    memory: Annotated[
        str | None,
        typer.Option(
            help="Private memory that the merge may take beside Python and its libraries, such as 500MB; "
            "where that isn't enough it stops before it writes."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be merged and claimed, and write nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Merge models into one that serves every task."""
    from confide.errors import MergeError
    from confide.merging.merge import check_free, write
    from confide.sizes import bytes_of

    if out is None and not dry_run:
        raise MergeError("name the folder to write with --out, or look first with --dry-run")
    if out is not None:
        check_free(out)
    shard = bytes_of(shard_size, "--shard-size")
    limit = bytes_of(memory, "--memory") if memory is not None else None
    parameters = _parameters(set_ or [])
    parameters |= {
        name: value for name, value in (("density", density), ("scale", scale)) if value is not None
    }
    apart = _checked(disjoint_checked, disjoint_date) or disjoint
    signs = None if dry_run else signing_key(key)
    plan, text = _plan(models, base, operator, parameters, statistics or [], heads, apart)
    if not json:
        for difference in plan.disagreements():
            print(f"Beware: the models weren't trained alike: {difference}.")
    if dry_run:
        return _show(plan, shard, json)
    assert out is not None
    with _computed(plan, text) as ready, progress_bars(show=not json) as progress:
        report = write(
            ready,
            out,
            key=signs,
            shard_size=shard,
            memory=limit,
            progress=lambda done, total: progress(f"Merging {len(plan.inputs)} models", done, total),
        )
    if json:
        print_json(_as_json(report, out))
    else:
        _print(report, out)


def _plan(
    models: list[Path],
    base: str | None,
    operator: str | None,
    parameters: dict[str, Any],
    statistics: list[Path],
    heads: list[str] | None,
    disjoint: bool | OwnersChecked,
) -> tuple[Plan, Path | None]:
    """What is to be merged, and the public text on which its statistics are still to be computed."""
    from confide.errors import MergeError
    from confide.merging import recipe as recipes
    from confide.merging.plan import plan_models, plan_recipe
    from confide.merging.statistics import split
    from confide.models.resolve import resolve

    files, text = split(statistics)
    if recipes.is_recipe(models):
        if operator or parameters or heads:
            raise MergeError(
                f"{models[0]} is a recipe: write the operator, parameters and heads there, not as options"
            )
        recipe = recipes.read(models[0])
        named = base or recipe.base
        if named is None:
            raise MergeError(f"{models[0]} names no base_model; add it, or give --base")
        return plan_recipe(recipe, resolve(named), files, disjoint), text or recipe.text
    if base is None:
        raise MergeError("name the public base of the models with --base")
    plan = plan_models(
        models,
        base=resolve(base),
        operator=operator or "ties",
        parameters=parameters,
        statistics=files,
        heads=heads,
        disjoint=disjoint,
    )
    return plan, text


@contextmanager
def _computed(plan: Plan, text: Path | None) -> Iterator[Plan]:
    """The plan with statistics on the text, where there is one; their files live as long as the block."""
    if text is None:
        yield plan
        return
    from confide.finetune.statistics import statistics_on

    models = [item.path for item in plan.inputs]
    with statistics_on(text, models, plan.operator.needs, plan.public.folder) as files:
        yield plan.with_statistics(files)


def _parameters(settings: list[str]) -> dict[str, Any]:
    from confide.errors import MergeError

    found: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or not name or name in found:
            raise MergeError(f"--set takes NAME=VALUE, each name once, not {text!r}")
        found[name] = value
    return found


def _show(plan: Plan, shard_size: int, json: bool) -> None:
    from confide.release.shards import plan_shards

    lines = plan.lines()
    files = plan_shards({line["name"]: plan.output(line["name"]) for line in lines}, shard_size)
    needed, what = plan.memory()
    claim = plan.statement.claim
    if json:
        print_json(
            {
                "operator": plan.operator.name,
                "parameters": dict(plan.parameters),
                "base": plan.base.model_dump(mode="json"),
                "models": [{"tasks": item.tasks, "kind": item.kind} for item in plan.inputs],
                "heads": [head.model_dump(mode="json") for head in plan.info.heads],
                "tensors": lines,
                "files": {name: list(tensors) for name, tensors in files.items()},
                "bytes": sum(line["bytes"] for line in lines),
                "memory": {"bytes": needed, "for": what},
                "disagreements": list(plan.disagreements()),
                "claim": claim.model_dump(mode="json") if claim else None,
                "no_claim": plan.statement.no_claim,
            }
        )
        return
    print_table(
        f"{plan.operator.name}{_settings(plan.parameters)} of {len(plan.inputs)} models",
        ("tensor", "rule", "dtype", "shape", "MB"),
        [
            (
                line["name"],
                line["rule"] + (_settings(line["settings"]) if line["settings"] else ""),
                line["dtype"],
                "×".join(str(side) for side in line["shape"]),
                f"{line['bytes'] / 1e6:.2f}",
            )
            for line in lines
        ],
    )
    for item in plan.inputs:
        print(f"Model: {item.tasks} ({item.kind}, {item.path})")
    total = sum(line["bytes"] for line in lines)
    print(
        f"Would write {total / 1e9:.3f} GB in {len(files)} files; needs about {needed / 1e6:.0f} MB "
        f"for {what}."
    )
    print(_claim(plan.statement, "Would claim"))


def _as_json(report: MergeReport, out: Path) -> dict[str, Any]:
    return {
        "out": str(out),
        "operator": report.operator,
        "parameters": dict(report.parameters),
        "base": report.base.model_dump(mode="json"),
        "models": list(report.models),
        "heads": [head.model_dump(mode="json") for head in report.info.heads],
        "merged": report.merged,
        "tensors": len(report.tensors),
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
    averaged = sum(line.rule.startswith("mean:") for line in report.tensors)
    others = f"{averaged} averaged, the rest the base's" if averaged else "the rest the base's"
    merged = report.merged - averaged
    print_table(
        f"{report.operator}{_settings(report.parameters)}: {merged} of {len(report.tensors)} tensors merged, "
        f"{others}",
        ("head", "labels", "max length"),
        [(head.task, str(len(head.labels)), str(head.max_length)) for head in report.info.heads],
    )
    if not report.merged:
        print("No model changed the encoder: this merge is the base with each model's head.")
    print(_claim(report.statement, "Claim"))
    print(signed(report.statement))
    print(
        f"Written to {out}; `confide verify {out}` checks everything, `confide privacy card {out}` explains."
    )


def _settings(parameters: Any) -> str:
    return "".join(f", {name} {_words(value)}" for name, value in parameters.items())


def _words(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "/".join(_words(each) for each in value)
    return str(value).lower() if isinstance(value, bool | str) else f"{value:g}"


def _claim(statement: Any, word: str) -> str:
    from confide.privacy.words import round_up

    claim = statement.claim
    if not claim:
        return f"No claim: {statement.no_claim}"
    return f"{word}: ({round_up(claim.epsilon)}, {round_up(claim.delta, 3)})-DP, {_how(statement)}."


def _how(statement: Any) -> str:
    if len(statement.spendings) < 2:
        return "of the one run it rests on"
    match statement.disjoint:
        case None:
            return "composed, because nobody declared that the data sets share no unit"
        case "declared":
            return "because the data sets were declared to share no unit"
        case _:
            return "because the owners checked that the data sets share no unit"
