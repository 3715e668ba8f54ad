"""ACTMat against its formula with numpy's pseudo-inverse."""

from __future__ import annotations

import numpy as np
import pytest

from confide.errors import MergeError
from confide.merging.operators import find
from confide.merging.stream import merge_arrays, merge_tensor
from confide.merging.vectors import Arrays, TaskVectors

from .helpers import merge_vectors


def formula(vectors: list[np.ndarray], rcond: float = 1e-12) -> np.ndarray:
    grams = [vector.T @ vector for vector in vectors]
    numerator = sum(vector @ gram for vector, gram in zip(vectors, grams, strict=True))
    return numerator @ np.linalg.pinv(sum(grams), rcond=rcond, hermitian=True)


def low_rank(rng: np.random.Generator, shape: tuple[int, int], rank: int) -> np.ndarray:
    return rng.normal(size=(shape[0], rank)) @ rng.normal(size=(rank, shape[1]))


def test_by_hand() -> None:
    # Row vectors: C_t = diag, so each column is Σ d³/Σ d².
    first, second = np.array([[1.0, 2.0]]) * np.eye(2), np.array([[3.0, -1.0]]) * np.eye(2)
    expected = np.diag([(1 + 27) / (1 + 9), (8 - 1) / (4 + 1)])
    np.testing.assert_allclose(merge_vectors([first, second], "actmat"), expected, rtol=1e-12)


@pytest.mark.parametrize("shape", [(12, 7), (7, 12), (9, 9)])
@pytest.mark.parametrize("rank", [2, 9])
def test_is_the_formula(shape: tuple[int, int], rank: int) -> None:
    rng = np.random.default_rng(0)
    vectors = [low_rank(rng, shape, min(rank, *shape)) for _ in range(3)]
    np.testing.assert_allclose(merge_vectors(vectors, "actmat"), formula(vectors), rtol=1e-6, atol=1e-8)


def test_low_rank_task_vectors_dont_blow_up() -> None:
    """Merged LoRA weights in float32: an exact part of low rank, and rounding in every direction."""
    rng = np.random.default_rng(1)
    base = (0.05 * rng.normal(size=(64, 48))).astype(np.float32)
    exact = [low_rank(rng, (64, 48), 4) * 1e-3 for _ in range(3)]
    models = [(base + vector).astype(np.float32) for vector in exact]
    merged = merge_arrays({"w": base}, [{"w": model} for model in models], "actmat")["w"]
    expected = formula(exact)
    assert np.linalg.norm(merged - base - expected) < 1e-2 * np.linalg.norm(expected)


def test_what_rcond_leaves_out_is_the_mean() -> None:
    first, second = np.diag([1.0, 1e-3]), np.diag([3.0, 3e-3])
    merged = merge_vectors([first, second], "actmat", rcond=1e-4)
    np.testing.assert_allclose(merged, np.diag([28 / 10, 2e-3]), rtol=1e-9)
    merged = merge_vectors([first, second], "actmat", rcond=1e-9)
    np.testing.assert_allclose(merged, np.diag([28 / 10, 2.8e-3]), rtol=1e-9)


def test_packed_projections_are_split() -> None:
    rng = np.random.default_rng(2)
    vectors = [rng.normal(size=(9, 3)) for _ in range(2)]
    name = "layers.0.attn.Wqkv.weight"
    base = {name: np.zeros((9, 3))}
    merged = merge_arrays(base, [{name: vector} for vector in vectors], "actmat")[name]
    expected = np.concatenate([formula([v[i : i + 3] for v in vectors]) for i in (0, 3, 6)])
    np.testing.assert_allclose(merged, expected, rtol=1e-9)
    assert not np.allclose(merged, formula(vectors))


@pytest.mark.parametrize("operator", ["actmat", "wudi"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_squares_that_overflow(operator: str) -> None:
    vectors = [1e200 * np.eye(3), 1e200 * np.tri(3)]
    with pytest.raises(MergeError, match=r"tensor layer\.0\.weight: "):
        merge_vectors(vectors, operator)


def test_ranks_are_in_the_report() -> None:
    rng = np.random.default_rng(3)
    vectors = [low_rank(rng, (8, 6), 2) for _ in range(2)]
    models = TaskVectors(
        Arrays("base", {"a": np.zeros((8, 6)), "b": np.zeros(4)}),
        [Arrays(str(i), {"a": vector, "b": np.ones(4)}) for i, vector in enumerate(vectors)],
    )
    rule = find("actmat").prepare(models, {})
    for name in ("a", "b"):
        list(merge_tensor(models, name, rule, "actmat", lambda line: None))
    assert rule.facts == {"a": {"rank": [4]}}
    assert rule.label("a") is None
    assert rule.label("b") == "mean: actmat merges matrices (also stacked experts') with sides under 20,000"


def test_layers_that_are_kept_as_in_by_out() -> None:
    """GPT-2's Conv1D: the Gram is over the layer's inputs, which are the rows there."""
    rng = np.random.default_rng(0)
    wide, packed = "h.0.mlp.c_fc.weight", "h.0.attn.c_attn.weight"
    vectors = [{wide: rng.normal(size=(7, 4)), packed: rng.normal(size=(9, 4))} for _ in range(2)]
    kept = [Arrays(str(n), {name: d.T for name, d in each.items()}) for n, each in enumerate(vectors)]
    base = Arrays("base", {wide: np.zeros((4, 7)), packed: np.zeros((4, 9))})
    task = TaskVectors(base, kept, {wide, packed})
    rule = find("actmat").prepare(task, {})
    whole = formula([each[wide] for each in vectors])
    thirds = [formula([each[packed][start : start + 3] for each in vectors]) for start in (0, 3, 6)]
    for name, expected in ((wide, whole), (packed, np.concatenate(thirds))):
        merged = np.concatenate(list(merge_tensor(task, name, rule, "actmat", lambda line: None)))
        np.testing.assert_allclose(merged.reshape(base.shape(name)), expected.T, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("operator", ["actmat", "wudi"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("chunk", [7, 28, 1000])
def test_each_expert_of_a_stack_is_a_matrix(operator: str, turned: bool, chunk: int) -> None:
    """As if every expert had a tensor of its own; their biases, (E, out), are no matrix."""
    rng = np.random.default_rng(0)
    stack, bias = "layers.1.mlp.experts.down_proj", "layers.1.mlp.experts.down_proj_bias"
    vectors = [rng.normal(size=(3, 7, 4)) for _ in range(2)]
    biases = [rng.normal(size=(3, 7)) for _ in range(2)]
    kept = [vector.swapaxes(1, 2) if turned else vector for vector in vectors]
    base = Arrays("base", {stack: np.zeros_like(kept[0]), bias: np.zeros((3, 7))})
    models = [Arrays(str(n), {stack: kept[n], bias: biases[n]}) for n in range(2)]
    task = TaskVectors(base, models, {stack} if turned else set()).in_chunks(chunk)
    rule = find(operator).prepare(task, {})

    def merged(name: str) -> np.ndarray:
        parts = list(merge_tensor(task, name, rule, operator, lambda line: None))
        return np.concatenate(parts).reshape(base.shape(name))

    alone = [merge_vectors([vector[expert] for vector in vectors], operator) for expert in range(3)]
    expected = np.stack([one.T if turned else one for one in alone])
    np.testing.assert_allclose(merged(stack), expected, rtol=1e-6, atol=1e-9)
    if operator == "actmat":
        assert rule.facts == {stack: {"rank": [4, 4, 4]}}
        np.testing.assert_allclose(merged(bias), sum(biases) / 2)
    else:
        assert not merged(bias).any()
