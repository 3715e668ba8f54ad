from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models.moe.families import VOCABULARY, Pooled, build
from torch import Tensor, nn

from confide.errors import ModelError
from confide.gradients.experts import Lora, OwnerExperts
from confide.models.moe.attach import attach
from confide.models.moe.harden import harden
from confide.models.moe.layers import sparse_layers
from confide.models.moe.selfcheck import SelfCheck, self_check


def hardened(family: str, dtype: torch.dtype = torch.float32) -> Pooled:
    model = build(family, dtype)
    harden(model, max_length=32)
    return model


def check(model: nn.Module, forward: Any = None, **options: Any) -> SelfCheck:
    layer = sparse_layers(model)[-1]
    run = forward or (lambda batch: model(**batch))
    return self_check(model, run, layer, vocabulary=VOCABULARY, pad=0, **options)


@pytest.mark.parametrize("family", ["Switch", "OLMoE", "Llama-4"])
def test_a_hardened_model_passes_on_both_sides(family: str) -> None:
    model = hardened(family)
    flags = [p.requires_grad for p in model.parameters()]
    found = check(model, sides=("right", "left"))
    assert max(found.alone, found.swapped, found.gradient) < 1e-5
    assert found.leak == 0.0
    assert not any(isinstance(module, OwnerExperts) for module in model.modules())
    assert [p.requires_grad for p in model.parameters()] == flags


def test_attached_experts_are_checked_as_they_are() -> None:
    model = hardened("Qwen3-MoE", torch.float64)
    experts = attach(sparse_layers(model)[-1], Lora(2, 4.0))
    assert check(model).gradient < 1e-12
    assert sparse_layers(model)[-1].block.experts is experts


def test_capacity_with_left_padding_is_caught() -> None:
    model = hardened("Switch")
    for layer in sparse_layers(model):
        layer.router.expert_capacity = 2
    check(model, sides=("right",))
    with pytest.raises(ModelError, match=r"output changes by .* padded beside longer rows"):
        check(model, sides=("left",))


def test_outputs_that_mix_rows_are_caught() -> None:
    model = hardened("OLMoE")

    def mixed(share: float) -> Any:
        def run(batch: dict[str, Tensor]) -> Tensor:
            output = model(**batch)
            return output + share * output.mean(0)

        return run

    with pytest.raises(ModelError, match="output changes by"):
        check(model, mixed(0.1))
    with pytest.raises(ModelError, match=r"has derivative .* with respect to another row"):
        check(model, mixed(1e-6))


def test_a_wrong_owner_gradient_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from confide.gradients import expert_engine

    model = hardened("OLMoE")
    right = expert_engine.expert_parts

    def wrong(experts: Any, names: Any, pairs: Any, gradient: Tensor, rows: Any) -> Any:
        return right(experts, names, pairs, gradient * 1.001, rows)

    monkeypatch.setattr(expert_engine, "expert_parts", wrong)
    with pytest.raises(ModelError, match="owner gradient is off by"):
        check(model)


def test_padding_that_is_read_is_caught() -> None:
    model = hardened("OLMoE")

    def deaf(batch: dict[str, Tensor]) -> Tensor:
        return model(batch["input_ids"], torch.ones_like(batch["attention_mask"]))

    with pytest.raises(ModelError, match="padded beside longer rows"):
        check(model, deaf)
