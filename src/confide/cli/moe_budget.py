"""`confide moe budget`: how to divide a budget between streams, by public records or by a charged query."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from confide.cli.output import print_json, print_table, spelled
from confide.cli.progress import progress_bars
from confide.cli.train_options import number_or_rule

if TYPE_CHECKING:
    from confide.finetune.private_sensitivity import NoisySensitivity, PrivateSensitivities
    from confide.finetune.settings import Settings
    from confide.tasks.records import TaskData


def budget(
    model: Annotated[
        str, typer.Option(help="Mixture of experts: a folder, package:NAME, or a Hugging Face id.")
    ],
    data: Annotated[Path, typer.Option(help="Labelled texts. Public, and not charged, without --dataset.")],
    text: Annotated[str, typer.Option(help="Column of texts.")] = "text",
    label: Annotated[str, typer.Option(help="Column of labels.")] = "label",
    labels: Annotated[
        str | None, typer.Option(help="Class names, comma-separated, in the order of the logits.")
    ] = None,
    test_size: Annotated[float, typer.Option(help="Share kept for testing, which isn't asked.")] = 0.2,
    dataset: Annotated[
        str | None,
        typer.Option(help="Name of the data set: its records are private, and one noisy query is charged."),
    ] = None,
    epsilon: Annotated[float, typer.Option(help="Of --dataset: ε of the query.")] = 0.1,
    delta: Annotated[
        str, typer.Option(help="Of --dataset: a number, or auto (min(1e-6, 1/(10n))), 1/n, n^-1.1.")
    ] = "auto",
    bound: Annotated[
        float | None,
        typer.Option(help="Of --dataset: R, which a record's λ of the shared stream is cut to; public."),
    ] = None,
    expert_bound: Annotated[
        float | None, typer.Option(help="Of --dataset: R of the stream of experts; public.")
    ] = None,
    declared_units: Annotated[
        int | None, typer.Option(help="Of --dataset: n as a public constant; counted if left out.")
    ] = None,
    unit: Annotated[str | None, typer.Option(help="Of --dataset: column that says whose row it is.")] = None,
    rows_per_unit: Annotated[int, typer.Option(help="At most this many rows of a unit are used.")] = 8,
    ledger: Annotated[
        str | None,
        typer.Option(help="Of --dataset: file or URL that is charged, or none; the default if left out."),
    ] = None,
    layer: Annotated[
        str, typer.Option(help="Layer to train: first, last, or the number of a block.")
    ] = "last",
    rank: Annotated[int, typer.Option(help="LoRA rank, that of experts included.", min=1)] = 8,
    clipping_bound: Annotated[float, typer.Option(help="C of the shared stream.")] = 1.0,
    expert_clipping_bound: Annotated[float, typer.Option(help="C of the stream of experts.")] = 1.0,
    noise: Annotated[float, typer.Option(help="Standard deviation of the noise injected.")] = 0.01,
    draws: Annotated[int, typer.Option(help="Draws of it, each with both signs.", min=2)] = 16,
    texts: Annotated[
        int, typer.Option(help="Texts to use at most; with --dataset, units expected in the draw.", min=1)
    ] = 500,
    max_length: Annotated[int, typer.Option(help="Tokens kept of a text, as in training.", min=1)] = 64,
    seed: Annotated[int, typer.Option(help="Of the texts, the noise injected and the head.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say how to divide a budget, from how noise on either stream raises the loss."""
    from confide.errors import ConfigError
    from confide.finetune.settings import Settings
    from confide.tasks.files import read_task

    options = {name: value for name, value in locals().items() if name in _OPTIONS}
    if not (noise > 0 and clipping_bound > 0 and expert_clipping_bound > 0):
        raise ConfigError("--noise, --clipping-bound and --expert-clipping-bound must be positive")
    if not all(value is None or value > 0 for value in (bound, expert_bound)):
        raise ConfigError("--bound and --expert-bound must be positive")
    if layer == "entropy":
        raise ConfigError("--layer entropy needs a corpus: find the block with `confide moe routing` first")
    _refuse_idle(options)
    settings = Settings.of(
        {
            "method": "raptor",
            "epsilon": epsilon,
            "delta": number_or_rule(delta),
            "declared_units": declared_units,
            "trainable": {"rank": rank},
            "max_length": max_length,
            "seed": seed,
            "experts": {"layer": layer, "rank": rank},
        },
        spelled,
    )
    records = read_task(
        data,
        text=text,
        label=label,
        labels=labels.split(",") if labels is not None else None,
        name="public" if dataset is None else dataset,
        unit=unit,
        rows_per_unit=rows_per_unit,
        test_size=test_size,
        seed=seed,
    )
    weights = clipping_bound**2, expert_clipping_bound**2
    if dataset is None:
        _public(options, settings, records, weights, json=json)
    else:
        _private(options, settings, records, weights, json=json)


