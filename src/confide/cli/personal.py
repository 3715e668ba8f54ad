"""`confide personal`: what a merge lost of one task's model, in a file of about 1 % of its size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from confide.cli.keys import Key, signed, signing_key
from confide.cli.output import print_json, print_table
from confide.cli.progress import progress_bars

if TYPE_CHECKING:
    from confide.merging.personal.apply import Applied
    from confide.merging.personal.pack import Packed
    from confide.privacy.statement import Statement

app = typer.Typer(help="Give a task back what a merge took from it (DTS).", no_args_is_help=True)

_Merged = Annotated[Path, typer.Argument(help="A release of `confide merge`.")]
_Out = Annotated[Path, typer.Option(help="Folder to write; it must not exist.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command("pack")
def pack(
    merged: _Merged,
    models: Annotated[list[Path], typer.Argument(help="Releases of tasks, one personal file for each.")],
    out: Annotated[
        Path, typer.Option(help="File to write; with several models a folder, for a TASK.personal of each.")
    ],
    budget: Annotated[
        str, typer.Option(help="Size of a file on disk, in percent of the base's weights.")
    ] = "1%",
    description: Annotated[
        str, typer.Option(help="What the task is about, in public words, to compare it with new tasks.")
    ] = "",
    json: _Json = False,
) -> None:
    """Write what a model has beyond the merge into a small file."""
    from confide.errors import ConfigError
    from confide.merging.personal.inputs import open_model
    from confide.merging.personal.pack import pack as pack_model

    part = _part(budget)
    if len(models) == 1:
        files = {models[0]: out}
    elif description:
        raise ConfigError("--description is of one task; pack models with descriptions one by one")
    else:
        files = {model: out / f"{open_model(model).head.task}.personal" for model in models}
        if len(set(files.values())) < len(models):
            raise ConfigError("two of the models are for one task, so their files would have one name")
    results = {}
    with progress_bars(show=not json) as progress:
        for model, file in files.items():
            what = f"Packing {model.name}"
            results[file] = pack_model(
                merged,
                model,
                out=file,
                budget=part,
                description=description,
                progress=lambda done, total, what=what: progress(what, done, total),  # type: ignore[misc]
            )
    if json:
        print_json([_packed(packed, file) for file, packed in results.items()])
        return
    print_table(
        f"Personal files, up to {budget} of the base",
        ("file", "bytes", "% of the base", "tensors", "residual lost %"),
        [
            (
                str(file),
                str(packed.size),
                f"{100 * packed.size / packed.base_size:.3f}",
                f"{len({part.name for part in packed.about.parts})} of {len(packed.changed)}",
                f"{100 * packed.error:.1f}",
            )
            for file, packed in results.items()
        ],
    )
    for packed in results.values():
        print(f"{packed.about.head.task}: {_claim(packed.about.statement)}")


@app.command("unpack")
def unpack(
    file: Annotated[Path, typer.Argument(help="A personal file.")],
    out: Annotated[Path, typer.Option(help="safetensors file to write; it must not exist.")],
    json: _Json = False,
) -> None:
    """Write the residual that a personal file stands for as plain float32 tensors."""
    from confide.merging.personal.apply import unpack as unpack_file

    about = unpack_file(file, out=out).about
    if json:
        print_json(about.model_dump(mode="json", by_alias=True))
        return
    print_table(
        f"{about.head.task}: layers of the residual to merge {about.merge}",
        ("tensor", "shape", "rows coded", "rank"),
        [
            (
                part.name,
                "×".join(map(str, part.shape)),
                str(part.rows),
                "–" if part.rank is None else str(part.rank),
            )
            for part in about.parts
        ],
    )
    print(_claim(about.statement))
    print(f"Written to {out}.")


@app.command("apply")
def apply(
    merged: _Merged,
    file: Annotated[Path, typer.Argument(help="A personal file that was packed for this merge.")],
    out: _Out,
    key: Key = None,
    json: _Json = False,
) -> None:
    """Write the merge with one task's personal file as a release."""
    from confide.merging.personal.apply import apply as apply_file

    _print_applied(apply_file(merged, file, out=out, key=signing_key(key)), [file], out, json)


