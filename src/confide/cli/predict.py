"""`confide predict`: labels for new rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from confide.cli.output import print_json


def predict(
    release: Annotated[Path, typer.Argument(help="A release of `confide train` or `confide merge`.")],
    data: Annotated[Path, typer.Option(help="CSV, TSV, JSON Lines or Parquet file with new texts.")],
    text: Annotated[str, typer.Option(help="Column of texts.")] = "text",
    task: Annotated[str | None, typer.Option(help="Which head of a merge.")] = None,
    out: Annotated[Path | None, typer.Option(help="CSV file to write; the terminal if left out.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Label the rows of a file, in their order."""
    import csv
    import io

    from confide import api
    from confide.files import write_text
    from confide.tasks.files import read_texts

    model = api.load(release, task=task)
    predictions = model.predict(read_texts(data, text))
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["row", "label", "probability"])
    for number, prediction in enumerate(predictions, start=1):
        writer.writerow([number, prediction["label"], f"{prediction['probability']:.4f}"])
    if out is not None:
        write_text(out, lines.getvalue())
    if json:
        print_json([{"row": n, **prediction} for n, prediction in enumerate(predictions, start=1)])
    elif out is None:
        print(lines.getvalue(), end="")
    else:
        print(f"{len(predictions)} rows labelled in {out}")
