"""What `test_ledger` runs in processes of their own: `charge` until refused, or `reserve` and be killed."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from pathlib import Path

from confide.errors import PrivacyError
from confide.privacy.events import Composed, PoissonGaussian
from confide.privacy.ledger import Ledger
from confide.privacy.statement import Spending


def spending(
    run: str | None = None,
    dataset: str = "clinic",
    sigma: float = 4.0,
    steps: int = 100,
    rate: float = 0.05,
    unit: str = "record",
    adjacency: str = "add-or-remove-one",
) -> Spending:
    return Spending(
        run=run or secrets.token_hex(8),
        dataset=dataset,
        units=1000,
        unit=unit,
        adjacency=adjacency,  # type: ignore[arg-type]
        event=Composed((PoissonGaussian(rate, (sigma,), steps),)),
        delta=1e-6,
        schedule=None,
        steps_run={},
    )


def charge(url: str, folder: Path) -> None:
    """Say that one is ready, wait for the start, then reserve runs; print how many were let through."""
    (folder / f"ready-{os.getpid()}").touch()
    while not (folder / "start").exists():
        time.sleep(0.01)
    admitted = 0
    try:
        while True:
            Ledger.open(url).reserve(spending())
            admitted += 1
    except PrivacyError as refusal:
        if "the cap on clinic" not in str(refusal):
            raise
    print(admitted)


def reserve_and_die(url: str, run: str) -> None:
    Ledger.open(url).reserve(spending(run))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "charge":
        charge(sys.argv[2], Path(sys.argv[3]))
    else:
        reserve_and_die(sys.argv[2], sys.argv[3])
