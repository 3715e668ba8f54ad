"""`confide statistics`: what RegMean and Fisher averaging weigh a released model by, from public text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from confide.choices import Statistics
from confide.cli.output import print_json


def statistics(
    release: Annotated[Path, typer.Argument(help="Folder of a release, or of a merge with --task.")],
    corpus: Annotated[
        Path, typer.Option(help="Public text, one a line; whoever names it says that it is public.")
    ],
    out: Annotated[Path, typer.Option(help="File to write, such as reviews.safetensors.")],
    kind: Annotated[Statistics, typer.Option(help="grams for regmean, fisher for fisher.")] = "grams",
    texts: Annotated[int, typer.Option(help="At most this many texts, picked at random with seed 0.")] = 2000,
    base: Annotated[
        str | None,
        typer.Option(help="The public base: only tensors that differ from it get statistics; much faster."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Which head of a merge.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compute a model's statistics on public text, for `confide merge --statistics`.

    Nothing is noised here. Statistics of private records are a charged query: `confide train
    --release-statistics`.
    """
    from confide.errors import MergeError
    from confide.finetune.statistics import write_public_statistics
    from confide.models.resolve import resolve
    from confide.tasks.corpus import read_corpus, sample

    if out.exists():
        raise MergeError(f"{out} exists already; choose another --out or remove it first")
    chosen = sample(read_corpus(corpus), texts, seed=0)
    write_public_statistics(
        release,
        chosen,
        out,
        kind,
        source=f"{len(chosen)} texts, {corpus.name}",
        task=task,
        base=resolve(base) if base is not None else None,
    )
    if json:
        print_json({"out": str(out), "kind": kind, "texts": len(chosen)})
    else:
        print(f"{kind} of {release} on {len(chosen)} public texts, written to {out}.")
