"""DeepSeek-VL2's language model, in the words of the classes that transformers has for its parts.

transformers has no class for the whole, and the one that comes with the weights can't be trained privately:
in evaluation mode routed experts get no gradient, and in training mode the gradient of the whole batch's
balance is added. But each published size is a language model that transformers knows by another name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from confide.errors import ModelError

MODEL_TYPE = "deepseek_vl_v2"
PREFIX = "language."
"""What stands before the language model's names in the whole."""

_WHOLE = "DeepseekVLV2ForCausalLM"
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "moe_intermediate_size": 1407,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "n_shared_experts": None,
    "n_routed_experts": None,
    "num_experts_per_tok": None,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "pad_token_id": None,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "topk_method": "greedy",
    "n_group": None,
    "topk_group": None,
}
_LATENT: Mapping[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
"""What the published configuration class takes where config.json says nothing; here of latent attention."""


def language_model(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    """config.json of a DeepSeek-VL2 → that of its language model as transformers has it.

    - latent attention, softmax gates (VL2-Small): `deepseek_v2`;
    - latent attention, sigmoid gates with a correction for balance (VL2): `deepseek_v3`;
    - plain attention, softmax gates (VL2-Tiny): `deepseek_ocr2_text`.

    Args:
        where: what to name in errors.

    Raises:
        ModelError: no language model is described, or one that none of these classes computes exactly.
    """
    own, whole = config.get("language_config"), config.get("architectures") or [_WHOLE]
    if whole != [_WHOLE]:
        raise ModelError(
            f"{where} is of a {whole[0]}, which shares DeepSeek-VL2's model_type ({MODEL_TYPE}) and is "
            "another model; use a DeepSeek-VL2, or another base"
        )
    if not isinstance(own, Mapping):
        raise ModelError(f"{where} says nothing of a language model (language_config)")

    def value(name: str, default: Any) -> Any:
        return own.get(name, default)

    scores, method = value("scoring_func", "softmax"), value("topk_method", "greedy")
    latent, balanced = value("use_mla", True), (scores, method) == ("sigmoid", "noaux_tc")
    found = {name: value(name, default) for name, default in _DEFAULTS.items()}
    _require(
        where,
        {
            "n_routed_experts and n_shared_experts": all(
                found[name] is not None
                for name in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok")
            ),
            "moe_layer_freq": value("moe_layer_freq", 1) == 1,
            "rope_scaling": value("rope_scaling", None) is None,
            "topk_method and scoring_func": balanced
            or (scores == "softmax" and method in ("greedy", "group_limited_greedy")),
            "norm_topk_prob": balanced or not value("norm_topk_prob", False),
            "use_mla": latent or not balanced,
            # Experts outside the best groups score 0 there and −∞ in transformers.
            "topk_group": not balanced or (found["n_group"] or 0) == found["topk_group"],
        },
    )
    found["rope_parameters"] = {"rope_type": "default", "rope_theta": float(value("rope_theta", 10000.0))}
    if dtype := own.get("torch_dtype", config.get("torch_dtype")):
        found["dtype"] = dtype
    if quantised := own.get("quantization_config", config.get("quantization_config")):
        found["quantization_config"] = quantised
    if not latent:
        dense = min(found.pop("first_k_dense_replace"), found["num_hidden_layers"])
        found["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (found["num_hidden_layers"] - dense)
        return {"model_type": "deepseek_ocr2_text", "architectures": ["DeepseekOcr2TextModel"], **found}
    found |= {name: value(name, default) for name, default in _LATENT.items()}
    found["num_key_value_heads"] = found["num_attention_heads"]  # of latent attention it says nothing
    if not balanced:
        return {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], **found}
    del found["topk_method"]
    found |= {"norm_topk_prob": value("norm_topk_prob", False), "num_nextn_predict_layers": 0}
    return {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], **found}


def _require(where: object, known: Mapping[str, bool]) -> None:
    for names, fits in known.items():
        if not fits:
            raise ModelError(
                f"{where} describes a language model unlike those of the published DeepSeek-VL2 models "
                f"({names} in language_config), which no class of transformers computes; use one of those"
            )
