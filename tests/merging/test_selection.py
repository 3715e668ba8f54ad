"""Against a full sort."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from confide.merging import selection as module
from confide.merging.selection import OrderStatistic, order_statistics, signed_order_statistics
from confide.merging.vectors import CHUNK, Arrays, TaskVectors


def select(models: list[np.ndarray], k: int) -> list:
    base = {
        "a": np.zeros(models[0].size // 2, np.float32),
        "b": np.zeros(-(-models[0].size // 2), np.float32),
    }
    half = models[0].size // 2
    split = [Arrays(str(i), {"a": model[:half], "b": model[half:]}) for i, model in enumerate(models)]
    found = order_statistics(TaskVectors(Arrays("base", base), split), ["a", "b"], [[k]] * len(models))
    return [statistic for (statistic,) in found]


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_is_what_a_sort_finds(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 30))
    numbers = st.one_of(
        st.floats(allow_nan=False, allow_infinity=False, width=32), st.sampled_from([0.0, -0.0, 1.0, -1.0])
    )
    models = [
        data.draw(arrays(np.float32, size, elements=numbers)) for _ in range(data.draw(st.integers(1, 3)))
    ]
    k = data.draw(st.integers(1, size))
    for model, found in zip(models, select(models, k), strict=True):
        magnitude = np.abs(model)
        assert found.value == np.sort(magnitude)[k - 1]
        assert found.equal == np.sum(magnitude == found.value)
        assert found.above == np.sum(magnitude > found.value)


@pytest.mark.parametrize("scale", [1e-40, 1e-3, 1e30])
def test_more_than_a_chunk(scale: float) -> None:
    rng = np.random.default_rng(0)
    models = [(rng.normal(size=2 * CHUNK + 999) * scale).astype(np.float32) for _ in range(2)]
    for k in (1, CHUNK, models[0].size - 7, models[0].size):
        for model, found in zip(models, select(models, k), strict=True):
            assert np.float32(found.value) == np.sort(np.abs(model))[k - 1]


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_signed_values_and_several_ranks(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 30))
    numbers = st.floats(allow_nan=False, allow_infinity=False, width=32) | st.sampled_from([0.0, 1.0, -1.0])
    models = [data.draw(arrays(np.float32, size, elements=numbers)) for _ in range(2)]
    ranks = [data.draw(st.lists(st.integers(1, size), max_size=3)) for _ in models]
    cut = data.draw(st.integers(0, size))

    def values() -> Iterator[list[np.ndarray]]:
        yield [model[:cut].astype(np.float64) for model in models]
        yield [model[cut:].astype(np.float64) for model in models]

    for model, own, found in zip(models, ranks, signed_order_statistics(values, ranks), strict=True):
        assert [statistic.value for statistic in found] == [np.sort(model)[k - 1] for k in own]
        for statistic in found:
            # The two zeros are told apart.
            if statistic.value != 0:
                assert statistic.equal == np.sum(model == statistic.value)
                assert statistic.above == np.sum(model > statistic.value)


def sampled(monkeypatch: pytest.MonkeyPatch, models: list[np.ndarray], k: int) -> tuple[list, int]:
    """What is found where a sample of 1,000 comes first, and how many statistics needed the two passes."""
    monkeypatch.setattr(module, "_SAMPLE", 1000)
    monkeypatch.setattr(module, "_BLOCK", 100)
    slow, plain = [], module._select

    def count(*arguments: Any) -> list[list[OrderStatistic]]:
        slow.append(1)
        return plain(*arguments)

    monkeypatch.setattr(module, "_select", count)
    return select(models, k), len(slow)


@pytest.mark.parametrize("case", ["normal", "rounded", "sorted", "zeros", "first", "last"])
def test_a_sample_changes_nothing(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    rng = np.random.default_rng(3)
    models = [rng.normal(1, 0.003, size=40_000).astype(np.float32) for _ in range(2)]
    if case == "rounded":
        models = [np.round(model, 3) for model in models]
    if case == "sorted":  # the sample's blocks miss whole ranges of values
        models = [np.sort(model) for model in models]
    if case == "zeros":
        models[1][:39_000] = 0
    k = {"first": 1, "last": 40_000}.get(case, 32_000)
    found, slow = sampled(monkeypatch, models, k)
    assert slow == (case in ("first", "last"))
    for model, one in zip(models, found, strict=True):
        value = np.sort(np.abs(model))[k - 1]
        assert one.value == value
        assert (one.equal, one.above) == (np.sum(model == value), np.sum(model > value))


def test_a_sample_that_misleads_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = np.full(40_000, 3, np.float32)
    for start in range(0, 20_000, 4000):
        model[start : start + 100] = 1  # these blocks are the sample's, in both tensors
        model[20_000 + start : 20_000 + start + 100] = 1
    found, slow = sampled(monkeypatch, [model], 32_000)
    assert slow == 1
    assert found == [OrderStatistic(3.0, 39_000, 0)]
