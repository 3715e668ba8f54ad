from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from confide.models.embeddings import embed


def test_mean_over_a_texts_own_tokens(tiny_base: Path) -> None:
    texts = ["the film was lovely", "dull", "a book " * 12]
    found = embed(tiny_base, texts)
    model, tokenizer = AutoModel.from_pretrained(tiny_base).eval(), AutoTokenizer.from_pretrained(tiny_base)
    for text, row in zip(texts, found, strict=True):
        with torch.inference_mode():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        np.testing.assert_allclose(row, states.mean(0).numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(embed(tiny_base, texts[1:2])[0], found[1])
