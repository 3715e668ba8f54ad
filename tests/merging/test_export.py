from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from confide.errors import ReleaseError
from confide.merging.merge import merge
from confide.models.releases import load_release
from confide.release.export import export
from confide.release.write import verify

from .conftest import make_base, make_release


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("export")
    base = make_base(root / "base")
    models = [
        make_release(root / "films", base, "films"),
        make_release(root / "tweets", base, "tweets", ("a", "b", "c")),
    ]
    merge(models, base=base, operator="average", out=root / "merged", disjoint=True, shard_size=3000)
    return root / "merged"


def test_plain_transformers_loads_an_exported_task(merged: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    statement = export(merged, "tweets", tmp_path / "tweets")
    model, found = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "tweets", output_loading_info=True
    )
    assert not any(found.values())
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert model.config.architectures == ["BertForSequenceClassification"]
    ours, head = load_release(merged, "tweets")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "tweets")("good film", return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(
            model.eval()(**tokens).logits, ours.model(**tokens).logits, rtol=1e-6, atol=1e-7
        )
        again, _ = load_release(tmp_path / "tweets")
        torch.testing.assert_close(
            again.model(**tokens).logits, ours.model(**tokens).logits, rtol=1e-6, atol=1e-7
        )
    assert verify(tmp_path / "tweets") == statement
    assert statement.claim == verify(merged).claim
    assert statement.spendings == verify(merged).spendings
    assert set(load_file(tmp_path / "tweets" / "model.safetensors")) >= set(head.tensors)


def test_what_cant_be_exported(merged: Path, tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="several heads"):
        export(merged, None, tmp_path / "out")
    with pytest.raises(ReleaseError, match="no head for task 'nothing'"):
        export(merged, "nothing", tmp_path / "out")
    with pytest.raises(ReleaseError, match="is one task's model already"):
        export(merged.parent / "films", None, tmp_path / "out")
    export(merged, "films", tmp_path / "out")
    with pytest.raises(ReleaseError, match="exists already"):
        export(merged, "films", tmp_path / "out")
