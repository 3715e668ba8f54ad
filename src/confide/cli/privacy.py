"""`confide privacy`: what a setting costs, what a budget needs, what a release claims."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from confide.choices import Adjacency, Trained
from confide.cli.output import print_json, shown

if TYPE_CHECKING:
    from confide.privacy.statement import Claim, Statement
    from confide.report.privacy_card import Card

app = typer.Typer(help="Compute and check privacy claims.", no_args_is_help=True)

_Delta = Annotated[str, typer.Option(help="A number, or auto, 1/n, n^-1.1 (these need --records).")]
_Records = Annotated[int | None, typer.Option(help="n, the number of records (or other units).")]
_Queries = Annotated[int, typer.Option(help="Noisy queries on each draw; 2 for DP-Merging's pair.")]
_Adjacency = Annotated[Adjacency, typer.Option(help="Which data sets are neighbours.")]
_Sampling = Annotated[str, typer.Option(help="How units join a draw; only `poisson` has a bound.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command("epsilon")
def epsilon(
    sampling_rate: Annotated[float, typer.Option(help="Poisson rate q: expected batch / records.")],
    noise_multiplier: Annotated[float, typer.Option(help="σ: noise on a query / clipping bound.")],
    steps: Annotated[int, typer.Option(help="Number of draws.")],
    delta: _Delta,
    queries: _Queries = 1,
    records: _Records = None,
    adjacency: _Adjacency = "add-or-remove-one",
    sampling: _Sampling = "poisson",
    json: _Json = False,
) -> None:
    """The ε that a number of noisy steps costs."""
    from confide.errors import PrivacyError
    from confide.privacy import accountant
    from confide.privacy.events import PoissonGaussian, require_poisson

    require_poisson(sampling)
    if queries < 1 or steps < 1:
        raise PrivacyError(f"--steps and --queries must be at least 1, not {steps} and {queries}")
    event = PoissonGaussian(sampling_rate, (noise_multiplier,) * queries, steps)
    small = _delta(delta, records)
    claim = accountant.epsilon(event, small, adjacency)
    if json:
        print_json(claim.model_dump())
        return
    for line in _bounds(claim):
        print(line)


@app.command("noise")
def noise(
    epsilon: Annotated[float, typer.Option(help="ε of the budget.")],
    delta: _Delta,
    records: Annotated[int, typer.Option(help="n, the number of records (or other units).")],
    batch: Annotated[float, typer.Option(help="Expected batch; the sampling rate is batch / records.")],
    epochs: Annotated[
        float | None, typer.Option(help="Steps are epochs · records / batch, rounded up.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of draws, instead of --epochs.")] = None,
    queries: _Queries = 1,
    adjacency: _Adjacency = "add-or-remove-one",
    json: _Json = False,
) -> None:
    """The smallest noise multiplier with which training fits a budget."""
    from confide.errors import ConfigError
    from confide.privacy import accountant, calibration
    from confide.privacy.events import PoissonGaussian
    from confide.privacy.solve import steps_of
    from confide.privacy.streams import Budget
    from confide.privacy.words import round_up

    if records < 1:
        raise ConfigError(f"--records must be at least 1, not {records}")
    if not 0 < batch <= records:
        raise ConfigError(
            f"the expected batch must lie between 0 and the number of records ({records}), not {batch:g}"
        )
    if (epochs is None) == (steps is None):
        raise ConfigError("give either --epochs or --steps")
    draws = steps if steps is not None else steps_of(epochs or 0.0, records, batch)
    if draws < 1:
        raise ConfigError(f"there must be at least one step, not {draws}")
    budget = Budget(epsilon, _delta(delta, records))
    rate = batch / records
    sigma = calibration.noise_multiplier(rate, draws, budget, queries=queries, adjacency=adjacency)
    claim = accountant.epsilon(PoissonGaussian(rate, (sigma,) * queries, draws), budget.delta, adjacency)
    if json:
        facts = {"sampling_rate": rate, "steps": draws, "queries": queries}
        print_json({"noise_multiplier": sigma} | facts | claim.model_dump())
        return
    each = f" on each of {queries} queries per draw" if queries > 1 else ""
    print(f"noise multiplier σ = {round_up(sigma)}{each}, {draws} steps at sampling rate {rate:.4g}")
    for line in _bounds(claim):
        print(line)


@app.command("plan")
def plan(
    records: Annotated[int, typer.Option(help="n, the number of records (or other units), declared.")],
    epsilon: Annotated[float | None, typer.Option(help="ε of the budget.")] = None,
    delta: _Delta = "auto",
    noise_multiplier: Annotated[float | None, typer.Option(help="σ of every query.")] = None,
    batch: Annotated[float | None, typer.Option(help="Expected batch B; the rate is B / records.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of draws.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes, instead of --steps.")] = None,
    queries: _Queries = 1,
    adjacency: _Adjacency = "add-or-remove-one",
    parameters: Annotated[int | None, typer.Option(help="d, the number of trained parameters.")] = None,
    base: Annotated[
        str | None, typer.Option(help="Public base, to count parameters and measure time and memory.")
    ] = None,
    trainable: Annotated[Trained, typer.Option(help="With --base: what is trained.")] = "lora",
    blocks: Annotated[int, typer.Option(help="With --base: top blocks; 0 for all.")] = 1,
    rank: Annotated[int, typer.Option(help="With --base: LoRA rank.")] = 8,
    classes: Annotated[int, typer.Option(help="With --base: number of labels.")] = 2,
    max_length: Annotated[int, typer.Option(help="With --base: tokens of a text.")] = 64,
    sampling: _Sampling = "poisson",
    json: _Json = False,
) -> None:
    """Solve for what is left out of ε, σ, steps and batch, and say what to expect; nothing is spent."""
    from confide.cli.plan import print_plan
    from confide.errors import ConfigError
    from confide.privacy.events import require_poisson
    from confide.privacy.plan import plan as foresee
    from confide.privacy.solve import Known, solve

    require_poisson(sampling)
    if base is not None and (parameters is not None or queries > 2):
        raise ConfigError("--base counts --parameters itself, and trains with 1 or 2 --queries")
    solved = solve(
        Known(
            units=records,
            delta=_delta(delta, records, warn=False),
            epsilon=epsilon,
            noise_multiplier=noise_multiplier,
            batch=batch,
            steps=steps,
            epochs=epochs,
            queries=queries,
            adjacency=adjacency,
        )
    )
    if base is None:
        sizes = {"all": parameters} if parameters is not None else {}
        print_plan(foresee(solved.schedule(), records, solved.delta, sizes), None, json=json)
        return
    from confide.finetune.plan import fit_to_base

    schedule, sizes, cost = fit_to_base(
        solved,
        base,
        {"kind": trainable, "blocks": blocks, "rank": rank},
        classes=classes,
        max_length=max_length,
    )
    print_plan(foresee(schedule, records, solved.delta, sizes), cost, json=json)


@app.command("show")
def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A release folder.")], json: _Json = False
) -> None:
    """What a release claims, in words, recomputed from its events."""
    from confide.privacy import composition, statement, words
    from confide.privacy.words import round_up
    from confide.release import format
    from confide.release.write import verify

    complete = (folder / format.FILE_NAME).exists()
    found = verify(folder) if complete else statement.read(folder)
    composition.check(found)
    honest = composition.recompute(found)
    separate = composition.per_dataset(found) if found.kind == "merge" else {}
    together = composition.worst_case(found) if found.disjoint else None
    if json:
        facts = _as_json(found, honest, separate, together)
        print_json(facts | {"weights": "match" if complete else "not checked"})
        return
    for line in words.describe(found):
        print(line)
    for dataset, claim in separate.items():
        print(f"  {dataset} alone: ε = {round_up(claim.epsilon)}")
    if together:
        print(f"  if the data sets did share units: ε = {round_up(together.epsilon)}")
    if found.assumptions:
        print("Assumptions:")
    for line in found.assumptions:
        print(f"- {line}")
    if honest and found.claim:
        print(f"Recomputed from the events: ε = {round_up(honest.epsilon)} ({honest.accountant}).")
        print("The claim holds.")
    if complete:
        print("The weights are the ones that the statement is about.")
    else:
        print(f"The weights were not checked: {folder} holds no {format.FILE_NAME}.")


@app.command("card")
def card(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A release folder.")],
    out: Annotated[Path | None, typer.Option(help="Write a page (HTML) that can be printed, too.")] = None,
    json: _Json = False,
) -> None:
    """Explain a release to a privacy officer: what is protected, against whom, and what is not."""
    import dataclasses

    from confide.errors import ConfigError, ReleaseError
    from confide.files import write_text
    from confide.release import format
    from confide.release.verify import examine
    from confide.report import privacy_card

    if out is not None and out.exists():
        raise ConfigError(f"{out} exists already; choose another --out or remove it first")
    statement, checks = examine(folder)
    for check in checks:
        if check.result == "failed" or statement is None:
            raise ReleaseError(f"{folder} gets no card: {check.what}: {check.detail}")
    assert statement is not None
    found = privacy_card.card(statement, checks, [head.task for head in format.read(folder).heads])
    if out is not None:
        write_text(out, privacy_card.html(found))
    if json:
        print_json(dataclasses.asdict(found))
        return
    _print_card(found)
    if out is not None:
        print(f"Written to {out}")


def _print_card(card: Card) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    console.print(card.title, style="bold")
    console.print(card.headline, style="bold")
    console.print(shown(card.summary))
    for section in card.sections:
        console.print(f"\n{section.title}", style="bold")
        for paragraph in section.paragraphs:
            console.print(shown(paragraph))
        for name, said in section.points:
            console.print(shown(f"- {name}: {said}" if name else f"- {said}"))
        for table in section.tables:
            grid = Table(header_style="bold")
            for position, name in enumerate(table.header):
                grid.add_column(name, justify="left" if position < table.words else "right", overflow="fold")
            for row in table.rows:
                grid.add_row(*map(shown, row))
            console.print(grid)


def _as_json(
    found: Statement, honest: Claim | None, separate: dict[str, Claim], together: Claim | None
) -> dict[str, Any]:
    return {
        "claim": found.claim.model_dump() if found.claim else None,
        "no_claim": found.no_claim,
        "recomputed": honest.model_dump() if honest and found.claim else None,
        "datasets": {name: claim.model_dump() for name, claim in separate.items()},
        "if_not_disjoint": together.model_dump() if together else None,
        "spendings": [spending.model_dump(mode="json") for spending in found.spendings],
        "assumptions": list(found.assumptions),
    }


def _bounds(claim: Claim) -> tuple[str, str]:
    from confide.privacy.words import round_down, round_up

    renyi = "no rule by RDP" if claim.epsilon_rdp is None else f"ε = {round_up(claim.epsilon_rdp)} by RDP"
    proven = (
        "no lower bound is proven"
        if claim.epsilon_lower is None
        else f"certainly not below {round_down(claim.epsilon_lower)}"
    )
    return (
        f"ε = {round_up(claim.epsilon)} at δ = {claim.delta:.4g}   (upper bound: {claim.accountant})",
        f"{renyi}; {proven}",
    )


def _delta(delta: str, records: int | None, *, warn: bool = True) -> float:
    """δ as a number; a warning about a weak one goes to stderr."""
    from confide.errors import ConfigError
    from confide.privacy.calibration import delta_warning, resolve_delta

    if records is None and delta in ("auto", "1/n", "n^-1.1"):
        raise ConfigError(f"--delta {delta} needs --records")
    value = resolve_delta(delta, 1 if records is None else records)
    if warn and records is not None and (warning := delta_warning(value, records)):
        typer.echo(f"confide: warning: {warning}", err=True)
    return value
