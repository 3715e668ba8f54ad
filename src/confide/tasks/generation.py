"""Texts that a language model writes, one token after another, the likeliest each time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from confide.errors import ConfigError, DataError
from confide.models.backbones import Classifier
from confide.tasks.language import encode_prompts
from confide.tasks.text import buckets

_BATCH_TOKENS = 2048


def generate(classifier: Classifier, texts: Sequence[str], max_length: int) -> list[str]:
    """What follows each text, or answers it, up to the end that the model gives it.

    Rows of one length are computed together, so that there is no padding.

    Args:
        classifier: a language model.
        texts: as `language.encode_prompts` cuts them.
        max_length: most tokens of a text with what follows; of an encoder and decoder, of what it writes.

    Raises:
        ConfigError: a model that fills masks, which writes nothing.
        DataError: a text without a token.
    """
    problem = classifier.problem
    if problem.objective == "masked":
        raise ConfigError(
            "this model fills masks and writes no texts; load it with AutoModelForMaskedLM to fill them, or "
            "score it with confide evaluate"
        )
    prompts = encode_prompts(classifier.tokenizer, texts, max_length, problem)
    lengths = np.array([len(ids) for ids in prompts], dtype=np.int64)
    if not lengths.all():
        raise DataError(f"text {int(np.argmin(lengths != 0)) + 1} is empty: it has no token; fill or drop it")
    written = [""] * len(prompts)
    for rows in _of_one_length(lengths, max_length):
        length = int(lengths[rows[0]])
        ids = torch.tensor([prompts[row] for row in rows])
        room = max_length if problem.objective == "seq2seq" else max_length - length
        for row, own in zip(rows, _written(classifier, ids, room), strict=True):
            written[row] = classifier.tokenizer.decode(own, skip_special_tokens=True).strip()
    return written


def _of_one_length(lengths: np.ndarray[Any, np.dtype[np.int64]], max_length: int) -> Iterator[Any]:
    for length in np.unique(lengths):
        same = np.flatnonzero(lengths == length)
        for part in buckets(np.full(len(same), max_length), np.arange(len(same)), _BATCH_TOKENS):
            yield same[part]


def _written(classifier: Classifier, ids: torch.Tensor, room: int) -> list[list[int]]:
    from transformers import GenerationConfig

    model: Any = classifier.model
    base = model.generation_config
    ends = {classifier.tokenizer.eos_token_id, *np.atleast_1d(base.eos_token_id or []).tolist()} - {None}
    settings = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=room,
        eos_token_id=sorted(ends) or None,
        pad_token_id=classifier.tokenizer.pad_token_id,
        bos_token_id=base.bos_token_id,
        decoder_start_token_id=base.decoder_start_token_id,
        forced_bos_token_id=base.forced_bos_token_id,
    )
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    skipped = 1 if classifier.problem.objective == "seq2seq" else ids.shape[1]
    return [_until_end(row, ends) for row in found[:, skipped:].tolist()]


def _until_end(ids: list[int], ends: set[int]) -> list[int]:
    places = [place for place, one in enumerate(ids) if one in ends]
    return ids[: places[0]] if places else ids
