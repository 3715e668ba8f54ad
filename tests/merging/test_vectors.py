from __future__ import annotations

import numpy as np
import pytest

from confide.errors import MergeError
from confide.merging import vectors as module
from confide.merging.stream import merge_arrays
from confide.merging.vectors import Arrays, TaskVectors

BASE = {
    "layer.weight": np.ones((2, 3), np.float32),
    "embeddings.word_embeddings.weight": np.ones((5, 2), np.float32),
    "pooler.dense.bias": np.ones(2, np.float32),
    "count": np.array([7]),
}


def changed(**values: object) -> dict[str, np.ndarray]:
    return {**BASE, **values}  # type: ignore[dict-item]


def without(name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in BASE.items() if key != name}


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([], "at least one model"),
        ([BASE, without("layer.weight")], r"layer\.weight is missing from model 2, though"),
        ([without("layer.weight")] * 2, r"layer\.weight of base base is missing from model 1"),
        ([changed(extra=np.ones(1))], "extra of model 1 is not in base"),
        (
            [BASE, changed(**{"layer.weight": np.ones((3, 3), np.float32)})],
            r"layer\.weight has shape \[3, 3\] in model 2 and \[2, 3\] in base",
        ),
        (
            [changed(**{"embeddings.word_embeddings.weight": np.ones((6, 2), np.float32)})],
            "the vocabularies have 6 and 5 tokens",
        ),
        ([changed(count=np.array([8]))], "integer tensor count differs between model 1"),
        ([changed(count=np.array([7.0]))], "count is F64 in model 1 and I64 in base"),
        (
            [BASE, changed(**{"layer.weight": np.full((2, 3), np.nan, np.float32)})],
            r"layer\.weight of model 2 holds values that aren't finite",
        ),
        (
            [BASE, changed(**{"layer.weight": np.full((2, 3), -np.inf, np.float32)})],
            r"layer\.weight of model 2 holds values that aren't finite",
        ),
    ],
)
@pytest.mark.parametrize("operator", ["average", "ties"])
def test_what_cant_be_merged(models: list[dict[str, np.ndarray]], message: str, operator: str) -> None:
    with pytest.raises(MergeError, match=message):
        merge_arrays(BASE, models, operator)


@pytest.mark.parametrize("operator", ["average", "task-arithmetic", "ties"])
def test_a_base_that_isnt_finite(operator: str) -> None:
    base = changed(**{"layer.weight": np.full((2, 3), np.inf, np.float32)})
    for model in (BASE, base):
        with pytest.raises(MergeError, match=r"layer\.weight of base holds"):
            merge_arrays(base, [model], operator)


def test_a_result_that_overflows() -> None:
    base = {"w": np.zeros(3, np.float16)}
    model = {"w": np.full(3, 6e4, np.float16)}
    with pytest.raises(MergeError, match="tensor w: task-arithmetic gives values that F16 can't hold"):
        merge_arrays(base, [model, model], "task-arithmetic", {"scale": 1})


def test_a_pooler_that_no_model_has_stays_the_bases() -> None:
    model = without("pooler.dense.bias") | {"layer.weight": np.zeros((2, 3), np.float32)}
    merged = merge_arrays(BASE, [model, model], "average")
    np.testing.assert_array_equal(merged["pooler.dense.bias"], BASE["pooler.dense.bias"])
    np.testing.assert_array_equal(merged["layer.weight"], np.zeros((2, 3)))
    np.testing.assert_array_equal(merged["count"], [7])
    assert list(merged) == list(BASE)
    with pytest.raises(MergeError, match=r"pooler\.dense\.bias is missing from model 2"):
        merge_arrays(BASE, [BASE, model], "average")


def test_chunks_cover_a_tensor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 7)
    rng = np.random.default_rng(0)
    base, one, two = (rng.normal(size=(5, 6)).astype(np.float32) for _ in range(3))
    vectors = TaskVectors(Arrays("base", {"w": base}), [Arrays("1", {"w": one}), Arrays("2", {"w": two})])
    pieces = [(b.copy(), v.copy()) for b, v in vectors.chunks("w")]
    assert [len(b) for b, _ in pieces] == [7, 7, 7, 7, 2]
    np.testing.assert_array_equal(np.concatenate([b for b, _ in pieces]), base.ravel())
    exact = np.stack([one.ravel(), two.ravel()]).astype(float) - base.ravel().astype(float)
    np.testing.assert_array_equal(np.concatenate([v for _, v in pieces], axis=1), exact)


def test_changed_finds_the_last_coordinate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 7)
    base = {"a": np.zeros(20, np.float32), "b": np.zeros(20, np.float32)}
    late = {"a": np.zeros(20, np.float32), "b": np.zeros(20, np.float32)}
    late["b"][-1] = 1
    assert TaskVectors(Arrays("base", base), [Arrays("m", base), Arrays("n", late)]).changed == ("b",)
