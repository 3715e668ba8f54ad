from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from confide.errors import MergeError, ReleaseError
from confide.merging.merge import merge
from confide.merging.personal import apply as module
from confide.merging.personal import file
from confide.merging.personal.apply import apply, fuse, unpack
from confide.merging.personal.pack import pack
from confide.merging.personal.residual import array
from confide.models.releases import load_release
from confide.privacy import composition
from confide.release.tensors import Checkpoint
from confide.release.write import verify

from .conftest import Arrays, arrays, as_dtype, build

Releases = tuple[Path, Path]


@pytest.fixture(scope="module")
def packed(merged: Path, releases: Releases, tmp_path_factory: pytest.TempPathFactory) -> Releases:
    folder = tmp_path_factory.mktemp("packed")
    for model in releases:
        pack(merged, model, out=folder / model.name, budget=0.15, description=model.name)
    return folder / "films", folder / "tweets"


def plus(merged: Path, parts: list[tuple[float, Path]]) -> Arrays:
    """The merge plus weighted residuals, by plain arithmetic."""
    result = arrays(merged)
    for weight, path in parts:
        for name, layers in file.read(path).layers.items():
            result[name] = result[name] + weight * array(layers)
    return result


def test_apply_is_the_merge_plus_the_residual(
    merged: Path, releases: Releases, packed: Releases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_block_rows", lambda width: 5)
    applied = apply(merged, packed[1], out=tmp_path / "out")
    found = arrays(tmp_path / "out")
    expected = {f"bert.{name}": values for name, values in plus(merged, [(1.0, packed[1])]).items()}
    model = arrays(releases[1])
    expected |= {name: values for name, values in model.items() if name.startswith("classifier.")}
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6, atol=1e-7)
    # It is nearer to the task's own model than the merge is.
    ours = sum(np.sum((found[name] - model[name]) ** 2) for name in model)
    before = arrays(merged)
    theirs = sum(np.sum((before[n.removeprefix("bert.")] - v) ** 2) for n, v in model.items() if "bert" in n)
    assert ours < 0.5 * theirs
    assert applied.head.task == "tweets"


