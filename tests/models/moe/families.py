"""Tiny random models of every family, a head on top, and made-up batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tests.models.moe import vl2
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, CLASSES, EXPERTS = 90, 16, 3, 4


def _common(**changes: Any) -> dict[str, Any]:
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "attention_dropout": 0.1,
    }
    return values | changes


def _switch(**changes: Any) -> nn.Module:
    from transformers import SwitchTransformersConfig, SwitchTransformersEncoderModel

    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "d_model": WIDTH,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 4,
        "num_sparse_encoder_layers": 2,
        "num_heads": 2,
        "num_experts": EXPERTS,
        "expert_capacity": 64,
        "initializer_factor": 1.0,
        "dropout_rate": 0.1,
    }
    return SwitchTransformersEncoderModel(SwitchTransformersConfig(**(values | changes)))


def _auto(config: Any) -> nn.Module:
    from transformers import AutoModel

    return AutoModel.from_config(config)


def _olmoe(**changes: Any) -> nn.Module:
    from transformers import OlmoeConfig

    return _auto(OlmoeConfig(**_common(num_experts=EXPERTS, num_experts_per_tok=2, **changes)))


def _mixtral(**changes: Any) -> nn.Module:
    from transformers import MixtralConfig

    config = _common(num_local_experts=EXPERTS, num_experts_per_tok=2, router_jitter_noise=0.1, **changes)
    return _auto(MixtralConfig(**config))


def _qwen2(**changes: Any) -> nn.Module:
    from transformers import Qwen2MoeConfig

    config = _common(
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=20,
        decoder_sparse_step=1,
        **changes,
    )
    return _auto(Qwen2MoeConfig(**config))


def _qwen3(**changes: Any) -> nn.Module:
    from transformers import Qwen3MoeConfig

    config = _common(
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        decoder_sparse_step=1,
        head_dim=8,
        **changes,
    )
    return _auto(Qwen3MoeConfig(**config))


def _deepseek(version: int, **changes: Any) -> nn.Module:
    from transformers import DeepseekV2Config, DeepseekV3Config

    config = _common(
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1 if version == 2 else 2,
        topk_method="group_limited_greedy" if version == 2 else "noaux_tc",
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        head_dim=8,
        **changes,
    )
    return _auto((DeepseekV2Config if version == 2 else DeepseekV3Config)(**config))


def _vl2(size: str, **changes: Any) -> nn.Module:
    """The language model of a DeepSeek-VL2, as confide reads its configuration."""
    from transformers import AutoConfig

    from confide.models.moe import deepseek_vl2  # noqa: F401 (the Auto classes then know it)
    from confide.release.vl2 import language_model

    said = language_model(vl2.whole_config({**vl2.SIZES[size], "attention_dropout": 0.1, **changes}), size)
    config = AutoConfig.for_model(**said, initializer_range=0.2)
    config.dtype = None
    return _auto(config)


def _granite(**changes: Any) -> nn.Module:
    from transformers import GraniteMoeConfig

    return _auto(GraniteMoeConfig(**_common(num_local_experts=EXPERTS, num_experts_per_tok=2, **changes)))


def _gpt_oss(**changes: Any) -> nn.Module:
    from transformers import GptOssConfig

    config = _common(
        num_local_experts=EXPERTS, num_experts_per_tok=2, head_dim=8, sliding_window=8, **changes
    )
    return _auto(GptOssConfig(**config, layer_types=["sliding_attention", "full_attention"]))


def _llama4(**changes: Any) -> nn.Module:
    from transformers import Llama4TextConfig, Llama4TextModel

    config = _common(
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        intermediate_size_mlp=24,
        head_dim=8,
        interleave_moe_layer_step=1,
        attn_temperature_tuning=False,
        attention_chunk_size=64,
        **changes,
    )
    return Llama4TextModel(Llama4TextConfig(**config))


FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "Switch": _switch,
    "OLMoE": _olmoe,
    "Mixtral": _mixtral,
    "Qwen2-MoE": _qwen2,
    "Qwen3-MoE": _qwen3,
    "DeepSeek-V2": functools.partial(_deepseek, 2),
    "DeepSeek-V3": functools.partial(_deepseek, 3),
    **{size: functools.partial(_vl2, size) for size in vl2.SIZES},
    "Granite-MoE": _granite,
    "gpt-oss": _gpt_oss,
    "Llama-4": _llama4,
}


class Pooled(nn.Module):
    """An encoder, the mean of its last hidden states over real tokens, and a linear head."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(WIDTH, CLASSES)
        self.config: Any = encoder.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        return self.head((hidden * mask).sum(1) / mask.sum(1))  # type: ignore[no-any-return]


def build(family: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Pooled:
    """A model in training mode, with everything that hardening must turn off still on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = FAMILIES[family]()
        with torch.no_grad():
            for name, parameter in encoder.named_parameters():
                if name.endswith("bias") or not bool(parameter.any()):  # routers and biases start at zero
                    parameter.normal_(std=0.3)
        model = Pooled(encoder).to(dtype).train()
    if family not in ("Switch", "Llama-4"):
        encoder.set_experts_implementation("eager")
    return model


def batch(lengths: list[int], left: bool = False, seed: int = 1) -> dict[str, Tensor]:
    """Random tokens, padded on one side."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        at = slice(longest - length, None) if left else slice(length)
        ids[row, at] = torch.randint(1, VOCABULARY, (length,), generator=generator)
        mask[row, at] = 1
    return {"input_ids": ids, "attention_mask": mask}


def losses(model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(**inputs), labels, reduction="none")
