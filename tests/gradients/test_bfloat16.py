"""The model under bfloat16 autocast: what is added is bounded, whatever passes between layers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from confide.errors import ModelError
from confide.gradients.engine import Engine
from confide.privacy.streams import Clipping

from .conftest import difference, norm_of
from .families import FAMILIES
from .test_experts import OWNER, engine_of, inputs, losses, toy

BOUND = 0.25
RULES = {
    "flat": Clipping("flat", BOUND),
    "normalised": Clipping("normalised", BOUND, 1e-3),
    "per-role": Clipping("per-role", BOUND, shares=(0.3, 0.7)),
    "adaptive": Clipping("adaptive", BOUND, count_noise=1.0),
}
VALUES = st.sampled_from(
    [0.0, 1.0, -1.0, 1e-45, 1e-38, 1e-30, 1e-20, 1e12, 1e19, 1e30, -1e30, 3e38, math.inf, -math.inf, math.nan]
)


class Two(nn.Module):
    """Two linear layers; between them everything is bfloat16. The gradient that arrives is u."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lower, self.upper = nn.Linear(40, 30), nn.Linear(30, 20)
        self.seen: list[tuple[str, Tensor]] = []
        self.came: dict[str, Tensor] = {}

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self._watched("lower", x)
            y = self._watched("upper", h)
        assert h.dtype == y.dtype == torch.bfloat16
        return (y.float() * u).sum((1, 2))

    def _watched(self, name: str, x: Tensor) -> Tensor:
        y: Tensor = getattr(self, name)(x)
        self.seen.append((name, x.detach()))
        y.register_hook(lambda g: self.came.__setitem__(name, g))
        return y


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.lists(VALUES, min_size=6, max_size=6),
    st.lists(VALUES, min_size=6, max_size=6),
    st.sampled_from(sorted(RULES)),
    st.sampled_from([1, 2, 6]),
    st.booleans(),
)
def test_what_a_record_adds_is_within_the_bound(
    seed: int, xs: list[float], us: list[float], rule: str, length: int, cancels: bool
) -> None:
    """Measured in float64 on the sum itself, and computed again from the very bfloat16 tokens."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, length, 40, generator=generator) * torch.tensor(xs[:length])[None, :, None]
    u = torch.randn(1, length, 20, generator=generator) * torch.tensor(us[:length])[None, :, None]
    if length == 6 and cancels:
        x[:, 3:], u[:, 3:] = x[:, :3], -u[:, :3]
    model = Two()
    parameters = dict(model.named_parameters())
    roles = {name: int(name.startswith("upper")) for name in parameters}
    engine = Engine(model, parameters, roles)
    with engine:
        norms = engine.add(model(x, u), torch.arange(1), 1, RULES[rule])
    added = engine.take()
    assert {value.dtype for value in added.values()} == {torch.float32}
    assert all(bool(value.isfinite().all()) for value in added.values())
    assert norm_of(added) <= BOUND

    tokens = dict(model.seen[-2:])
    gradients = {}
    for name in ("lower", "upper"):
        a, g = tokens[name][0].double(), model.came[name][0].double()
        gradients[f"{name}.weight"], gradients[f"{name}.bias"] = g.T @ a, g.sum(0)
    length_ = norm_of(gradients)
    if rule == "flat" and 1e-15 < length_ < 1e15 and not cancels:
        assert float(norms[0]) == pytest.approx(length_, rel=1e-4)
        expected = {name: min(1.0, BOUND / length_) * value for name, value in gradients.items()}
        assert norm_of({n: added[n].double() - expected[n] for n in added}) <= 1e-3 * norm_of(expected)


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama", "T5", "ViT", "ConvNeXt"])
def test_every_kind_of_layer_under_autocast(name: str) -> None:
    """By rule, entry by entry and run again: within bfloat16's rounding of float32, and within the bound."""
    family = next(family for family in FAMILIES if family.name == name)
    model = family.build().float()
    engine = Engine(model, dict(model.named_parameters()))

    def total(rows: list[int], half: bool, bound: float) -> dict[str, Tensor]:
        batch = {k: v.float() if v.is_floating_point() else v for k, v in family.batch(rows).items()}
        with engine:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                each = family.loss(model, batch)
            engine.add(each.float(), torch.arange(len(rows)), len(rows), Clipping("flat", bound))
        return engine.take()

    for _ in range(2):  # what acts entry by entry is found out in the first pass
        assert difference(total([0, 1, 2], True, 1e6), total([0, 1, 2], False, 1e6)) < 0.1
    assert norm_of(total([1], True, 1e-3)) <= 1e-3


def test_sums_are_never_taken_under_autocast() -> None:
    model = nn.Linear(3, 2)
    with Engine(model, dict(model.named_parameters())) as engine:
        each = model(torch.randn(2, 3)).sum(1)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ModelError, match="nothing but the call"):
            engine.add(each, torch.arange(2), 2, Clipping("flat", 1.0))


def test_experts_stay_in_float32() -> None:
    model = toy(None, dtype=torch.float32)
    with engine_of(model) as engine:
        engine.expect(len(OWNER), OWNER)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ModelError, match="float32 or wider"):
            losses(model, inputs(torch.float32))
