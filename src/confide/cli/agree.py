"""`confide agree`: what organisations that will merge have in common, in one small file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from confide.cli.output import print_json, spelled


def agree(
    base: Annotated[str, typer.Option(help="Public base: a folder, a Hugging Face id or package:NAME.")],
    out: Annotated[Path, typer.Option(help="File to write, such as agreement.json.")],
    task: Annotated[
        list[str] | None,
        typer.Option(help="NAME=label,label, once for each task; tasks stay open if left out."),
    ] = None,
    method: Annotated[
        Literal["dp-merging", "dp-adamw", "non-private"], typer.Option(help="How to train.")
    ] = "dp-merging",
    trainable: Annotated[
        Literal["lora", "blocks", "all", "head"], typer.Option(help="What is trained beside the head.")
    ] = "lora",
    blocks: Annotated[int, typer.Option(help="Top blocks for lora and blocks; 0 for all.")] = 1,
    rank: Annotated[int, typer.Option(help="LoRA rank.")] = 8,
    clipping_bound: Annotated[float, typer.Option(help="C.")] = 1.0,
    anchor: Annotated[
        float | None, typer.Option(help="λ of the pull to the base; the method's own if left out.")
    ] = None,
    max_length: Annotated[int, typer.Option(help="Tokens of a text.")] = 64,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write what models must have in common to merge well; `confide train --agreement` keeps to it."""
    from confide import files
    from confide.errors import ConfigError
    from confide.finetune.agreement import agreement
    from confide.finetune.base import PublicBase
    from confide.finetune.settings import Settings

    if out.exists():
        raise ConfigError(f"{out} exists already; an agreement is never changed, so choose another --out")
    tasks: dict[str, list[str]] = {}
    for text in task or []:
        name, equals, labels = text.partition("=")
        if not equals or not name or len(labels.split(",")) < 2 or name in tasks:
            raise ConfigError(f"--task takes NAME=label,label, each task once, not {text!r}")
        tasks[name] = labels.split(",")
    settings = Settings.of(
        {
            "method": method,
            "trainable": {"kind": trainable, "blocks": blocks, "rank": rank},
            "clipping_bound": clipping_bound,
            "anchor": anchor,
            "max_length": max_length,
        },
        spell=spelled,
    )
    public = PublicBase.of(base)
    made = agreement(settings, public.identity, public.folder, tasks)
    files.write_json(out, made.model_dump(mode="json"))
    if json:
        print_json({"out": str(out), "hash": made.hash, **made.model_dump(mode="json")})
        return
    print(f"Agreement {made.hash} written to {out}.")
    print(
        f"Everybody trains with `confide train --agreement {out.name}`, and what contradicts it is refused."
    )
