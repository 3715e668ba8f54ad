"""`confide moe`: what mixtures of experts need before they are trained, on public text; and `diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from confide.cli.diagnose import diagnose
from confide.cli.output import print_json, print_table
from confide.cli.progress import progress_bars

app = typer.Typer(help="Prepare mixtures of experts, on public text, and diagnose.", no_args_is_help=True)
app.command("diagnose")(diagnose)

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
    from confide.models.backbones import load_encoder, resolve
    from confide.models.moe.layers import sparse_layers
    from confide.models.moe.selection import select
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


@app.command("budget")
def budget(
    model: Annotated[
        str, typer.Option(help="Mixture of experts: a folder, package:NAME, or a Hugging Face id.")
    ],
    data: Annotated[Path, typer.Option(help="Public labelled texts. Nothing read here is charged.")],
    text: Annotated[str, typer.Option(help="Column of texts.")] = "text",
    label: Annotated[str, typer.Option(help="Column of labels.")] = "label",
    layer: Annotated[
        str, typer.Option(help="Layer to train: first, last, or the number of a block.")
    ] = "last",
    rank: Annotated[int, typer.Option(help="LoRA rank, that of experts included.", min=1)] = 8,
    clipping_bound: Annotated[float, typer.Option(help="C of the shared stream.")] = 1.0,
    expert_clipping_bound: Annotated[float, typer.Option(help="C of the stream of experts.")] = 1.0,
    noise: Annotated[float, typer.Option(help="Standard deviation of the noise injected.")] = 0.01,
    draws: Annotated[int, typer.Option(help="Draws of it, each with both signs.", min=2)] = 16,
    texts: Annotated[int, typer.Option(help="Texts to use at most.", min=1)] = 500,
    max_length: Length = 64,
    seed: Seed = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say how to divide a budget, from how noise on either stream raises the loss on public records."""
    import dataclasses

    import numpy as np

    from confide.errors import ConfigError
    from confide.finetune.prepare import counter
    from confide.finetune.sensitivity import stream_sensitivities
    from confide.finetune.settings import Settings
    from confide.models.backbones import load_classifier, resolve
    from confide.privacy.splits import best_share, paper_share
    from confide.tasks.files import read_task
    from confide.tasks.records import Records

    if not (noise > 0 and clipping_bound > 0 and expert_clipping_bound > 0):
        raise ConfigError("--noise, --clipping-bound and --expert-clipping-bound must be positive")
    if layer == "entropy":
        raise ConfigError("--layer entropy needs a corpus: find the block with `confide moe routing` first")
    settings = Settings.of(
        {
            "method": "raptor",
            "trainable": {"rank": rank},
            "max_length": max_length,
            "seed": seed,
            "experts": {"layer": layer, "rank": rank},
        }
    )
    records = read_task(data, text=text, label=label, name="public", seed=seed)
    kept = np.sort(np.random.default_rng(seed).permutation(len(records.train))[:texts])
    few = Records.of([records.train.texts[row] for row in kept], records.train.labels[kept].tolist())
    task = dataclasses.replace(records, train=few)
    classifier = load_classifier(resolve(model), task.labels, seed)
    with progress_bars(show=not json) as progress:
        advance = counter(progress, "losses", 4 * draws + 2)
        found = stream_sensitivities(classifier, settings, task, noise=noise, draws=draws, progress=advance)
    shared = found.shared.value * clipping_bound**2
    own = found.own.value * found.experts**2 * expert_clipping_bound**2
    result = {
        "layer": found.layer,
        "experts": found.experts,
        "shared": {"sensitivity": found.shared.value, "error": found.shared.error, "harm": shared},
        "own": {"sensitivity": found.own.value, "error": found.own.error, "harm": own},
        "shared_share": best_share(shared, own),
        "paper_share": paper_share(shared, own),
    }
    if json:
        print_json(result)
        return
    rows = [
        [name, f"{kind.value:.4g} ± {kind.error:.2g}", f"{harm:.4g}"]
        for name, kind, harm in (("shared", found.shared, shared), ("experts", found.own, own))
    ]
    print_table(f"Noise on block {found.layer}'s experts and on the rest", ("stream", "λ", "per σ²"), rows)
    print(f"--shared-share {result['shared_share']:.3f}")
    print(f"RAPTOR's own rule, a share of ε for `split: paper-ratio`: {result['paper_share']:.3f}")


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