_OPTIONS: dict[str, Any] = {
    name: parameter.default for name, parameter in inspect.signature(budget).parameters.items()
}
_CHARGED = ("epsilon", "delta", "bound", "expert_bound", "declared_units", "unit", "rows_per_unit", "ledger")


def _refuse_idle(options: Mapping[str, Any]) -> None:
    from confide.errors import ConfigError

    for name, needed, acts in (
        *((name, "--dataset, for private records", options["dataset"] is not None) for name in _CHARGED),
        ("rows_per_unit", "--unit", options["unit"] is not None),
    ):
        if options[name] != _OPTIONS[name] and not acts:
            raise ConfigError(f"{spelled(name)} has no effect here: it needs {needed}")


def _public(
    options: Mapping[str, Any],
    settings: Settings,
    records: TaskData,
    weights: tuple[float, float],
    *,
    json: bool,
) -> None:
    import dataclasses

    import numpy as np

    from confide.finetune.prepare import counter
    from confide.finetune.sensitivity import stream_sensitivities
    from confide.models.backbones import load_classifier
    from confide.models.resolve import resolve
    from confide.privacy.splits import best_share, paper_share
    from confide.tasks.records import Records

    rows = np.random.default_rng(options["seed"]).permutation(len(records.train))[: options["texts"]]
    kept = np.sort(rows)
    few = Records.of([records.train.texts[row] for row in kept], records.train.labels[kept].tolist())
    task = dataclasses.replace(records, train=few)
    classifier = load_classifier(resolve(options["model"]), task.labels, options["seed"])
    draws = options["draws"]
    with progress_bars(show=not json) as progress:
        advance = counter(progress, "losses", 4 * draws + 2)
        found = stream_sensitivities(
            classifier, settings, task, noise=options["noise"], draws=draws, progress=advance
        )
    shared = found.shared.value * weights[0]
    own = found.own.value * found.experts**2 * weights[1]
    result: dict[str, Any] = {
        "layer": found.layer,
        "experts": found.experts,
        "shared": {"sensitivity": found.shared.value, "error": found.shared.error, "harm": shared},
        "own": {"sensitivity": found.own.value, "error": found.own.error, "harm": own},
        "shared_share": best_share(shared, own),
        "paper_share": paper_share(shared, own),
        "warnings": [
            f"λ of {what} is {kind.value:.3g} ± {kind.error:.2g} over the draws: it may be nothing but "
            "chance. More --draws and more --texts make it clearer."
            for what, kind in (("the shared stream", found.shared), ("the experts", found.own))
            if kind.value <= 3 * kind.error
        ],
    }
    if json:
        print_json(result)
        return
    cells = [
        [name, f"{kind.value:.4g} ± {kind.error:.2g}", f"{harm:.4g}"]
        for name, kind, harm in (("shared", found.shared, shared), ("experts", found.own, own))
    ]
    print_table(_title(found.layer), ("stream", "λ", "per σ²"), cells)
    _print_advice(result)


def _private(
    options: Mapping[str, Any],
    settings: Settings,
    records: TaskData,
    weights: tuple[float, float],
    *,
    json: bool,
) -> None:
    from confide.cli.ledger import ledger_for_training
    from confide.finetune.base import PublicBase
    from confide.finetune.prepare import counter
    from confide.finetune.private_sensitivity import passes, private_sensitivities
    from confide.finetune.run import prepare

    base = PublicBase.of(options["model"])
    book = ledger_for_training(options["ledger"])
    draws = options["draws"]
    with progress_bars(show=not json) as progress:
        found = private_sensitivities(
            prepare(records, base, settings.max_length),
            base,
            settings,
            dataset=options["dataset"],
            expected=options["texts"],
            noise=options["noise"],
            draws=draws,
            bounds=(options["bound"], options["expert_bound"]),
            ledger=book,
            progress=counter(progress, "losses", passes(draws)),
        )
    harms = found.shared.value * weights[0], found.own.value * found.experts**2 * weights[1]
    result = _document(found, harms, book.name if book else None)
    if json:
        print_json(result)
        return
    cells = [
        [name, f"{kind.value:.4g}", f"{kind.noise:.2g}", f"{kind.bound:.4g}", f"{harm:.4g}"]
        for name, kind, harm in zip(("shared", "experts"), (found.shared, found.own), harms, strict=True)
    ]
    print_table(_title(found.layer), ("stream", "λ, noisy", "its noise", "R", "per σ²"), cells)
    _print_advice(result)
    for sentence in _spent(found, result["spent"]):
        print(sentence)