def test_what_apply_writes_is_a_release(
    merged: Path, releases: Releases, packed: Releases, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    applied = apply(merged, packed[1], out=tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    statement = verify(tmp_path / "out")
    composition.check(statement)
    assert statement == applied.statement
    assert statement.claim == file.read(packed[1]).about.statement.claim
    assert {s.run for s in statement.spendings} == {"run-films", "run-tweets"}
    plain, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert plain.config.id2label == {0: "bad", 1: "even", 2: "good"}
    classifier, head = load_release(tmp_path / "out")
    assert head == file.read(packed[1]).about.head
    ids = torch.tensor([[2, 5, 6, 3]])
    with torch.inference_mode():
        torch.testing.assert_close(plain.eval()(ids).logits, classifier.model(ids).logits)
    assert "made personal again" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(ReleaseError, match="exists already"):
        apply(merged, packed[1], out=tmp_path / "out")


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_is_written_as_the_merge_is(base: Path, tmp_path: Path, dtype: str) -> None:
    half = as_dtype(base, tmp_path / "base", dtype)
    releases = [build(tmp_path / task, half, task, dtype=dtype) for task in ("films", "tweets")]
    merged = tmp_path / "merged"
    merge(releases, base=half, operator="ties", out=merged)
    pack(merged, releases[0], out=tmp_path / "p", budget=0.2)
    apply(merged, tmp_path / "p", out=tmp_path / "out")
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert {checkpoint.dtype(name) for name in checkpoint.names} == {dtype}
    step = 2.0**-8 if dtype == "BF16" else 2.0**-11
    for name, values in plus(merged, [(1.0, tmp_path / "p")]).items():
        np.testing.assert_allclose(checkpoint.numpy(f"bert.{name}"), values, rtol=step, atol=1e-6)


def test_an_unseen_task(base: Path, merged: Path, packed: Releases, tmp_path: Path) -> None:
    new = build(tmp_path / "songs", base, "songs", ("a", "b", "c", "d"))
    applied = fuse(merged, packed, head=new, similarities=[0.6, 0.2], out=tmp_path / "out")
    assert applied.weights == pytest.approx((0.75, 0.25))
    expected = plus(merged, [(0.75, packed[0]), (0.25, packed[1])])
    found = arrays(tmp_path / "out")
    for name, values in expected.items():
        np.testing.assert_allclose(found[f"bert.{name}"], values, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(found["classifier.weight"], arrays(new)["classifier.weight"])
    statement = verify(tmp_path / "out")
    composition.check(statement)
    # The new data set is in no declaration, so its cost is added unless somebody declares it.
    assert {s.dataset for s in statement.spendings} == {"films-2026", "tweets-2026", "songs-2026"}
    assert statement.disjoint is None
    declared = fuse(
        merged, packed, head=new, similarities=[1, 1], out=tmp_path / "declared", disjoint=True
    ).statement
    assert declared.disjoint == "declared"
    assert declared.claim is not None
    assert statement.claim is not None
    assert declared.claim.epsilon < statement.claim.epsilon

    unlike = fuse(merged, packed, head=new, similarities=[-0.5, 0.0], out=tmp_path / "unlike")
    assert unlike.weights == (0.0, 0.0)
    for name, values in arrays(merged).items():
        np.testing.assert_array_equal(arrays(tmp_path / "unlike")[f"bert.{name}"], values)
    with pytest.raises(MergeError, match="pairs"):
        fuse(merged, packed, head=new, similarities=[1.0], out=tmp_path / "one")
    with pytest.raises(MergeError, match="finite"):
        fuse(merged, packed, head=new, similarities=[1.0, float("nan")], out=tmp_path / "one")


def test_unpack(packed: Releases, releases: Releases, tmp_path: Path) -> None:
    read = unpack(packed[0], out=tmp_path / "residual.safetensors")
    found = arrays(tmp_path / "residual.safetensors")
    assert set(found) == {*read.layers, "classifier.weight", "classifier.bias"}
    for name, layers in read.layers.items():
        np.testing.assert_allclose(found[name], array(layers), rtol=1e-5, atol=1e-8)
    np.testing.assert_array_equal(found["classifier.bias"], arrays(releases[0])["classifier.bias"])
    with pytest.raises(ReleaseError, match="exists already"):
        unpack(packed[0], out=tmp_path / "residual.safetensors")


def test_another_merge_or_base(
    base: Path, releases: Releases, packed: Releases, make_base: Callable[..., Path], tmp_path: Path
) -> None:
    merge(releases, base=base, operator="average", out=tmp_path / "average")
    with pytest.raises(MergeError, match="fits no other merge") as caught:
        apply(tmp_path / "average", packed[0], out=tmp_path / "out")
    assert str(caught.value).count("sha256:") == 2
    assert file.read(packed[0]).about.merge in str(caught.value)
    strange = make_base(seed=1, hidden_size=48, num_hidden_layers=2, intermediate_size=80)
    aliens = [build(tmp_path / task, strange, task) for task in ("x", "y")]
    merge(aliens, base=strange, operator="ties", out=tmp_path / "other")
    with pytest.raises(MergeError, match="base") as caught:
        apply(tmp_path / "other", packed[0], out=tmp_path / "out")
    assert str(caught.value).count("sha256:") == 2
    with pytest.raises(MergeError, match="base"):
        fuse(tmp_path / "other", packed, head=aliens[0], similarities=[1, 1], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_values_that_the_dtype_cannot_hold(base: Path, tmp_path: Path) -> None:
    half = as_dtype(base, tmp_path / "base", "F16")
    name = "bert.encoder.layer.0.output.dense.bias"

    # In one group of codes lie a small step up from a large value and a large step up from 0.
    def far(tensors: Arrays) -> None:
        tensors[name] = np.ones_like(tensors[name])
        tensors[name][:2] = 65408, 50000

    def near(tensors: Arrays) -> None:
        tensors[name] = np.zeros_like(tensors[name])
        tensors[name][0] = 65024

    releases = [build(tmp_path / "far", half, "far", dtype="F16", change=far)]
    releases += [build(tmp_path / "near", half, "near", dtype="F16", change=near)]
    merged = tmp_path / "merged"
    merge(releases[1:], base=half, operator="average", out=merged)
    pack(merged, releases[0], out=tmp_path / "p", budget=0.1)
    with pytest.raises(MergeError, match=r"layer\.0\.output\.dense\.bias.*F16"):
        apply(merged, tmp_path / "p", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
