"""Tiny random models of every architecture in docs/architectures.md, with records of uneven length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from confide.gradients import losses

Record = dict[str, Tensor]
VOCABULARY, CLASSES, LENGTHS = 29, 3, (4, 7, 2, 7, 5)


@dataclass(frozen=True)
class Family:
    """An architecture, how its records are batched, and its loss.

    Attributes:
        name: as in the table.
        task: what is trained.
        build: a new model, evaluation mode, float64, random weights.
        records: one dict of tensors without batch dimension each.
        left: whether batches are padded on the left.
        loss: (model, batch) → (rows,).
        lora: last name components of the modules that LoRA adapts.
        saved: modules that are trained whole beside LoRA.
        tolerance: largest relative error.
    """

    name: str
    task: str
    build: Callable[[], nn.Module]
    records: Sequence[Record]
    loss: Callable[[nn.Module, Record], Tensor]
    lora: tuple[str, ...]
    saved: tuple[str, ...] = ()
    left: bool = False
    tolerance: float = 1e-9

    def batch(self, rows: Sequence[int]) -> Record:
        """Some records, padded to the longest of them."""
        picked = [self.records[row] for row in rows]
        return {key: _padded([record[key] for record in picked], key, self.left) for key in picked[0]}

    def __str__(self) -> str:
        return f"{self.name}: {self.task}"


def adapted(family: Family, model: nn.Module) -> nn.Module:
    """The model with LoRA (rslora for a change), B not zero."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=2,
        lora_alpha=4,
        lora_dropout=0.0,
        use_rslora=len(family.name) % 2 == 0,
        target_modules=list(family.lora),
        modules_to_save=list(family.saved) or None,
    )
    torch.manual_seed(3)
    found: nn.Module = get_peft_model(model, config).double()  # type: ignore[arg-type]
    for name, parameter in found.named_parameters():
        if "lora_B" in name:  # zero at first, which would hide the gradient of lora_A
            parameter.data.normal_(std=0.3)
    return found.eval()


def _padded(values: list[Tensor], key: str, left: bool) -> Tensor:
    if values[0].ndim != 1:
        return torch.stack(values)
    fill = losses.IGNORED if key in ("labels", "targets") else 0
    longest = max(len(value) for value in values)
    room = torch.full((len(values), longest), fill, dtype=values[0].dtype)
    for row, value in zip(room, values, strict=True):
        row[longest - len(value) :] = value if left else row[longest - len(value) :]
        row[: len(value)] = row[: len(value)] if left else value
    return room


