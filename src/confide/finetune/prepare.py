"""A task made ready for one base: encoded once, frozen blocks computed once, shared by all methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from confide.models.backbones import Classifier
from confide.models.tail import Features, Source, Tail, features, supports
from confide.tasks.evaluate import predict
from confide.tasks.metrics import score
from confide.tasks.records import TaskData
from confide.tasks.text import Encoded, buckets, encode

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, how much is done, how much there is)."""

Split = Literal["train", "test"]
_CACHE_BYTES = 4 * 2**30
_FORWARD_TOKENS = 4096


def silent(what: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


class Prepared:
    """Inputs of one task under one base; everything here is private and lives in memory only."""

    def __init__(self, task: TaskData, tokenizer: Any, max_length: int) -> None:
        self.task = task
        self.max_length = max_length
        self._encoded: dict[Split, Encoded] = {
            "train": encode(tokenizer, task.train.texts, max_length),
            "test": encode(tokenizer, task.test.texts, max_length),
        }
        self._features: dict[tuple[Split, int], Features] = {}

    def tokens(self) -> Iterator[bytes]:
        """What the base's tokenizer made of every text, to be hashed."""
        for encoded in self._encoded.values():
            yield from (encoded.tokens.tobytes(), encoded.offsets.tobytes(), str(encoded.pad).encode())

    def encoded(self, split: Split) -> Encoded:
        """Token ids of a split."""
        return self._encoded[split]

    def inputs(
        self, classifier: Classifier, first_block: int, split: Split, progress: Progress = silent
    ) -> Source:
        """What enters block `first_block`: features of the frozen blocks, or token ids where those don't fit.

        Args:
            classifier: any whose blocks below `first_block` are the base's.
        """
        encoded = self._encoded[split]
        if not first_block or not caches(classifier, first_block, encoded):
            return encoded
        key = (split, first_block)
        if key not in self._features:
            lower = max((b for s, b in self._features if s == split and b < first_block), default=0)
            source: Source = self._features[split, lower] if lower else encoded
            batches = buckets(source.lengths, np.arange(len(source)), _FORWARD_TOKENS)
            done = 0

            def advance(rows: int) -> None:
                nonlocal done
                done += rows
                progress(f"frozen blocks, {self.task.name}", done, len(source))

            self._features[key] = features(classifier, source, first_block, batches, lower, advance)
        return self._features[key]

    def forget(self, split: Split) -> None:
        """Free the features of a split."""
        self._features = {key: value for key, value in self._features.items() if key[0] != split}


def caches(classifier: Classifier, first_block: int, encoded: Source) -> bool:
    """Whether the frozen blocks' outputs are kept: the architecture is known and they fit in memory."""
    if not supports(classifier):
        return False
    config: Any = classifier.model.config
    tokens = len(encoded) if first_block == config.num_hidden_layers else int(encoded.lengths.sum())
    return tokens * int(config.hidden_size) * 4 <= _CACHE_BYTES


def forward_of(
    classifier: Classifier, first_block: int, inputs: Source
) -> tuple[nn.Module, Callable[[dict[str, Tensor]], Tensor]]:
    """The module that maps `inputs` to logits, and how to call it."""
    if isinstance(inputs, Features):
        tail = Tail(classifier, first_block)
        return tail, lambda batch: tail(**batch)
    model = classifier.model
    # The model's own loss is never used: its mean over the batch would tie records to each other.
    return model, lambda batch: model(**batch).logits


def score_test(prepared: Prepared, classifier: Classifier, first_block: int) -> float:
    """Score of a classifier on the task's test records; not noised.

    Args:
        classifier: one whose blocks below `first_block` are the base's.
    """
    inputs = prepared.inputs(classifier, first_block, "test")
    _, forward = forward_of(classifier, first_block, inputs)
    return score(prepared.task.metric, predict(forward, inputs), prepared.task.test.labels)


def micro_batches(
    inputs: Source, budget: int
) -> Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], list[npt.NDArray[np.int64]]]:
    """Splits drawn rows by a budget of tokens, never a unit."""
    lengths = inputs.lengths
    return lambda rows, position: buckets(lengths[rows], position, budget)


def labels_of(task: TaskData) -> Tensor:
    """(rows,) classes of the training records."""
    return torch.from_numpy(task.train.labels)
