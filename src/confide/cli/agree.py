"""`confide agree`: what organisations that will merge have in common, in one small file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from confide.choices import ExpertClipping, Method, RecordWeight, Trained, Variant
from confide.cli.output import print_json
from confide.cli.train_options import spelled_option


def agree(
    base: Annotated[str, typer.Option(help="Public base: a folder, a Hugging Face id or package:NAME.")],
    out: Annotated[Path, typer.Option(help="File to write, such as agreement.json.")],
    task: Annotated[
        list[str] | None,
        typer.Option(help="NAME=label,label, once for each task; tasks stay open if left out."),
    ] = None,
    method: Annotated[Method, typer.Option(help="How to train.")] = "dp-merging",
    trainable: Annotated[Trained, typer.Option(help="What is trained beside the head.")] = "lora",
    blocks: Annotated[
        int | None,
        typer.Option(help="Top blocks for lora and blocks; 0 for all. 1 if left out; for raptor, all."),
    ] = None,
    rank: Annotated[int, typer.Option(help="LoRA rank.")] = 8,
    clipping_bound: Annotated[float, typer.Option(help="C.")] = 1.0,
    layer: Annotated[
        str | None,
        typer.Option(help="Of raptor: layer whose experts are trained: first, last, or a block's number."),
    ] = None,
    variant: Annotated[
        Variant | None, typer.Option(help="Of raptor: the method itself, or what it is compared with.")
    ] = None,
    shared_share: Annotated[
        float | None, typer.Option(help="Of raptor: the shared stream's share of the budget.")
    ] = None,
    expert_clipping: Annotated[
        ExpertClipping | None, typer.Option(help="Of raptor: clipping rule of the stream of experts.")
    ] = None,
    expert_clipping_bound: Annotated[
        float | None, typer.Option(help="Of raptor: C of the stream of experts.")
    ] = None,
    record_weight: Annotated[
        RecordWeight | None, typer.Option(help="Of raptor: how the stream of experts weighs records.")
    ] = None,
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
    from confide.finetune.idle import refuse_idle
    from confide.finetune.settings import Settings

    if out.exists():
        raise ConfigError(f"{out} exists already; an agreement is never changed, so choose another --out")
    tasks: dict[str, list[str]] = {}
    for text in task or []:
        name, equals, labels = text.partition("=")
        if not equals or not name or len(labels.split(",")) < 2 or name in tasks:
            raise ConfigError(f"--task takes NAME=label,label, each task once, not {text!r}")
        tasks[name] = labels.split(",")
    given: dict[str, Any] = {
        "method": method,
        "trainable": {"kind": trainable, "rank": rank, **({} if blocks is None else {"blocks": blocks})},
        "clipping_bound": clipping_bound,
        "anchor": anchor,
        "max_length": max_length,
    }
    wished = {
        "layer": layer,
        "variant": variant,
        "shared_share": shared_share,
        "clipping": expert_clipping,
        "clipping_bound": expert_clipping_bound,
        "record_weight": record_weight,
    }
    experts = {key: value for key, value in wished.items() if value is not None}
    if method == "raptor":
        given["experts"] = {**experts, "rank": rank}
    elif experts:
        raise ConfigError(f"{spelled_option(f'experts.{next(iter(experts))}')} needs --method raptor")
    settings = Settings.of(given, spell=spelled_option)
    refuse_idle(settings, {f"experts.{key}" for key in experts}, spelled_option)
    public = PublicBase.of(base)
    made = agreement(settings, public.identity, public.folder, tasks)
    files.write_json(out, made.to_json())
    if json:
        print_json({"out": str(out), "hash": made.hash, **made.to_json()})
        return
    print(f"Agreement {made.hash} written to {out}.")
    print(
        f"Everybody trains with `confide train --agreement {out.name}`, and what contradicts it is refused."
    )
