"""Bias, variance and drift of owners' gradients against every draw there is, and against simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from confide.finetune.diagnostics import owner_moments
from confide.finetune.owner_estimator import OwnerMoments, drift_error, estimator, simulate

EXPERTS, SIZE, RATE, DENOMINATOR = 3, 4, 0.3, 1.7


@pytest.fixture
def records() -> tuple[torch.Tensor, np.ndarray]:
    """Nine gradients with owners; nobody is owned by expert 1."""
    generator = torch.Generator().manual_seed(3)
    owner = np.array([0, 2, 2, 0, 2, 2, 2, 0, 2])
    return torch.randn(9, SIZE, generator=generator, dtype=torch.float64), owner


def moments_of(gradients: torch.Tensor, owner: np.ndarray) -> OwnerMoments:
    return owner_moments(
        sums_of(gradients, owner, np.arange(len(owner))), gradients.norm(dim=1).numpy(), owner, EXPERTS
    )


def sums_of(gradients: torch.Tensor, owner: np.ndarray, drawn: np.ndarray) -> torch.Tensor:
    sums = torch.zeros(EXPERTS, gradients.shape[1], dtype=torch.float64)
    for row in drawn:
        sums[owner[row]] += gradients[row]
    return sums


def test_the_closed_form_is_the_expectation_over_all_draws(records: tuple[torch.Tensor, np.ndarray]) -> None:
    gradients, owner = records
    moments = moments_of(gradients, owner)
    means = torch.stack(
        [gradients[owner == e].mean(0) if (owner == e).any() else torch.zeros(SIZE) for e in range(EXPERTS)]
    )
    assert torch.allclose(moments.means, means)
    mean, square, error = torch.zeros(EXPERTS, SIZE).double(), np.zeros(EXPERTS), np.zeros(EXPERTS)
    for drawn in itertools.product([0, 1], repeat=9):
        chance = math.prod(RATE if one else 1 - RATE for one in drawn)
        found = sums_of(gradients, owner, np.flatnonzero(drawn)) / DENOMINATOR
        mean += chance * found
        square += chance * found.square().sum(1).numpy()
        error += chance * (found - means).square().sum(1).numpy()
    closed = estimator(moments, sampling_rate=RATE, denominator=DENOMINATOR)
    assert np.allclose(closed.bias, (mean - means).norm(dim=1))
    assert np.allclose(closed.sampling, square - mean.square().sum(1).numpy())
    assert np.allclose(closed.error, error)
    assert torch.allclose(torch.from_numpy(closed.scale)[:, None] * means, mean)
    noisy = estimator(moments, sampling_rate=RATE, denominator=DENOMINATOR, noise=2.0)
    assert np.allclose(noisy.noise, SIZE * 4 / DENOMINATOR**2)
    assert np.allclose(noisy.error, error + noisy.noise)


def test_draws_agree_within_their_standard_error() -> None:
    generator, rng = torch.Generator().manual_seed(1), np.random.default_rng(1)
    owner = rng.choice(EXPERTS, 80, p=[0.6, 0.3, 0.1])
    gradients = (
        torch.randn(80, 12, generator=generator, dtype=torch.float64) + torch.from_numpy(owner)[:, None]
    )
    moments = moments_of(gradients, owner)

    def drawn(rows: np.ndarray) -> torch.Tensor:
        return sums_of(gradients, owner, rows)

    rate, denominator = 0.25, 0.25 * 80 / EXPERTS
    closed = estimator(moments, sampling_rate=rate, denominator=denominator)
    found = simulate(
        drawn, moments, records=80, sampling_rate=rate, denominator=denominator, draws=600, rng=rng
    )
    assert closed.scale == pytest.approx(EXPERTS * np.bincount(owner) / 80)
    assert (np.abs(found.scale - closed.scale) < 4 * found.scale_error).all()
    assert (np.abs(found.error - closed.error) < 4 * found.error_error).all()
    # The errors are small enough to tell a closed form without (1 − q), or without bias, from the right one.
    wrong = closed.error + rate / (1 - rate) * closed.sampling
    assert (np.abs(found.error - wrong) > 4 * found.error_error).any()
    assert (np.abs(found.error - closed.sampling) > 4 * found.error_error).any()
    assert (np.abs(found.scale - 1) > 4 * found.scale_error).any()


def test_an_expert_without_records_is_only_noise(records: tuple[torch.Tensor, np.ndarray]) -> None:
    gradients, owner = records
    moments = moments_of(gradients, owner)
    closed = estimator(moments, sampling_rate=RATE, denominator=DENOMINATOR, noise=1.0)
    assert (closed.scale[1], closed.bias[1], closed.sampling[1]) == (0, 0, 0)
    found = simulate(
        lambda rows: sums_of(gradients, owner, rows),
        moments,
        records=9,
        sampling_rate=RATE,
        denominator=DENOMINATOR,
        draws=3,
        rng=np.random.default_rng(0),
    )
    assert math.isnan(found.scale[1])
    assert (found.error[1], found.error_error[1]) == (0, 0)


def test_stale_owners_cost_no_more_than_the_bound() -> None:
    generator, rng = torch.Generator().manual_seed(2), np.random.default_rng(2)
    for _ in range(20):
        raw = torch.randn(30, 5, generator=generator, dtype=torch.float64)
        gradients = raw / raw.norm(dim=1, keepdim=True).clamp(min=1)
        before, after = rng.integers(0, EXPERTS, 30), rng.integers(0, EXPERTS, 30)
        last, own = (sums_of(gradients, owner, np.arange(30)) for owner in (before, after))
        found = drift_error(
            last, last, last, own, changed=int((before != after).sum()), drift=0.0, weight=0.2, bound=1.0
        )
        assert found.stale_bound is not None
        assert 0 < found.stale <= found.stale_bound
        assert (found.moved, found.lipschitz, found.total) == (0, 0, found.stale)
    # One record that moves reaches the bound.
    one = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    found = drift_error(one, one, one, one.flip(0), changed=1, drift=0.0, weight=0.5, bound=1.0)
    assert found.stale == pytest.approx(found.stale_bound) == pytest.approx(math.sqrt(0.5))


def test_the_lipschitz_estimate_is_right_for_a_linear_gradient() -> None:
    first, step = torch.zeros(2, 2), torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    found = drift_error(
        first, first + step / 2, first + step, first + step, changed=0, drift=10.0, weight=0.1, bound=None
    )
    assert found.lipschitz == pytest.approx(0.05)
    assert found.moved == found.total == pytest.approx(0.5)
    assert found.moved_estimate == pytest.approx(found.moved)
    assert found.stale_bound is None
