from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from confide.privacy.distinguisher import epsilon_lower
from confide.privacy.events import Composed, PoissonGaussian


@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one"])
def test_one_step_against_the_best_test_by_hand(adjacency: str) -> None:
    """For one step the best test is a threshold on the output itself."""
    q, sigma, delta = 0.3, 0.8, 1e-3
    t = np.linspace(-3, 8, 400001)

    def above(shift: float) -> np.ndarray:
        return (1 - q) * stats.norm.sf(t / sigma) + q * stats.norm.sf((t - shift) / sigma)

    q_above = stats.norm.sf(t / sigma) if adjacency == "add-or-remove-one" else above(-1.0)
    excess = above(1.0) - delta
    best = np.max(np.log(excess[excess > 0] / q_above[excess > 0]))
    found = epsilon_lower(PoissonGaussian(q, (sigma,), 1), delta, adjacency)  # type: ignore[arg-type]
    assert best - 1e-3 <= found <= best + 1e-9


def test_two_steps_against_simulation() -> None:
    """The reported ε is reached by an attack that is simulated, within its statistical error."""
    q, sigma, steps, delta = 0.2, 1.0, 5, 0.02
    lower = epsilon_lower(PoissonGaussian(q, (sigma,), steps), delta)
    rng = np.random.default_rng(1)
    size = 400_000
    member = rng.random((size, steps)) < q
    noise = rng.normal(size=(size, steps))

    def losses(x: np.ndarray) -> np.ndarray:
        return np.log((1 - q) + q * np.exp((2 * x - 1) / 2)).sum(1)

    with_unit, without = losses(noise + member), losses(rng.normal(size=(size, steps)))
    thresholds = np.quantile(with_unit, np.linspace(0.5, 0.95, 40))
    p = np.array([(with_unit >= t).mean() for t in thresholds])
    r = np.array([(without >= t).mean() for t in thresholds])
    assert np.max(np.log((p - delta) / r)) == pytest.approx(lower, abs=0.05)


def test_coarser_grid_is_never_above() -> None:
    event = Composed((PoissonGaussian(0.01, (0.9,), 500), PoissonGaussian(0.02, (2.0,), 100)))
    fine = epsilon_lower(event, 1e-5, interval=1e-4)
    for interval in (1e-3, 1e-2, 0.1):
        coarse = epsilon_lower(event, 1e-5, interval=interval)
        assert 0 <= coarse <= fine + 1e-6


def test_nothing_proven_is_zero() -> None:
    assert epsilon_lower(PoissonGaussian(0.01, (50.0,), 1), 1e-2) == 0.0
    assert math.isfinite(epsilon_lower(PoissonGaussian(0.5, (0.001,), 3), 1e-5))
