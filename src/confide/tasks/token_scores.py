"""How well a language model predicts the tokens that it is asked for."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn import functional

from confide.errors import DataError, ModelError
from confide.gradients.losses import IGNORED
from confide.release.format import Metric
from confide.tasks.evaluate import Forward
from confide.tasks.text import Encoded, buckets


def token_scores(forward: Forward, encoded: Encoded, batch_tokens: int = 1024) -> dict[Metric, float]:
    """`perplexity`, the exponential of the mean cross entropy, and `accuracy`, over all tokens of all rows.

    Logits of one batch at a time are held, as those of all rows would not fit.

    Args:
        forward: maps `Encoded.batch` inputs of b rows to (b, longest, vocabulary) logits.
        encoded: n rows with targets.
        batch_tokens: most tokens of a batch, padding included.

    Raises:
        DataError: there is no row.
        ModelError: a logit is not finite.
    """
    asked = torch.from_numpy(encoded.asked)
    loss, right, count = 0.0, 0, 0
    with torch.inference_mode():
        for rows in buckets(encoded.lengths, np.arange(len(encoded)), batch_tokens):
            logits = forward(encoded.batch(rows)).float().cpu()
            labels = asked[torch.from_numpy(rows), : logits.shape[1]]
            own = labels != IGNORED
            logits, labels = logits[own], labels[own]
            if not bool(logits.isfinite().all()):
                raise ModelError("the model gives logits that are not finite; its training or merge diverged")
            loss += float(functional.cross_entropy(logits, labels, reduction="none").double().sum())
            right += int((logits.argmax(-1) == labels).sum())
            count += len(labels)
    if not count:
        raise DataError("there is no token to score")
    mean = loss / count
    return {"perplexity": math.exp(mean) if mean < 700 else math.inf, "accuracy": right / count}
