"""`confide train`: a private task model from one's own file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from confide.cli.keys import Key, signed, signing_key
from confide.cli.output import print_json
from confide.cli.plan import print_plan
from confide.cli.progress import progress_bars

if TYPE_CHECKING:
    from confide.finetune.run import FineTuned
    from confide.privacy.statement import Statement

_NOTE = "The score comes from test records without noise: it is for you, and no part of the release."


def train(
    base: Annotated[str, typer.Option(help="Public base: a folder, a Hugging Face id or package:NAME.")],
    data: Annotated[Path, typer.Option(help="CSV, TSV, JSON Lines or Parquet file.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    dataset: Annotated[str, typer.Option(help="Name of the data set, by which its spending is told apart.")],
    text: Annotated[str, typer.Option(help="Column of texts.")] = "text",
    label: Annotated[str, typer.Option(help="Column of labels.")] = "label",
    labels: Annotated[
        str | None, typer.Option(help="Class names, comma-separated, in the order of the logits.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Name of the task in a merge; the data set's if left out.")
    ] = None,
    epsilon: Annotated[float, typer.Option(help="ε of the release.")] = 4.0,
    delta: Annotated[str, typer.Option(help="A number, or auto (min(1e-6, 1/(10n))), 1/n, n^-1.1.")] = "auto",
    method: Annotated[
        Literal["dp-merging", "dp-adamw", "non-private"], typer.Option(help="How to train.")
    ] = "dp-merging",
    trainable: Annotated[
        Literal["lora", "blocks", "all", "head"], typer.Option(help="What is trained beside the head.")
    ] = "lora",
    blocks: Annotated[int, typer.Option(help="Top blocks for lora and blocks; 0 for all.")] = 1,
    rank: Annotated[int, typer.Option(help="LoRA rank.")] = 8,
    declared_units: Annotated[
        int | None, typer.Option(help="n as a public constant; counted if left out, and then assumed public.")
    ] = None,
    expected_batch: Annotated[int | None, typer.Option(help="B, mean size of a draw.")] = None,
    steps: Annotated[int | None, typer.Option(help="Noisy steps.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Of the encoder, at the first step.")] = None,
    head_learning_rate: Annotated[float | None, typer.Option(help="Of the head.")] = None,
    clipping_bound: Annotated[float | None, typer.Option(help="C.")] = None,
    ascent: Annotated[
        Literal["none", "paired", "fresh", "lagged"] | None,
        typer.Option(help="The method's own if left out."),
    ] = None,
    ascent_radius: Annotated[float | None, typer.Option(help="ρ.")] = None,
    anchor: Annotated[float | None, typer.Option(help="λ of the pull to the base.")] = None,
    unit: Annotated[
        str | None, typer.Option(help="Column that says whose row it is; the claim is then per unit.")
    ] = None,
    rows_per_unit: Annotated[int, typer.Option(help="At most this many rows of a unit are used.")] = 8,
    test_size: Annotated[float, typer.Option(help="Share of units kept for testing.")] = 0.2,
    test_data: Annotated[Path | None, typer.Option(help="A test file instead.")] = None,
    metric: Annotated[
        Literal["accuracy", "macro-f1"], typer.Option(help="Score on the test part.")
    ] = "accuracy",
    max_length: Annotated[int, typer.Option(help="Tokens of a text; longer ones are cut.")] = 64,
    seed: Annotated[int, typer.Option(help="Of initial weights and the split, not of noise.")] = 0,
    simulate: Annotated[
        int | None,
        typer.Option(help="Fix noise and sampling by this number: repeatable, and claims nothing."),
    ] = None,
    ledger: Annotated[
        str | None,
        typer.Option(help="File or URL that the run is charged to, or none; the default one if left out."),
    ] = None,
    key: Key = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be spent, and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Fine-tune a classifier on your own records under differential privacy."""
    from confide.cli.ledger import ledger_for_training
    from confide.errors import ConfigError
    from confide.files import new_folder, write_json
    from confide.finetune.plan import measure, trained_parameters
    from confide.finetune.run import PublicBase, finetune, plan, prepare, public_units
    from confide.finetune.settings import Settings
    from confide.models.backbones import load_classifier
    from confide.privacy.plan import plan as foresee
    from confide.tasks.files import read_task

    if out.exists():
        raise ConfigError(f"{out} exists already; choose another --out or remove it first")
    given: dict[str, Any] = {
        "method": method,
        "epsilon": epsilon,
        "delta": _number_or_rule(delta),
        "declared_units": declared_units,
        "expected_batch": expected_batch,
        "steps": steps,
        "trainable": {"kind": trainable, "blocks": blocks, "rank": rank},
        "learning_rate": learning_rate,
        "head_learning_rate": head_learning_rate,
        "clipping_bound": clipping_bound,
        "ascent": ascent,
        "ascent_radius": ascent_radius,
        "anchor": anchor,
        "max_length": max_length,
        "seed": seed,
    }
    settings = Settings.of(
        {key: value for key, value in given.items() if value is not None},
        spell=lambda key: "--" + key.rsplit(".", 1)[-1].replace("_", "-"),
    )
    records = read_task(
        data,
        text=text,
        label=label,
        labels=labels.split(",") if labels is not None else None,
        name=task or dataset,
        unit=unit,
        rows_per_unit=rows_per_unit,
        test_size=test_size,
        test_file=test_data,
        seed=seed,
        metric=metric,
    )
    public = PublicBase.of(base)
    if dry_run:
        classifier = load_classifier(public.folder, records.labels, settings.seed)
        adapted, schedule, planned = plan(records, classifier, settings)
        count = public_units(records, settings)
        foreseen = foresee(schedule, count, planned, trained_parameters(adapted, schedule))
        rows = records.train.units.rows_per_unit
        cost = measure(adapted, schedule, count, settings.max_length, rows)
        print_plan(foreseen, cost, json=json)
        return
    signs = signing_key(key)  # before anything is spent
    claims = method != "non-private" and simulate is None
    book = ledger_for_training(ledger) if claims else None
    # The folder comes first: one that can't be written must not cost a budget.
    with new_folder(out) as folder:
        with progress_bars(show=not json) as progress:
            result = finetune(
                prepare(records, public, settings.max_length),
                public,
                settings,
                dataset=dataset,
                simulate=simulate,
                ledger=book,
                progress=progress,
            )
            score = result.score()
        statement = result.release(folder / "release", key=signs)
        result.keep_private(folder / "private")
        summary = _summary(result, statement, out, score)
        write_json(folder / "report" / "results.json", {**summary, "note": _NOTE})
    if json:
        print_json(summary)
    else:
        _show(result, statement, summary, score)


