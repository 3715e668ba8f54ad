"""Which data sets may share a unit, against a definition that tries every set."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from confide.errors import PrivacyError
from confide.privacy import disjointness
from confide.privacy.disjointness import canonical, check_dataset_name, groups

NAMES = "abcdefg"


def _every(names: str, pairs: frozenset[frozenset[str]], touched: int) -> set[frozenset[str]]:
    """Largest sets that one change can touch: unions of `touched` sets without a pair that is apart."""
    sets = [
        frozenset(chosen)
        for size in range(1, len(names) + 1)
        for chosen in itertools.combinations(names, size)
        if not any(frozenset(pair) in pairs for pair in itertools.combinations(chosen, 2))
    ]
    unions = {frozenset().union(*chosen) for chosen in itertools.product(sets, repeat=touched)}
    return {one for one in unions if not any(one < other for other in unions)}


PAIRS = st.frozensets(
    st.sampled_from([frozenset(pair) for pair in itertools.combinations(NAMES[:5], 2)]), max_size=10
)


@given(PAIRS)
def test_cliques_are_all_that_there_are(pairs: frozenset[frozenset[str]]) -> None:
    names = NAMES[:5]
    assert set(groups(names, pairs, "add-or-remove-one")) == _every(names, pairs, 1)
    replaced = set(groups(names, pairs, "replace-one"))
    assert all(any(one <= other for other in replaced) for one in _every(names, pairs, 2))


def test_few_or_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{group}{number}" for group in range(5) for number in range(4)]
    pairs = frozenset(
        frozenset(pair) for pair in itertools.combinations(names, 2) if pair[0][0] == pair[1][0]
    )
    assert groups(names, pairs, "add-or-remove-one") == (frozenset(names),)  # 4⁵ sets are too many
    monkeypatch.setattr(disjointness, "_MOST_GROUPS", 4**5)
    assert len(groups(names, pairs, "add-or-remove-one")) == 4**5


def test_nothing_apart_is_one_group() -> None:
    many = [str(number) for number in range(60)]
    assert groups(many, frozenset(), "add-or-remove-one") == (frozenset(many),)
    assert groups(many, frozenset(), "replace-one") == (frozenset(many),)


@pytest.mark.parametrize(
    "name", ["Caf\u00e9 2026", "Cafe\u0301 2026", "CAF\u00c9\u00a02026 ", "\uff23af\u00e9  \uff12026"]
)
def test_names_that_look_alike_are_one_data_set(name: str) -> None:
    assert canonical(name) == "caf\u00e9 2026"


@pytest.mark.parametrize("name", ["", "  ", "a\u200b", "a\x1b[8m", "a\n", "a\u202e"])
def test_names_with_unseen_characters_are_refused(name: str) -> None:
    with pytest.raises(PrivacyError, match="can't name a data set"):
        check_dataset_name(name)
