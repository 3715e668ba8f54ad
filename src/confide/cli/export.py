"""`confide export`: one task of a merge as a folder that plain transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from confide.cli.output import print_json


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A merge.")],
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist.")],
    task: Annotated[str | None, typer.Option(help="Which head, where the merge has several.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write one task of a merge as a whole model; it claims what the merge claims."""
    from confide.release.export import export as write
    from confide.release.format import read

    statement = write(folder, task, out)
    if json:
        print_json(
            {"out": str(out), "claim": statement.claim.model_dump(mode="json") if statement.claim else None}
        )
    else:
        loader = read(out).only_head().problem.loader
        print(
            f"Written to {out}; {loader}.from_pretrained({str(out)!r}) loads it, "
            f"and `confide predict {out}` too."
        )
