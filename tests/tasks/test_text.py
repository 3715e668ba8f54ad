import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from confide.errors import DataError
from confide.privacy.units import UnitMap
from confide.tasks.text import buckets, encode

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "good", "bad", "film", "a", "very"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


TEXTS = ["a good film", "bad", "a very very very bad film", "unheard of", "good good", ""]


def test_batch_is_what_the_tokenizer_pads(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded = encode(tokenizer, TEXTS, 6)
    assert len(encoded) == len(TEXTS)
    assert encoded.lengths.tolist() == [5, 3, 6, 4, 4, 2]
    for rows in ([0, 1, 2, 3, 4, 5], [1], [4, 0], [3, 3]):
        batch = encoded.batch(np.array(rows))
        expected = tokenizer(
            [TEXTS[row] for row in rows], padding=True, truncation=True, max_length=6, return_tensors="pt"
        )
        for key in ("input_ids", "attention_mask"):
            assert torch.equal(batch[key], expected[key])
            assert batch[key].dtype == torch.int64


def test_padding_is_local_to_the_batch(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded = encode(tokenizer, TEXTS, 64)
    assert encoded.batch(np.array([1])).pop("input_ids").shape == (1, 3)
    assert encoded.batch(np.array([1, 2])).pop("input_ids").shape == (2, 8)


def test_nothing_encodes_to_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded = encode(tokenizer, [], 8)
    assert len(encoded) == 0
    assert encoded.batch(np.empty(0, np.int64))["input_ids"].shape == (0, 0)


def test_chunks_join_seamlessly(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encode(tokenizer, TEXTS, 8)
    monkeypatch.setattr("confide.tasks.text._CHUNK", 2)
    parts = encode(tokenizer, TEXTS, 8)
    assert np.array_equal(whole.tokens, parts.tokens)
    assert np.array_equal(whole.offsets, parts.offsets)


def test_unusable_tokenizer_or_length(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="max_length 2 leaves no room"):
        encode(tokenizer, TEXTS, 2)
    unpadded = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(DataError, match="no padding token"):
        encode(unpadded, TEXTS, 8)


@given(
    rows=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 30)), min_size=1, max_size=60),
    budget=st.integers(1, 120),
)
def test_buckets_cover_rows_and_keep_units_whole(rows: list[tuple[int, int]], budget: int) -> None:
    units = UnitMap.column("user", [owner for owner, _ in rows], 4)
    drawn, position = units.rows_of(np.arange(units.count))
    lengths = np.array([length for _, length in rows])[drawn]
    batches = buckets(lengths, position, budget)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(drawn)))
    where: dict[int, int] = {}
    for number, batch in enumerate(batches):
        owners = position[batch]
        assert len(set(owners.tolist())) == 1 + np.count_nonzero(np.diff(owners))
        assert len(batch) * lengths[batch].max() <= budget or len(set(owners.tolist())) == 1
        for owner in owners.tolist():
            assert where.setdefault(owner, number) == number


def test_similar_lengths_meet() -> None:
    lengths = np.array([3, 50, 4, 49, 5, 51])
    batches = buckets(lengths, np.arange(6), 160)
    assert [sorted(lengths[batch].tolist()) for batch in batches] == [[49, 50, 51], [3, 4, 5]]
    assert buckets(np.empty(0, np.int64), np.empty(0, np.int64), 10) == []


def test_a_text_without_a_token_is_refused() -> None:
    class Bare:
        pad_token_id = 0

        def num_special_tokens_to_add(self) -> int:
            return 0

        def __call__(self, texts: list[str], **_: object) -> dict[str, list[list[int]]]:
            return {"input_ids": [[1] * len(text) for text in texts]}

    with pytest.raises(DataError, match="text 2 is empty"):
        encode(Bare(), ["ab", "", "c"], 8)
