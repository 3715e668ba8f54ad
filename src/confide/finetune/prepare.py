"""A task made ready for one base: encoded once, frozen blocks computed once, shared by all methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from confide.gradients import losses
from confide.models.backbones import Classifier
from confide.models.language import writes
from confide.models.moe.selection import Selection
from confide.models.tail import Features, Source, Tail, features, pools, supports
from confide.release.format import Metric, Problem
from confide.tasks.evaluate import evaluate, logits
from confide.tasks.images import Images
from confide.tasks.inputs import source
from confide.tasks.records import Records, TaskData
from confide.tasks.text import Encoded, buckets
from confide.tasks.token_scores import token_scores

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, how much is done, how much there is)."""

Split = Literal["train", "test"]
RoutingKey = tuple[str | None, int, str]
"""Public corpus, longest text in tokens, and how tokens vote."""

_CACHE_BYTES = 4 * 2**30
_FORWARD_TOKENS = 4096


def silent(what: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


def counter(progress: Progress, what: str, total: int) -> Callable[[int], None]:
    """A function to call with how much is done since its last call."""
    done = 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        progress(what, done, total)

    return advance


class Prepared:
    """Inputs of one task under one base; everything here is private and lives in memory only.

    Attributes:
        max_length: longest record in tokens.
        routings: of the base on public text, as far as they are known (`experts.routing_key`).
        owners: (rows,) of the training records, by the name of the layer and the vote, as far as runs under
            this base found them.
    """

    def __init__(self, task: TaskData, classifier: Classifier, max_length: int) -> None:
        self.task = task
        self._encoded: dict[Split, Source] = {
            "train": source(classifier, task.train.inputs, max_length),
            "test": source(classifier, task.test.inputs, max_length),
        }
        images = task.problem.inputs == "image"
        self.max_length = int(self._encoded["train"].lengths[0]) if images else max_length
        self._features: dict[tuple[Split, int], Features] = {}
        self.routings: dict[RoutingKey, Selection] = {}
        self.owners: dict[tuple[str, str], npt.NDArray[np.int64]] = {}

    def tokens(self) -> Iterator[bytes]:
        """What the base's tokenizer made of every text, to be hashed; images are the same for any base."""
        for encoded in self._encoded.values():
            if isinstance(encoded, Encoded):
                yield from encoded.content()

    def labels(self, split: Split) -> npt.NDArray[Any]:
        """(rows,) classes or numbers; (rows, longest) classes of tokens, `IGNORED` where there is none."""
        return placed_labels(self._encoded[split], getattr(self.task, split))

    def encoded(self, split: Split) -> Encoded:
        """Token ids of a split of texts."""
        encoded = self._encoded[split]
        assert isinstance(encoded, Encoded)
        return encoded

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
            below: Source = self._features[split, lower] if lower else encoded
            batches = buckets(below.lengths, np.arange(len(below)), _FORWARD_TOKENS)
            advance = counter(progress, f"frozen blocks, {self.task.name}", len(below))
            self._features[key] = features(classifier, below, first_block, batches, lower, advance)
        return self._features[key]

    def cached_bytes(self, classifier: Classifier, first_block: int) -> int:
        """Bytes of the frozen blocks' outputs for all records; 0 where they aren't kept."""
        if not first_block:
            return 0
        kept = [split for split in self._encoded.values() if caches(classifier, first_block, split)]
        return sum(_bytes(classifier, first_block, split) for split in kept)

    def forget(self, split: Split) -> None:
        """Free the features of a split."""
        self._features = {key: value for key, value in self._features.items() if key[0] != split}


def placed_labels(encoded: Source, records: Records) -> npt.NDArray[Any]:
    """Labels where the model's outputs are: a row's; those of its words at their first tokens; or tokens."""
    if isinstance(encoded, Encoded) and encoded.writes:
        return encoded.asked
    if records.labels.dtype != object:
        return records.labels
    assert isinstance(encoded, Encoded)
    return encoded.word_labels(list(records.labels))


def caches(classifier: Classifier, first_block: int, encoded: Source) -> bool:
    """Whether the frozen blocks' outputs are kept: the architecture is known and they fit in memory."""
    if not supports(classifier):
        return False
    return _bytes(classifier, first_block, encoded) <= _CACHE_BYTES


def _bytes(classifier: Classifier, first_block: int, encoded: Source) -> int:
    config: Any = classifier.model.config
    return kept_tokens(classifier, first_block, encoded) * int(config.hidden_size) * 4


def kept_tokens(classifier: Classifier, first_block: int, encoded: Source) -> int:
    """Tokens whose outputs of the frozen blocks are kept: a pooler reads the first of each row only."""
    config: Any = classifier.model.config
    only_first = pools(classifier) and first_block == config.num_hidden_layers
    return len(encoded) if only_first else int(encoded.lengths.sum())


def forward_of(
    classifier: Classifier, first_block: int, inputs: Source
) -> tuple[nn.Module, Callable[[dict[str, Tensor]], Tensor]]:
    """The module that maps `inputs` to logits, and how to call it."""
    if isinstance(inputs, Features):
        tail = Tail(classifier, first_block)
        return tail, lambda batch: tail(**batch)
    model = classifier.model
    options = {"use_cache": False} if writes(model.config) else {}  # a cache is for generating
    # The model's own loss is never used: its mean over the batch would tie records to each other.
    return model, lambda batch: model(**batch, **options).logits


def scores(
    metric: Metric, forward: Callable[[dict[str, Tensor]], Tensor], inputs: Source, labels: npt.NDArray[Any]
) -> dict[Metric, float]:
    """The metric's value, and of a language model those of the other metrics; not noised."""
    if isinstance(inputs, Encoded) and inputs.writes:
        found = token_scores(forward, inputs)
        return {metric: found[metric], **found}
    return {metric: evaluate(metric, logits(forward, inputs), labels)}


def scores_on_test(prepared: Prepared, classifier: Classifier, first_block: int) -> dict[Metric, float]:
    """`scores` of a model on the task's test records, the task's own metric first.

    Args:
        classifier: one whose blocks below `first_block` are the base's.
    """
    inputs = prepared.inputs(classifier, first_block, "test")
    _, forward = forward_of(classifier, first_block, inputs)
    return scores(prepared.task.metric, forward, inputs, prepared.labels("test"))


def score_test(prepared: Prepared, classifier: Classifier, first_block: int) -> float:
    """The task's own of the `scores_on_test`."""
    return scores_on_test(prepared, classifier, first_block)[prepared.task.metric]


def micro_batches(
    inputs: Source, budget: int
) -> Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], list[npt.NDArray[np.int64]]]:
    """Splits drawn rows by a budget of tokens, never a unit."""
    lengths = inputs.lengths
    return lambda rows, position: buckets(lengths[rows], position, budget)


