from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from confide.errors import PrivacyError
from confide.gradients.keys import Key
from confide.gradients.noise import add_noise

STREAM = Key.fixed(1).generator("main", 3, "descent")


def zeros(*sizes: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    return {str(i): torch.zeros(size, dtype=dtype) for i, size in enumerate(sizes)}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 60_000), min_size=1, max_size=6))
def test_noise_is_one_vector_whatever_the_tensors(sizes: list[int]) -> None:
    split = torch.cat(list(add_noise(zeros(*sizes), 2.0, STREAM).values()))
    whole = add_noise(zeros(sum(sizes)), 2.0, STREAM)["0"]
    assert torch.equal(split, whole)


def test_threads_do_not_change_the_noise() -> None:
    size = (2 << 20) + 12_345
    one = add_noise(zeros(size, 17), 1.0, STREAM)
    torch.set_num_threads(2)
    two = add_noise(zeros(size, 17), 1.0, STREAM)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_scales_with_the_standard_deviation_from_tiny_to_huge() -> None:
    unit = add_noise(zeros(100_000), 1.0, STREAM)["0"]
    for std in (1e-30, 0.37, 1e30):
        scaled = add_noise(zeros(100_000), std, STREAM)["0"]
        assert torch.allclose(scaled / std, unit, rtol=1e-14, atol=0)


def test_addition_is_in_float64_and_rounded_once() -> None:
    size = 100_000
    sums = torch.linspace(-3, 3, size)
    noise = add_noise(zeros(size), 0.5, STREAM)["0"]
    noisy = add_noise({"0": sums.clone()}, 0.5, STREAM)["0"]
    assert noisy.dtype == torch.float32
    assert torch.equal(noisy, (sums.double() + noise).float())


def test_views_shapes_and_order_are_kept_and_tensors_overwritten() -> None:
    square = torch.zeros(30, 40).T
    sums = {"b": square, "a": torch.zeros(())}
    noisy = add_noise(sums, 1.0, STREAM)
    assert list(noisy) == ["b", "a"]
    assert noisy["b"] is square
    assert square.shape == (40, 30)
    flat = add_noise(zeros(1201), 1.0, STREAM)["0"].float()
    assert torch.equal(square.reshape(-1), flat[:1200])
    assert float(noisy["a"]) == float(flat[1200])


def test_no_value_is_left_without_noise() -> None:
    noise = add_noise(zeros(3_000_000), 1.0, STREAM)["0"]
    assert (noise != 0).all()
    assert len(np.unique(noise.numpy())) == len(noise)


def test_addresses_give_independent_noise() -> None:
    key = Key.fixed(1)
    draws = [
        add_noise(zeros(200_000), 1.0, key.generator(*address))["0"]
        for address in [("a", 0, "d"), ("a", 1, "d"), ("b", 0, "d"), ("a", 0, "ascent")]
    ]
    correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(4)
    assert correlation.abs().max() < 5 / math.sqrt(200_000)


def test_zero_noise_changes_nothing_and_nothing_is_nothing() -> None:
    assert torch.equal(add_noise({"x": torch.ones(5)}, 0.0, STREAM)["x"], torch.ones(5))
    assert add_noise({}, 1.0, STREAM) == {}
    assert add_noise(zeros(0), 1.0, STREAM)["0"].shape == (0,)


@pytest.mark.parametrize("std", [-1.0, 1e-40, float("nan"), float("inf")])
def test_bad_standard_deviations_are_refused(std: float) -> None:
    with pytest.raises(PrivacyError, match="standard deviation"):
        add_noise(zeros(3), std, STREAM)
