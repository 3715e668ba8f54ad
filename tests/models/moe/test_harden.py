from __future__ import annotations

import pytest
import torch
from tests.models.moe.families import FAMILIES, batch, build
from torch import nn

from confide.errors import ModelError
from confide.models.moe.harden import harden
from confide.models.moe.layers import sparse_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_training_mode_is_deterministic_and_equals_evaluation(family: str) -> None:
    model = build(family)
    harden(model, max_length=16)
    assert model.training
    inputs = batch([5, 9, 3])
    with torch.no_grad():
        first, second = model(**inputs), model(**inputs)
        assert torch.equal(first, second)
        assert torch.equal(model.eval()(**inputs), first)
    for layer in sparse_layers(model):
        assert not any(p.requires_grad for p in layer.router.parameters())


@pytest.mark.parametrize("family", ["Switch", "Mixtral", "Qwen2-MoE"])
def test_without_hardening_training_mode_is_random(family: str) -> None:
    model = build(family)
    inputs = batch([5, 9, 3])
    with torch.no_grad():
        assert not torch.equal(model(**inputs), model(**inputs))


def test_auxiliary_losses_are_turned_off() -> None:
    model = build("OLMoE")
    model.config.output_router_logits = True
    harden(model, max_length=16)
    assert model.config.output_router_logits is False


def test_capacity_covers_the_longest_sequence() -> None:
    model = build("Switch")
    harden(model, max_length=200)
    assert {layer.router.expert_capacity for layer in sparse_layers(model)} == {200}
    harden(model, max_length=20)
    assert {layer.router.expert_capacity for layer in sparse_layers(model)} == {200}
    built = FAMILIES["Switch"](expert_capacity=model.config.expert_capacity)  # as who loads a release does
    assert {layer.router.expert_capacity for layer in sparse_layers(built)} == {200}


def test_half_precision_is_refused() -> None:
    with pytest.raises(ModelError, match="half-precision rounding"):
        harden(build("Mixtral", torch.bfloat16), max_length=16)
    with pytest.raises(ModelError, match="float16 this family clamps"):
        harden(build("Switch", torch.float16), max_length=16)


def test_a_family_that_mixes_records_is_refused() -> None:
    from transformers import NllbMoeConfig
    from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeEncoder

    config = NllbMoeConfig(
        vocab_size=20,
        d_model=8,
        encoder_layers=2,
        encoder_attention_heads=1,
        encoder_ffn_dim=8,
        decoder_layers=1,
        decoder_attention_heads=1,
        decoder_ffn_dim=8,
        num_experts=2,
        encoder_sparse_step=1,
    )
    with pytest.raises(ModelError, match=r"nllb-moe.*capacity is counted over the whole batch"):
        harden(NllbMoeEncoder(config), max_length=16)


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(ModelError, match="no layer of experts"):
        harden(nn.Sequential(nn.Linear(2, 2)), max_length=16)
