"""Texts as vectors: the mean of what a public encoder makes of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from confide.models.backbones import load_classifier

_LONGEST = 256


def embed(base: Path, texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Mean of the last hidden states over a text's tokens.

    Args:
        base: folder of a public encoder (`models.resolve`).
        texts: public texts, such as descriptions of tasks; longer than 256 tokens they are cut.

    Returns:
        (len(texts), width).

    Raises:
        ModelError: the base can't be loaded.
    """
    classifier = load_classifier(base, ("a", "b"), seed=0)
    encoder: Any = classifier.model.get_submodule(classifier.prefix.rstrip("."))
    rows = []
    with torch.inference_mode():
        for text in texts:  # one at a time, so that no padding is in a mean
            tokens = classifier.tokenizer([text], truncation=True, max_length=_LONGEST, return_tensors="pt")
            rows.append(encoder(**tokens).last_hidden_state[0].mean(0).numpy())
    return np.stack(rows)
