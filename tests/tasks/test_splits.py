import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from confide.tasks.overlap import normalise
from confide.tasks.splits import TEST_RECORDS, distinct, split

words = st.sampled_from(["a", "A", "a!", "b", "b c", "B-C", "d", "e", "f", "g", "h", "😀"])


def test_first_copy_is_kept_and_contradictions_are_dropped() -> None:
    texts = ["Fine", "bad", "fine!", "Bad.", "new", "fine"]
    assert distinct(texts, [1, 0, 1, 1, 0, 1]).tolist() == [0, 4]


@given(st.lists(st.tuples(words, st.integers(0, 1), st.sampled_from("uvwxyz")), min_size=1, max_size=60))
def test_no_text_and_no_group_on_both_sides(rows: list[tuple[str, int, str]]) -> None:
    texts, labels, groups = (list(column) for column in zip(*rows, strict=True))
    for by_group in (None, groups):
        train, test = split(texts, labels, by_group)
        sides = [{normalise(text) for text in side.texts} for side in (train, test)]
        assert not sides[0] & sides[1]
        assert len(sides[0]) + len(sides[1]) == len(train) + len(test) == len(distinct(texts, labels))
        if by_group:
            owner = {texts[row]: groups[row] for row in distinct(texts, labels)}
            assert not {owner[text] for text in train.texts} & {owner[text] for text in test.texts}
        for side in (train, test):
            for text, label in zip(side.texts, side.labels, strict=True):
                assert (text, label) in {(t, y) for t, y, _ in rows}


def test_share_cap_and_repeatability() -> None:
    texts = [f"text {row}" for row in range(20_000)]
    labels = (np.arange(20_000) % 2).tolist()
    train, test = split(texts[:5_000], labels[:5_000])
    assert (len(train), len(test)) == (4_000, 1_000)
    train, test = split(texts, labels)
    assert (len(train), len(test)) == (18_000, TEST_RECORDS)
    assert split(texts, labels)[1].texts == test.texts
    # Rows of test groups beyond the cap are left out, not moved to the training side.
    train, test = split(texts, labels, [str(row % 10) for row in range(20_000)])
    assert (len(train), len(test)) == (16_000, TEST_RECORDS)
