"""The trained top of a BERT classifier on cached outputs of its frozen bottom.

What lies below the lowest trained block is a fixed public function of a record, so it is computed once. And
where a pooler passes only the first token's output to the head, the last block computes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from confide.gradients.experts import OwnerExperts
from confide.models.backbones import Classifier

Batch = dict[str, Tensor]


class Source(Protocol):
    """Model inputs by row: token ids, or features."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each record."""

    def batch(self, rows: npt.NDArray[np.int64]) -> Batch:
        """Padded inputs of some rows."""

    def __len__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Features:
    """Outputs of the frozen blocks for many records. Private, kept in memory only.

    Attributes:
        hidden: (tokens, width) float32, records one after the other.
        offsets: (records + 1,) where each starts.
    """

    hidden: Tensor
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each record."""
        return np.diff(self.offsets)

    def batch(self, rows: npt.NDArray[np.int64], width: int = 0) -> Batch:
        """`hidden` (rows, longest, width), zero-padded, and `attention_mask` (rows, longest).

        Args:
            width: pad to at least so many tokens.
        """
        starts = torch.from_numpy(self.offsets[rows])
        lengths = torch.from_numpy(self.lengths[rows])
        position = torch.arange(max(width, int(lengths.max())))
        mask = position < lengths[:, None]
        token = torch.where(mask, starts[:, None] + position, 0)
        hidden = self.hidden[token.flatten()].view(*token.shape, -1)
        return {"hidden": hidden.masked_fill_(~mask[..., None], 0.0), "attention_mask": mask}


class Tail(nn.Module):
    """Blocks from `first_block` up, pooler and head; the modules are the classifier's own, not copies.

    Equal to the classifier's forward up to rounding. Only for BERT, with experts or without (`supports`).
    """

    def __init__(self, classifier: Classifier, first_block: int) -> None:
        super().__init__()
        bert: Any = classifier.model.get_submodule(classifier.prefix.rstrip("."))
        self.blocks = bert.encoder.layer[first_block:]
        self.pooler = bert.pooler
        self.head = classifier.model.get_submodule("classifier")

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits of hidden states (rows, length, width) and their mask: (rows, classes), per token without a
        pooler."""
        mask = attention_mask[:, None, None, :]
        for index, block in enumerate(self.blocks):
            last = self.pooler is not None and index == len(self.blocks) - 1
            last = last and not _attached(block)  # what takes their gradients wants to see every token
            hidden = _first_token(block, hidden, mask) if last else _block(block, hidden, mask)
        return self.head(hidden if self.pooler is None else self.pooler(hidden))  # type: ignore[no-any-return]


def supports(classifier: Classifier) -> bool:
    """Whether `Tail` knows this architecture exactly."""
    config: Any = classifier.model.config
    classifies = classifier.problem.target != "text"
    return bool(classifies and config.model_type in ("bert", "moe_bert") and config.hidden_act == "gelu")


def pools(classifier: Classifier) -> bool:
    """Whether the head reads nothing but the first token's output."""
    return classifier.problem.target != "tokens"


def features(
    classifier: Classifier,
    source: Source,
    first_block: int,
    batches: list[npt.NDArray[np.int64]],
    start: int = 0,
    progress: Callable[[int], None] = lambda rows: None,
) -> Features:
    """Run every record through the frozen part once.

    Args:
        source: token ids, or features that enter block `start`.
        first_block: the block that the result enters; the number of blocks for the pooler, which reads
            the first token only, so that only this is kept.
        batches: row numbers that together cover all records once, of similar length each.
        progress: called with the number of rows done since the last call.
    """
    bert: Any = classifier.model.get_submodule(classifier.prefix.rstrip("."))
    frozen = bert.encoder.layer[start:first_block]
    only_first = pools(classifier) and first_block == len(bert.encoder.layer)
    kept = np.ones_like(source.lengths) if only_first else source.lengths
    offsets = np.concatenate([[0], np.cumsum(kept)]).astype(np.int64)
    hidden = torch.empty(int(offsets[-1]), bert.config.hidden_size)
    with torch.inference_mode():
        for rows in batches:
            inputs = source.batch(rows)
            mask = inputs["attention_mask"].bool()[:, None, None, :]
            state = inputs["hidden"] if "hidden" in inputs else _embedded(bert, inputs)
            for index, block in enumerate(frozen):
                last = only_first and index == len(frozen) - 1
                state = _first_token(block, state, mask) if last else _block(block, state, mask)
            for row, output in zip(rows, state, strict=True):
                hidden[offsets[row] : offsets[row + 1]] = output[: kept[row]]
            progress(len(rows))
    return Features(hidden, offsets)


def _embedded(bert: Any, inputs: Batch) -> Tensor:
    return bert.embeddings(  # type: ignore[no-any-return]
        input_ids=inputs["input_ids"], token_type_ids=inputs.get("token_type_ids")
    )


def _block(block: Any, hidden: Tensor, mask: Tensor, queries: int | None = None) -> Tensor:
    """The block's output for the first `queries` tokens, or for all."""
    attention = block.attention.self
    asked = hidden[:, :queries]

    def heads(states: Tensor) -> Tensor:
        return states.view(*states.shape[:2], attention.num_attention_heads, -1).transpose(1, 2)

    context = functional.scaled_dot_product_attention(
        heads(attention.query(asked)), heads(attention.key(hidden)), heads(attention.value(hidden)), mask
    )
    return _above_attention(block, context.transpose(1, 2).flatten(2), asked)


def _first_token(block: Any, hidden: Tensor, mask: Tensor) -> Tensor:
    """(rows, 1, width): what the block makes of the first token.

    One query per row lets the projections of keys and values move out of the sum over tokens: a head's score
    of a token is (W_kᵀq)·h up to a constant that the softmax cancels, and its value is W_v Σ αh + b_v, since
    Σ α = 1. Only where the key's projection isn't trained; a rule of the engine must see it called otherwise.
    """
    attention = block.attention.self
    key = attention.key
    if type(key) is not nn.Linear or key.weight.requires_grad:
        return _block(block, hidden, mask, queries=1)
    asked = hidden[:, :1]
    query = attention.query(asked).view(len(hidden), attention.num_attention_heads, -1)
    into = torch.einsum("bhd,hdw->bhw", query, key.weight.view(*query.shape[1:], -1))
    scores = (into @ hidden.transpose(1, 2)) * attention.scaling
    weights = scores.masked_fill(~mask[:, 0], -torch.inf).softmax(-1)
    # Every head's mean is projected whole, and the head's own part of the result kept.
    values = attention.value(weights @ hidden).view(*query.shape[:2], *query.shape[1:])
    context = values.diagonal(dim1=1, dim2=2).transpose(1, 2)
    return _above_attention(block, context.flatten(1)[:, None], asked)


def _above_attention(block: Any, context: Tensor, hidden: Tensor) -> Tensor:
    attended = block.attention.output(context, hidden)
    return block.feed_forward_chunk(attended)  # type: ignore[no-any-return]


def _attached(block: nn.Module) -> bool:
    return any(isinstance(module, OwnerExperts) for module in block.modules())
