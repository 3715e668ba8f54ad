"""Before training: does a row's output depend on that row alone? Asked of the real model, on public rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confide.errors import ModelError
from confide.models.backbones import Classifier
from confide.models.tail import Features, Source
from confide.tasks.text import Encoded

_TOLERANCE = 1e-4  # relative; rounding moves a logit by about 1e-6 when a batch's shape changes
_SHORT, _LONG = 6, 20


def check_rows_are_independent(
    classifier: Classifier, forward: Callable[[dict[str, Tensor]], Tensor], inputs: Source
) -> None:
    """Compare a row alone, again, and padded beside a longer one.

    Per-record clipping bounds nothing if a record's gradient depends on whom it is batched with: through
    padding that isn't masked, statistics of the batch, or randomness that is left on. No record is used,
    so whether this refuses says nothing about any.

    Raises:
        ModelError: the outputs differ.
    """
    rows = _public_rows(classifier, inputs)
    with torch.no_grad():
        alone = forward(rows.batch(np.array([0])))
        again = forward(rows.batch(np.array([0])))
        beside = forward(rows.batch(np.array([0, 1])))[:1]
    scale = float(alone.abs().max()) + torch.finfo(alone.dtype).tiny
    for what, other in (("run twice", again), ("padded beside a longer one", beside)):
        difference = float((other - alone).abs().max()) / scale
        if not difference <= _TOLERANCE:
            raise ModelError(
                f"a row's output changes by {difference:.1e} (relative) when it is {what}, so a record's "
                "gradient would depend on other records and clipping would bound nothing; this base can't be "
                "trained privately"
            )


def _public_rows(classifier: Classifier, inputs: Source) -> Source:
    """Two made-up rows, a short and a long one, of the kind that training reads."""
    rng = np.random.default_rng(0)
    offsets = np.array([0, _SHORT, _SHORT + _LONG])
    config: Any = classifier.model.config
    if isinstance(inputs, Features):
        if int(inputs.lengths.max(initial=1)) == 1:  # the pooler's input: one token a row
            offsets = np.array([0, 1, 2])
        hidden = rng.standard_normal((int(offsets[-1]), inputs.hidden.shape[1]))
        return Features(torch.from_numpy(hidden).to(inputs.hidden.dtype), offsets)
    tokens = rng.integers(0, config.vocab_size, int(offsets[-1])).astype(np.int32)
    pad = classifier.tokenizer.pad_token_id
    tokens[tokens == pad] = (pad + 1) % config.vocab_size
    return Encoded(tokens, offsets, int(pad))
