"""`confide ledger`: what was spent on each data set, what may still be, and whether the book is whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from confide.choices import Adjacency
from confide.cli.output import print_json, print_table

if TYPE_CHECKING:
    from confide.privacy.account import Account
    from confide.privacy.ledger import Ledger

app = typer.Typer(help="Look after what was spent on each data set.", no_args_is_help=True)

_Ledger = Annotated[
    str | None,
    typer.Option(help="SQLite file or database URL; $CONFIDE_LEDGER or the user's own if left out."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_Dataset = Annotated[str, typer.Argument(help="Name of the data set.")]


@app.command("show")
def show(
    dataset: Annotated[str | None, typer.Argument(help="Name of a data set; all if left out.")] = None,
    ledger: _Ledger = None,
    json: _Json = False,
) -> None:
    """What was spent on each data set, or on one run by run."""
    from confide.errors import PrivacyError
    from confide.privacy.composition import canonical

    book = _read(ledger)
    found = book.accounts()
    one = found.get(canonical(dataset)) if dataset is not None else None
    if dataset is not None and one is None:
        known = ", ".join(found) or "no data set yet"
        raise PrivacyError(f"the ledger {book.name} knows no data set {dataset!r}; it knows {known}")
    chosen = [one] if one is not None else list(found.values())
    if json:
        print_json({"ledger": book.name, "datasets": [_facts(account) for account in chosen]})
        return
    if one is not None:
        _print_charges(one)
    _print_accounts(book.name, chosen)


@app.command("cap")
def cap(
    dataset: _Dataset,
    epsilon: Annotated[float, typer.Option(help="ε that all runs together may spend.")],
    delta: Annotated[float, typer.Option(help="δ of the cap.")],
    ledger: _Ledger = None,
    json: _Json = False,
) -> None:
    """Limit what all runs on a data set may spend together; set it before the first run."""
    book = _open(ledger)
    book.cap(dataset, epsilon, delta)
    account = book.account(dataset)
    if json:
        print_json(_facts(account))
        return
    _print_accounts(book.name, [account])
    if account.spendings:
        typer.echo(
            "confide: warning: runs were charged before this cap was set. It limits what follows; what a cap "
            "promises holds for one that was fixed before the first run.",
            err=True,
        )


@app.command("plan")
def plan(
    dataset: _Dataset,
    sampling_rate: Annotated[float, typer.Option(help="Poisson rate q: expected batch / units.")],
    steps: Annotated[int, typer.Option(help="Number of draws.")],
    noise_multiplier: Annotated[
        float | None, typer.Option(help="σ of each query; the smallest that fits the cap if left out.")
    ] = None,
    queries: Annotated[int, typer.Option(help="Noisy queries on each draw; 2 for DP-Merging's pair.")] = 1,
    adjacency: Annotated[
        Adjacency, typer.Option(help="Which data sets are neighbours.")
    ] = "add-or-remove-one",
    ledger: _Ledger = None,
    json: _Json = False,
) -> None:
    """What a run would leave of a data set's cap; nothing is charged."""
    from confide.errors import PrivacyError
    from confide.privacy.events import PoissonGaussian
    from confide.privacy.words import round_up

    if queries < 1 or steps < 1:
        raise PrivacyError(f"--steps and --queries must be at least 1, not {steps} and {queries}")
    book = _read(ledger)
    account = book.account(dataset)
    if account.delta is None:
        raise PrivacyError(
            f"the ledger {book.name} has neither a cap nor a run of {dataset!r}; set a cap with "
            "`confide ledger cap`"
        )
    sigma = noise_multiplier
    if sigma is None:
        sigma = account.least_noise(sampling_rate, steps, queries, adjacency)
    event = PoissonGaussian(sampling_rate, (sigma,) * queries, steps)
    before = account.filtered() or 0.0
    planned = account.hypothetical(event, adjacency)
    after = account.filtered(planned)
    assert after is not None
    facts: dict[str, Any] = {
        "dataset": dataset,
        "noise_multiplier": sigma,
        "delta": account.delta,
        "epsilon_before": before,
        "epsilon_after": _finite(after),
        "cap": account.cap.epsilon if account.cap else None,
        "fits": account.fits(planned),
    }
    if json:
        print_json(facts)
        return
    verdict = "no cap" if account.cap is None else f"cap {account.cap.epsilon:g}"
    print(f"noise multiplier σ = {round_up(sigma)}, {steps} steps at sampling rate {sampling_rate:.4g}")
    print(f"ε of {dataset} by the filter: {round_up(before)} now, {_up(after)} with this run ({verdict})")
    if not facts["fits"]:
        print("This run would be refused.")


