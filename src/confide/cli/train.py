"""`confide train`: a private task model from one's own file."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from confide.choices import (
    AnchorForm,
    Ascent,
    Clipping,
    Decay,
    ExpertClipping,
    Method,
    Metric,
    Optimizer,
    Precision,
    RecordWeight,
    Statistics,
    Trained,
    Variant,
)
from confide.cli.keys import Key, signing_key
from confide.cli.output import print_json, spelled
from confide.cli.plan import foreseen_charge, print_plan
from confide.cli.progress import progress_bars
from confide.cli.train_options import read_options, stored
from confide.cli.trained import NOTE, show, show_finished, summary_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from confide.finetune.base import PublicBase
    from confide.finetune.checkpoint import Unfinished
    from confide.finetune.folder import RunFolder
    from confide.finetune.settings import Settings
    from confide.privacy.ledger import Ledger
    from confide.tasks.records import TaskData


def train(
    base: Annotated[
        str | None, typer.Option(help="Public base: a folder, a Hugging Face id or package:NAME.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="CSV, TSV, JSON Lines or Parquet file; or a folder of images for each class."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; must not exist.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Name of the data set, by which its spending is told apart.")
    ] = None,
    text: Annotated[str, typer.Option(help="Column of texts.")] = "text",
    text_pair: Annotated[str | None, typer.Option(help="Column of second texts, for pairs.")] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Column of lists of words, each with a label of its own.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Column of paths of images.")] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Column of texts that a language model is to write for those of --text."),
    ] = None,
    language_model: Annotated[
        bool, typer.Option("--language-model", help="Learn the texts of --text themselves.")
    ] = False,
    image_size: Annotated[int, typer.Option(help="Side that images are resized to, in pixels.")] = 224,
    label: Annotated[str, typer.Option(help="Column of labels.")] = "label",
    label_range: Annotated[
        str | None, typer.Option(help="LOW,HIGH: labels are numbers between these; public.")
    ] = None,
    labels: Annotated[
        str | None, typer.Option(help="Class names, comma-separated, in the order of the logits.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Name of the task in a merge; the data set's if left out.")
    ] = None,
    epsilon: Annotated[float, typer.Option(help="ε of the release.")] = 4.0,
    delta: Annotated[str, typer.Option(help="A number, or auto (min(1e-6, 1/(10n))), 1/n, n^-1.1.")] = "auto",
    method: Annotated[Method, typer.Option(help="How to train.")] = "dp-merging",
    trainable: Annotated[Trained, typer.Option(help="What is trained beside the head.")] = "lora",
    blocks: Annotated[
        int | None,
        typer.Option(help="Top blocks for lora and blocks; 0 for all. 1 if left out; for raptor, all."),
    ] = None,
    rank: Annotated[int, typer.Option(help="LoRA rank.")] = 8,
    declared_units: Annotated[
        int | None, typer.Option(help="n as a public constant; counted if left out, and then assumed public.")
    ] = None,
    expected_batch: Annotated[int | None, typer.Option(help="B, mean size of a draw.")] = None,
    steps: Annotated[int | None, typer.Option(help="Noisy steps.")] = None,
    optimizer: Annotated[Optimizer, typer.Option(help="Over the noisy gradients.")] = "adamw",
    learning_rate: Annotated[float | None, typer.Option(help="Of the encoder, at the first step.")] = None,
    head_learning_rate: Annotated[float | None, typer.Option(help="Of the head.")] = None,
    decay: Annotated[Decay, typer.Option(help="Of both learning rates.")] = "linear",
    warmup: Annotated[int, typer.Option(help="Steps in which both rates rise from 0 first.")] = 0,
    weight_decay: Annotated[float, typer.Option(help="Decoupled, to 0; only without an anchor.")] = 0.0,
    bias_correction: Annotated[
        float, typer.Option(help="Subtract the noise from AdamW's second moment, down to this; 0 doesn't.")
    ] = 0.0,
    clipping: Annotated[
        Clipping,
        typer.Option(help="How a unit's gradient is bounded."),
    ] = "flat",
    clipping_bound: Annotated[float | None, typer.Option(help="C.")] = None,
    head_share: Annotated[float, typer.Option(help="Of per-role: the head's share of C².")] = 0.5,
    clipping_quantile: Annotated[
        float, typer.Option(help="Of adaptive: share of the gradients to leave unclipped.")
    ] = 0.5,
    clipping_rate: Annotated[float, typer.Option(help="Of adaptive: how fast C follows.")] = 0.2,
    count_noise: Annotated[
        float | None, typer.Option(help="Of adaptive: noise on the number of unclipped units.")
    ] = None,
    ascent: Annotated[
        Ascent | None,
        typer.Option(help="The method's own if left out."),
    ] = None,
    ascent_radius: Annotated[float | None, typer.Option(help="ρ.")] = None,
    ascent_noise_ratio: Annotated[
        float, typer.Option(help="Noise of the ascent's query over the descent's.")
    ] = 1.0,
    anchor: Annotated[float | None, typer.Option(help="λ of the pull to the base.")] = None,
    variant: Annotated[
        Variant,
        typer.Option(help="Of raptor: the method itself, or what it is compared with."),
    ] = "raptor",
    layer: Annotated[
        str,
        typer.Option(help="Layer whose experts are trained: entropy, first, last, or a block's number."),
    ] = "entropy",
    public: Annotated[
        Path | None, typer.Option(help="Public texts, one a line, by which layer entropy is chosen.")
    ] = None,
    shared_share: Annotated[float, typer.Option(help="The shared stream's share of the budget.")] = 0.9,
    expert_steps: Annotated[
        int | None, typer.Option(help="Steps of the stream of experts; as many as --steps if left out.")
    ] = None,
    expert_learning_rate: Annotated[float, typer.Option(help="Of the experts, at the first step.")] = 0.01,
    expert_clipping: Annotated[
        ExpertClipping,
        typer.Option(help="Clipping rule of the stream of experts."),
    ] = "normalised",
    expert_clipping_bound: Annotated[float, typer.Option(help="C of the stream of experts.")] = 1.0,
    record_weight: Annotated[
        RecordWeight, typer.Option(help="How the stream of experts weighs records.")
    ] = "residual",
    diagnostics: Annotated[
        bool,
        typer.Option("--diagnostics", help="Measure what the experts made of the records; private."),
    ] = False,
    anchor_form: Annotated[AnchorForm, typer.Option(help="Through the optimizer, or beside it.")] = "coupled",
    unit: Annotated[
        str | None, typer.Option(help="Column that says whose row it is; the claim is then per unit.")
    ] = None,
    rows_per_unit: Annotated[int, typer.Option(help="At most this many rows of a unit are used.")] = 8,
    test_size: Annotated[float, typer.Option(help="Share of units kept for testing.")] = 0.2,
    test_data: Annotated[Path | None, typer.Option(help="A test file instead.")] = None,
    metric: Annotated[
        Metric | None,
        typer.Option(
            help="Score on the test part; by default accuracy, of numbers pearson, of texts perplexity."
        ),
    ] = None,
    publish_accuracy: Annotated[
        float | None,
        typer.Option(help="Release the test accuracy with this much noise, in test units; charged."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="About how much the process may take, such as 8GiB.")
    ] = None,
    precision: Annotated[Precision, typer.Option(help="Of the forward and the backward pass.")] = "float32",
    max_length: Annotated[int, typer.Option(help="Tokens of a text; longer ones are cut.")] = 64,
    release_statistics: Annotated[
        Statistics | None,
        typer.Option(help="Release them with the weights, noised, for regmean or fisher; a charged query."),
    ] = None,
    statistics_noise: Annotated[float, typer.Option(help="σ of that query.")] = 5.0,
    statistics_bound: Annotated[
        float | None, typer.Option(help="R: a unit's statistics have norm R² at most; public if left out.")
    ] = None,
    agreement: Annotated[
        Path | None, typer.Option(help="File of `confide agree`; what contradicts it is refused.")
    ] = None,
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
    checkpoint_every: Annotated[
        float, typer.Option(help="Seconds between two checkpoints; 0 for one after each step.", min=0)
    ] = 300.0,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the unfinished run of this folder; alone.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be spent, and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Fine-tune a model on your own records under differential privacy."""
    from confide.errors import ConfigError

    options = {name: value for name, value in locals().items() if name in _OPTIONS}
    if resume is not None:
        changed = sorted(name for name, value in options.items() if value != _OPTIONS[name])
        if changed or dry_run:
            extra = spelled((changed or ["dry_run"])[0])
            raise ConfigError(f"--resume takes every option from the run itself; leave out {extra}")
        _go_on(resume, json=json)
        return
    if base is None or data is None or out is None or dataset is None:
        needed = [name for name in ("base", "data", "out", "dataset") if options[name] is None]
        raise ConfigError(f"Missing option --{needed[0]}")
    if out.exists():
        raise ConfigError(f"{out} exists already; choose another --out or remove it first")
    settings, records, model = read_options(options, _OPTIONS)
    if dry_run:
        from confide.finetune.agreement import agreed
        from confide.finetune.plan import measure, trained_parameters
        from confide.finetune.run import plan, public_units
        from confide.models.backbones import load_classifier
        from confide.privacy.composition import new_run, training_spending
        from confide.privacy.plan import plan as foresee

        agreed(settings, records, model.identity, model.folder)
        classifier = load_classifier(model.folder, records.labels, settings.seed, records.problem)
        adapted, schedule, planned = plan(records, classifier, settings)
        count = public_units(records, settings)
        foreseen = foresee(schedule, count, planned, trained_parameters(adapted, schedule))
        rows = records.train.units.rows_per_unit
        cost = measure(adapted, schedule, count, settings.max_length, rows, settings.memory)
        told = None
        if schedule.private and options["ledger"] != "none":
            told = foreseen_charge(
                options["ledger"],
                training_spending(
                    schedule, delta=planned, dataset=dataset, units=count, run=new_run(), steps_run={}
                ),
            )
        print_plan(foreseen, cost, told, json=json)
        return
    from confide.finetune.folder import RunFolder

    signs = signing_key(key)  # before anything is spent
    book = _ledger(options, settings)
    # The folder comes before the charge: one that can't be written must not cost a budget.
    folder = RunFolder(out)
    with closing(folder.begin(stored(options), checkpoint_every)) as unfinished:
        _train(folder, unfinished, options, settings, records, model, book, signs, json=json)


