"""What language models read and are asked for: texts, and texts with an answer, as tokens and targets.

Everything here is a function of a record alone, masks included: were they drawn by the record's place in the
file, a record more or less would change what all others are asked for, and the claim would be wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from confide.errors import DataError
from confide.gradients.losses import IGNORED
from confide.release.format import Problem
from confide.tasks.records import Text
from confide.tasks.text import Encoded

Ids = list[int]

SEPARATOR = "\n"
"""Between a prompt and its answer, for decoders."""

MASKED = 0.15
"""Share of a text's tokens that a masked model is asked for (Devlin et al. 2019, section 3.1)."""

_HIDDEN, _OTHER = 0.8, 0.1  # of these: replaced by the mask, by a random token; the others stay as they are


def encode_language(
    tokenizer: Any, texts: Sequence[Text], max_length: int, problem: Problem, start: int | None = None
) -> Encoded:
    """Tokenise texts, or pairs of a prompt and its answer, with what is asked for at each token.

    Args:
        tokenizer: a Hugging Face tokenizer with a padding token.
        texts: what training reads; to go on from prompts alone, `encode_prompts`.
        max_length: most tokens of a record, special tokens included; of an encoder and decoder, of each.
        problem: with its objective.
        start: token that a decoder beside an encoder begins with.

    Raises:
        DataError: a record without a token to learn.
    """
    match problem.objective:
        case "seq2seq":
            assert start is not None
            return _translated(tokenizer, texts, max_length, start)
        case "masked":
            return _masked(tokenizer, texts, max_length)
        case _ if problem.inputs == "pair":
            prompts = _opened(tokenizer, [pair[0] + SEPARATOR for pair in texts])
            answers = _ids(tokenizer, [pair[1] for pair in texts], add_special_tokens=False)
            end = _end(tokenizer)
            rows = [
                _answered(tokenizer, asked, [*said, *end] if said else [], max_length)
                for asked, said in zip(prompts, answers, strict=True)
            ]
        case _:
            rows = [_continued([*ids, *_end(tokenizer)], max_length) for ids in _opened(tokenizer, texts)]
    ids, targets = [row for row, _ in rows], [row for _, row in rows]
    _refuse_without(targets, "nothing is left to learn: each token is predicted from those before")
    return _flat(tokenizer, ids, targets)


