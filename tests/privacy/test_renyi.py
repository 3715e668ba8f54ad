"""Rényi divergences against dp-accounting's own, and against the definition."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant

from confide.errors import PrivacyError
from confide.privacy import renyi
from confide.privacy.events import (
    Composed,
    PoissonGaussian,
    RandomSelection,
    RepeatAndSelect,
    TruncatedPoissonGaussian,
)

SINGLE = PoissonGaussian(0.02, (1.1,), 200)


@pytest.mark.parametrize(("mean", "shape"), [(10.0, 1.0), (10.0, 0.0), (3.0, 0.5), (1.0, 1.0), (1e6, 2.0)])
def test_repeat_and_select_is_dp_accountings(mean: float, shape: float) -> None:
    native = RdpAccountant(renyi.ORDERS)
    sampled = dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(1.1))
    base = dp_accounting.SelfComposedDpEvent(sampled, 200)
    native.compose(RepeatAndSelectDpEvent(base, mean, shape))
    ours = renyi.divergences(RepeatAndSelect(SINGLE, mean, shape), "add-or-remove-one")
    np.testing.assert_allclose(ours, native.rdp, rtol=1e-7)


@pytest.mark.parametrize(("mean", "shape"), [(10.0, 1.0), (7.0, 0.0), (40.0, 0.3)])
def test_the_stopping_probability_gives_the_mean(mean: float, shape: float) -> None:
    """Summing the distribution itself (definition 1 of the paper)."""
    gamma = math.exp(renyi._log_stopping_probability(mean, shape))
    weights = [1.0]  # of k = 1, 2, …, up to a constant: (1 − γ)ᵏ Π (ℓ + η)/(ℓ + 1) over ℓ = 1 … k − 1
    for k in range(1, 20_000):
        weights.append(weights[-1] * (1 - gamma) * (k + shape) / (k + 1))
    mean_found = sum(k * weight for k, weight in enumerate(weights, start=1)) / sum(weights)
    assert mean_found == pytest.approx(mean, rel=1e-6)


def test_random_selection_by_quadrature() -> None:
    """Two Gaussians, and which one is known: the moment is the mixture of both moments."""
    p, sigmas, alpha = (0.3, 0.7), (0.8, 2.0), 3.5
    event = RandomSelection(p, tuple(PoissonGaussian(1.0, (sigma,), 1) for sigma in sigmas))
    x = np.linspace(-30, 40, 400001)
    moment = 0.0
    for weight, sigma in zip(p, sigmas, strict=True):
        log_ratio = (2 * x - 1) / (2 * sigma**2)
        density = np.exp(-(x**2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
        moment += weight * float((density * np.exp(alpha * log_ratio)).sum() * (x[1] - x[0]))
    (found,) = renyi.divergences(event, "add-or-remove-one", [alpha])
    assert found == pytest.approx(math.log(moment) / (alpha - 1), rel=1e-9)


def test_selection_lies_between_its_parts_and_composes() -> None:
    low, high = PoissonGaussian(0.02, (3.0,), 100), PoissonGaussian(0.02, (0.9,), 100)
    for adjacency in ("add-or-remove-one", "replace-one"):
        parts = [renyi.divergences(part, adjacency) for part in (low, high)]  # type: ignore[arg-type]
        mixed = RandomSelection((0.9, 0.1), (low, high))
        middle = renyi.divergences(mixed, adjacency)  # type: ignore[arg-type]
        assert (parts[0] <= middle + 1e-12).all()
        assert (middle <= parts[1] + 1e-12).all()
        together = renyi.divergences(Composed((mixed, low)), adjacency)  # type: ignore[arg-type]
        np.testing.assert_allclose(together, middle + parts[0])


def test_a_repetition_costs_more_than_one_run_and_less_than_all() -> None:
    base = renyi.epsilon(SINGLE, 1e-6, "replace-one")
    three = renyi.epsilon(RepeatAndSelect(SINGLE, 3.0, 1.0), 1e-6, "replace-one")
    ten = renyi.epsilon(RepeatAndSelect(SINGLE, 10.0, 1.0), 1e-6, "replace-one")
    assert base < three < ten < 3 * base + math.log(10) + 5


def test_no_rule_for_truncated_draws() -> None:
    event = Composed((SINGLE, RandomSelection((1.0,), (TruncatedPoissonGaussian(0.01, 1.0, 7, 1000, 30),))))
    assert not renyi.has_rule(event)
    with pytest.raises(PrivacyError, match="no rule for truncated"):
        renyi.divergences(event, "add-or-remove-one")


@pytest.mark.parametrize("delta", [1e-30, 1e-14])
def test_a_divergence_below_rounding_is_not_nothing(delta: float) -> None:
    """One query at q = 1e-9: its worlds differ by 4e-13 in total variation, so ε = 0 needs a δ above that."""
    assert renyi.epsilon(PoissonGaussian(1e-9, (1000.0,), 1), delta, "add-or-remove-one") > 0
