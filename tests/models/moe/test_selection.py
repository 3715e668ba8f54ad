from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from torch import nn

from confide.errors import ModelError
from confide.models.moe.layers import SparseLayer
from confide.models.moe.owners import Owners
from confide.models.moe.selection import LayerRouting, measure, select


def layer(number: int, experts: int = 4) -> SparseLayer:
    return SparseLayer(f"layer.{number}", number, nn.Module(), nn.Linear(1, 1), "fused", experts, 1)


def owners(shares: list[float], texts: int, seed: int) -> Owners:
    return np.random.default_rng(seed).choice(len(shares), texts, p=shares).astype(np.int64)


EVEN, MILD, STEEP = [0.25] * 4, [0.4, 0.3, 0.2, 0.1], [0.85, 0.1, 0.05, 0.0]


def test_measures_are_the_textbooks() -> None:
    found = LayerRouting(3, "x", (50, 30, 20, 0))
    assert found.entropy == pytest.approx(stats.entropy([50, 30, 20, 0]))
    assert found.evenness == pytest.approx(stats.entropy([50, 30, 20, 0], base=4))
    assert found.deficit == pytest.approx(stats.entropy([0.5, 0.3, 0.2, 0], [0.25] * 4))
    assert found.chi_square == pytest.approx(stats.chisquare([50, 30, 20, 0]).statistic)
    assert found.variation == pytest.approx(np.std([50, 30, 20, 0]) / 25)
    even = LayerRouting(3, "x", (7, 7))
    assert (even.evenness, even.deficit, even.chi_square, even.variation) == (1, 0, 0, 0)
    assert LayerRouting(0, "x", (9, 0)).entropy == 0


def test_the_most_even_layer_is_chosen_and_a_clear_choice_is_stable() -> None:
    layers = [layer(1), layer(3), layer(5)]
    found = measure(
        layers,
        {
            "layer.1": owners(STEEP, 2000, 1),
            "layer.3": owners(EVEN, 2000, 2),
            "layer.5": owners(MILD, 2000, 3),
        },
    )
    assert found.chosen == 3
    assert found.texts == 2000
    assert found.margin == pytest.approx(math.log(4) - stats.entropy(MILD), abs=0.03)
    assert found.warnings == ()
    assert found.stable_from is not None
    assert found.stable_from <= 500
    assert found.stability[-1] == (2000, 1.0)
    assert all(share >= 0.95 for size, share in found.stability if size >= found.stable_from)


def test_few_texts_and_a_near_tie_are_warned_of() -> None:
    found = measure([layer(0), layer(1)], {"layer.0": owners(EVEN, 300, 1), "layer.1": owners(EVEN, 300, 2)})
    few, close = found.warnings
    assert "300 public texts are few" in few
    assert "nats, less than 0.05" in close
    assert found.stable_from is None


def test_one_layer_needs_no_choice() -> None:
    found = measure([layer(4)], {"layer.4": owners(MILD, 1500, 1)})
    assert (found.chosen, found.margin, found.warnings, found.stable_from) == (4, 0.0, (), 50)


def test_equal_layers_give_the_lowest() -> None:
    same = owners(MILD, 1000, 1)
    assert measure([layer(2), layer(7)], {"layer.2": same, "layer.7": same}).chosen == 2


def test_wishes() -> None:
    layers = [layer(1), layer(3)]
    selection = measure(layers, {"layer.1": owners(EVEN, 100, 1), "layer.3": owners(STEEP, 100, 1)})
    assert [select(layers, wish, selection).number for wish in ("first", "last", "entropy", "3")] == [
        1,
        3,
        1,
        3,
    ]
    with pytest.raises(ModelError, match="measured on public text"):
        select(layers, "entropy")
    with pytest.raises(ModelError, match="block 2 has no experts; the sparse layers are 1, 3"):
        select(layers, "2")
    for wish in ("best", "-1", ""):
        with pytest.raises(ModelError, match="none of: entropy, first, last"):
            select(layers, wish)
