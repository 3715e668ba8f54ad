"""Routing of a model on public text: the owners of every text in every sparse layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from confide.choices import Vote
from confide.models.moe.harden import harden
from confide.models.moe.layers import sparse_layers
from confide.models.moe.owners import owner_maps
from confide.models.moe.selection import Selection, measure
from confide.models.tail import Source
from confide.tasks.text import buckets, encode

_FORWARD_TOKENS = 4096


def batches(
    source: Source, tokens: int = _FORWARD_TOKENS
) -> Iterator[tuple[npt.NDArray[np.int64], dict[str, Tensor]]]:
    """(rows, model inputs) of similar length that together are every text once."""
    for rows in buckets(source.lengths, np.arange(len(source)), tokens):
        yield rows, source.batch(rows)


def public_routing(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[str],
    max_length: int,
    vote: Vote = "plurality",
    progress: Callable[[int], None] = lambda texts: None,
) -> Selection:
    """Which layer has the most even owners on public texts.

    Args:
        model: without a head; hardened in place.
        texts: public.
        max_length: in tokens, as in training.
        progress: called with the number of texts read since the last call.

    Raises:
        ModelError: a dense model, or a family that can't be hardened.
    """
    layers = sparse_layers(model)
    harden(model, max_length=max_length)
    encoded = encode(tokenizer, texts, max_length)

    def counted() -> Iterator[tuple[npt.NDArray[np.int64], dict[str, Tensor]]]:
        for rows, batch in batches(encoded):
            yield rows, batch
            progress(len(rows))

    return measure(layers, owner_maps(layers, lambda batch: model(**batch), counted(), len(encoded), vote))
