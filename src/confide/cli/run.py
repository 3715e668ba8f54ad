"""`confide run`: a whole study from one YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from confide.cli.keys import Key, signing_key
from confide.cli.output import print_json
from confide.cli.progress import progress_bars


def run(
    plan: Annotated[Path, typer.Argument(help="The study: base, tasks, methods, merges (YAML).")],
    out: Annotated[Path, typer.Option(help="Folder for releases and report.")],
    fast: Annotated[bool, typer.Option("--fast", help="The file's shorter variant, for a taste.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a study in --out that was stopped.")
    ] = False,
    ledger: Annotated[
        str | None,
        typer.Option(
            help="File or URL that tasks from own files are charged to, or none; the default one if left out."
        ),
    ] = None,
    key: Key = None,
    json: Annotated[bool, typer.Option("--json", help="Print results.json on stdout.")] = False,
) -> None:
    """Train, merge and score everything that a study names, and write its report."""
    from confide.cli.ledger import ledger_for_training
    from confide.experiment.plan import read
    from confide.experiment.run import run as run_study
    from confide.report.html import write_private, write_report
    from confide.report.terminal import print_study

    study_plan = read(plan, fast=fast)
    own = any(task.data is not None for task in study_plan.tasks)
    book = ledger_for_training(ledger) if own else None
    signs = signing_key(key)
    with progress_bars(show=not json) as progress:
        study = run_study(study_plan, out, progress, book, signs, resume=resume)
    write_private(study, out / "private")  # first: a report says that the study is finished
    write_report(study, out / "report")
    if json:
        print_json(study.results())
        return
    print_study(study)
    if book:
        charged = ", ".join(task.name for task in study_plan.tasks if task.data is not None)
        print(f"Private runs are charged to {charged} in the ledger {book.name}.")
    print(f"Report: {out / 'report' / 'report.html'}")
