"""A plan on the terminal: what would be spent, and what can be expected of it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confide.cli.output import print_json, print_table

if TYPE_CHECKING:
    from confide.finetune.plan import Cost
    from confide.privacy.plan import Plan
    from confide.privacy.statement import Spending

_TITLE = "What would be spent (nothing has been)"


@dataclass(frozen=True)
class ForeseenCharge:
    """What a ledger would say of a run.

    Attributes:
        ledger: its name.
        before, after: ε by the filter, without this run and with it.
        cap: ε that all runs together may spend; None for no cap.
        fits: whether the run would be admitted.
    """

    ledger: str
    dataset: str
    before: float
    after: float | None
    cap: float | None
    fits: bool


def foreseen_charge(url: str | None, spending: Spending) -> ForeseenCharge | None:
    """Ask a ledger about a run without charging it; None where no ledger is yet.

    Raises:
        PrivacyError: the data set's runs protect another unit.
    """
    from confide.errors import PrivacyError
    from confide.privacy.ledger import Ledger

    try:
        book = Ledger.open(url, start=False)
    except PrivacyError:
        return None
    account = book.account(spending.dataset)
    after = account.filtered(spending)
    return ForeseenCharge(
        ledger=book.name,
        dataset=spending.dataset,
        before=account.filtered() or 0.0,
        after=after if after is not None and math.isfinite(after) else None,
        cap=account.cap.epsilon if account.cap else None,
        fits=account.fits(spending),
    )


def print_plan(plan: Plan, cost: Cost | None, charge: ForeseenCharge | None = None, *, json: bool) -> None:
    """The plan as one table per stream, or one JSON document."""
    if json:
        print_json(_as_json(plan, cost, charge))
        return
    rows = [("units", f"{plan.units} ({plan.unit})")]
    if plan.claim:
        rows += _claim(plan)
    several = len(plan.streams) > 1
    for stream in plan.streams:
        start, each = f"{stream.name}: " if several else "", stream.queries_per_step
        rows += [
            (f"{start}noise multiplier σ", _up(stream.noise_multiplier)),
            (
                f"{start}expected batch",
                f"{stream.expected_batch:g} (rate {stream.sampling_rate:.4g})",
            ),
            (f"{start}steps", f"{stream.steps}" + (f", {each} noisy queries each" if each > 1 else "")),
        ]
        if stream.noise_to_signal is not None:
            rows += [
                (f"{start}trained parameters", f"{stream.trained_parameters:,}"),
                (f"{start}noise to signal", f"{stream.noise_to_signal:.3g}"),
                (f"{start}cosine to the gradient", f"at most {stream.cosine:.2g}"),
            ]
    if plan.claim:
        rows.append(("noisy queries", f"{plan.queries}"))
    if cost:
        rows += [
            ("time", f"at most about {_duration(cost.seconds)} ({cost.seconds_per_step:.2g} s per step)"),
            ("memory", f"about {cost.memory_bytes / 2**20:,.0f} MB"),
        ]
    print_table(_TITLE, ("setting", "value"), rows)
    if not several and (ratio := plan.streams[0].noise_to_signal) is not None:
        print(
            f"The noise on one update is {ratio:.3g} times as long as the longest mean gradient that "
            "clipping allows. Fewer trained parameters, larger batches and more records make it smaller."
        )
    for sentence in plan.advice:
        print(f"Beware: {sentence}")
    if plan.claim and not plan.advice:
        print("The setting looks sensible.")
    if charge:
        after = "infinite" if charge.after is None else _up(charge.after)
        cap = "no cap" if charge.cap is None else f"cap {charge.cap:g}"
        print(
            f"ε of {charge.dataset} by the filter: {_up(charge.before)} now, {after} with this run ({cap})."
        )
        if not charge.fits:
            print("Beware: this run would be refused; `confide ledger plan` says which noise fits.")


def _claim(plan: Plan) -> list[tuple[str, str]]:
    from confide.privacy.words import round_down

    claim = plan.claim
    assert claim is not None
    return [
        ("ε", f"{_up(claim.epsilon)} ({claim.accountant})"),
        ("ε by RDP", "no rule" if claim.epsilon_rdp is None else _up(claim.epsilon_rdp)),
        ("ε certainly above", "–" if claim.epsilon_lower is None else round_down(claim.epsilon_lower)),
        ("δ", f"{claim.delta:.4g}"),
    ]


def _up(value: float) -> str:
    from confide.privacy.words import round_up

    return round_up(value)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _as_json(plan: Plan, cost: Cost | None, charge: ForeseenCharge | None) -> dict[str, Any]:
    return {
        "units": plan.units,
        "unit": plan.unit,
        "claim": plan.claim.model_dump() if plan.claim else None,
        "streams": [
            dataclasses.asdict(stream) | {"noise_to_signal": stream.noise_to_signal, "cosine": stream.cosine}
            for stream in plan.streams
        ],
        "queries": plan.queries,
        "cost": dataclasses.asdict(cost) if cost else None,
        "ledger": dataclasses.asdict(charge) if charge else None,
        "advice": list(plan.advice),
    }
