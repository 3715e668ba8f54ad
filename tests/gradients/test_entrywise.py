from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from tests.gradients.conftest import difference, norm_of
from torch import Tensor, nn

from confide.gradients import entrywise, recompute
from confide.gradients.engine import Engine
from confide.privacy.streams import Clipping

Values = Mapping[str, Tensor]


def scaled(x: Tensor) -> Callable[[Values], Tensor]:
    return lambda values: (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)) * (1 + values["w"])


@pytest.mark.parametrize(
    ("shape", "make"),
    [
        ((5,), scaled),
        ((5,), lambda x: lambda values: x * values["w"] ** 2),
        ((1, 4, 5), lambda x: lambda values: x + values["w"]),
        ((1, 1, 5), lambda x: lambda values: torch.cat([values["w"].expand(len(x), -1, -1), x[:, 1:]], 1)),
        ((1,), lambda x: lambda values: x.tanh() * values["w"]),
        ((4, 1), lambda x: lambda values: x * values["w"]),
    ],
    ids=["rms", "square", "positions", "class token", "one number", "per position"],
)
def test_gradients_equal_autograd_row_by_row(
    shape: tuple[int, ...], make: Callable[[Tensor], Callable[[Values], Tensor]]
) -> None:
    torch.manual_seed(0)
    x, g = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    weight = torch.randn(shape, dtype=torch.float64)
    assert entrywise.acts(make(x), "w", weight, g.shape)
    found, output = entrywise.gradient(make(x), "w", weight, g, 3)
    assert torch.equal(output, make(x)({"w": weight}))
    for row in range(3):
        leaf = weight.clone().requires_grad_()
        alone = make(x[row : row + 1])({"w": leaf})
        (expected,) = torch.autograd.grad(alone, leaf, g[row : row + 1])
        torch.testing.assert_close(found[row], expected, rtol=1e-13, atol=1e-13)


def test_several_entries_per_row_are_summed() -> None:
    x, g = torch.randn(2, 6, 4, 5, dtype=torch.float64)
    weight = torch.randn(5, dtype=torch.float64)
    found, _ = entrywise.gradient(lambda values: x * values["w"], "w", weight, g, 3)
    torch.testing.assert_close(found, (x * g).view(3, -1, 5).sum(1))


@pytest.mark.parametrize(
    ("shape", "function"),
    [
        ((5,), lambda x, w: x * w.flip(0)),
        ((5,), lambda x, w: x * w.mean()),
        ((5,), lambda x, w: x * w + 1e-3 * w.roll(1)),
        ((5,), lambda x, w: x * w.softmax(0)),
        ((3, 4, 5), lambda x, w: x * w),  # its first dimension would be the row
        ((1, 7, 5), lambda x, w: x + w[:, :4]),
        ((5, 5), lambda x, w: x @ w),
    ],
)
def test_anything_else_is_told_apart(
    shape: tuple[int, ...], function: Callable[[Tensor, Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 4, 5), torch.randn(shape)
    assert not entrywise.acts(lambda values: function(x, values["w"]), "w", weight, x.shape)


class _Tokens(nn.Module):
    """A class token, positions and a layer scale, as vision transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.positions = nn.Parameter(torch.randn(1, 9, 6))
        self.mixed = nn.Parameter(torch.randn(6, 6))  # used in a way that only a recomputation covers

    def forward(self, x: Tensor) -> Tensor:
        whole = torch.cat([self.token.expand(len(x), -1, -1), x @ self.mixed], 1)
        return whole + self.positions[:, : whole.shape[1]]


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def gradients_of(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(model(x).square().mean(), list(model.parameters()))


def test_later_batches_of_any_size_and_length_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), _Tokens(), _Scale(), nn.Tanh(), nn.Linear(6, 2)).double()
    twin = copy.deepcopy(model)  # no hooks
    parameters = dict(model.named_parameters())
    engine = Engine(model, parameters)
    row_by_row: list[tuple[str, ...]] = []
    slow = recompute.Recomputation.gradients

    def watched(self: recompute.Recomputation, *args: object) -> object:
        row_by_row.append(self.names)
        return slow(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(recompute.Recomputation, "gradients", watched)
    with engine:
        for rows, length in ((4, 8), (3, 8), (5, 4), (2, 4), (1, 8)):
            x = torch.randn(rows, length, 5, dtype=torch.float64)
            engine.add(model(x).square().mean((1, 2)), np.arange(rows), rows, Clipping("flat", 0.1))
            found = engine.take()
            expected = {name: torch.zeros_like(p) for name, p in parameters.items()}
            for row in range(rows):
                gradient = dict(zip(parameters, gradients_of(twin, x[row : row + 1]), strict=True))
                for name, value in gradient.items():
                    expected[name] += min(1.0, 0.1 / norm_of(gradient)) * value
            assert difference(found, expected) < 1e-9
    # Each shape once; from then on only what is not entry by entry: all of `mixed`, `positions` where cut.
    assert row_by_row.count(("weight",)) == 2
    assert ("mixed",) in row_by_row
    assert ("positions", "mixed") in row_by_row
