"""Texts as token ids: encoded once, padded only where they meet in a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from confide.errors import DataError

Rows = npt.NDArray[np.int64]
_CHUNK = 4096


@dataclass(frozen=True)
class Encoded:
    """Token ids of many texts, end to end.

    Attributes:
        tokens: (all tokens,) int32.
        offsets: (rows + 1,) int64; row i is `tokens[offsets[i]:offsets[i + 1]]`.
        pad: token id that fills shorter rows; the attention mask hides it.
    """

    tokens: npt.NDArray[np.int32]
    offsets: Rows
    pad: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Rows:
        """(rows,) tokens of each row, special tokens included."""
        return np.diff(self.offsets)

    def batch(self, rows: Rows) -> dict[str, torch.Tensor]:
        """Model inputs for the given rows.

        Returns:
            `input_ids` and `attention_mask`, both (len(rows), longest of these rows) int64.
        """
        rows = np.asarray(rows, dtype=np.int64)
        lengths = self.lengths[rows]
        column = np.arange(lengths.max(initial=0))
        inside = column < lengths[:, None]
        ids = np.full(inside.shape, self.pad, dtype=np.int64)
        ids[inside] = self.tokens[(self.offsets[rows][:, None] + column)[inside]]
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(inside.astype(np.int64)),
        }


def encode(tokenizer: Any, texts: Sequence[str], max_length: int) -> Encoded:
    """Tokenise all texts, each cut to `max_length` tokens, special tokens included.

    Args:
        tokenizer: a Hugging Face tokenizer with a padding token.

    Raises:
        DataError: the tokenizer has no padding token, or cuts below its own special tokens; a text without a
            token, which has no gradient.
    """
    if tokenizer.pad_token_id is None:
        raise DataError("the tokenizer has no padding token; set tokenizer.pad_token before encoding")
    if max_length <= tokenizer.num_special_tokens_to_add():
        raise DataError(f"max_length {max_length} leaves no room for a token of the text")
    rows: list[list[int]] = []
    for start in range(0, len(texts), _CHUNK):
        rows += tokenizer(
            list(texts[start : start + _CHUNK]),
            truncation=True,
            max_length=max_length,
            return_attention_mask=False,
            return_token_type_ids=False,
        )["input_ids"]
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    if not lengths.all():
        row = int(np.argmin(lengths != 0))
        raise DataError(f"text {row + 1} is empty: it has no token; fill or drop it")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    tokens = np.fromiter((token for row in rows for token in row), dtype=np.int32, count=int(offsets[-1]))
    return Encoded(tokens, offsets, int(tokenizer.pad_token_id))


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
