"""Models that were trained from a DeepSeek-VL2 meet over it again, as language models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tests.models.moe import vl2
from tests.models.moe.bases import tokenizer

from confide.geometry.drift import folder_drift
from confide.merging.merge import merge
from confide.models.backbones import load_classifier, load_encoder
from confide.release.tensors import Checkpoint


def test_the_merge_is_a_language_model_that_loads(tmp_path: Path) -> None:
    import torch

    base = vl2.write(
        tmp_path / "vl2", {**vl2.SIZES["DeepSeek-VL2-Tiny"], "vocab_size": 300}, tokenizer(["a"])
    )
    models = []
    for number in range(2):
        encoder, words = load_encoder(base)
        with torch.no_grad():
            for parameter in encoder.parameters():
                parameter.add_(0.01 * (number + 1))
        models.append(tmp_path / f"model{number}")
        encoder.save_pretrained(models[-1])  # type: ignore[operator]
        words.save_pretrained(models[-1])
    merge(models, base=base, operator="average", out=tmp_path / "merged")
    config = json.loads((tmp_path / "merged" / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "deepseek_ocr2_text"
    public, merged = Checkpoint.open(base), Checkpoint.open(tmp_path / "merged")
    assert {f"language.model.{name}" for name in merged.names} == {
        name for name in public.names if name.startswith("language.model.")
    }
    name = "layers.1.mlp.experts.2.up_proj.weight"
    moved = merged.numpy(name).astype(np.float64) - public.numpy(f"language.model.{name}")
    assert abs(moved.mean() - 0.015) < 0.002  # rounded to bfloat16 where the base is
    assert 0 < folder_drift(base, tmp_path / "merged") < 0.1
    model = load_classifier(tmp_path / "merged", ("a", "b"), seed=0).model
    assert torch.equal(
        model.get_parameter("model.norm.weight"), torch.from_numpy(merged.numpy("norm.weight").copy()).float()
    )
