"""Adapters of experts through PEFT itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.moe.bases import save_base
from tests.models.moe.families import batch

from confide.errors import ModelError
from confide.finetune.expert_settings import SHARED
from confide.gradients.experts import Lora
from confide.models.adapters import Trainable, adapt, plain_state
from confide.models.backbones import load_classifier
from confide.models.moe.attach import attach, merged_experts
from confide.models.moe.export import is_adapter, write_adapter
from confide.models.moe.harden import harden
from confide.models.moe.layers import sparse_layers

LORA = Lora(3, 5.0)
ALL = ["Switch", "OLMoE", "DeepSeek-V2", "Granite-MoE", "gpt-oss", "Llama-4"]


@pytest.mark.parametrize("family", ALL)
def test_experts_alone_are_an_adapter_that_peft_computes_and_merges(family: str, tmp_path: Path) -> None:
    from peft import PeftModel

    base = save_base(family, ["a fine play"], tmp_path / "base")
    classifier, plain = (load_classifier(base, ("a", "b"), seed=0) for _ in range(2))
    harden(classifier.model, max_length=16)
    layer = sparse_layers(classifier.model)[-1]
    experts = attach(layer, LORA)
    adapted = adapt(classifier, Trainable(kind="head"), 0, (layer,))
    assert is_adapter(adapted)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for value in experts.trained().values():
            value.add_(torch.empty_like(value).normal_(std=0.2, generator=generator))
    folder = tmp_path / "adapter"
    folder.mkdir()
    write_adapter(adapted, folder)
    named = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["target_parameters"]
    assert all(name.startswith(f"{layer.name}.experts.") for name in named)
    loaded: Any = PeftModel.from_pretrained(plain.model, str(folder)).eval()  # type: ignore[arg-type]
    inputs = batch([5, 9, 3])
    with torch.no_grad():
        want = classifier.model(**inputs).logits
        assert float((loaded(**inputs).logits - want).abs().max()) < 1e-4
        merged = loaded.merge_and_unload()
        assert float((merged(**inputs).logits - want).abs().max()) < 1e-4
    for name, value in merged_experts(layer).items():
        assert torch.equal(merged.state_dict()[name], value), name


def test_all_that_was_trained_is_one_adapter_of_two_ranks(tmp_path: Path) -> None:
    from peft import PeftModel

    base = save_base("OLMoE", ["a fine play"], tmp_path / "base")
    classifier = load_classifier(base, ("a", "b"), seed=0)
    harden(classifier.model, max_length=16)
    layers = sparse_layers(classifier.model)
    attach(layers[0], LORA)
    trainable = Trainable(blocks=1, rank=2, alpha=8.0, targets=SHARED)
    adapted = adapt(classifier, trainable, 0, layers[:1])
    assert is_adapter(adapted)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name in (*adapted.encoder, *adapted.head, *adapted.expert_parameters):
            value = classifier.model.get_parameter(name)
            value.add_(torch.empty_like(value).normal_(std=0.2, generator=generator))
    (tmp_path / "adapter").mkdir()
    write_adapter(adapted, tmp_path / "adapter")
    merged, plain = (load_classifier(base, ("a", "b"), seed=seed).model for seed in (1, 2))
    merged.load_state_dict(plain_state(adapted))
    loaded: Any = PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
    inputs = batch([5, 9, 3])
    with torch.no_grad():
        want = merged(**inputs).logits
        # The scale 5/3 isn't exact, so that the order of factors shows in the last bits.
        assert float((loaded(**inputs).logits - want).abs().max()) < 1e-5
        assert float((classifier.model(**inputs).logits - want).abs().max()) < 1e-4
    attach(layers[1])
    whole = adapt(classifier, Trainable(kind="head"), 0, layers)
    assert not is_adapter(whole)


def test_experts_without_lora_are_no_adapter(tmp_path: Path) -> None:
    classifier = load_classifier(save_base("OLMoE", ["a"], tmp_path / "base"), ("a", "b"), seed=0)
    harden(classifier.model, max_length=16)
    layer = sparse_layers(classifier.model)[-1]
    attach(layer)
    adapted = adapt(classifier, Trainable(kind="head"), 0, (layer,))
    assert not is_adapter(adapted)
    with pytest.raises(ModelError, match="no LoRA attached"):
        write_adapter(adapted, tmp_path)
