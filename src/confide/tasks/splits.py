"""Fixed splits of public tasks: the same test records in every run, and no text on both sides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from confide.tasks.overlap import normalise
from confide.tasks.records import Records

TEST_SHARE = 0.2
TEST_RECORDS = 2_000
SPLIT_SEED = 20_261_130

Rows = npt.NDArray[np.int64]


def distinct(texts: Sequence[str], labels: Sequence[int]) -> Rows:
    """Rows to keep: the first of every normalised text, none if its copies disagree on the label."""
    first: dict[str, int] = {}
    disagree: set[int] = set()
    for row, text in enumerate(texts):
        kept = first.setdefault(normalise(text), row)
        if labels[kept] != labels[row]:
            disagree.add(kept)
    return np.array([row for row in first.values() if row not in disagree], dtype=np.int64)


def split(
    texts: Sequence[str], labels: Sequence[int], groups: Sequence[str] | None = None
) -> tuple[Records, Records]:
    """Train and test records: distinct texts, a fixed 20 % of them for test, at most 2,000.

    Args:
        groups: one name per row, such as its document. Then 20 % of the groups are for test and no group is
            on both sides; of the test groups' rows at most 2,000, picked at random, are used.
    """
    rows = distinct(texts, labels)
    records = Records.of([texts[row] for row in rows], [labels[row] for row in rows])
    rng = np.random.default_rng(SPLIT_SEED)
    names = [groups[row] for row in rows] if groups else [str(row) for row in rows]
    order = list(dict.fromkeys(names))
    held = round(TEST_SHARE * len(order)) if groups else min(round(TEST_SHARE * len(order)), TEST_RECORDS)
    test_names = {order[position] for position in rng.permutation(len(order))[:held]}
    in_test = np.array([name in test_names for name in names], dtype=np.bool_)
    test = np.flatnonzero(in_test).astype(np.int64)
    test = np.sort(rng.permutation(test)[:TEST_RECORDS])
    return records.take(np.flatnonzero(~in_test).astype(np.int64)), records.take(test)