def _model(kind: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(1)
        made: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**settings))
        for name, parameter in made.named_parameters():  # nothing may hide behind a zero or a one
            parameter.data += 0.1 * torch.randn_like(parameter) if parameter.ndim < 4 else 0.0
            assert parameter.numel(), name
        return made.double().eval()

    return build


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _ids(length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(3, VOCABULARY, (length,), generator=generator)


def _texts(*extra: str) -> list[Record]:
    generator = _generator()
    records = []
    for number, length in enumerate(LENGTHS):
        record = {
            "input_ids": _ids(length, generator),
            "attention_mask": torch.ones(length, dtype=torch.long),
        }
        if "label" in extra:
            record["label"] = torch.tensor(number % CLASSES)
        if "labels" in extra:
            record["labels"] = torch.randint(0, CLASSES, (length,), generator=generator)
        if "masked" in extra:
            keep = torch.arange(length) % 2 == 0
            record["labels"] = torch.where(keep, _ids(length, generator), losses.IGNORED)
        if "targets" in extra:
            record["targets"] = _ids(LENGTHS[-1 - number] + 1, generator)
        records.append(record)
    return records


def _images(size: int) -> list[Record]:
    generator = _generator()
    return [
        {
            "pixel_values": torch.randn(3, size, size, generator=generator, dtype=torch.float64),
            "label": torch.tensor(number % CLASSES),
        }
        for number in range(4)
    ]


def _classify(model: nn.Module, batch: Record) -> Tensor:
    inputs = {key: value for key, value in batch.items() if key != "label"}
    return losses.classification(model(**inputs).logits, batch["label"])


def _label_tokens(model: nn.Module, batch: Record) -> Tensor:
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    return losses.tokens(model(**inputs).logits, batch["labels"])


def _continue_anywhere(model: nn.Module, batch: Record) -> Tensor:
    """For models whose positions are relative, or follow from the mask."""
    logits = model(**batch, use_cache=False).logits
    return losses.causal(logits, batch["input_ids"], batch["attention_mask"])


def _continue(model: nn.Module, batch: Record) -> Tensor:
    mask = batch["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(**batch, position_ids=positions, use_cache=False).logits
    return losses.causal(logits, batch["input_ids"], mask)


def _translate(model: nn.Module, batch: Record) -> Tensor:
    labels = batch["targets"]
    start = torch.zeros_like(labels[:, :1])
    shifted = torch.cat([start, labels[:, :-1].clamp(min=0)], 1)
    logits = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        decoder_input_ids=shifted,
        use_cache=False,
    ).logits
    return losses.tokens(logits, labels)


def _embed_text(model: nn.Module, batch: Record) -> Tensor:
    return losses.regression(model(**batch).text_embeds, torch.ones(1, dtype=torch.float64))


_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "num_labels": CLASSES,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
_DECODER = _SMALL | {"num_key_value_heads": 1, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "num_labels": CLASSES,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6,
    "dropout_rate": 0.0,
}
_IMAGE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": CLASSES,
    "initializer_range": 0.3,
}
_ATTENTION = ("query", "value")
_PROJECTIONS = ("q_proj", "v_proj")


def _text(
    name: str, kind: str, config: str, changes: dict[str, Any], lora: tuple[str, ...], head: str
) -> Family:
    build = _model(kind, config, **(_SMALL | changes))
    return Family(name, "classification", build, _texts("label"), _classify, lora, (head,))


def _decoder(
    name: str, kind: str, task: str, changes: dict[str, Any], left: bool = True, tolerance: float = 1e-7
) -> Family:
    build = _model(f"{kind}ForCausalLM", f"{kind}Config", **(_DECODER | changes))
    return Family(name, task, build, _texts(), _continue, _PROJECTIONS, left=left, tolerance=tolerance)


def _image(
    name: str,
    kind: str,
    config: str,
    settings: dict[str, Any],
    lora: tuple[str, ...] = _PROJECTIONS,
    size: int = 8,
) -> Family:
    build = _model(kind, config, **settings)
    return Family(name, "image classification", build, _images(size), _classify, lora, ("classifier",))


