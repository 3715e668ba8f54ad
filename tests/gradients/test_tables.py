from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from tests.gradients.conftest import difference, norm_of
from torch import Tensor, nn
from torch.nn import functional

from confide.gradients import recompute, tables
from confide.gradients.engine import Engine
from confide.privacy.streams import Clipping

Values = Mapping[str, Tensor]
ROWS, T, P, C = 3, 4, 7, 5


def cut(x: Tensor, values: Values) -> Tensor:
    return x + values["w"][:, :T]


def stretched(x: Tensor, values: Values) -> Tensor:
    table = functional.interpolate(values["w"].mT, size=T, mode="linear")
    return x + 2 * table.mT


def map_of(function: Callable[[Tensor, Values], Tensor], x: Tensor, w: Tensor) -> Tensor | None:
    found = tables.maps(lambda v: function(x[:1], v), lambda v: function(x, v), {"w": w}, len(x))
    return None if found is None else found["w"]


@pytest.mark.parametrize("function", [cut, stretched, lambda x, v: x + v["w"].flip(1)[:, 1 : 1 + T]])
def test_the_map_gives_each_rows_gradient(function: Callable[[Tensor, Values], Tensor]) -> None:
    torch.manual_seed(0)
    x, g = torch.randn(2, ROWS, T, C, dtype=torch.float64)
    w = torch.randn(1, P, C, dtype=torch.float64)
    found = map_of(function, x, w)
    assert found is not None
    assert found.shape == (T, P)
    for row in range(ROWS):
        leaf = w.clone().requires_grad_()
        (expected,) = torch.autograd.grad(function(x[row : row + 1], {"w": leaf}), leaf, g[row : row + 1])
        torch.testing.assert_close(found.T @ g[row], expected[0], rtol=1e-12, atol=1e-12)


def test_more_positions_than_channels() -> None:
    x, w = torch.randn(2, 11, 3), torch.randn(1, 20, 3)
    found = map_of(lambda x, v: x + v["w"][:, 4:15], x, w)
    assert found is not None
    assert torch.equal(found, torch.eye(20)[4:15])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, v: x + v["w"][:, :T] * x.sign(),  # depends on the row
        lambda x, v: x + v["w"][:, :T] * (x[:, :, :1] > -9),  # the same, on one row only: see below
        lambda x, v: x + v["w"][:, :T].flip(2),  # mixes channels
        lambda x, v: x + v["w"][:, :T] * torch.arange(C),  # channels differ
        lambda x, v: x + v["w"].mean(2, keepdim=True)[:, :T],
        lambda x, v: x @ v["w"][0, :C],
        lambda x, v: (x + v["w"][:, :T]).tanh(),
    ],
)
def test_anything_else_is_told_apart(function: Callable[[Tensor, Values], Tensor]) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(ROWS, T, C), torch.randn(1, P, C)
    x[-1, 0] = -10
    assert map_of(function, x, w) is None


class _Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, C))
        self.table = nn.Parameter(torch.randn(1, P, C))

    def forward(self, x: Tensor) -> Tensor:
        whole = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        table = functional.interpolate(self.table.mT, size=whole.shape[1], mode="linear").mT
        shown = torch.where(x.amax((1, 2), keepdim=True) > 50, table.flip(1), table)
        return whole + shown


@pytest.mark.parametrize("unit", [[0, 1, 2], [0, 1, 0]])
def test_clipped_sums_are_exact_also_where_a_later_row_acts_otherwise(
    unit: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(C, C), _Positions(), nn.Tanh(), nn.Linear(C, 2)).double()
    parameters = dict(model.named_parameters())
    engine = Engine(model, parameters)
    slow: list[int] = []
    plain = recompute.Recomputation.gradients

    def watched(self: recompute.Recomputation, *args: object) -> object:
        slow.append(1)
        return plain(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(recompute.Recomputation, "gradients", watched)
    count = max(unit) + 1
    for batch in range(4):
        x = torch.randn(ROWS, 4, C, dtype=torch.float64)
        if batch == 3:
            x[1] = 1e3
        expected = {name: torch.zeros_like(p) for name, p in parameters.items()}
        norms = []
        for own in range(count):
            rows = [row for row in range(ROWS) if unit[row] == own]
            loss = torch.stack([model(x[row : row + 1]).square().mean() for row in rows]).mean()
            gradient = dict(
                zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True)
            )
            norms.append(norm_of(gradient))
            for name, value in gradient.items():
                expected[name] += min(1.0, 0.1 / norms[-1]) * value
        with engine:
            losses = model(x).square().mean((1, 2))
            found = engine.add(losses, np.array(unit), count, Clipping("flat", 0.1))
        assert difference(engine.take(), expected) < 1e-9
        np.testing.assert_allclose(found.numpy(), norms, rtol=1e-9)
    assert len(slow) == 2  # the first batch, and the one that is different


def test_a_row_that_is_not_finite_adds_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_Positions(), nn.Linear(C, 2))
    engine = Engine(model, dict(model.named_parameters()))
    x = torch.randn(ROWS, 4, C)
    sums = []
    for bad in (False, False, True):
        with engine:
            losses = model(x).square().mean((1, 2))
            if bad:
                losses = torch.cat([losses[:2], losses[2:] * torch.nan])
            elif sums:
                losses = torch.cat([losses[:2], losses[2:] * 0])
            engine.add(losses, np.arange(ROWS), ROWS, Clipping("flat", 0.1))
        sums.append(engine.take())
    for name, value in sums[2].items():
        assert bool(value.isfinite().all())
        torch.testing.assert_close(value, sums[1][name])
