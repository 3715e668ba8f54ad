"""WUDI against the loop in the paper's form, and its closed form against a least-squares solver."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from confide.errors import MergeError
from confide.merging.operators import find
from confide.merging.stream import merge_arrays

from .helpers import merge_vectors


def paper_loop(vectors: np.ndarray, rate: float, iterations: int, dtype: torch.dtype) -> np.ndarray:
    """Adam from Σ D_t on Σ_t ‖(W − D_t) D_tᵀ‖²_F / ‖D_t‖²_F, by autograd."""
    tasks = torch.from_numpy(vectors).to(dtype)
    merged = tasks.sum(0).clone().requires_grad_()
    optimizer = torch.optim.Adam([merged], lr=rate)
    for _ in range(iterations):
        optimizer.zero_grad()
        loss = sum(((merged - task) @ task.T).square().sum() / task.square().sum() for task in tasks)
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
    return merged.detach().double().numpy()


def tasks(shape: tuple[int, int], count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=shape)
    drawn = [0.01 * rng.uniform(0.3, 2) * (shared + 2 * rng.normal(size=shape)) for _ in range(count)]
    return np.array(drawn).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("shape", [(24, 24), (48, 16), (16, 48)])
@pytest.mark.parametrize("rate", [1e-5, 1e-3])
def test_the_path_is_the_papers(shape: tuple[int, int], rate: float) -> None:
    vectors = tasks(shape, 8)
    for iterations in (1, 30, 300):
        merged = merge_vectors(list(vectors), "wudi", learning_rate=rate, iterations=iterations)
        for dtype in (torch.float64, torch.float32):
            expected = paper_loop(vectors, rate, iterations, dtype)
            assert np.linalg.norm(merged - expected) <= 1e-5 * np.linalg.norm(expected)
            # And of the way that Adam went, not only of where it started.
            start = vectors.sum(axis=0)
            assert np.linalg.norm(merged - expected) <= 1e-3 * np.linalg.norm(expected - start)


@pytest.mark.parametrize("shape", [(20, 12), (6, 30)])
def test_the_closed_form_is_the_minimum(shape: tuple[int, int]) -> None:
    vectors = tasks(shape, 3)
    merged = merge_vectors(list(vectors), "wudi", solver="closed")
    # (W − D_t) D_tᵀ/‖D_t‖ stacked over tasks: least squares with columns D_tᵀ/‖D_t‖, of least norm.
    inputs = np.concatenate([vector / np.linalg.norm(vector) for vector in vectors]).T
    outputs = np.concatenate([vector @ vector.T / np.linalg.norm(vector) for vector in vectors], axis=1)
    expected = np.linalg.lstsq(inputs.T, outputs.T, rcond=1e-9)[0].T
    np.testing.assert_allclose(merged, expected, rtol=1e-6, atol=1e-9)


def test_many_steps_go_to_the_closed_form() -> None:
    vectors = tasks((8, 6), 3)
    closed = merge_vectors(list(vectors), "wudi", solver="closed")
    merged = merge_vectors(list(vectors), "wudi", learning_rate=1e-4, iterations=5000)
    start = vectors.sum(axis=0)
    assert np.linalg.norm(merged - closed) < 0.05 * np.linalg.norm(start - closed)


def test_a_zero_task_vector_has_no_say() -> None:
    vectors = list(tasks((6, 5), 2))
    zero = np.zeros((6, 5))
    for parameters in ({}, {"solver": "closed"}):
        with_zero = merge_vectors([*vectors, zero], "wudi", **parameters)
        np.testing.assert_allclose(with_zero, merge_vectors(vectors, "wudi", **parameters), rtol=1e-9)


def test_other_tensors_stay_the_bases() -> None:
    rng = np.random.default_rng(3)
    names = {
        "embeddings.word_embeddings.weight": (5, 4),
        "encoder.layer.0.attention.output.LayerNorm.weight": (4,),
        "encoder.layer.0.output.dense.weight": (4, 6),
        "encoder.layer.0.output.dense.bias": (4,),
        "pooler.dense.weight": (4, 4),
    }
    base, *models = ({name: rng.normal(size=shape) for name, shape in names.items()} for _ in range(3))
    merged = merge_arrays(base, models, "wudi")
    changed = {name for name in names if not np.array_equal(merged[name], base[name])}
    assert changed == {"encoder.layer.0.output.dense.weight"}


def test_what_isnt_finite() -> None:
    bad = np.ones((3, 3))
    bad[1, 1] = np.nan
    for operator in ("wudi", "actmat"):
        with pytest.raises(MergeError, match=r"layer\.0\.weight of model 2 holds values that aren't finite"):
            merge_vectors([np.ones((3, 3)), bad], operator)


def test_the_scale() -> None:
    vectors = list(tasks((6, 5), 2))
    once = merge_vectors(vectors, "wudi")
    np.testing.assert_allclose(merge_vectors(vectors, "wudi", scale=0.5), once / 2)
    assert find("wudi").settings({})["iterations"] == 300
