"""Imbalance bounds and stable owners: for every input, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import entropy, spearmanr

from confide.models.moe.ownership import imbalance, margins, stability, transfer, vote_shares
from confide.models.moe.selection import LayerRouting

COUNTS = st.lists(st.integers(0, 500), min_size=2, max_size=12).filter(any)
VOTES = arrays(np.float64, st.tuples(st.integers(1, 9), st.integers(2, 6)), elements=st.floats(0, 9))


@settings(deadline=None)
@given(COUNTS)
def test_the_bounds_hold_for_all_counts(counts: list[int]) -> None:
    found = imbalance(counts)
    shares = np.array(counts) / sum(counts)
    assert found.deficit == pytest.approx(math.log(len(counts)) - entropy(shares), abs=1e-12)
    off = len(counts) * shares - 1
    assert found.mean_bias == pytest.approx(np.abs(off).mean())
    assert found.largest_bias == pytest.approx(np.abs(off).max())
    assert found.variation == pytest.approx(math.sqrt((off**2).mean()))
    # Even counts leave a divergence of rounding size, whose root is not.
    assert found.mean_bias <= found.mean_bound + 1e-7
    assert found.largest_bias <= found.largest_bound + 1e-6
    assert found.variation >= found.least_variation - 1e-6


def test_one_expert_owns_all() -> None:
    found = imbalance([0, 9, 0, 0])
    assert found.deficit == pytest.approx(math.log(4))
    assert found.largest_bias == 3
    assert found.mean_bias == 1.5
    assert (
        found.least_variation == pytest.approx(found.variation) == pytest.approx(math.sqrt(3))
    )  # Jensen is tight


def test_votes_become_shares_and_nobody_is_even() -> None:
    shares = vote_shares(np.array([[1.0, 3.0], [0.0, 0.0]]))
    assert shares.tolist() == [[0.25, 0.75], [0.5, 0.5]]
    assert margins(shares).tolist() == [0.5, 0.0]


@settings(deadline=None)
@given(VOTES, st.data())
def test_an_owner_with_a_margin_above_the_move_stays(votes: np.ndarray, data: st.DataObject) -> None:
    other = data.draw(arrays(np.float64, votes.shape, elements=st.floats(0, 9)))
    before, after = vote_shares(votes), vote_shares(other)
    for weight in (1.0, 0.1):
        moved = before + weight * (after - before)
        stays = np.abs(moved - before).sum(1) < margins(before) - 1e-12
        assert (moved.argmax(1) == before.argmax(1))[stays].all()
        found = stability(before, before + (moved - before) / 2, moved, 2.0)
        assert found.changed + found.kept_for_sure <= 1 + 1e-12
        # Votes that go along a straight line are predicted: kappa bounds, and the line hits.
        assert found.changed_at_most >= found.changed - 1e-12


def test_predictions_by_hand() -> None:
    before = np.array([[0.6, 0.4], [0.9, 0.1], [0.5, 0.5], [0.2, 0.8]])
    halfway = np.array([[0.55, 0.45], [0.85, 0.15], [0.45, 0.55], [0.2, 0.8]])
    after = np.array([[0.45, 0.55], [0.8, 0.2], [0.5, 0.5], [0.1, 0.9]])
    found = stability(before, halfway, after, 4.0)
    assert found.changed == 0.25  # the first; of the third's equals the lowest wins twice
    assert found.kappa == pytest.approx(0.05)
    assert found.mean_kappa == pytest.approx(0.0375)
    assert found.changed_at_most == 0.5  # margins .2 and 0 against .05 · 4, within rounding
    assert found.changed_by_mean == 0.25
    assert found.changed_along_line == 0.25  # the third; the first is at a tie
    assert found.kept_for_sure == 0.5
    assert found.margin == pytest.approx((0.2 + 0.8 + 0 + 0.6) / 4)
    still = stability(before, before, before, 0.0)
    assert (still.kappa, still.changed, still.changed_at_most, still.kept_for_sure) == (0, 0, 0, 0.75)


def test_public_and_private_layers_are_ranked() -> None:
    public = [LayerRouting(1, "a", (5, 5)), LayerRouting(3, "b", (9, 1)), LayerRouting(5, "c", (7, 3))]
    private = [LayerRouting(1, "a", (6, 4)), LayerRouting(3, "b", (5, 5)), LayerRouting(5, "c", (6, 4))]
    found = transfer(public, private)
    assert (found.public_choice, found.private_choice) == (1, 3)
    expected = spearmanr([x.entropy for x in public], [x.entropy for x in private]).statistic
    assert found.agreement == pytest.approx(expected)
    assert transfer(public[:1], private[:1]).agreement is None