def _document(found: PrivateSensitivities, harms: tuple[float, float], ledger: str | None) -> dict[str, Any]:
    from confide.privacy.splits import best_share, paper_share

    (query,) = found.spending.schedule.queries if found.spending.schedule else ()
    streams = {"shared": found.shared, "own": found.own}
    divides = min(harms) > 0
    return {
        "layer": found.layer,
        "experts": found.experts,
        **{
            name: {"sensitivity": kind.value, "noise": kind.noise, "bound": kind.bound, "harm": harm}
            for (name, kind), harm in zip(streams.items(), harms, strict=True)
        },
        "shared_share": best_share(*harms) if divides else None,
        "paper_share": paper_share(*harms) if divides else None,
        "warnings": [
            sentence
            for what, kind in (("the shared stream", found.shared), ("the experts", found.own))
            for sentence in _unclear(what, kind)
        ],
        "spent": {
            "dataset": found.spending.dataset,
            "run": found.spending.run,
            "units": found.spending.units,
            "unit": found.spending.unit,
            "claim": found.claim.model_dump(),
            "sampling_rate": query.sampling_rate,
            "noise_multipliers": list(query.noise_multipliers),
            "ledger": ledger,
            "entry": found.entry.entry if found.entry else None,
        },
    }


def _unclear(what: str, kind: NoisySensitivity) -> list[str]:
    if kind.clear:
        return []
    return [
        f"λ of {what} is {kind.value:.3g}, and the noise in it has a standard deviation of {kind.noise:.2g}: "
        "it may be nothing but noise. More records, more --texts, a larger --epsilon, or more --draws, which "
        "cost nothing, make it clearer."
    ]


def _print_advice(result: Mapping[str, Any]) -> None:
    """What to beware of, and the shares that follow."""
    for sentence in result["warnings"]:
        print(f"Warning: {sentence}")
    if result["shared_share"] is None:
        print("No share follows: noise on a stream that costs nothing, or less, can't be weighed.")
        return
    print(f"--layer {result['layer']} --shared-share {result['shared_share']:.3f}")
    print(f"RAPTOR's own rule, a share of ε for `split: paper-ratio`: {result['paper_share']:.3f}")


def _spent(found: PrivateSensitivities, spent: Mapping[str, Any]) -> list[str]:
    from confide.privacy.words import round_up

    claim, name = found.claim, spent["dataset"]
    unit = "record" if spent["unit"] == "record" else f"value of {spent['unit']}"
    sigmas = " and ".join(f"{sigma:.4g}" for sigma in spent["noise_multipliers"])
    sentences = [
        f"Spent on {name}: ε = {round_up(claim.epsilon)}, δ = {round_up(claim.delta, 3)} "
        f"({claim.accountant}).",
        f"So much may all that is printed here depend on any one {unit} of {name}, added or removed: one "
        f"noisy vector with noise multipliers {sigmas}, over a draw of rate {spent['sampling_rate']:.4g}.",
        f"n = {spent['units']} counts as public, and so do the names of the labels, as in training.",
    ]
    if spent["ledger"] is None:
        return [*sentences, "No ledger was charged: add this to what else is spent on the same records."]
    return [
        *sentences,
        f"Charged to {spent['ledger']} as run {spent['run']}. The statement of a model that is trained with "
        f"this share holds the training alone. What both spend is in `confide ledger show {name}`: ε by the "
        "filter, because the training was chosen after seeing this.",
    ]


def _title(layer: int) -> str:
    return f"Noise on block {layer}'s experts and on the rest"
