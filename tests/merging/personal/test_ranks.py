from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from confide.errors import MergeError
from confide.merging.personal.ranks import Candidate, choose


def bytes_of(candidates: Mapping[str, Candidate], units: Mapping[str, int]) -> float:
    return sum(candidates[name].price * count for name, count in units.items())


def energy(candidates: Mapping[str, Candidate], units: Mapping[str, int]) -> float:
    return sum(float(candidates[name].energies[:count].sum()) for name, count in units.items())


spectra = st.lists(st.floats(0.01, 100), min_size=0, max_size=4).map(lambda v: np.array(sorted(v)[::-1]))


@given(st.lists(st.builds(Candidate, spectra, st.integers(1, 6).map(float)), max_size=3), st.integers(0, 60))
def test_no_choice_of_the_same_size_is_better(given: list[Candidate], budget: int) -> None:
    candidates = {str(number): candidate for number, candidate in enumerate(given)}
    units = choose(candidates, lambda u: bytes_of(candidates, u) <= budget)
    spent = bytes_of(candidates, units)
    assert spent <= budget
    for counts in itertools.product(*(range(len(c.energies) + 1) for c in given)):
        other = dict(zip(candidates, counts, strict=True))
        if bytes_of(candidates, other) <= spent:
            assert energy(candidates, other) <= energy(candidates, units) * (1 + 1e-12) + 1e-12
    if spent < budget:  # the next unit in the order didn't fit
        left = [candidates[n].price for n, count in units.items() if count < len(candidates[n].energies)]
        assert not left or spent + max(left) > budget


def test_nothing_fits() -> None:
    with pytest.raises(MergeError, match="budget"):
        choose({"a": Candidate(np.array([1.0]), 1.0)}, lambda units: False)
