from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from confide.errors import PrivacyError
from confide.gradients.clipping import clip_factors, round_down
from confide.privacy.streams import Clipping

NORMS = st.floats(0, 1e150)


def factor(norm: float, clipping: Clipping, slack: float = 0.0, dtype: torch.dtype = torch.float32) -> float:
    squares = torch.tensor([norm], dtype=torch.float64).square()
    return float(clip_factors(squares, torch.tensor([slack], dtype=torch.float64), clipping, dtype))


@given(NORMS, st.floats(1e-6, 1e6))
def test_flat_never_exceeds_the_bound_and_only_shortens(norm: float, bound: float) -> None:
    c = factor(norm, Clipping("flat", bound))
    assert norm * c <= bound
    assert c == 1 if norm <= bound * (1 - 1e-9) else c <= 1
    assert norm * c >= min(norm, bound) * (1 - 1e-6)


@given(NORMS, st.floats(1e-6, 1e6), st.floats(1e-4, 10))
def test_normalised_is_auto_s_and_stays_below_the_bound(norm: float, bound: float, stability: float) -> None:
    c = factor(norm, Clipping("normalised", bound, stability))
    assert norm * c <= bound
    assert c == pytest.approx(min(bound / (norm + stability), 2**20), rel=1e-6)


@pytest.mark.parametrize("rule", ["flat", "normalised"])
@pytest.mark.parametrize("square", [math.nan, math.inf, -math.inf])
def test_non_finite_norms_give_exactly_zero(rule: str, square: float) -> None:
    squares, slack = torch.tensor([square, 1.0]).double(), torch.zeros(2, dtype=torch.float64)
    factors = clip_factors(squares, slack, Clipping(rule, 1.0), torch.float32)  # type: ignore[arg-type]
    expected_zero = square != -math.inf
    assert (factors[0] == 0) == expected_zero
    assert factors[1] > 0


def test_slack_counts_as_length() -> None:
    assert factor(0.0, Clipping("flat", 1.0), slack=4.0) == pytest.approx(0.5, rel=1e-6)
    squares = torch.tensor([-1.0], dtype=torch.float64)
    slack = torch.tensor([4.0], dtype=torch.float64)
    assert float(clip_factors(squares, slack, Clipping("flat", 1.0), torch.float32)) == pytest.approx(0.5)


def test_no_clipping_is_refused() -> None:
    with pytest.raises(PrivacyError, match="sensitivity"):
        factor(1.0, Clipping("none", 1.0))


@given(st.floats(0, 1e300))
def test_round_down_never_rounds_up(value: float) -> None:
    rounded = float(round_down(torch.tensor([value], dtype=torch.float64), torch.float32))
    assert rounded <= value
    if 1e-37 < value < 3e38:
        assert rounded >= value * (1 - 2**-23)
