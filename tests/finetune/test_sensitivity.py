"""Sensitivity to noise, on losses whose Hessian is known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from confide.errors import ModelError
from confide.finetune.sensitivity import sensitivity


def test_it_is_half_the_trace_of_the_hessian() -> None:
    weight = nn.Parameter(torch.linspace(-1, 1, 400, dtype=torch.float64))
    curvature = torch.linspace(0.1, 3, 400, dtype=torch.float64)
    before = weight.data.clone()

    def loss() -> float:
        return float((0.5 * curvature * weight.data.square() + 7 * weight.data).sum())

    found = sensitivity({"w": weight}, loss, noise=1e-3, draws=60)
    wanted = 0.5 * float(curvature.sum())
    assert 0 < found.error < 0.03 * wanted
    assert abs(found.value - wanted) < 4 * found.error
    assert torch.equal(weight.data, before)


def test_a_concave_loss_has_a_negative_one_and_a_broken_one_is_refused() -> None:
    weight = nn.Parameter(torch.zeros(50, dtype=torch.float64))
    found = sensitivity({"w": weight}, lambda: -float(weight.data.square().sum()), noise=0.1, draws=4)
    assert found.value < 0
    with pytest.raises(ModelError, match="isn't finite"):
        sensitivity({"w": weight}, lambda: float("nan"), noise=0.1, draws=4)
    with pytest.raises(ModelError, match="at least 2"):
        sensitivity({"w": weight}, lambda: 0.0, noise=0.1, draws=1)
