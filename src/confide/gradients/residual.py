"""RAPTOR's residual weights: records that the model already gets right count less."""

from __future__ import annotations

import torch
from torch import Tensor


def residual_weights(logits: Tensor, labels: Tensor, power: float = 1.0) -> Tensor:
    """(1 − softmax(z)_y)^power of each row, a constant: no gradient flows through it.

    A row's weight depends on that row alone and lies in [0, 1], so the clipping bound stays what it is.

    Args:
        logits: (rows, classes).
        labels: (rows,) class numbers.
        power: γ; 1 is the paper's, 0 weighs all rows alike.

    Returns:
        (rows,) in float32 or wider. Private.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    others = logits.detach().to(wide).softmax(-1)
    # The sum over the other classes keeps small weights exact, where 1 − p would cancel.
    return others.scatter(1, labels[:, None], 0.0).sum(-1) ** power


def remembered(memory: Tensor, rows: Tensor, weights: Tensor, keep: float) -> Tensor:
    """Exponential means of rows' weights over the steps that drew them: m ← keep·m + (1 − keep)·w.

    A row that is drawn for the first time begins with its weight; rows that aren't drawn stay as they are. So
    a row's mean depends on that row, on the draws that it was in, and on the models at those steps, never on
    another row.

    Args:
        memory: (all rows,) the means, NaN before the first draw; changed in place. Private.
        rows: numbers of the rows that are drawn now, each once.
        weights: (rows,) as `residual_weights` gives them.
        keep: β in [0, 1).

    Returns:
        (rows,) the new means, in the memory's dtype.
    """
    before = memory[rows]
    now = weights.to(memory.dtype)
    memory[rows] = torch.where(before.isnan(), now, keep * before + (1 - keep) * now)
    return memory[rows]
