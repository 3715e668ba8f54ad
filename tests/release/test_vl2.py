"""Which configurations of DeepSeek-VL2 are read as what, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.models.moe.vl2 import SIZES, whole_config

from confide.errors import ModelError
from confide.release.names import model_config, model_type
from confide.release.vl2 import language_model

TINY, SMALL, FULL = SIZES["DeepSeek-VL2-Tiny"], SIZES["DeepSeek-VL2-Small"], SIZES["DeepSeek-VL2"]


@pytest.mark.parametrize(
    ("language", "family"), [(TINY, "deepseek_ocr2_text"), (SMALL, "deepseek_v2"), (FULL, "deepseek_v3")]
)
def test_each_size_is_a_model_that_transformers_has(
    language: dict[str, Any], family: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(whole_config(language)), encoding="utf-8")
    found = model_config(tmp_path)
    assert model_type(tmp_path) == found["model_type"] == family
    for name in ("hidden_size", "n_routed_experts", "num_experts_per_tok", "vocab_size", "eos_token_id"):
        assert found[name] == language[name]
    assert found["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    if family == "deepseek_ocr2_text":
        assert found["mlp_layer_types"] == ["dense", "sparse"]
    else:
        assert found["first_k_dense_replace"] == 1
        assert found["num_key_value_heads"] == language["num_attention_heads"]


def test_what_a_configuration_leaves_out_is_what_the_published_class_takes() -> None:
    """Not what transformers' own class of a similar name would: its shared experts, layers and end differ."""
    said = {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6}
    found = language_model(whole_config({**said, "hidden_size": 64}), "here")
    assert found["num_hidden_layers"] == 30
    assert (found["kv_lora_rank"], found["q_lora_rank"]) == (512, 1536)
    assert (found["bos_token_id"], found["eos_token_id"]) == (100000, 100001)


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        (SMALL, {"n_routed_experts": None}, "n_routed_experts"),
        (SMALL, {"n_shared_experts": None}, "n_shared_experts"),
        (SMALL, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (SMALL, {"rope_scaling": {"type": "yarn", "factor": 40}}, "rope_scaling"),
        (SMALL, {"norm_topk_prob": True}, "norm_topk_prob"),
        (SMALL, {"scoring_func": "sigmoid"}, "topk_method and scoring_func"),
        (SMALL, {"topk_method": "noaux_tc"}, "topk_method and scoring_func"),
        (FULL, {"use_mla": False}, "use_mla"),
        (FULL, {"n_group": 4, "topk_group": 2}, "topk_group"),
    ],
)
def test_what_no_class_computes_is_refused(base: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        language_model(whole_config({**base, **changes}), "here")


def test_another_model_of_the_same_type_is_refused() -> None:
    with pytest.raises(ModelError, match="is of a DeepseekOCRForCausalLM, which shares"):
        language_model({**whole_config(TINY), "architectures": ["DeepseekOCRForCausalLM"]}, "here")
    with pytest.raises(ModelError, match="says nothing of a language model"):
        language_model({"model_type": "deepseek_vl_v2"}, "here")
