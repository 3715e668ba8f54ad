"""Inputs as tensors: texts encoded once and padded where they meet in a micro-batch, images normalised."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from confide.errors import DataError
from confide.gradients.losses import IGNORED
from confide.release.format import TEXT_CLASSES, Problem
from confide.tasks.images import Images
from confide.tasks.records import Text

Rows = npt.NDArray[np.int64]
_CHUNK = 4096


@dataclass(frozen=True)
class Encoded:
    """Token ids of many texts, end to end.

    Attributes:
        tokens: (all tokens,) int32.
        offsets: (rows + 1,) int64; row i is `tokens[offsets[i]:offsets[i + 1]]`.
        pad: token id that fills shorter rows; the attention mask hides it.
        types: (all tokens,) 1 for tokens of a pair's second text, for models that tell them apart; or None.
        words: (all tokens,) which word of its text a token begins, -1 for all others; None for plain texts.
        targets: (all tokens,) what a language model's output at each token is compared with, `IGNORED` where
            nothing is asked; or None.
        answers: what a decoder beside an encoder is to write, a row for each; or None.
        start: the token that this decoder begins with.
    """

    tokens: npt.NDArray[np.int32]
    offsets: Rows
    pad: int
    types: npt.NDArray[np.int8] | None = None
    words: npt.NDArray[np.int32] | None = None
    targets: npt.NDArray[np.int32] | None = None
    answers: Encoded | None = None
    start: int | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Rows:
        """(rows,) tokens of each row, special tokens and answers included."""
        own = np.diff(self.offsets)
        return own if self.answers is None else own + self.answers.lengths

    def batch(self, rows: Rows, width: int = 0) -> dict[str, torch.Tensor]:
        """Model inputs for the given rows.

        Args:
            width: pad to at least so many tokens.

        Returns:
            `input_ids`, `attention_mask` and, for pairs, `token_type_ids`: each (len(rows), longest of these
            rows) int64. Beside an encoder `decoder_input_ids`: answers, a token later, with right padding,
            which no token of the answer looks at.
        """
        rows = np.asarray(rows, dtype=np.int64)
        lengths = np.diff(self.offsets)[rows]
        column = np.arange(lengths.max(initial=width))
        inside = column < lengths[:, None]
        position = (self.offsets[rows][:, None] + column)[inside]
        ids = np.full(inside.shape, self.pad, dtype=np.int64)
        ids[inside] = self.tokens[position]
        inputs = {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(inside.astype(np.int64)),
        }
        if self.types is not None:
            types = np.zeros(inside.shape, dtype=np.int64)
            types[inside] = self.types[position]
            inputs["token_type_ids"] = torch.from_numpy(types)
        if self.answers is not None:
            written = self.answers.batch(rows, width)["input_ids"]
            assert self.start is not None
            inputs["decoder_input_ids"] = functional.pad(written[:, :-1], (1, 0), value=self.start)
        return inputs

    @property
    def writes(self) -> bool:
        """Whether a language model is asked for tokens."""
        return self.targets is not None or self.answers is not None

    def content(self) -> Iterator[bytes]:
        """All of it, to be hashed."""
        yield from (self.tokens.tobytes(), self.offsets.tobytes(), str(self.pad).encode())
        if self.targets is not None:
            yield self.targets.tobytes()
        if self.answers is not None:
            yield from (*self.answers.content(), str(self.start).encode())

    @property
    def asked(self) -> Rows:
        """(rows, longest) int64: what outputs of a language model are compared with, `IGNORED` elsewhere."""
        if self.answers is not None:
            return dataclasses.replace(self.answers, targets=self.answers.tokens).asked
        assert self.targets is not None
        lengths = np.diff(self.offsets)
        inside = np.arange(lengths.max(initial=0)) < lengths[:, None]
        placed = np.full(inside.shape, IGNORED, dtype=np.int64)
        placed[inside] = self.targets
        return placed

    def word_labels(self, labels: Sequence[npt.NDArray[np.int64]]) -> Rows:
        """Each text's labels at the first tokens of its words; a word that was cut off is lost.

        Args:
            labels: for each text the labels of its words.

        Returns:
            (rows, longest) int64, `IGNORED` at all other tokens.
        """
        assert self.words is not None
        placed = np.full((len(self), int(self.lengths.max(initial=0))), IGNORED, dtype=np.int64)
        for row, own in enumerate(labels):
            words = self.words[self.offsets[row] : self.offsets[row + 1]]
            first = np.flatnonzero(words >= 0)
            placed[row, first] = own[words[first]]
        return placed

    def of_words(self, classes: Rows, counts: Sequence[int]) -> list[list[int | None]]:
        """What was found at the first token of each word; None for words that were cut off.

        Args:
            classes: (rows, longest).
            counts: words of each text.
        """
        assert self.words is not None
        found: list[list[int | None]] = []
        for row, count in enumerate(counts):
            words = self.words[self.offsets[row] : self.offsets[row + 1]]
            own: list[int | None] = [None] * count
            for place in np.flatnonzero(words >= 0):
                own[words[place]] = int(classes[row, place])
            found.append(own)
        return found


@dataclass(frozen=True, eq=False)
class Normalised:
    """Images as a model reads them.

    Attributes:
        mean, std: of each colour, for values in [0, 1].
        tokens: what an image becomes: its patches, and the class token.
    """

    images: Images
    mean: tuple[float, ...]
    std: tuple[float, ...]
    tokens: int

    def __len__(self) -> int:
        return len(self.images)

    @property
    def lengths(self) -> Rows:
        """(images,) tokens of each."""
        return np.full(len(self.images), self.tokens, dtype=np.int64)

    def batch(self, rows: Rows) -> dict[str, torch.Tensor]:
        """`pixel_values` (len(rows), 3, size, size) float32."""
        values = torch.from_numpy(self.images.read(np.asarray(rows, dtype=np.int64))).float().div_(255)
        values.sub_(torch.tensor(self.mean)).div_(torch.tensor(self.std))
        return {"pixel_values": values.permute(0, 3, 1, 2).contiguous()}


def encode(tokenizer: Any, texts: Sequence[Text], max_length: int, problem: Problem | None = None) -> Encoded:
    """Tokenise all texts, each cut to `max_length` tokens, special tokens included; of a pair the longer one.

    Args:
        tokenizer: a Hugging Face tokenizer with a padding token.
        problem: whether the texts are pairs, or lists of words; single texts if left out.

    Raises:
        DataError: the tokenizer has no padding token, cuts below its own special tokens, or can't tell words;
            a text without a token, which has no gradient.
    """
    problem = problem or TEXT_CLASSES
    pairs, words = problem.inputs == "pair", problem.target == "tokens"
    if tokenizer.pad_token_id is None:
        raise DataError("the tokenizer has no padding token; set tokenizer.pad_token before encoding")
    if max_length <= tokenizer.num_special_tokens_to_add(pair=pairs):
        raise DataError(f"max_length {max_length} leaves no room for a token of the text")
    if words and not tokenizer.is_fast:
        raise DataError("labels per token need a tokenizer of the tokenizers library (tokenizer.json)")
    types = pairs and "token_type_ids" in tokenizer.model_input_names
    ids: list[list[int]] = []
    second: list[list[int]] = []
    begins: list[list[int]] = []
    for start in range(0, len(texts), _CHUNK):
        chunk = texts[start : start + _CHUNK]
        first = [text[0] for text in chunk] if pairs else [list(text) if words else text for text in chunk]
        encoded = tokenizer(
            first,
            *([[text[1] for text in chunk]] if pairs else []),
            is_split_into_words=words,
            truncation=True,
            max_length=max_length,
            return_attention_mask=False,
            return_token_type_ids=types,
        )
        ids += encoded["input_ids"]
        second += encoded["token_type_ids"] if types else []
        begins += [_begins(encoded.word_ids(row)) for row in range(len(chunk))] if words else []
    lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    if not lengths.all():
        row = int(np.argmin(lengths != 0))
        raise DataError(f"text {row + 1} is empty: it has no token; fill or drop it")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

    def flat(rows: list[list[int]], dtype: Any) -> npt.NDArray[Any]:
        return np.fromiter((value for row in rows for value in row), dtype=dtype, count=int(offsets[-1]))

    return Encoded(
        flat(ids, np.int32),
        offsets,
        int(tokenizer.pad_token_id),
        flat(second, np.int8) if types else None,
        flat(begins, np.int32) if words else None,
    )


def _begins(words: Sequence[int | None]) -> list[int]:
    """The word that each token begins; -1 for a special token or a later part of a word."""
    before = [None, *words]
    return [-1 if word is None or word == last else word for word, last in zip(words, before, strict=False)]


def buckets(lengths: Rows, position: Rows, budget: int) -> list[Rows]:
    """Split drawn rows into micro-batches of similar length, without splitting a unit.

    Args:
        lengths: (r,) tokens of each drawn row.
        position: (r,) unit of each row as `UnitMap.rows_of` gives it; the rows of one unit are adjacent.
        budget: most tokens of a micro-batch, padding included; a unit that is larger gets one of its own.

    Returns:
        Index arrays into the r rows, longest first; each index is in exactly one, a unit's rows are adjacent.
    """
    if not len(lengths):
        return []
    starts = np.concatenate([[0], np.flatnonzero(np.diff(position)) + 1])
    sizes = np.diff(np.append(starts, len(position)))
    longest = np.maximum.reduceat(lengths, starts)
    batches: list[Rows] = []
    batch: list[Rows] = []
    rows = width = 0
    for unit in np.argsort(-longest, kind="stable"):
        if batch and (rows + sizes[unit]) * width > budget:
            batches.append(np.concatenate(batch))
            batch, rows = [], 0
        if not batch:
            width = int(longest[unit])
        batch.append(np.arange(starts[unit], starts[unit] + sizes[unit], dtype=np.int64))
        rows += int(sizes[unit])
    batches.append(np.concatenate(batch))
    return batches


def packs(position: Rows, size: int) -> list[Rows]:
    """Split drawn rows into micro-batches of at most `size` rows, in order, without splitting a unit.

    Args:
        position: as in `buckets`.
        size: no unit has more rows.
    """
    packed: list[Rows] = []
    starts = np.append(np.flatnonzero(np.diff(position, prepend=-1)), len(position))
    first = 0
    for end, following in zip(starts[1:], [*starts[2:], None], strict=True):
        if following is None or following - first > size:
            packed.append(np.arange(first, end, dtype=np.int64))
            first = int(end)
    return packed
