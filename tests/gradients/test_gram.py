from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from confide.gradients.gram import Gram, squared_norms


def truth(a: Tensor, g: Tensor) -> Tensor:
    return (g.double().mT @ a.double()).square().sum((1, 2))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(2, 24),
    st.integers(1, 60),
    st.integers(1, 60),
    st.floats(-30, 12),
    st.floats(-30, 12),
    st.booleans(),
)
def test_true_norm_lies_below_the_bound(
    seed: int, s: int, p: int, d: int, size_a: float, size_g: float, cancel: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = (torch.randn(3, s, p, generator=generator, dtype=torch.float64) * 10**size_a).float()
    g = (torch.randn(3, s, d, generator=generator, dtype=torch.float64) * 10**size_g).float()
    if cancel:
        a[:, 1] = a[:, 0] * (1 + 2**-20)
        g[:, 1] = -g[:, 0]
        a[:, 2:] *= 1e-7
    squares, slack = squared_norms(Gram.of(a), Gram.of(g))
    exact = truth(a, g)
    assert (exact <= (squares.clamp(min=0) + slack) * (1 + 1e-12)).all()
    kept = exact > 1e-60
    assert (squares[kept] >= exact[kept] * (1 - 1e-2) - slack[kept]).all()


def test_nearly_cancelling_tokens_are_measured_in_float64() -> None:
    torch.manual_seed(0)
    a = torch.randn(2, 2, 384)
    g = torch.randn(2, 2, 384)
    a[0, 1] = a[0, 0] + 1e-5 * torch.randn(384)
    g[0, 1] = -g[0, 0]
    naive = ((a @ a.mT) * (g @ g.mT)).sum((1, 2))
    exact = truth(a, g)
    assert abs(float(naive[0] / exact[0]) - 1) > 1e-3
    squares, _ = squared_norms(Gram.of(a), Gram.of(g))
    assert float(squares[0]) == pytest.approx(float(exact[0]), rel=1e-4)
    assert float(squares[1]) == pytest.approx(float(exact[1]), rel=1e-5)


def test_slack_covers_the_rounding_of_the_sum_itself() -> None:
    torch.manual_seed(0)
    a = torch.randn(1, 64, 300) * 1e4
    g = torch.randn(1, 64, 200) * 1e4
    a[:, 32:], g[:, 32:] = a[:, :32], -g[:, :32]  # cancels exactly, in exact arithmetic only
    squares, slack = squared_norms(Gram.of(a), Gram.of(g))
    shuffled = torch.randperm(64)
    added = float((g[0, shuffled].T @ a[0, shuffled]).double().norm())
    assert added > 1
    assert float(truth(a, g)) < 1e-6
    assert added**2 <= float(squares.clamp(min=0) + slack)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e35])
def test_non_finite_and_nearly_overflowing_tokens_are_not_finite(bad: float) -> None:
    a, g = torch.randn(3, 4, 5), torch.randn(3, 4, 6)
    a[1, 2, 3] = bad
    squares, slack = squared_norms(Gram.of(a), Gram.of(g))
    assert not bool((squares + slack)[1].isfinite())
    assert bool((squares + slack)[[0, 2]].isfinite().all())


def test_large_finite_tokens_are_measured() -> None:
    a, g = torch.randn(2, 4, 5) * 1e30, torch.randn(2, 4, 6) * 1e20
    squares, _ = squared_norms(Gram.of(a), Gram.of(g))
    assert torch.allclose(squares, truth(a, g), rtol=1e-9)


@pytest.mark.parametrize("cancel", [False, True])
def test_long_tokens_are_multiplied_in_pieces(cancel: bool) -> None:
    """As of a vocabulary: one float32 product over all entries would need float64 to be sure."""
    torch.manual_seed(0)
    a, g = torch.randn(2, 6, 30), torch.randn(2, 6, 5000)
    if cancel:
        g[:, 1], a[:, 1] = -g[:, 0], a[:, 0] * (1 + 2**-20)
    gram = Gram.of(g)
    exact = g.double() @ g.double().mT
    allowed = gram.error * gram.lengths[:, :, None].double() * gram.lengths[:, None]
    assert ((gram.products.double() - exact).abs() <= allowed).all()
    assert gram.error < 2100 * torch.finfo(torch.float32).eps / 2
    squares, slack = squared_norms(Gram.of(a), gram)
    assert (truth(a, g) <= squares + slack).all()
    assert squares.tolist() == pytest.approx(truth(a, g).tolist(), rel=1e-4)


@pytest.mark.parametrize("length", [63, 64, 65, 131])
def test_mirrored_products_are_those_of_the_whole(length: int) -> None:
    torch.manual_seed(0)
    a, g = torch.randn(3, length, 9), torch.randn(3, length, 7)
    products = Gram.of(a).products
    assert torch.equal(products, products.mT)
    torch.testing.assert_close(products, (a.double() @ a.double().mT).float())
    squares, slack = squared_norms(Gram.of(a), Gram.of(g))
    expected = (g.double().mT @ a.double()).square().sum((1, 2))
    assert ((squares - expected).abs() <= slack).all()
    torch.testing.assert_close(squares, expected, rtol=1e-6, atol=0)
