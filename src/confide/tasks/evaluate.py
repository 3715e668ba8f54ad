"""Outputs for many records, whatever computes them, and how well they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from confide.errors import ModelError
from confide.gradients.losses import IGNORED
from confide.models.tail import Source
from confide.release.format import Metric
from confide.tasks.metrics import score
from confide.tasks.text import buckets

Forward = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def logits(forward: Forward, encoded: Source, batch_tokens: int = 8192) -> npt.NDArray[np.float32]:
    """Logits of every row, in the order of the rows; computed in batches of similar length.

    Args:
        forward: maps `Source.batch` inputs of b rows to (b, classes) logits. It puts its model in
            evaluation mode and the inputs on its device.
        encoded: n ≥ 1 rows.
        batch_tokens: most tokens of a batch, padding included.

    Returns:
        (n, classes) float32; (n, longest, classes) with 0 at padding, if it gives logits for tokens.

    Raises:
        ModelError: a logit is not finite; no class would be the largest.
    """
    result: npt.NDArray[np.float32] | None = None
    longest = int(encoded.lengths.max(initial=0))
    with torch.inference_mode():
        for rows in buckets(encoded.lengths, np.arange(len(encoded)), batch_tokens):
            values = forward(encoded.batch(rows)).float().cpu().numpy()
            if not np.isfinite(values).all():
                raise ModelError("the model gives logits that are not finite; its training or merge diverged")
            if result is None:
                middle = (longest,) if values.ndim == 3 else ()
                result = np.zeros((len(encoded), *middle, values.shape[-1]), dtype=np.float32)
            if values.ndim == 3:
                result[rows, : values.shape[1]] = values
            else:
                result[rows] = values
    if result is None:
        raise ModelError("there is no row to compute logits for")
    return result


def evaluate(metric: Metric, values: npt.NDArray[np.float32], labels: npt.NDArray[Any]) -> float:
    """Score of outputs.

    Args:
        values: as `logits` gives them.
        labels: (n,) numbers or classes; (n, longest) classes of tokens, `IGNORED` at those that don't count.

    Raises:
        DataError: nothing has a label.
    """
    if labels.dtype.kind == "f":
        return score(metric, values[:, 0], labels)
    scored = labels != IGNORED
    return score(metric, values.argmax(axis=-1)[scored], labels[scored])
