"""One loss per record, from a model's outputs.

A model's own `labels=` loss is a mean over all tokens of a batch, so that one record's gradient would depend
on how long the others are. Here a record's loss is the mean over its own tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100
"""Label of a position that has no target, such as padding."""


def classification(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of `logits` (rows, classes) at `labels` (rows,); (rows,)."""
    return functional.cross_entropy(logits, labels, reduction="none")


def regression(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error of `outputs` (rows, …) at `targets`, mean over all but the first dimension; (rows,)."""
    return (outputs - targets).square().reshape(len(outputs), -1).mean(1)


def tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over a record's labelled positions; (rows,), 0 for a record that has none.

    For masked and sequence-to-sequence language models and for labels per token.

    Args:
        logits: (rows, S, classes).
        labels: (rows, S), `IGNORED` where there is none.
    """
    flat = logits.flatten(0, 1)  # classes last, as they lie in memory
    each = functional.cross_entropy(flat, labels.flatten(), reduction="none", ignore_index=IGNORED)
    return each.view(labels.shape).sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


def causal(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Mean cross entropy of a record's tokens given those before; (rows,).

    A token counts if it and the one before it are the record's own: with padding on the left, the record's
    first token would otherwise be predicted from a pad.

    Args:
        logits: (rows, S, vocabulary).
        ids: (rows, S).
        mask: (rows, S), 0 at padding on either side.
    """
    own = mask[:, 1:].bool() & mask[:, :-1].bool()
    following = torch.where(own, ids[:, 1:], IGNORED)
    # The last position predicts nothing; to cut it off would copy all logits.
    return tokens(logits, functional.pad(following, (0, 1), value=IGNORED))