def _summary(result: FineTuned, statement: Statement, out: Path, score: float) -> dict[str, Any]:
    return {
        "release": str(out / "release"),
        "dataset": statement.spendings[0].dataset,
        "method": result.settings.method,
        "epsilon": statement.claim.epsilon if statement.claim else None,
        "delta": statement.claim.delta if statement.claim else None,
        "no_claim": statement.no_claim,
        "signed_by": statement.signature.key if statement.signature else None,
        "metric": result.prepared.task.metric,
        "score": score,
        "score_is_private": False,
    }


def _number_or_rule(delta: str) -> float | str:
    from confide.errors import ConfigError

    if delta in ("auto", "1/n", "n^-1.1"):
        return delta
    try:
        value = float(delta)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise ConfigError(f"--delta: a number between 0 and 1, auto, 1/n or n^-1.1, not {delta}")
    return value


def _show(result: FineTuned, statement: Statement, summary: dict[str, Any], score: float) -> None:
    from confide.privacy.calibration import delta_warning
    from confide.privacy.words import describe

    for line in describe(result.statement):
        print(line)
    claim = result.statement.claim
    if claim and (warning := delta_warning(claim.delta, result.statement.spendings[0].units)):
        print(f"Warning: {warning}.")
    print(signed(statement))
    task = result.prepared.task
    print(
        f"{summary['metric']} on {len(task.test)} test records: {100 * score:.1f} %. "
        "This number is not noised: it is for you, and no part of the release."
    )
    print(
        f"Release in {summary['release']}; it loads with transformers, and `confide predict` labels new rows."
    )