def encode_prompts(tokenizer: Any, texts: Sequence[Text], max_length: int, problem: Problem) -> list[Ids]:
    """What a model goes on from, as in training; without an end, and with room for an answer."""
    if problem.objective == "seq2seq":
        return _cut(tokenizer, texts, max_length)
    separator = SEPARATOR if problem.inputs == "pair" else ""
    rows = _opened(tokenizer, [f"{text}{separator}" for text in texts])
    return [_last(tokenizer, row, max_length - max_length // 2) for row in rows]


def _continued(ids: Ids, max_length: int) -> tuple[Ids, Ids]:
    """A text, each token the target of the one before."""
    ids = ids[:max_length]
    return ids, [*ids[1:], IGNORED]


def _answered(tokenizer: Any, asked: Ids, said: Ids, max_length: int) -> tuple[Ids, Ids]:
    """A prompt and its answer; only tokens of the answer are targets.

    Where both are too long the answer keeps half the room. A prompt loses its beginning, an answer its end.
    """
    asked = _last(tokenizer, asked, max_length - min(len(said), max_length // 2))
    said = said[: max_length - len(asked)]
    ids, first = [*asked, *said], max(1, len(asked))
    # Output i is compared with token i + 1; the prompt's last one gives the answer's first, if there is one.
    return ids, [*([IGNORED] * (first - 1)), *ids[first:], IGNORED]


def _translated(tokenizer: Any, texts: Sequence[Text], max_length: int, start: int) -> Encoded:
    sources = _flat(tokenizer, _cut(tokenizer, [pair[0] for pair in texts], max_length))
    written = _cut(tokenizer, [pair[1] for pair in texts], max_length, answers=True)
    around = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    _refuse_without(
        [[IGNORED if one in around else one for one in own] for own in written], "an answer without a token"
    )
    answers = _flat(tokenizer, written)
    return Encoded(sources.tokens, sources.offsets, sources.pad, answers=answers, start=start)


def _masked(tokenizer: Any, texts: Sequence[Text], max_length: int) -> Encoded:
    if tokenizer.mask_token_id is None:
        raise DataError("the tokenizer has no mask token, which this model's training needs")
    special = frozenset(tokenizer.all_special_ids)
    rows = [
        mask(ids, special, int(tokenizer.mask_token_id), len(tokenizer))
        for ids in _cut(tokenizer, texts, max_length)
    ]
    ids, targets = [row for row, _ in rows], [row for _, row in rows]
    _refuse_without(targets, "a text without a token that can be masked")
    return _flat(tokenizer, ids, targets)


def mask(ids: Ids, special: frozenset[int], token: int, vocabulary: int) -> tuple[Ids, Ids]:
    """Hide some tokens of a text: of 15 %, but at least one, 80 % become the mask and 10 % a random token.

    Which ones, is drawn by a generator that the text's own tokens seed, so that it is the same in every step
    and every run, and doesn't depend on any other record.

    Args:
        ids: of the text, special tokens included.
        special: tokens that are never hidden nor put anywhere.
        token: the mask.
        vocabulary: tokens are drawn below this number.

    Returns:
        The text as it is read; and its tokens where they are asked for, `IGNORED` elsewhere.
    """
    places = np.flatnonzero([one not in special for one in ids])
    seed = hashlib.sha256(np.array(ids, dtype="<i8").tobytes()).digest()
    random = np.random.default_rng(int.from_bytes(seed[:16], "little"))
    count = max(1, round(MASKED * len(places))) if len(places) else 0
    chosen = random.permutation(places)[:count]
    read, asked = list(ids), [IGNORED] * len(ids)
    for place in chosen:
        asked[place] = ids[place]
        fate = random.random()
        other = int(random.integers(vocabulary))
        if fate < _HIDDEN:
            read[place] = token
        elif fate < _HIDDEN + _OTHER and other not in special:
            read[place] = other
    return read, asked


def _opened(tokenizer: Any, texts: Sequence[Text]) -> list[Ids]:
    """Tokens of texts with what the tokenizer puts before them, and without an end."""
    ends = {tokenizer.eos_token_id, tokenizer.sep_token_id}
    return [ids[:-1] if len(ids) > 1 and ids[-1] in ends else ids for ids in _ids(tokenizer, texts)]


def _end(tokenizer: Any) -> Ids:
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def _last(tokenizer: Any, ids: Ids, room: int) -> Ids:
    """The last tokens that fit; a token that begins every text stays."""
    if len(ids) <= room:
        return ids
    begins = ids[:1] if ids[0] == tokenizer.bos_token_id else []
    return [*begins, *ids[len(ids) - room + len(begins) :]]


def _cut(tokenizer: Any, texts: Sequence[Text], max_length: int, answers: bool = False) -> list[Ids]:
    return _ids(tokenizer, texts, answers, truncation=True, max_length=max_length)


def _ids(tokenizer: Any, texts: Sequence[Text], answers: bool = False, **options: Any) -> list[Ids]:
    if not texts:
        return []
    given = {"text_target" if answers else "text": list(texts)}
    found: list[Ids] = tokenizer(**given, **options, verbose=False)["input_ids"]
    return found


def _refuse_without(targets: Sequence[Ids], what: str) -> None:
    rows = [row for row, own in enumerate(targets, start=1) if all(target == IGNORED for target in own)]
    if rows:
        more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
        raise DataError(f"text {rows[0]}{more}: {what}; lengthen or drop it")


def _flat(tokenizer: Any, ids: Sequence[Ids], targets: Sequence[Ids] | None = None) -> Encoded:
    lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    if not lengths.all():
        raise DataError(f"text {int(np.argmin(lengths != 0)) + 1} is empty: it has no token; fill or drop it")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    asked = None if targets is None else _together(targets)
    return Encoded(_together(ids), offsets, int(tokenizer.pad_token_id), targets=asked)


def _together(rows: Sequence[Ids]) -> npt.NDArray[np.int32]:
    return np.array([value for row in rows for value in row], dtype=np.int32)