@app.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="JSON file to write; must not exist.")],
    ledger: _Ledger = None,
    json: _Json = False,
) -> None:
    """Write every entry to a JSON file, with the hashes from which anybody can check it."""
    from confide.errors import ConfigError
    from confide.files import write_json
    from confide.privacy import chain
    from confide.privacy.ledger import SCHEMA

    if file.exists():
        raise ConfigError(f"{file} exists already; choose another name or remove it first")
    entries = _read(ledger).verify()
    head = chain.head(entries)
    listed = [
        {"position": e.position, "dataset": e.dataset, "content": e.value, "hash": e.hash} for e in entries
    ]
    write_json(file, {"schema": SCHEMA, "head": head, "entries": listed})
    if json:
        print_json({"file": str(file), "entries": len(entries), "head": head})
        return
    print(f"{len(entries)} entries in {file}; the head is {head}")


@app.command("verify")
def verify(
    head: Annotated[
        str | None, typer.Option(help="A head noted earlier, as in a statement; it must be in the ledger.")
    ] = None,
    ledger: _Ledger = None,
    json: _Json = False,
) -> None:
    """Check every hash; with --head, that no entries were cut off since it was noted."""
    from confide.privacy import chain

    book = _read(ledger)
    entries = book.verify(head)
    if json:
        print_json({"ledger": book.name, "entries": len(entries), "head": chain.head(entries)})
        return
    print(f"{len(entries)} entries, and every hash is right. The head is {chain.head(entries)}")
    if head is None:
        print("Whether the last entries were cut off shows only with --head, from a statement or a note.")


def ledger_for_training(url: str | None) -> Ledger | None:
    """The ledger that a training command charges; `none` is allowed, and warned of."""
    if url == "none":
        typer.echo(
            "confide: warning: no ledger is charged, so nobody adds this run to others on the same records",
            err=True,
        )
        return None
    return _open(url)


def _open(url: str | None) -> Ledger:
    from confide.privacy.ledger import Ledger

    return Ledger.open(url)


def _read(url: str | None) -> Ledger:
    """A ledger that is only looked at: a name with a slip in it must not become a new, empty one."""
    from confide.privacy.ledger import Ledger

    return Ledger.open(url, start=url is None)


def _facts(account: Account) -> dict[str, Any]:
    from confide.errors import PrivacyError

    filtered = composed = problem = None
    try:
        filtered, composed = account.filtered(), account.composed()
    except PrivacyError as error:  # units that don't add up, or too little noise: shown, not hidden
        problem = str(error)
    return {
        "dataset": account.dataset,
        "problem": problem,
        "cap": {"epsilon": account.cap.epsilon, "delta": account.cap.delta} if account.cap else None,
        "delta": account.delta,
        "epsilon_filter": _finite(filtered),
        "epsilon_pld": composed.epsilon if composed else None,
        "left": max(account.cap.epsilon - filtered, 0.0) if account.cap and filtered is not None else None,
        "charges": [
            {
                "entry": charge.entry,
                "state": charge.state,
                **charge.spending.model_dump(mode="json", exclude={"schedule", "no_claim", "dataset"}),
            }
            for charge in account.charges
        ],
    }


def _print_accounts(name: str, accounts: list[Account]) -> None:
    from confide.privacy.words import round_down, round_up

    rows, problems = [], []
    for account in accounts:
        facts = _facts(account)
        rows.append(
            (
                account.dataset,
                str(len(account.spendings)),
                _up(facts["epsilon_filter"] if account.spendings else 0.0),
                _up(facts["epsilon_pld"] if account.spendings else 0.0),
                round_up(facts["delta"], 3) if facts["delta"] else "–",
                f"{account.cap.epsilon:g}" if account.cap else "–",
                round_down(facts["left"], 4) if facts["left"] is not None else "–",
            )
        )
        problems += [facts["problem"]] if facts["problem"] else []
    header = ("data set", "runs", "ε by filter", "ε by PLD", "δ", "cap", "left")
    print_table(f"Spent, by {name}", header, rows)
    for problem in problems:
        print(f"No figure: {problem}.")
    print("The filter's ε holds whatever made people choose later runs, and a cap is held against it.")
    print("ε by PLD is tighter, and holds if all runs were fixed before the first.")


def _print_charges(account: Account) -> None:
    from confide.privacy.events import queries

    rows = []
    for charge in account.charges:
        spending = charge.spending
        planned = queries(spending.event) if spending.event else 0
        ran = ", ".join(f"{name} {steps}" for name, steps in spending.steps_run.items()) or "–"
        rows.append((spending.run, charge.state, str(planned), ran, f"{spending.delta:.3g}"))
    print_table(f"Runs on {account.dataset}", ("run", "state", "queries charged", "steps run", "δ"), rows)


def _finite(value: float | None) -> float | None:
    import math

    return value if value is not None and math.isfinite(value) else None


def _up(value: float | None) -> str:
    from confide.privacy.words import round_up

    return "∞" if _finite(value) is None else round_up(value or 0.0, 4)
