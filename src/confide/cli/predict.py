"""`confide predict`: labels, numbers or texts for new rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from confide.cli.output import print_json

if TYPE_CHECKING:
    from confide.release.format import Problem


def predict(
    release: Annotated[Path, typer.Argument(help="A release of `confide train` or `confide merge`.")],
    data: Annotated[
        Path,
        typer.Option(help="CSV, TSV, JSON Lines or Parquet file with new records; or a folder of images."),
    ],
    text: Annotated[str, typer.Option(help="Column of texts.")] = "text",
    text_pair: Annotated[str | None, typer.Option(help="Column of second texts, for pairs.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Column of lists of words; tokens if left out.")] = None,
    image: Annotated[str | None, typer.Option(help="Column of paths of images; image if left out.")] = None,
    task: Annotated[str | None, typer.Option(help="Which head of a merge.")] = None,
    out: Annotated[Path | None, typer.Option(help="CSV file to write; the terminal if left out.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Label the rows of a file, in their order; a language model goes on from them."""
    import csv
    import io

    from confide import api
    from confide.files import write_text
    from confide.tasks.columns import Columns
    from confide.tasks.files import read_inputs

    model = api.load(release, task=task)
    columns = Columns(text=text, text_pair=text_pair, tokens=tokens, image=image)
    inputs = read_inputs(data, model.head.problem, columns)
    predictions = model.predict(inputs)
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows(_table(model.head.problem, inputs, predictions))
    if out is not None:
        write_text(out, lines.getvalue())
    if json:
        print_json([{"row": n, **prediction} for n, prediction in enumerate(predictions, start=1)])
    elif out is None:
        print(lines.getvalue(), end="")
    else:
        does = "answered" if model.head.problem.target == "text" else "labelled"
        print(f"{len(predictions)} rows {does} in {out}")


def _table(problem: Problem, inputs: Any, predictions: Sequence[Mapping[str, Any]]) -> Iterator[list[Any]]:
    """A line for each row; for words, a line for each word."""
    match problem.target:
        case "class":
            yield ["row", "label", "probability"]
            for row, one in enumerate(predictions, start=1):
                yield [row, one["label"], f"{one['probability']:.4f}"]
        case "number":
            yield ["row", "number"]
            for row, one in enumerate(predictions, start=1):
                yield [row, f"{one['number']:.6g}"]
        case "text":
            yield ["row", "text"]
            yield from ([row, one["text"]] for row, one in enumerate(predictions, start=1))
        case "tokens":
            yield ["row", "word", "label"]
            for row, (words, one) in enumerate(zip(inputs, predictions, strict=True), start=1):
                yield from ([row, word, label] for word, label in zip(words, one["labels"], strict=True))
