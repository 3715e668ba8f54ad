"""`confide evaluate`: how well a release does on labelled records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from confide.cli.output import print_json


def evaluate(
    release: Annotated[Path, typer.Argument(help="A release of `confide train` or `confide merge`.")],
    task: Annotated[
        str | None, typer.Option(help="Which head; also which registered test set, without --data.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Labelled file, or folder of images, to score on.")
    ] = None,
    text: Annotated[str, typer.Option(help="Column of texts.")] = "text",
    text_pair: Annotated[str | None, typer.Option(help="Column of second texts, for pairs.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Column of lists of words; tokens if left out.")] = None,
    image: Annotated[str | None, typer.Option(help="Column of paths of images; image if left out.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Column of texts that a language model is to write.")
    ] = None,
    label: Annotated[str, typer.Option(help="Column of labels.")] = "label",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Score a release on the test records of a registered task, or on a file."""
    from confide import api
    from confide.tasks.metrics import in_words

    model = api.load(release, task=task)
    head = model.head
    records = (
        api.test_records(head)
        if data is None
        else api.labelled(
            data,
            text=text,
            label=label,
            labels=head.labels,
            text_pair=text_pair,
            tokens=tokens,
            image=image,
            target=target,
            problem=head.problem,
        )
    )
    scores = model.scores(records)
    result = {
        "task": head.task,
        "metric": head.metric,
        "score": scores[head.metric],
        **({"scores": scores} if len(scores) > 1 else {}),
        "records": len(records),
    }
    if json:
        print_json(result)
    else:
        said = ", ".join(in_words(metric, value) for metric, value in scores.items())
        print(f"{head.task}: {said} on {len(records)} records (not noised)")
