"""`confide moe`: what mixtures of experts need before they are trained; `routing` and `upcycle` are here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from confide.cli.diagnose import diagnose
from confide.cli.moe_budget import budget
from confide.cli.output import print_json, print_table
from confide.cli.progress import progress_bars

app = typer.Typer(help="Prepare mixtures of experts, and diagnose.", no_args_is_help=True)
app.command("diagnose")(diagnose)
app.command("budget")(budget)

Corpus = Annotated[
    Path, typer.Option(help="Public texts, one a line, or `brown`. Nothing read here is charged.")
]
Private = Annotated[
    Path | None, typer.Option(help="Private records that the corpus must share no text with.")
]
Column = Annotated[str, typer.Option(help="Column of texts in --data.")]
Length = Annotated[int, typer.Option(help="Tokens kept of a text, as in training.", min=1)]
Seed = Annotated[int, typer.Option(help="Of the choice of texts, and of what is random after it.")]


@app.command("routing")
def routing(
    model: Annotated[
        str, typer.Option(help="Mixture of experts: a folder, package:NAME, or a Hugging Face id.")
    ],
    corpus: Corpus,
    data: Private = None,
    text: Column = "text",
    layer: Annotated[
        str, typer.Option(help="Layer to train: entropy, first, last, or the number of a block.")
    ] = "entropy",
    vote: Annotated[
        str, typer.Option(help="How tokens vote for an owner: plurality (gate weights) or majority.")
    ] = "plurality",
    texts: Annotated[int, typer.Option(help="Texts to use at most.", min=1)] = 5000,
    max_length: Length = 128,
    seed: Seed = 0,
    figure: Annotated[Path | None, typer.Option(help="Figure to write: .png, .svg or .pdf.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show how evenly each layer's experts own public texts, and which layer to train."""
    from confide.errors import ConfigError
    from confide.finetune.prepare import counter
    from confide.finetune.public_routing import public_routing
    from confide.models.backbones import load_encoder
    from confide.models.moe.layers import sparse_layers
    from confide.models.moe.selection import select
    from confide.models.resolve import resolve
    from confide.report.mixtures import routing_text, routing_words
    from confide.report.routing import check_format, draw_routing

    if vote not in ("plurality", "majority"):
        raise ConfigError(f"--vote {vote} is neither plurality nor majority")
    if figure is not None:
        check_format(figure)
    chosen = _public(corpus, data, text, texts, seed)
    encoder, tokenizer = load_encoder(resolve(model))
    layers = sparse_layers(encoder)
    if layer != "entropy":
        select(layers, layer)  # before the work, if it can't be
    with progress_bars(show=not json) as progress:
        advance = counter(progress, "texts", len(chosen))
        kind: Literal["plurality", "majority"] = "majority" if vote == "majority" else "plurality"
        selection = public_routing(encoder, tokenizer, chosen, max_length, kind, advance)
    block = select(layers, layer, selection).number
    if figure is not None:
        draw_routing(selection, figure)
    if json:
        print_json(_document(selection, block))
        return
    table = routing_text(selection, block)
    print_table(f"Owners of {selection.texts} public texts", table.header, table.rows)
    print(f"* the layer to train ({layer})")
    for sentence in routing_words(selection):
        print(sentence)


@app.command("upcycle")
def upcycle(
    base: Annotated[str, typer.Option(help="Dense BERT: a folder, package:NAME, or a Hugging Face id.")],
    corpus: Corpus,
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    data: Private = None,
    text: Column = "text",
    experts: Annotated[int, typer.Option(help="Experts of each layer.", min=2)] = 8,
    blocks: Annotated[str, typer.Option(help="Blocks that get experts, from 0.")] = "1,3,5",
    texts: Annotated[int, typer.Option(help="Texts to use at most.", min=1)] = 2000,
    max_length: Length = 128,
    seed: Seed = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Make a mixture of experts out of a dense encoder; its outputs stay the same until it is trained."""
    from confide.errors import ReleaseError
    from confide.finetune.base import PublicBase
    from confide.finetune.prepare import counter
    from confide.finetune.upcycled import upcycle_base

    numbers = _numbers(blocks)
    if out.exists():
        raise ReleaseError(f"{out} exists already; choose another folder or remove it first")
    chosen = _public(corpus, data, text, texts, seed)
    with progress_bars(show=not json) as progress:
        made = upcycle_base(
            PublicBase.of(base),
            chosen,
            out,
            experts=experts,
            blocks=numbers,
            max_length=max_length,
            seed=seed,
            progress=counter(progress, "texts", len(chosen)),
        )
    if json:
        print_json(
            {
                "out": str(out),
                "experts": made.experts,
                "blocks": list(made.blocks),
                "texts": made.texts,
                "parameters": made.parameters,
                "compared": made.compared,
                "difference": made.difference,
                "seconds": round(made.seconds, 1),
            }
        )
    else:
        what, same = made.in_words()
        print(f"{out}: {what}\n{same}")


def _public(corpus: Path, data: Path | None, text: str, count: int, seed: int) -> tuple[str, ...]:
    from confide.tasks.corpus import check_public, read_corpus, sample
    from confide.tasks.files import read_texts

    lines = read_corpus(corpus)
    if data is not None:
        check_public(lines, read_texts(data, text), str(data))
    return sample(lines, count, seed)


def _numbers(blocks: str) -> list[int]:
    from confide.errors import ConfigError

    parts = [part.strip() for part in blocks.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--blocks {blocks} is no list of block numbers such as 1,3,5")
    return [int(part) for part in parts]


def _document(selection: Any, block: int) -> dict[str, Any]:
    return {
        "texts": selection.texts,
        "layer": block,
        "by_entropy": selection.chosen,
        "margin": selection.margin,
        "stable_from": selection.stable_from,
        "stability": [{"texts": size, "share": share} for size, share in selection.stability],
        "warnings": list(selection.warnings),
        "layers": [
            {
                "block": layer.block,
                "name": layer.name,
                "owners": list(layer.counts),
                "entropy": layer.entropy,
                "evenness": layer.evenness,
                "deficit": layer.deficit,
                "chi_square": layer.chi_square,
                "variation": layer.variation,
            }
            for layer in selection.layers
        ],
    }