_OPTIONS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(train).parameters.items()
    if name not in ("resume", "dry_run", "json")
}
"""What defines a run, with the defaults."""


def _ledger(options: Mapping[str, Any], settings: Settings) -> Ledger | None:
    from confide.cli.ledger import ledger_for_training

    claims = settings.private and options["simulate"] is None
    return ledger_for_training(options["ledger"]) if claims else None


def _go_on(path: Path, *, json: bool) -> None:
    """Go on with an unfinished run, from wherever it was stopped."""
    from confide.errors import ResumeError
    from confide.finetune.folder import RunFolder

    folder = RunFolder.of(path)
    if folder.whole:
        folder.finish()
    if folder.out.exists() and not folder.side.exists():
        show_finished(folder.out, json=json)
        return
    if folder.out.exists():
        raise ResumeError(f"{folder.out} exists beside {folder.side}; move one of them away")
    with closing(folder.open()) as unfinished:
        options = folder.options()
        unfinished.every = options["checkpoint_every"]
        signs = signing_key(options["key"])
        settings, records, model = read_options(options, _OPTIONS)
        _train(
            folder,
            unfinished,
            options,
            settings,
            records,
            model,
            _ledger(options, settings),
            signs,
            json=json,
        )


def _train(
    folder: RunFolder,
    unfinished: Unfinished,
    options: Mapping[str, Any],
    settings: Settings,
    records: TaskData,
    public: PublicBase,
    ledger: Ledger | None,
    signs: Ed25519PrivateKey | None,
    *,
    json: bool,
) -> None:
    """Train and release; what failed before it asked anything leaves nothing behind."""
    from confide.errors import ResumeError
    from confide.files import write_json
    from confide.finetune.run import finetune, prepare

    try:
        with progress_bars(show=not json) as progress:
            result = finetune(
                prepare(records, public, settings.max_length),
                public,
                settings,
                dataset=options["dataset"],
                simulate=options["simulate"],
                ledger=ledger,
                progress=progress,
                unfinished=unfinished,
            )
            scores = result.scores()
        result.keep_private(folder.side / "private")
        summary = summary_of(result, folder.out, scores, signs)
        write_json(folder.side / "report" / "results.json", {**summary, "note": NOTE})
        # The last: where it is, nothing is missing.
        statement = result.release(folder.side / "release", key=signs)
        folder.finish()
    except ResumeError:
        raise
    except BaseException:
        if unfinished.asked:
            print(f"The run can go on where it stopped: confide train --resume {folder.out}", file=sys.stderr)
        else:
            folder.remove()
        raise
    if json:
        print_json(summary)
    else:
        show(result, statement, summary, scores)
        if ledger:
            print(f"Charged to {statement.spendings[0].dataset} in the ledger {ledger.name}.")
