"""Which data sets may hold the same unit, by what was declared at each merge.

Two data sets are apart only if somebody declared it at the merge where they met: a merge that is declared
disjoint says that no unit is in two of its *inputs*, and nothing about data sets within one input. So what an
earlier merge left undeclared stays composed, and what it declared stays apart. Where two declarations differ,
the one that claims less holds: data sets that any input keeps together are together.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Collection, Sequence

from confide.errors import PrivacyError
from confide.privacy.streams import Adjacency

Pairs = frozenset[frozenset[str]]

_MOST_GROUPS = 256  # each is priced


def canonical(dataset: str) -> str:
    """Names that look alike are one data set: the other guess would claim too little.

    Case, blanks, and the ways in which Unicode spells one character (NFKC) make no difference.
    """
    folded = unicodedata.normalize("NFKC", dataset).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded).split())


def check_dataset_name(dataset: str) -> None:
    """Make sure that two names that look the same are the same.

    Raises:
        PrivacyError: nothing to see, or characters that can't be seen.
    """
    if not dataset.strip() or not dataset.isprintable():
        raise PrivacyError(f"{dataset!r} can't name a data set; use printable characters")


def apart(names: Sequence[frozenset[str]], within: Sequence[Pairs], *, disjoint: bool) -> Pairs:
    """Pairs of data sets (canonical names) of a merge that were said to share no unit.

    Args:
        names: of the data sets of each input.
        within: pairs of each input that were said to share no unit there.
        disjoint: whether this merge says so of its inputs. A data set that is in both of two inputs is not
            apart from anything by that.
    """
    pairs = {pair for said in within for pair in said}
    if disjoint:
        for one, other in itertools.combinations(names, 2):
            pairs |= {frozenset(pair) for pair in itertools.product(one - other, other - one)}
    return frozenset(
        pair
        for pair in pairs
        if all(pair in said for own, said in zip(names, within, strict=True) if pair <= own)
    )


def groups(datasets: Collection[str], pairs: Pairs, adjacency: Adjacency) -> tuple[frozenset[str], ...]:
    """Sets of data sets that one change of a unit may touch; every other set lies within one of these.

    A unit may be in several data sets only if none of them are apart, so it is in one of the cliques of the
    others. Under replace-one it may leave one clique and join another, so any two count together.

    Returns:
        Few enough to be priced; where there would be too many, everything together, which is never less.
    """
    everything = frozenset(datasets)
    meets = {
        name: {other for other in everything if other != name and frozenset((name, other)) not in pairs}
        for name in everything
    }
    found: list[frozenset[str]] = []

    def grow(inside: set[str], candidates: set[str], done: set[str]) -> None:
        """Bron and Kerbosch 1973, with a pivot: every clique once."""
        if len(found) > _MOST_GROUPS:
            return
        if not candidates and not done:
            found.append(frozenset(inside))
            return
        pivot = max(sorted(candidates | done), key=lambda name: len(candidates & meets[name]))
        for name in sorted(candidates - meets[pivot]):
            grow(inside | {name}, candidates & meets[name], done & meets[name])
            candidates, done = candidates - {name}, done | {name}

    grow(set(), set(everything), set())
    if adjacency == "replace-one" and 1 < len(found) <= _MOST_GROUPS:
        found = list({one | other for one, other in itertools.combinations(found, 2)})
    return tuple(sorted(found, key=sorted)) if len(found) <= _MOST_GROUPS else (everything,)
