"""A mixture of experts made out of a dense base on public text, as a folder, and compared with that base."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from confide.finetune.base import PublicBase
from confide.finetune.public_routing import batches
from confide.models.backbones import load_encoder
from confide.models.moe import upcycle
from confide.tasks.text import encode

_COMPARED = 200


@dataclass(frozen=True)
class Upcycled:
    """What was made.

    Attributes:
        folder: the mixture, a base like any other.
        experts: E of each layer.
        blocks: that have experts, from 0.
        texts: public ones that the routers come from.
        dense_parameters, parameters: of the base and of the mixture.
        compared: texts on which the written mixture was compared with its base.
        difference: the largest between their last hidden states on these, in the states' unit; 0 says that
            they are equal bit for bit.
        seconds: wall time of all of it.
    """

    folder: Path
    experts: int
    blocks: tuple[int, ...]
    texts: int
    dense_parameters: int
    parameters: int
    compared: int
    difference: float
    seconds: float

    def in_words(self) -> tuple[str, str]:
        """Sentences: what it is, and whether its outputs are the base's."""
        blocks = ", ".join(map(str, self.blocks))
        same = (
            "are the dense model's, bit for bit"
            if self.difference == 0
            else f"differ from the dense model's by {self.difference:.1e} at most"
        )
        return (
            f"{self.parameters:,} parameters ({self.dense_parameters:,} before), {self.experts} experts in "
            f"block{'s' if len(self.blocks) > 1 else ''} {blocks}, routed by {self.texts} public texts",
            f"Before training its outputs {same} (compared on {self.compared} of the texts)",
        )


def upcycle_base(
    base: PublicBase,
    texts: Sequence[str],
    out: Path,
    *,
    experts: int,
    blocks: Sequence[int],
    max_length: int,
    seed: int = 0,
    progress: Callable[[int], None] = lambda texts: None,
) -> Upcycled:
    """Write a mixture of experts whose outputs are the base's until it is trained, and check that they are.

    Args:
        base: dense BERT.
        texts: public; the router of a block clusters that block's inputs on them.
        out: folder to write; must not exist.
        experts, blocks: E of each layer, and which blocks get experts, from 0.
        max_length: tokens kept of a text.
        seed: of the clustering; public.
        progress: called with the number of texts read since the last call.

    Raises:
        ModelError: not a BERT, a block that it hasn't, or fewer tokens than experts.
        ReleaseError: `out` exists, or can't be written.
    """
    start = time.monotonic()
    dense, tokenizer = load_encoder(base.folder)
    encoded = encode(tokenizer, texts, max_length)
    inputs = (batch for _, batch in batches(encoded))
    sparse = upcycle.upcycle(dense, inputs, blocks=blocks, experts=experts, seed=seed, progress=progress)
    upcycle.save(sparse, tokenizer, out)
    few = encode(tokenizer, texts[:_COMPARED], max_length)
    written, _ = load_encoder(out)
    return Upcycled(
        folder=out,
        experts=experts,
        blocks=tuple(sorted(set(blocks))),
        texts=len(texts),
        dense_parameters=_count(dense),
        parameters=_count(sparse),
        compared=len(few),
        difference=_difference(dense, written, few),
        seconds=time.monotonic() - start,
    )


def _difference(dense: Any, sparse: Any, encoded: Any) -> float:
    """The largest between the last hidden states; NaN where one of them isn't a number."""
    found = [0.0]
    with torch.no_grad():
        for _, batch in batches(encoded):
            gap = sparse.eval()(**batch).last_hidden_state - dense.eval()(**batch).last_hidden_state
            found.append(float(gap[batch["attention_mask"] != 0].abs().max()))
    return float(torch.tensor(found, dtype=torch.float64).max())


def _count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
