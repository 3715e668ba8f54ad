"""`confide export`: one task of a merge as a whole model, or LoRA of a release as an adapter for PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from confide.cli.output import print_json


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A merge; with --peft, a release of RAPTOR.")],
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist.")],
    task: Annotated[str | None, typer.Option(help="Which head, where the merge has several.")] = None,
    peft: Annotated[
        bool, typer.Option("--peft", help="Write the release's LoRA and head as a PEFT adapter of its base.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write one task of a merge as a whole model, or a release's LoRA; the claim is the same."""
    from confide.errors import ConfigError
    from confide.release.export import export as write
    from confide.release.export import export_adapter
    from confide.release.format import read
    from confide.release.names import CLASSES, model_type

    if peft and task is not None:
        raise ConfigError("--task has no effect here: a release of one task has one adapter")
    statement = export_adapter(folder, out) if peft else write(folder, task, out)
    if json:
        print_json(
            {"out": str(out), "claim": statement.claim.model_dump(mode="json") if statement.claim else None}
        )
    elif peft:
        print(
            f"Written to {out}; PeftModel.from_pretrained(model, {str(out)!r}) adds it to a classifier of "
            f"{statement.base.name} with as many labels."
        )
    else:
        loader, module = read(out).only_head().problem.loader, CLASSES.get(model_type(out))
        print(
            f"Written to {out}; {loader}.from_pretrained({str(out)!r}) loads it"
            f"{f', after `import {module}`,' if module else ','} and `confide predict {out}` too."
        )
