"""Logits of many texts, whatever computes them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from confide.errors import ModelError
from confide.models.tail import Source
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
        (n, classes) float32.

    Raises:
        ModelError: a logit is not finite; no class would be the largest.
    """
    result: npt.NDArray[np.float32] | None = None
    with torch.inference_mode():
        for rows in buckets(encoded.lengths, np.arange(len(encoded)), batch_tokens):
            values = forward(encoded.batch(rows)).float().cpu().numpy()
            if not np.isfinite(values).all():
                raise ModelError("the model gives logits that are not finite; its training or merge diverged")
            if result is None:
                result = np.empty((len(encoded), values.shape[1]), dtype=np.float32)
            result[rows] = values
    if result is None:
        raise ModelError("there is no row to compute logits for")
    return result


def predict(forward: Forward, encoded: Source, batch_tokens: int = 8192) -> npt.NDArray[np.int64]:
    """(n,) most likely class of every row; arguments and errors as in `logits`."""
    values: npt.NDArray[np.float32] = logits(forward, encoded, batch_tokens)
    largest: npt.NDArray[np.int64] = values.argmax(axis=1).astype(np.int64)
    return largest