FAMILIES = [
    _text("BERT", "BertForSequenceClassification", "BertConfig", {}, _ATTENTION, "classifier"),
    Family(
        "BERT",
        "masked language model, tied",
        _model("BertForMaskedLM", "BertConfig", **_SMALL),
        _texts("masked"),
        _label_tokens,
        _ATTENTION,
    ),
    _text(
        "DistilBERT",
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24},
        ("q_lin", "v_lin"),
        "classifier",
    ),
    _text("RoBERTa", "RobertaForSequenceClassification", "RobertaConfig", {}, _ATTENTION, "classifier"),
    _text(
        "ALBERT",
        "AlbertForSequenceClassification",
        "AlbertConfig",
        {"embedding_size": 8},
        _ATTENTION,
        "classifier",
    ),
    _text("MPNet", "MPNetForSequenceClassification", "MPNetConfig", {}, ("q", "v"), "classifier"),
    _text(
        "ModernBERT",
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        {
            "global_attn_every_n_layers": 2,
            "local_attention": 4,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        ("Wqkv",),
        "classifier",
    ),
    _text(
        "ELECTRA",
        "ElectraForSequenceClassification",
        "ElectraConfig",
        {"embedding_size": 8},
        _ATTENTION,
        "classifier",
    ),
    _text(
        "DeBERTa-v3",
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        {
            "relative_attention": True,
            "position_buckets": 4,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "max_relative_positions": -1,
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
        ("query_proj", "value_proj"),
        "classifier",
    ),
    Family(
        "T5",
        "encoder, token labels",
        _model("T5ForTokenClassification", "T5Config", **_T5),
        _texts("labels"),
        _label_tokens,
        ("q", "v"),
        ("classifier",),
    ),
    Family(
        "T5",
        "encoder-decoder, tied",
        _model("T5ForConditionalGeneration", "T5Config", **_T5, tie_word_embeddings=True),
        _texts("targets"),
        _translate,
        ("q", "v"),
    ),
    Family(
        "GPT-2",
        "causal language model, tied",
        _model(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCABULARY,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=16,
            initializer_range=0.3,
        ),
        _texts(),
        _continue,
        ("c_attn",),
        left=True,
    ),
    _decoder("Llama", "Llama", "causal language model", {}),
    _decoder("Llama", "Llama", "causal language model, tied", {"tie_word_embeddings": True}),
    _decoder("Llama", "Llama", "the same, padded right", {"tie_word_embeddings": True}, False, 1e-9),
    _decoder("Qwen2", "Qwen2", "causal language model, tied", {"tie_word_embeddings": True}),
    _decoder("Qwen3", "Qwen3", "causal language model", {}),
    _decoder("Gemma", "Gemma", "causal language model, tied", {}),
    _decoder("Mistral", "Mistral", "causal language model", {}),
    _decoder(
        "Mixtral",
        "Mixtral",
        "causal language model",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    ),
    Family(
        "BLOOM",
        "causal language model, tied, padded right",
        _model(
            "BloomForCausalLM",
            "BloomConfig",
            vocab_size=VOCABULARY,
            hidden_size=16,
            n_layer=2,
            n_head=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        _texts(),
        _continue_anywhere,
        ("query_key_value",),
    ),
    Family(
        "BART",
        "encoder-decoder, tied",
        _model(
            "BartForConditionalGeneration",
            "BartConfig",
            vocab_size=VOCABULARY,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_position_embeddings=16,
            dropout=0.0,
            scale_embedding=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            forced_eos_token_id=2,
        ),
        _texts("targets"),
        _translate,
        _PROJECTIONS,
    ),
    _image("ViT", "ViTForImageClassification", "ViTConfig", _IMAGE),
    _image("DeiT", "DeiTForImageClassification", "DeiTConfig", _IMAGE),
    _image(
        "DINOv2",
        "Dinov2ForImageClassification",
        "Dinov2Config",
        _IMAGE | {"mlp_ratio": 2, "layerscale_value": 0.5},
    ),
    _image(
        "CLIP",
        "CLIPForImageClassification",
        "CLIPConfig",
        {"vision_config": _IMAGE, "num_labels": CLASSES},
    ),
    Family(
        "CLIP",
        "text embedding",
        _model("CLIPTextModelWithProjection", "CLIPTextConfig", **_SMALL, projection_dim=8, eos_token_id=2),
        _texts(),
        _embed_text,
        _PROJECTIONS,
    ),
    _image(
        "Swin",
        "SwinForImageClassification",
        "SwinConfig",
        {
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 2,
            "image_size": 16,
            "patch_size": 2,
            "drop_path_rate": 0.0,
            "num_labels": CLASSES,
        },
        size=16,
    ),
    _image(
        "ConvNeXt",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {
            "hidden_sizes": [8, 12],
            "depths": [1, 2],
            "num_stages": 2,
            "image_size": 16,
            "layer_scale_init_value": 0.5,
            "num_labels": CLASSES,
        },
        ("pwconv1", "pwconv2"),
        size=16,
    ),
]
