from __future__ import annotations

import pytest
import torch
from tests.models.moe.families import EXPERTS, FAMILIES, batch, build
from torch import nn

from confide.errors import ModelError
from confide.gradients.experts import Lora, OwnerExperts
from confide.models.moe.attach import attach, attached, merged_experts
from confide.models.moe.harden import harden
from confide.models.moe.layers import choose, sparse_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_found_by_what_they_hold(family: str) -> None:
    layers = sparse_layers(build(family))
    numbers = {"Switch": [1, 3]}.get(family, [1] if family.startswith("DeepSeek") else [0, 1])
    assert [layer.number for layer in layers] == numbers
    assert {layer.experts for layer in layers} == {EXPERTS}
    assert {layer.top_k for layer in layers} == {1 if family == "Switch" else 2}
    kinds = {"Switch": "listed", "Llama-4": "scaled"}
    assert {layer.kind for layer in layers} == {kinds.get(family, "fused")}


def test_a_dense_model_is_refused() -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    with pytest.raises(ModelError, match="BertModel has no layer of experts: it is a dense model"):
        sparse_layers(BertModel(config))


def test_experts_of_unknown_form_are_refused() -> None:
    model = build("Qwen3-MoE")
    block = model.get_submodule("encoder.layers.1.mlp")
    block.experts = nn.ModuleList([nn.Linear(3, 3)])
    with pytest.raises(ModelError, match=r"layers\.1\.mlp holds experts of type ModuleList"):
        sparse_layers(model)
    block.experts = build("Qwen3-MoE").get_submodule("encoder.layers.1.mlp.experts")
    block.experts.has_post_expert_norm = True
    with pytest.raises(ModelError, match="can't be trained privately"):
        sparse_layers(model)
    block.experts.has_post_expert_norm = False
    del block._modules["gate"]
    with pytest.raises(ModelError, match="can't be trained privately"):
        sparse_layers(model)


def test_a_layer_is_chosen_by_its_block() -> None:
    layers = sparse_layers(build("Switch"))
    assert choose(layers, 3) is layers[1]
    with pytest.raises(ModelError, match="block 2 has no experts; the sparse layers are 1, 3"):
        choose(layers, 2)


@pytest.mark.parametrize("family", ["Switch", "Mixtral", "gpt-oss", "Llama-4"])
@pytest.mark.parametrize("lora", [None, Lora(2, 3.0)], ids=["weights", "lora"])
def test_merged_experts_fit_the_familys_own(family: str, lora: Lora | None) -> None:
    model = build(family)
    harden(model, max_length=16)
    layer = sparse_layers(model)[0]
    names = list(model.state_dict())
    experts = attach(layer, lora)
    assert sparse_layers(model)[0].kind == layer.kind
    if family != "Switch":
        assert [name for name in model.state_dict() if "_lora_" not in name] == names
    with torch.no_grad():
        for value in experts.trained().values():
            value.add_(torch.randn_like(value), alpha=0.2)
        trained = model(**batch([5, 9]))
        merged = merged_experts(layer)
        assert merged.keys() == {name for name in names if name.startswith(f"{layer.name}.experts.")}
        plain = build(family)
        harden(plain, max_length=16)
        plain.load_state_dict(plain.state_dict() | merged)
        again = plain(**batch([5, 9]))
    assert float((again - trained).abs().max()) <= (0.0 if lora is None else 1e-12)


def test_attaching_twice_or_with_dropout_is_refused() -> None:
    model = build("Switch")
    layer = sparse_layers(model)[0]
    with pytest.raises(ModelError, match="dropout in its experts"):
        attach(layer)
    with pytest.raises(ModelError, match="no attached experts"):
        attached(layer)
    harden(model, max_length=16)
    assert isinstance(attach(layer), OwnerExperts)
    with pytest.raises(ModelError, match="attached already"):
        attach(layer)


def test_experts_with_a_parameter_of_unknown_use_are_refused() -> None:
    model = build("Mixtral")
    layer = sparse_layers(model)[0]
    layer.base.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(ModelError, match="parameter of unknown use: scale"):
        attach(layer)
