"""What language models are asked for: tokens, targets and masks of each record alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.language import tokenizer_for
from tokenizers import normalizers

from confide.errors import DataError
from confide.gradients.losses import IGNORED
from confide.release.format import Problem
from confide.tasks.files import read_records, read_task
from confide.tasks.language import encode_language, encode_prompts, mask
from confide.tasks.text import Encoded
from confide.tasks.token_scores import token_scores

TEXTS = ["a very dull plot here", "the film was fine", "and the book is quite warm today 12"]
CAUSAL = Problem(target="text", objective="causal")
ANSWERS = Problem(inputs="pair", target="text", objective="causal")
SEQ2SEQ = Problem(inputs="pair", target="text", objective="seq2seq")
MASKED = Problem(target="text", objective="masked")


def encoded(kind: str, texts: Sequence[Any], problem: Problem, length: int = 32) -> tuple[Encoded, Any]:
    tokenizer = tokenizer_for(kind, TEXTS)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return encode_language(tokenizer, texts, length, problem, start=0), tokenizer


def row(made: Encoded, number: int) -> tuple[list[int], list[int]]:
    """Tokens and targets of one record."""
    assert made.targets is not None
    part = slice(made.offsets[number], made.offsets[number + 1])
    return made.tokens[part].tolist(), made.targets[part].tolist()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_text_asks_for_each_next_token_and_its_end(kind: str) -> None:
    made, tokenizer = encoded(kind, TEXTS, CAUSAL)
    for number, text in enumerate(TEXTS):
        begin = [tokenizer.bos_token_id] if kind == "llama" else []
        ids = [*begin, *tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        assert row(made, number) == (ids, [*ids[1:], IGNORED])


def test_a_text_that_is_cut_has_no_end() -> None:
    made, tokenizer = encoded("gpt2", TEXTS, CAUSAL, 4)
    ids, asked = row(made, 0)
    assert ids == tokenizer(TEXTS[0])["input_ids"][:4]
    assert asked == [*ids[1:], IGNORED]


def test_only_an_answer_is_asked_for() -> None:
    made, tokenizer = encoded("llama", [(TEXTS[0], TEXTS[1])], ANSWERS)
    ids, asked = row(made, 0)
    prompt = tokenizer(TEXTS[0] + "\n")["input_ids"]
    answer = [*tokenizer(TEXTS[1], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert ids == [*prompt, *answer]
    assert [one for one in asked if one != IGNORED] == answer
    assert asked.index(answer[0]) == len(prompt) - 1
    (shown,) = encode_prompts(tokenizer, [TEXTS[0]], 32, ANSWERS)
    assert shown == prompt


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(3, 24))
def test_whatever_the_lengths_an_answer_has_room(prompt: int, answer: int, length: int) -> None:
    made, tokenizer = encoded("llama", [("7 " * prompt, "8 " * answer)], ANSWERS, length)
    ids, asked = row(made, 0)
    whole = len(tokenizer("7 " * prompt + "\n")["input_ids"])
    said = len(tokenizer("8 " * answer, add_special_tokens=False)["input_ids"]) + 1
    assert len(ids) == min(length, whole + said)
    assert ids[0] == tokenizer.bos_token_id
    kept = sum(one != IGNORED for one in asked)
    assert kept == min(said, max(length // 2, length - whole))


def test_an_answer_to_a_prompt_without_a_token() -> None:
    """As where a tokenizer drops spaces and puts nothing before a text."""
    tokenizer = tokenizer_for("gpt2", TEXTS)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
    ids, asked = row(encode_language(tokenizer, [(" ", TEXTS[1])], 32, ANSWERS), 0)
    assert ids == [*tokenizer(TEXTS[1])["input_ids"], tokenizer.eos_token_id]
    assert asked == [*ids[1:], IGNORED]


def test_an_answer_of_an_encoder_and_decoder() -> None:
    made, tokenizer = encoded("t5", [(TEXTS[0], TEXTS[1]), (TEXTS[1], TEXTS[2])], SEQ2SEQ)
    batch = made.batch(np.array([0, 1]))
    first, second = (tokenizer(text_target=text)["input_ids"] for text in TEXTS[1:])
    assert len(first) < len(second)
    assert batch["decoder_input_ids"][1].tolist() == [0, *second[:-1]]
    assert batch["decoder_input_ids"][0, : len(first)].tolist() == [0, *first[:-1]]
    assert made.asked[0].tolist() == [*first, *[IGNORED] * (len(second) - len(first))]
    assert (
        batch["input_ids"][0, : batch["attention_mask"][0].sum()].tolist() == tokenizer(TEXTS[0])["input_ids"]
    )
    assert made.lengths.tolist()[0] == len(tokenizer(TEXTS[0])["input_ids"]) + len(first)


def test_masks_are_a_function_of_the_record_alone() -> None:
    """Else one record less would change what all others are asked for, and no noise would cover that."""
    whole, _ = encoded("bert", TEXTS, MASKED)
    fewer, _ = encoded("bert", TEXTS[1:], MASKED)
    assert row(whole, 1) == row(fewer, 0)
    assert row(whole, 2) == row(fewer, 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 59), min_size=1, max_size=80))
def test_masks(ids: list[int]) -> None:
    special = frozenset(range(5))
    read, asked = mask(ids, special, 4, 60)
    places = [place for place, one in enumerate(asked) if one != IGNORED]
    free = sum(one not in special for one in ids)
    assert len(places) == (max(1, round(0.15 * free)) if free else 0)
    for place, (before, now, one) in enumerate(zip(ids, read, asked, strict=True)):
        if place in places:
            assert (one, before not in special, now == 4 or now not in special) == (before, True, True)
        else:
            assert (now, one) == (before, IGNORED)


def test_shares_of_masks() -> None:
    """Of the tokens that are asked for 80 % are hidden, 10 % another token, the others as they were."""
    hidden = other = same = 0
    for number in range(400):
        ids = [5 + (number * 31 + place * 7) % 55 for place in range(40)] + [5 + number % 55]
        read, asked = mask(ids, frozenset(range(5)), 4, 60)
        for before, now, one in zip(ids, read, asked, strict=True):
            if one != IGNORED:
                hidden, other, same = (
                    hidden + (now == 4),
                    other + (now not in (4, before)),
                    same + (now == before),
                )
    total = hidden + other + same
    assert total == 400 * 6
    assert hidden / total == pytest.approx(0.8, abs=0.04)
    assert other / total == pytest.approx(0.09, abs=0.03)  # what is drawn may be special, or the same


@pytest.mark.parametrize(
    ("kind", "texts", "problem", "message"),
    [
        ("gpt2", [(TEXTS[0], "")], ANSWERS, "text 1: nothing is left to learn"),
        ("t5", [(TEXTS[0], TEXTS[1]), (TEXTS[0], "")], SEQ2SEQ, "text 2: an answer without a token"),
        ("bert", ["", TEXTS[0]], MASKED, "text 1: a text without a token that can be masked"),
        ("gpt2", [TEXTS[0]], MASKED, "no mask token"),
    ],
)
def test_a_record_without_a_target(kind: str, texts: list[Any], problem: Problem, message: str) -> None:
    with pytest.raises(DataError, match=message):
        encoded(kind, texts, problem)


def test_a_text_of_one_token_teaches_nothing() -> None:
    with pytest.raises(DataError, match=r"text 1 \(and 2 more\): nothing is left to learn"):
        encoded("gpt2", TEXTS, CAUSAL, 1)


def test_padding_changes_no_targets() -> None:
    made, _ = encoded("gpt2", TEXTS, CAUSAL)
    for number in range(len(TEXTS)):
        ids, asked = row(made, number)
        assert made.asked[number].tolist() == asked + [IGNORED] * (made.asked.shape[1] - len(ids))


def test_files_of_texts(tmp_path: Path) -> None:
    file = tmp_path / "tickets.csv"
    file.write_text("question,reply,who\n" + "".join(f"how {n},so {n},{n % 5}\n" for n in range(20)))
    task = read_task(file, text="question", target="reply", unit="who")
    assert task.problem == Problem(inputs="pair", target="text")
    assert (task.labels, task.labels_from, task.metric) == ((), "declared", "perplexity")
    assert all(one[0].replace("how", "so") == one[1] for one in task.train.texts)
    assert (task.train.units.count, task.test.units.count) == (4, 1)
    alone = read_task(file, text="reply", language_model=True, metric="accuracy")
    assert alone.problem == Problem(target="text")
    assert all(isinstance(text, str) and text.startswith("so ") for text in alone.train.texts)
    known = read_records(file, text="question", target="reply", problem=ANSWERS)
    assert known.texts[3] == ("how 3", "so 3")
    with pytest.raises(DataError, match="name the column of the answers"):
        read_records(file, text="question", problem=ANSWERS)
    with pytest.raises(DataError, match="leave out label"):
        read_task(file, text="question", target="reply", label="who")
    with pytest.raises(DataError, match="not numbers"):
        read_task(file, text="question", target="reply", label_range=(0, 1))
    with pytest.raises(DataError, match="different columns"):
        read_task(file, text="question", target="question")


def test_token_scores_count_only_what_is_asked_for() -> None:
    """Odds of 1/2 for the right token of the first row's two targets, the second row's one wrong at 1/4."""
    made = Encoded(
        np.array([1, 2, 3, 1, 2], np.int32),
        np.array([0, 3, 5]),
        0,
        targets=np.array([2, 3, IGNORED, 3, IGNORED], np.int32),
    )

    def forward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        odds = torch.full((*batch["input_ids"].shape, 4), 1 / 6)
        right = {3: 2, 2: 1}[batch["input_ids"].shape[1]]
        if right == 2:
            odds[:, 0, 2] = odds[:, 1, 3] = 1 / 2
        else:
            odds[:] = torch.tensor([1 / 12, 1 / 3, 1 / 3, 1 / 4])
        return odds.log()

    found = token_scores(forward, made, batch_tokens=1)
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["perplexity"] == pytest.approx(math.exp((2 * math.log(2) + math.log(4)) / 3))
