"""Tiny DeepSeek-VL2 checkpoints as published ones lie on disk, and what their language model computes.

The reference is written from the published equations, a record and a token at a time. Like the code that
comes with the weights it takes norms, routers and rotary tables in single precision, all else in double.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

_COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "lm_head": True,
    "max_position_embeddings": 64,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 12,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_attention_heads": 2,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "rm_head": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "vocab_size": 90,
}
_LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
_PLAIN = {"kv_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0}
SIZES: dict[str, dict[str, Any]] = {
    "DeepSeek-VL2-Tiny": {**_COMMON, **_PLAIN, "use_mla": False},
    "DeepSeek-VL2-Small": {**_COMMON, **_LATENT},
    "DeepSeek-VL2": {
        **_COMMON,
        **_LATENT,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
}
"""`language_config` as the published models of each size have it, with small numbers."""


def whole_config(language: dict[str, Any]) -> dict[str, Any]:
    return {
        "candidate_resolutions": [[384, 384]],
        "global_view_pos": "head",
        "language_config": language,
        "model_type": "deepseek_vl_v2",
        "projector_config": {"model_type": "mlp_projector", "n_embed": language["hidden_size"]},
        "tile_tag": "2D",
        "torch_dtype": "bfloat16",
        "vision_config": {"model_type": "vision", "layers": 1, "patch_size": 14},
    }


def shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape under its published name; of what sees images a few."""
    width, heads = c["hidden_size"], c["num_attention_heads"]
    found: dict[str, tuple[int, ...]] = {
        "language.model.embed_tokens.weight": (c["vocab_size"], width),
        "language.model.norm.weight": (width,),
        "language.lm_head.weight": (c["vocab_size"], width),
        "vision.blocks.0.attn.qkv.weight": (24, 8),
        "vision.blocks.0.attn.proj.bias": (8,),
        "projector.layers.0.weight": (width, 8),
        "image_newline": (width,),
        "view_seperator": (width,),
    }

    def network(path: str, inner: int) -> None:
        for name in ("gate_proj", "up_proj"):
            found[f"{path}.{name}.weight"] = (inner, width)
        found[f"{path}.down_proj.weight"] = (width, inner)

    for number in range(c["num_hidden_layers"]):
        block = f"language.model.layers.{number}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{block}.{name}.weight"] = (width,)
        attention = f"{block}.self_attn"
        if not c.get("use_mla", True):
            for name in "qkvo":
                groups = c["num_key_value_heads"] if name in "kv" else heads
                out = (groups * width // heads, width)
                found[f"{attention}.{name}_proj.weight"] = out[::-1] if name == "o" else out
        else:
            query = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
            latent, v = c["kv_lora_rank"], c["v_head_dim"]
            if rank := c["q_lora_rank"]:
                found[f"{attention}.q_a_proj.weight"] = (rank, width)
                found[f"{attention}.q_a_layernorm.weight"] = (rank,)
                found[f"{attention}.q_b_proj.weight"] = (query, rank)
            else:
                found[f"{attention}.q_proj.weight"] = (query, width)
            found[f"{attention}.kv_a_proj_with_mqa.weight"] = (latent + c["qk_rope_head_dim"], width)
            found[f"{attention}.kv_a_layernorm.weight"] = (latent,)
            found[f"{attention}.kv_b_proj.weight"] = (heads * (c["qk_nope_head_dim"] + v), latent)
            found[f"{attention}.o_proj.weight"] = (width, heads * v)
        if number < c["first_k_dense_replace"]:
            network(f"{block}.mlp", c["intermediate_size"])
            continue
        found[f"{block}.mlp.gate.weight"] = (c["n_routed_experts"], width)
        if c["topk_method"] == "noaux_tc":
            found[f"{block}.mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
        for expert in range(c["n_routed_experts"]):
            network(f"{block}.mlp.experts.{expert}", c["moe_intermediate_size"])
        network(f"{block}.mlp.shared_experts", c["moe_intermediate_size"] * c["n_shared_experts"])
    return found


def write(folder: Path, language: dict[str, Any], words: Any, seed: int = 0) -> Path:
    """A folder with random weights, in bfloat16 as published ones, in two shards, and a tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(whole_config(language)), encoding="utf-8")
    words.save_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)

    def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        value = torch.randn(shape, generator=generator) * (0.5 if "gate.weight" in name else 0.3)
        return (value + 1 if "norm" in name else value).to(torch.bfloat16)

    tensors = {name: tensor(name, shape) for name, shape in shapes(language).items()}
    halves = [dict(list(tensors.items())[part::2]) for part in range(2)]
    files = [f"model-0000{part + 1}-of-000002.safetensors" for part in range(2)]
    for file, half in zip(files, halves, strict=True):
        save_file(half, folder / file, metadata={"format": "pt"})
    index = {name: file for file, half in zip(files, halves, strict=True) for name in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


class Reference:
    """The language model of a folder in float64."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        defaults = {"use_mla": True, "scoring_func": "softmax", "norm_topk_prob": False}
        self.c: dict[str, Any] = {**defaults, **config["language_config"]}
        self.w = {
            name: value.double()
            for file in folder.glob("*.safetensors")
            for name, value in load_file(file).items()
        }

    def hidden(self, ids: Tensor) -> Tensor:
        """(tokens,) → (tokens, width), after the last norm."""
        c, w = self.c, self.w
        h = w["language.model.embed_tokens.weight"][ids]
        for number in range(c["num_hidden_layers"]):
            block = f"language.model.layers.{number}"
            attend = self._latent if c["use_mla"] else self._plain
            h = h + attend(f"{block}.self_attn", self._norm(h, f"{block}.input_layernorm"))
            inner = self._norm(h, f"{block}.post_attention_layernorm")
            dense = number < c["first_k_dense_replace"]
            h = h + (self._network if dense else self._mixture)(f"{block}.mlp", inner)
        return self._norm(h, "language.model.norm")

    def logits(self, ids: Tensor) -> Tensor:
        """(tokens,) → (tokens, vocabulary)."""
        return self._linear(self.hidden(ids), "language.lm_head")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        single = x.float()
        single = single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.w[f"{name}.weight"] * single.double()

    def _network(self, path: str, x: Tensor) -> Tensor:
        gate = functional.silu(self._linear(x, f"{path}.gate_proj"))
        return self._linear(gate * self._linear(x, f"{path}.up_proj"), f"{path}.down_proj")

    def _mixture(self, path: str, x: Tensor) -> Tensor:
        c, rows = self.c, []
        logits = functional.linear(x.float(), self.w[f"{path}.gate.weight"].float())
        every = logits.softmax(-1) if c["scoring_func"] == "softmax" else logits.sigmoid()
        for token, scores in zip(x, every, strict=True):
            choice = scores
            if c["topk_method"] == "noaux_tc":
                choice = scores + self.w[f"{path}.gate.e_score_correction_bias"].float()
            elif c["topk_method"] == "group_limited_greedy":
                groups = scores.view(c["n_group"], -1)
                kept = groups.max(-1).values.topk(c["topk_group"]).indices
                inside = torch.isin(torch.arange(c["n_group"]), kept)[:, None].expand_as(groups)
                choice = torch.where(inside, groups, 0).flatten()
            experts = choice.topk(c["num_experts_per_tok"]).indices
            weight = scores[experts]
            if c["norm_topk_prob"]:
                weight = weight / (weight.sum() + 1e-20)
            weight = weight * c.get("routed_scaling_factor", 1.0)
            each = [
                g.double() * self._network(f"{path}.experts.{int(e)}", token[None])[0]
                for e, g in zip(experts, weight, strict=True)
            ]
            rows.append(torch.stack(each).sum(0))
        return torch.stack(rows) + self._network(f"{path}.shared_experts", x)

    def _plain(self, path: str, x: Tensor) -> Tensor:
        heads = self.c["num_attention_heads"]
        q, k, v = (
            self._linear(x, f"{path}.{name}_proj").view(len(x), -1, x.shape[1] // heads).transpose(0, 1)
            for name in "qkv"
        )
        repeat = heads // len(k)
        k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
        mixed = _attend(_rotated(q), _rotated(k), v, x.shape[1] // heads)
        return self._linear(mixed, f"{path}.o_proj")

    def _latent(self, path: str, x: Tensor) -> Tensor:
        c, heads = self.c, self.c["num_attention_heads"]
        nope, rope, latent = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
        if c["q_lora_rank"]:
            down = self._norm(self._linear(x, f"{path}.q_a_proj"), f"{path}.q_a_layernorm")
            q = self._linear(down, f"{path}.q_b_proj")
        else:
            q = self._linear(x, f"{path}.q_proj")
        q = q.view(len(x), heads, nope + rope).transpose(0, 1)
        compressed, k_rope = self._linear(x, f"{path}.kv_a_proj_with_mqa").split([latent, rope], -1)
        kv = self._linear(self._norm(compressed, f"{path}.kv_a_layernorm"), f"{path}.kv_b_proj")
        k, v = kv.view(len(x), heads, -1).transpose(0, 1).split([nope, c["v_head_dim"]], -1)
        q = torch.cat([q[..., :nope], _rotated(_halves(q[..., nope:]))], -1)
        k = torch.cat([k, _rotated(_halves(k_rope)).expand(heads, -1, -1)], -1)
        return self._linear(_attend(q, k, v, nope + rope), f"{path}.o_proj")


def _attend(q: Tensor, k: Tensor, v: Tensor, size: int) -> Tensor:
    """(heads, tokens, ·) → (tokens, heads · width)."""
    scores = q @ k.mT / math.sqrt(size)
    later = torch.ones(scores.shape[-2:]).triu(1).bool()
    return (scores.masked_fill(later, -math.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)


def _halves(x: Tensor) -> Tensor:
    """Pairs that lie side by side, put where a rotation of halves takes them."""
    return torch.cat([x[..., ::2], x[..., 1::2]], -1)


def _rotated(x: Tensor, base: float = 10000.0) -> Tensor:
    """Each pair (i, i + n/2) turned by its position times base^(−2i/n)."""
    size = x.shape[-1]
    rate = 1.0 / base ** (torch.arange(0, size, 2).float() / size)
    angle = torch.outer(torch.arange(x.shape[-2]).float(), rate)
    cos, sin = angle.cos().double(), angle.sin().double()
    one, two = x.split(size // 2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)
