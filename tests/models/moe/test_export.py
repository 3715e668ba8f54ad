"""Adapters of experts through PEFT itself."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.moe.bases import save_base
from tests.models.moe.families import batch, build
from torch import nn

from confide.errors import ModelError, ReleaseError
from confide.finetune.expert_settings import SHARED
from confide.gradients.experts import Lora, OwnerExperts
from confide.models.adapters import Trainable, adapt, plain_state
from confide.models.backbones import load_classifier
from confide.models.moe.attach import attach, merged_experts
from confide.models.moe.export import from_peft, is_adapter, to_peft, write_adapter
from confide.models.moe.harden import harden
from confide.models.moe.layers import SparseLayer, sparse_layers

LORA = Lora(3, 5.0)
ALL = ["Switch", "OLMoE", "DeepSeek-V2", "Granite-MoE", "gpt-oss", "Llama-4"]


def trained(
    family: str, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, nn.Module, SparseLayer, OwnerExperts]:
    """(plain, with experts attached and moved, its layer, those experts)."""
    model = build(family, dtype).encoder
    harden(model, max_length=16)
    plain = copy.deepcopy(model).eval()
    layer = sparse_layers(model)[-1]
    experts = attach(layer, LORA)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for value in experts.trained().values():
            value.add_(torch.empty_like(value).normal_(std=0.2, generator=generator))
    return plain, model, layer, experts


@pytest.mark.parametrize("family", ALL)
def test_peft_computes_and_merges_the_same(family: str, tmp_path: Path) -> None:
    from peft import PeftModel

    plain, model, layer, _ = trained(family)
    to_peft(layer, tmp_path / "adapter")
    loaded: Any = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    inputs = batch([5, 9, 3])
    with torch.no_grad():
        want = model(**inputs).last_hidden_state
        assert float((loaded(**inputs).last_hidden_state - want).abs().max()) < 1e-12
        merged = loaded.merge_and_unload()
        assert float((merged(**inputs).last_hidden_state - want).abs().max()) < 1e-12
    for name, value in merged_experts(layer).items():
        assert torch.equal(merged.state_dict()[name], value), name


@pytest.mark.parametrize("family", ALL)
def test_what_was_written_is_read_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    plain, _, layer, experts = trained(family, torch.float32)
    to_peft(layer, tmp_path / "adapter")
    again_layer = sparse_layers(plain)[-1]
    again = attach(again_layer, LORA)
    from_peft(again_layer, tmp_path / "adapter")
    for name, value in experts.trained().items():
        assert torch.equal(again.get_parameter(name), value), name


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


def test_refusals(tmp_path: Path) -> None:
    plain, _, layer, experts = trained("OLMoE")
    folder = tmp_path / "adapter"
    to_peft(layer, folder)
    with pytest.raises(ReleaseError, match="exists already"):
        to_peft(layer, folder)
    with pytest.raises(ReleaseError, match="no PEFT adapter that can be read"):
        from_peft(layer, tmp_path)
    other = sparse_layers(plain)[-1]
    with pytest.raises(ModelError, match="no LoRA attached"):
        to_peft(other, tmp_path / "other")
    attach(other, Lora(2, 5.0))
    with pytest.raises(ModelError, match=r"rank 3 and alpha 5\.0; the attached experts have rank 2"):
        from_peft(other, folder)

    before = {name: value.clone() for name, value in experts.trained().items()}
    weights = folder / "adapter_model.safetensors"
    stored = load_file(weights)
    first = sorted(stored)[0]
    save_file(stored | {first: stored[first][:-1].contiguous()}, weights)
    with pytest.raises(ReleaseError, match=r"should be \[12, 16\], but there is \[11, 16\]"):
        from_peft(layer, folder)
    save_file({name: value for name, value in stored.items() if name != first}, weights)
    with pytest.raises(ReleaseError, match="but there is nothing"):
        from_peft(layer, folder)
    save_file(stored | {"base_model.model.head.lora_A.weight": torch.ones(2, 2)}, weights)
    with pytest.raises(ReleaseError, match="adapts more than the experts"):
        from_peft(layer, folder)
    save_file(stored, weights)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 6.0}))
    with pytest.raises(ModelError, match=r"alpha 6\.0"):
        from_peft(layer, folder)
    assert all(torch.equal(experts.get_parameter(name), value) for name, value in before.items())
