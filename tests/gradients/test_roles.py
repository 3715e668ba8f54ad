"""Per-role clipping: a bound for each group, and a bounded whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from confide.errors import ModelError, PrivacyError
from confide.gradients.clipping import clip_factors, next_bound, role_factors
from confide.gradients.engine import Engine
from confide.privacy.streams import Clipping

NORMS = st.floats(0, 1e12)


@given(NORMS, NORMS, st.floats(0.01, 0.99), st.floats(1e-3, 1e3))
def test_the_whole_contribution_is_within_the_bound(one: float, two: float, share: float, c: float) -> None:
    clipping = Clipping("per-role", c, shares=(share, 1 - share))
    squares = [torch.tensor([norm], dtype=torch.float64).square() for norm in (one, two)]
    slack = [torch.zeros(1, dtype=torch.float64)] * 2
    a, b = (float(f) for f in role_factors(squares, slack, clipping, torch.float32))
    assert one * a <= c * math.sqrt(share)
    assert two * b <= c * math.sqrt(1 - share)
    assert math.hypot(one * a, two * b) <= c * (1 + 1e-9)
    assert one * a >= min(one, c * math.sqrt(share)) * (1 - 1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_unit_that_is_not_finite_in_one_role_adds_nothing(bad: float) -> None:
    clipping = Clipping("per-role", 1.0, shares=(0.5, 0.5))
    squares = [torch.tensor([1.0, bad]).double(), torch.tensor([4.0, 4.0]).double()]
    found = role_factors(squares, [torch.zeros(2).double()] * 2, clipping, torch.float32)
    assert [float(f[1]) for f in found] == [0, 0]
    assert all(float(f[0]) > 0 for f in found)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def test_the_engine_clips_each_role_apart() -> None:
    net = model()
    named = dict(net.named_parameters())
    roles = {name: 0 if name.startswith("0.") else 1 for name in named}
    clipping = Clipping("per-role", 0.6, shares=(0.3, 0.5))
    x, y = torch.randn(7, 4).double() * 3, torch.randint(0, 2, (7,))
    unit = torch.tensor([0, 0, 1, 2, 2, 2, 3])
    engine = Engine(net, named, roles)
    with engine:
        losses = nn.functional.cross_entropy(net(x), y, reduction="none")
        norms = engine.add(losses, unit, 4, clipping)
    found = engine.take()
    expected = {name: torch.zeros_like(value) for name, value in named.items()}
    relative = []
    for u in range(4):
        loss = nn.functional.cross_entropy(net(x[unit == u]), y[unit == u])
        grads = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
        longest = 0.0
        for role, share in enumerate((0.3, 0.5)):
            own = [name for name in named if roles[name] == role]
            norm = float(torch.cat([grads[name].flatten() for name in own]).norm())
            longest = max(longest, norm / math.sqrt(share))
            for name in own:
                expected[name] += grads[name] * min(1, 0.6 * math.sqrt(share) / norm)
        relative.append(longest)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(norms, torch.tensor(relative).double(), rtol=1e-6, atol=0)


def test_roles_must_be_known() -> None:
    net = model()
    engine = Engine(net, dict(net.named_parameters()))
    with engine, pytest.raises(ModelError, match="role of every parameter"):
        engine.add(
            net(torch.ones(2, 4).double()).sum(1), torch.arange(2), 2, Clipping("per-role", 1, shares=(1,))
        )


def test_one_factor_is_not_enough() -> None:
    with pytest.raises(PrivacyError, match="per group"):
        clip_factors(torch.ones(1), torch.zeros(1), Clipping("per-role", 1.0, shares=(1.0,)), torch.float32)


@pytest.mark.parametrize(
    ("rule", "shares"),
    [
        ("flat", (1.0,)),
        ("per-role", None),
        ("per-role", ()),
        ("per-role", (0.7, 0.4)),
        ("per-role", (1.2, -0.2)),
        ("per-role", (math.nan,)),
    ],
)
def test_bad_shares(rule: str, shares: tuple[float, ...] | None) -> None:
    with pytest.raises(PrivacyError, match="shares"):
        Clipping(rule, 1.0, shares=shares)  # type: ignore[arg-type]


def test_the_next_bound() -> None:
    clipping = Clipping("adaptive", 1.0, quantile=0.5, quantile_rate=0.2, count_noise=1.0)
    assert next_bound(clipping, 3.0, 0.9) == pytest.approx(3 * math.exp(-0.08))
    assert next_bound(clipping, 3.0, 1e9) == 1e-4
    assert next_bound(clipping, 3.0, -1e6) == 1e4
