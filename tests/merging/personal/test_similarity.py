from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from confide.errors import MergeError
from confide.merging.merge import merge
from confide.merging.personal.apply import apply
from confide.merging.personal.pack import pack
from confide.merging.personal.similarity import cosines, head_similarities, normalised

from .conftest import arrays, build


@pytest.mark.parametrize(
    ("given", "expected"),
    [([0.5], [1]), ([0.2, 0.6], [0.25, 0.75]), ([-1, 0.5, 0.5], [0, 0.5, 0.5]), ([-1, 0], [0, 0])],
)
def test_weights_are_clipped_and_sum_to_one(given: list[float], expected: list[float]) -> None:
    assert normalised(given) == pytest.approx(expected)


def test_cosines() -> None:
    one = np.array([[3.0, 0], [0, 4]])
    others = [one * 2, -one, np.array([[0, 1.0], [1, 0]]), np.zeros((2, 2)), np.array([[1, 0], [0, 0.0]])]
    assert cosines(one, others) == pytest.approx((1, -1, 0, 0, 0.6))
    with pytest.raises(MergeError, match="4 and"):
        cosines(one, [np.ones(3)])


def test_heads_with_a_hidden_layer(tmp_path: Path) -> None:
    import torch
    from transformers import RobertaConfig, RobertaModel

    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=30,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=40,
        max_position_embeddings=16,
    )
    RobertaModel(config).save_pretrained(tmp_path / "base")
    tasks = {"films": ("neg", "pos"), "tweets": ("a", "b", "c")}
    models = [build(tmp_path / t, tmp_path / "base", t, labels, dense=True) for t, labels in tasks.items()]
    merged = tmp_path / "merged"
    merge(models, base=tmp_path / "base", operator="ties", out=merged)
    files = [tmp_path / f"{task}.personal" for task in tasks]
    for model, file in zip(models, files, strict=True):
        packed = pack(merged, model, out=file, budget=0.5)
        assert packed.about.absent == ("pooler.dense.bias", "pooler.dense.weight")
    dense = [arrays(model)["classifier.dense.weight"].reshape(-1) for model in models]
    cosine = dense[0] @ dense[1] / np.linalg.norm(dense[0]) / np.linalg.norm(dense[1])
    assert head_similarities(models[0], files) == pytest.approx((1, cosine), abs=1e-6)
    apply(merged, files[1], out=tmp_path / "out")
    assert set(arrays(tmp_path / "out")) == set(arrays(models[1]))


def test_linear_heads_have_nothing_to_compare(
    merged: Path, releases: tuple[Path, Path], tmp_path: Path
) -> None:
    pack(merged, releases[0], out=tmp_path / "p", budget=0.2)
    with pytest.raises(MergeError, match=r"linear.*descriptions"):
        head_similarities(releases[1], [tmp_path / "p"])