@app.command("fuse")
def fuse(
    merged: _Merged,
    files: Annotated[list[Path], typer.Argument(help="Personal files that were packed for this merge.")],
    head: Annotated[Path, typer.Option(help="Release of a model of the new task; its head is used.")],
    out: _Out,
    description: Annotated[
        str, typer.Option(help="Of the new task: compare descriptions, not the heads' hidden layers.")
    ] = "",
    base: Annotated[
        str | None,
        typer.Option(help="The public base, which embeds descriptions: folder, id or package:NAME."),
    ] = None,
    disjoint: Annotated[
        bool,
        typer.Option("--disjoint", help="I declare that nobody's data is in two of all the data sets."),
    ] = False,
    key: Key = None,
    json: _Json = False,
) -> None:
    """Write the merge with the personal files of similar tasks, for a task that has none."""
    from confide.errors import ConfigError
    from confide.merging.personal.apply import fuse as fuse_files
    from confide.merging.personal.similarity import head_similarities

    signs = signing_key(key)
    if bool(description) != (base is not None):
        raise ConfigError("--description and --base go together: the base embeds the descriptions")
    if base is None:
        similarities = head_similarities(head, files)
    else:
        similarities = _description_similarities(description, files, base)
    applied = fuse_files(
        merged, files, head=head, similarities=similarities, out=out, disjoint=disjoint, key=signs
    )
    _print_applied(applied, files, out, json)


def _part(budget: str) -> float:
    from confide.errors import ConfigError

    try:
        number, sign, rest = budget.strip().partition("%")
        if not sign or rest:
            raise ValueError
        return float(number) / 100
    except ValueError:
        raise ConfigError(f"--budget is a percentage such as 1%, not {budget!r}") from None


def _description_similarities(description: str, files: list[Path], base: str) -> tuple[float, ...]:
    from confide.errors import ConfigError, MergeError
    from confide.merging.personal.file import read
    from confide.merging.personal.similarity import cosines
    from confide.models.embeddings import embed
    from confide.models.resolve import resolve
    from confide.release.hashes import base_hash

    folder = resolve(base)
    abouts = [read(path).about for path in files]
    for path, about in zip(files, abouts, strict=True):
        if not about.description:
            raise ConfigError(f"{path} has no description; pack it with --description")
        if about.statement.base.hash != base_hash(folder):
            raise MergeError(f"{path} was made from base {about.statement.base.name}, which {base} isn't")
    vectors = embed(folder, [description, *(about.description for about in abouts)])
    return cosines(vectors[0], list(vectors[1:]))


def _packed(packed: Packed, out: Path) -> dict[str, Any]:
    about = packed.about
    return {
        "out": str(out),
        "task": about.head.task,
        "bytes": packed.size,
        "budget_bytes": packed.budget,
        "base_bytes": packed.base_size,
        "residual_lost": packed.error,
        "changed_tensors": len(packed.changed),
        "tensors": [part.model_dump(mode="json") for part in about.parts],
    } | _claim_json(about.statement)


def _claim_json(statement: Statement) -> dict[str, Any]:
    return {
        "claim": statement.claim.model_dump(mode="json") if statement.claim else None,
        "no_claim": statement.no_claim,
    }


def _print_applied(applied: Applied, files: list[Path], out: Path, json: bool) -> None:
    weights = dict(zip(map(str, files), applied.weights, strict=True))
    if json:
        signature = applied.statement.signature
        facts = {
            "out": str(out),
            "task": applied.head.task,
            "weights": weights,
            "signed_by": signature.key if signature else None,
        }
        print_json(facts | _claim_json(applied.statement))
        return
    if len(files) > 1:
        print_table("Weights", ("personal file", "weight"), [(f, f"{w:.4f}") for f, w in weights.items()])
    print(_claim(applied.statement))
    print(signed(applied.statement))
    print(f"Written to {out}, for {applied.head.task}; `confide verify {out}` recomputes the claim.")


def _claim(statement: Statement) -> str:
    from confide.privacy.words import round_up

    if statement.claim is None:
        return f"No claim: {statement.no_claim}"
    return f"Claim: ({round_up(statement.claim.epsilon)}, {round_up(statement.claim.delta, 3)})-DP."