def targets(prepared: Prepared) -> Tensor:
    """What the loss compares the outputs for the training records with.

    Returns:
        (rows,) classes; (rows, 1) numbers, their declared range scaled to [-1, 1]; or (rows, longest) classes
        of tokens, or the tokens that a language model is asked for, `IGNORED` where there is none.
    """
    labels = prepared.labels("train")
    if prepared.task.problem.label_range is None:
        return torch.from_numpy(labels)
    low, high = prepared.task.problem.label_range
    return torch.from_numpy((2 * labels - (low + high)) / (high - low)).float()[:, None]


def loss_of(problem: Problem) -> Callable[[Tensor, Tensor], Tensor]:
    """(outputs, targets) → one loss per record: cross entropy, squared error, or the mean over its tokens."""
    match problem.target:
        case "class":
            return losses.classification
        case "number":
            return losses.regression
        case "tokens" | "text":
            # Targets are as wide as the longest record of all; padding is on the right.
            return lambda outputs, labels: losses.tokens(outputs, _as_wide(labels, outputs.shape[1]))


def _as_wide(labels: Tensor, width: int) -> Tensor:
    missing = max(0, width - labels.shape[1])
    return functional.pad(labels[:, :width], (0, missing), value=losses.IGNORED)


def made_up(classifier: Classifier, lengths: npt.NDArray[np.int64]) -> Source:
    """Random rows of the kind that the classifier reads, for checks and timing; no record is looked at.

    Args:
        lengths: tokens of each row, and as many to write beside an encoder; an image has as many as it has.
    """
    rng = np.random.default_rng(0)
    problem, config = classifier.problem, classifier.model.config
    if problem.image_size is not None:
        shape = (len(lengths), problem.image_size, problem.image_size, 3)
        pixels = rng.integers(0, 256, shape, dtype=np.uint8)
        return source(classifier, Images((Path(),) * len(lengths), problem.image_size, pixels), 0)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    vocabulary, pad = int(config.vocab_size), int(classifier.tokenizer.pad_token_id)  # type: ignore[union-attr,arg-type]
    tokens = rng.integers(0, vocabulary, int(offsets[-1]), dtype=np.int32)
    tokens[tokens == pad] = (pad + 1) % vocabulary
    if problem.objective == "seq2seq":
        start = int(config.decoder_start_token_id)  # type: ignore[union-attr,arg-type]
        return Encoded(tokens, offsets, pad, answers=Encoded(tokens[::-1].copy(), offsets, pad), start=start)
    types = None
    if problem.inputs == "pair" and "token_type_ids" in classifier.tokenizer.model_input_names:
        types = np.concatenate([np.arange(n) >= n // 2 for n in lengths]).astype(np.int8)
    return Encoded(tokens, offsets, pad, types)


def made_up_targets(problem: Problem, outputs: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """Targets for the outputs of some made-up rows.

    Args:
        rows: their numbers.
        lengths: tokens of each, all of them.
    """
    place = torch.arange(outputs.shape[1])
    match problem.target:
        case "class":
            return rows % outputs.shape[1]
        case "number":
            return (rows[:, None] % 2).to(outputs.dtype)
        case "text":
            asked = lengths // 2 if problem.objective == "seq2seq" else lengths
            return torch.where(
                place < asked[:, None], (rows[:, None] + place) % outputs.shape[2], losses.IGNORED
            )
        case "tokens":
            # Like words of two tokens: every other token has a label.
            own = (place < lengths[:, None]) & (place % 2 == 1)
            return torch.where(own, (rows[:, None] + place) % outputs.shape[2], losses.IGNORED)
