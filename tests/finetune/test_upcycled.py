"""A mixture on disk beside the dense model that it was made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from confide.errors import ModelError
from confide.finetune import upcycled
from confide.finetune.base import PublicBase
from confide.finetune.upcycled import upcycle_base
from confide.models.backbones import load_encoder

Sentences = Callable[[int, int], list[tuple[str, str]]]


@pytest.fixture
def texts(sentences: Sentences) -> list[str]:
    return [text for text, _ in sentences(120, 9)]


def make(base: Path, texts: list[str], out: Path, **changes: Any) -> upcycled.Upcycled:
    values: dict[str, Any] = {"experts": 4, "blocks": [2, 0], "max_length": 20}
    return upcycle_base(PublicBase.of(str(base)), texts, out, **(values | changes))


def test_what_is_written_computes_what_the_base_does(
    tiny_base: Path, texts: list[str], tmp_path: Path
) -> None:
    read: list[int] = []
    made = make(tiny_base, texts, tmp_path / "moe", progress=read.append)
    assert sum(read) == made.texts == made.compared == 120
    assert (made.experts, made.blocks, made.difference) == (4, (0, 2), 0.0)
    dense, sparse = (load_encoder(folder)[0] for folder in (tiny_base, made.folder))
    sizes = [sum(value.numel() for value in model.parameters()) for model in (dense, sparse)]
    assert [made.dense_parameters, made.parameters] == sizes
    assert made.parameters > made.dense_parameters
    what, same = made.in_words()
    assert "4 experts in blocks 0, 2, routed by 120 public texts" in what
    assert "are the dense model's, bit for bit (compared on 120" in same


def test_a_difference_is_found_and_said(
    tiny_base: Path, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = upcycled.upcycle.save

    def worse(sparse: Any, tokenizer: Any, out: Path) -> None:
        with torch.no_grad():
            sparse.encoder.layer[2].output.LayerNorm.bias[0] += 0.25
        save(sparse, tokenizer, out)

    monkeypatch.setattr(upcycled.upcycle, "save", worse)
    made = make(tiny_base, texts, tmp_path / "moe")
    assert made.difference == pytest.approx(0.25, abs=1e-5)
    assert "differ from the dense model's by 2.5e-01 at most" in made.in_words()[1]


def test_refused_and_nothing_written(tiny_base: Path, texts: list[str], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no block 3"):
        make(tiny_base, texts, tmp_path / "moe", blocks=[3])
    assert not list(tmp_path.iterdir())
