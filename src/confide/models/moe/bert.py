"""BERT with experts in some of its blocks, in the layout that transformers uses for such models.

No published checkpoint has this form; `upcycle` makes one out of a dense BERT. Importing this module makes
the Auto classes of transformers know it, so that it loads like any other, without code from a folder.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, BertConfig
from transformers.activations import ACT2FN
from transformers.integrations import use_experts_implementation
from transformers.models.bert.modeling_bert import (
    BertEmbeddings,
    BertEncoder,
    BertForSequenceClassification,
    BertLayer,
    BertModel,
    BertPooler,
)

MODEL_TYPE = "moe_bert"
_FEW = 16


@strict
class MoeBertConfig(BertConfig):  # type: ignore[misc]
    """A BERT's configuration and its experts'.

    Attributes:
        num_experts: E.
        num_experts_per_tok: k.
        sparse_blocks: numbers of the blocks whose feed-forward part is experts.
    """

    model_type = MODEL_TYPE

    num_experts: int = 8
    num_experts_per_tok: int = 1
    sparse_blocks: list[int] | tuple[int, ...] = (1, 3, 5)


class MoeBertRouter(nn.Module):
    """The k experts that a token is nearest to, with softmax weights that add up to 1."""

    def __init__(self, config: MoeBertConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens, width) → logits (tokens, E), weights (tokens, k), experts (tokens, k)."""
        logits = functional.linear(tokens, self.weight)
        weight, expert = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).topk(
            self.top_k, dim=-1
        )
        return logits, (weight / weight.sum(-1, keepdim=True)).to(logits.dtype), expert


@use_experts_implementation(has_gate=False, has_bias=True)
class MoeBertExperts(nn.Module):
    """E feed-forward networks with stacked weights."""

    def __init__(self, config: MoeBertConfig) -> None:
        super().__init__()
        count, width, inner = config.num_experts, config.hidden_size, config.intermediate_size
        self.num_experts = count
        self.up_proj = nn.Parameter(torch.empty(count, inner, width))
        self.up_proj_bias = nn.Parameter(torch.empty(count, inner))
        self.down_proj = nn.Parameter(torch.empty(count, width, inner))
        self.down_proj_bias = nn.Parameter(torch.empty(count, width))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(tokens, width), (tokens, k), (tokens, k) → (tokens, width)."""
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            slot, token = torch.eq(top_k_index.T, expert).nonzero(as_tuple=True)
            if not len(token):
                continue
            # A product of very few rows may round otherwise than one of many, as a dense layer's is.
            filling = torch.arange(max(min(_FEW, len(out)) - len(token), 0), device=token.device)
            rows = hidden_states[torch.cat([token, filling])]
            inner = self.act_fn(functional.linear(rows, self.up_proj[expert], self.up_proj_bias[expert]))
            answer = functional.linear(inner, self.down_proj[expert], self.down_proj_bias[expert])
            weight = top_k_weights[token, slot, None]
            out.index_add_(0, token, (answer[: len(token)] * weight).to(out.dtype))
        return out


class MoeBertBlock(nn.Module):
    """Router and experts."""

    def __init__(self, config: MoeBertConfig) -> None:
        super().__init__()
        self.gate = MoeBertRouter(config)
        self.experts = MoeBertExperts(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, length, width) → the same."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        _, weight, expert = self.gate(tokens)
        return self.experts(tokens, expert, weight).view_as(hidden)  # type: ignore[no-any-return]


class MoeBertLayer(BertLayer):  # type: ignore[misc]
    """A BERT block whose feed-forward part is experts."""

    def __init__(self, config: MoeBertConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        del self.intermediate, self.output.dense
        self.mlp = MoeBertBlock(config)

    def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
        """(rows, length, width) → the same."""
        hidden = self.output.dropout(self.mlp(attention_output))
        return self.output.LayerNorm(hidden + attention_output)  # type: ignore[no-any-return]


class _WithExperts:
    config_class = MoeBertConfig
    # Else a parent class that has no experts, once asked, answers for this one as well.
    _can_set_experts_implementation_cached_value = True

    def get_correct_experts_implementation(self, requested: str | None) -> str:
        """`eager` unless another is asked for: it alone gives the dense model's very bits."""
        return super().get_correct_experts_implementation(requested or "eager")  # type: ignore[misc,no-any-return]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[misc]
        config: MoeBertConfig = self.config  # type: ignore[attr-defined]
        if isinstance(module, MoeBertExperts | MoeBertRouter):
            for name, parameter in module.named_parameters(recurse=False):
                if getattr(parameter, "_is_hf_initialized", False):
                    continue
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)
                else:
                    nn.init.normal_(parameter, std=config.initializer_range)


class MoeBertModel(_WithExperts, BertModel):  # type: ignore[misc]
    """`BertModel` with experts in `config.sparse_blocks`."""

    def __init__(self, config: MoeBertConfig, add_pooling_layer: bool = True) -> None:
        super(BertModel, self).__init__(config)
        self.config = config
        self.gradient_checkpointing = False
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        for number in config.sparse_blocks:
            self.encoder.layer[number] = MoeBertLayer(config, number)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        self.post_init()


class MoeBertForSequenceClassification(_WithExperts, BertForSequenceClassification):  # type: ignore[misc]
    """`BertForSequenceClassification` with experts in `config.sparse_blocks`."""

    def __init__(self, config: MoeBertConfig) -> None:
        super(BertForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.config = config
        self.bert: Any = MoeBertModel(config)
        rate = config.classifier_dropout
        self.dropout = nn.Dropout(config.hidden_dropout_prob if rate is None else rate)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


AutoConfig.register(MODEL_TYPE, MoeBertConfig, exist_ok=True)
AutoModel.register(MoeBertConfig, MoeBertModel, exist_ok=True)
AutoModelForSequenceClassification.register(MoeBertConfig, MoeBertForSequenceClassification, exist_ok=True)
