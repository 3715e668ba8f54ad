from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from confide.gradients import normals
from confide.gradients.keys import Key
from confide.gradients.noise import add_noise, reader


def test_rectangles_have_equal_areas_and_lie_under_the_curve() -> None:
    x, height = normals._X, normals._HEIGHT
    areas = x[:-1] * (height[:-1] - height[1:])
    assert areas == pytest.approx(np.full(len(areas), math.sqrt(math.pi / 2) / 4096), rel=1e-9)
    assert height == pytest.approx(np.exp(-(x**2) / 2), rel=1e-13)
    assert (np.diff(x) > 0).all()


def test_parts_add_up_to_the_whole_curve() -> None:
    rectangles = normals._RECTANGLES / 4096 * math.sqrt(math.pi / 2)
    assert rectangles + normals._REST[-1] == pytest.approx(math.sqrt(math.pi / 2), rel=1e-13)
    assert normals._RECTANGLES == 4093


def test_density_of_rectangles_and_rest_is_the_normal_at_every_point() -> None:
    # At x the rectangles wider than x contribute 1/width each; the rest must fill the gap exactly.
    for x in (0.01, 0.05, 0.7, 1.3, 2.9, 4.0):
        widths = normals._X[:-1]
        staircase = (1 / widths[widths > x]).sum() / 4096 * math.sqrt(math.pi / 2)
        level = normals._HEIGHT[:-1][widths > x][0] - normals._HEIGHT[-1]
        assert staircase == pytest.approx(level, rel=1e-9)
        assert staircase <= math.exp(-x * x / 2)


def test_rest_has_the_distribution_that_is_left() -> None:
    stream = Key.fixed(2).generator("a", 0, "b")
    values = normals.rest(400_000, reader(stream))
    x, height = normals._X, normals._HEIGHT
    whole = math.sqrt(math.pi / 2)

    def left_below(t: float) -> float:
        stack = (np.minimum(x[:-1], t) / x[:-1]).sum() / 4096 * whole
        return float(whole * math.erf(t / math.sqrt(2)) - stack)

    edges = np.array([0, 0.02, *x[:-1:97], x[-1], 5.5, 9.9])
    expected = np.diff([left_below(t) for t in edges]) / left_below(20.0)
    observed = np.histogram(np.abs(values), edges)[0]
    assert observed.sum() == len(values)
    kept = expected > 1e-4
    z = (observed - expected * len(values)) / np.sqrt(expected * len(values))
    assert np.abs(z[kept]).max() < 4.5
    assert abs((values > 0).mean() - 0.5) < 5 * 0.5 / math.sqrt(len(values))
    tail = np.abs(values) > x[-1]
    expected_tail = whole * math.erfc(x[-1] / math.sqrt(2)) / normals._REST[-1] * len(values)
    assert abs(tail.sum() - expected_tail) < 5 * math.sqrt(expected_tail) + 1
    assert height[-1] > 0


def test_values_are_standard_normal() -> None:
    import torch

    noise = add_noise(
        {"x": torch.zeros(4_000_000, dtype=torch.float64)}, 1.0, Key.fixed(4).generator("a", 0, "b")
    )
    x = noise["x"].numpy()
    n = len(x)
    assert abs(x.mean()) < 4.5 / math.sqrt(n)
    assert abs((x**2).mean() - 1) < 4.5 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 4.5 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 4.5 * math.sqrt(96 / n)
    assert stats.kstest(x, "norm").pvalue > 1e-4
    uniform = stats.norm.cdf(x)
    assert stats.chisquare(np.histogram(uniform, 2000, (0, 1))[0]).pvalue > 1e-4
    for lag in (1, 2, 3, 4093, 1 << 15):
        assert abs((x[lag:] * x[:-lag]).mean()) < 4.5 / math.sqrt(n)
        assert abs(((x[lag:] ** 2 - 1) * (x[:-lag] ** 2 - 1)).mean()) < 4.5 * 2 / math.sqrt(n)
    for t in (3.0, 4.0, 5.0):
        expected = n * 2 * stats.norm.sf(t)
        assert abs((np.abs(x) > t).sum() - expected) < 4.5 * math.sqrt(expected) + 1


def test_tail_goes_beyond_six_sigma_with_the_right_frequency() -> None:
    # Only the tail branch can pass 5.23; so test that branch alone, in numbers that reach 6.
    stream = Key.fixed(8).generator("a", 0, "b")
    tails = [np.abs(v) for s in range(8) for v in [normals.rest(1_000_000, reader(stream, s + 1))]]
    values = np.concatenate(tails)
    beyond = values[values > normals._END]
    chance = stats.norm.sf(6.0) / stats.norm.sf(normals._END)
    assert (beyond > 6.0).sum() > 0
    assert abs((beyond > 6.0).sum() - chance * len(beyond)) < 4.5 * math.sqrt(chance * len(beyond)) + 1
