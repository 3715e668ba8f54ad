"""Drift against fractions computed exactly, on arrays and on folders."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from confide.errors import ModelError
from confide.geometry.drift import drift, folder_drift
from confide.release.shards import write_tensors
from confide.release.tensors import encode

FLOATS = st.floats(-100, 100, width=32).map(lambda value: value if abs(value) > 1e-3 else 0.0)


@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=2, max_size=12), st.integers(1, 11))
def test_is_the_ratio_of_two_norms_over_all_tensors_together(
    pairs: list[tuple[float, float]], cut: int
) -> None:
    base = np.array([pair[0] for pair in pairs], np.float32)
    base[0] = 1.0
    model = np.array([pair[1] for pair in pairs], np.float32)
    moved = sum((Fraction(float(w)) - Fraction(float(b))) ** 2 for w, b in zip(model, base, strict=True))
    length = sum(Fraction(float(b)) ** 2 for b in base)
    expected = math.sqrt(moved / length)

    def split(values: np.ndarray) -> dict[str, np.ndarray]:
        return {"a": values[:cut].reshape(1, -1), "b": values[cut:]}

    assert drift(split(base), split(model)) == pytest.approx(expected, rel=1e-12)


def test_the_base_has_not_moved_and_a_doubled_one_moved_by_its_own_length() -> None:
    base = {"w": np.array([[3.0, -4.0]])}
    assert drift(base, base) == 0
    assert drift(base, {"w": 2 * base["w"]}) == 1


def test_small_steps_of_a_large_tensor_are_not_lost() -> None:
    # 2^21 + 5 float32 steps of 1e-6 from 1: a float32 sum of squares is off by more than a percent.
    size = (1 << 21) + 5
    base = {"w": np.ones(size, np.float32)}
    step = float(np.float32(1 + 1e-6) - np.float32(1))
    assert drift(base, {"w": np.full(size, np.float32(1 + 1e-6))}) == pytest.approx(step, rel=1e-12)


@pytest.mark.parametrize(
    ("base", "model", "message"),
    [
        ({"w": np.ones(2)}, {"v": np.ones(2)}, "v is only in the model"),
        ({"w": np.ones(2), "x": np.ones(2)}, {"w": np.ones(2)}, "x is only in the base"),
        ({"w": np.ones(2)}, {"w": np.ones(3)}, r"w has shape \[3\] in the model and \[2\] in the base"),
        ({"w": np.ones(2)}, {"w": np.ones((2, 1))}, "w has shape"),
        ({"w": np.ones(2)}, {"w": np.array([1, np.nan])}, "w holds a value that is not finite"),
        ({"w": np.array([np.inf, 1])}, {"w": np.array([np.inf, 1])}, "w holds a value that is not finite"),
        ({"w": np.zeros(2)}, {"w": np.ones(2)}, "zero everywhere"),
        ({"i": np.arange(2)}, {"i": np.arange(1, 3)}, "i holds integers that differ"),
        ({"i": np.arange(2)}, {"i": np.arange(2.0)}, "i holds integers that differ"),
        ({}, {}, "zero everywhere"),
    ],
)
def test_refuses(base: dict[str, np.ndarray], model: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        drift(base, model)


def test_equal_integers_count_for_nothing() -> None:
    ids = np.arange(5)
    assert drift({"w": np.ones(1), "ids": ids}, {"w": np.full(1, 1.5), "ids": ids}) == 0.5


def folder(path: Path, tensors: dict[str, object]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    write_tensors(path / "model.safetensors", tensors)  # type: ignore[arg-type]
    return path


def test_folders_are_compared_under_canonical_names_without_head_and_unused_pooler(tmp_path: Path) -> None:
    weights = np.array([1.0, 2.0], np.float32)
    base = folder(
        tmp_path / "base",
        {"embeddings.LayerNorm.gamma": weights, "pooler.dense.bias": np.full(3, 9, np.float32)},
    )
    bf16 = ("BF16", (2,), [encode(weights + np.float32(0.5), "BF16")])
    model = folder(
        tmp_path / "model",
        {"bert.embeddings.LayerNorm.weight": bf16, "classifier.weight": np.ones((2, 2), np.float32)},
    )
    assert folder_drift(base, model) == pytest.approx(math.sqrt(0.5 / 5))
    assert folder_drift(base, base) == 0


def test_a_folder_without_an_encoder_tensor_of_the_base_is_refused(tmp_path: Path) -> None:
    one = {"embeddings.a": np.ones(1, np.float32)}
    base = folder(tmp_path / "base", {**one, "encoder.b": np.ones(1, np.float32)})
    with pytest.raises(ModelError, match=r"encoder\.b is only in the base"):
        folder_drift(base, folder(tmp_path / "model", one))
