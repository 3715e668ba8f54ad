"""Tiny language models of every kind with tokenizers trained on made-up texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 48,
    "initializer_range": 0.3,
}
_PAIR = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 48,
    "init_std": 0.3,
}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 48, "initializer_range": 0.3},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_SIZES, "num_key_value_heads": 1}),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {**_SIZES, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", _PAIR),
    "bert": ("BertForMaskedLM", "BertConfig", _SIZES),
}


def tokenizer_for(kind: str, texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte pairs of the texts, with the special tokens and the frame that a family has."""
    special = {
        "gpt2": {"eos_token": "<end>"},
        "llama": {"bos_token": "<s>", "eos_token": "</s>"},
        "qwen2": {"eos_token": "<end>", "pad_token": "<pad>"},
        "t5": {"pad_token": "<pad>", "eos_token": "</s>"},
        "bart": {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"},
        "bert": {
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "mask_token": "[MASK]",
        },
    }[kind]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(
        {letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter.isascii()} | {"Ġ", "Ċ"}
    )
    trainer = trainers.BpeTrainer(
        vocab_size=220, special_tokens=list(special.values()), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    frame = {
        "llama": "<s> $A",
        "t5": "$A </s>",
        "bart": "<s> $A </s>",
        "bert": "[CLS] $A [SEP]",
    }.get(kind)
    if frame:
        ids = [(token, tokenizer.token_to_id(token)) for token in special.values() if token in frame]
        tokenizer.post_processor = processors.TemplateProcessing(single=frame, special_tokens=ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=["input_ids", "attention_mask"], **special
    )


def save_base(kind: str, texts: Sequence[str], folder: Path) -> Path:
    """A random language model whose output layer isn't at its initial values, and its tokenizer."""
    name, config, sizes = KINDS[kind]
    tokenizer = tokenizer_for(kind, texts)
    tokens = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    tokens["decoder_start_token_id"] = {"t5": tokenizer.pad_token_id, "bart": tokenizer.eos_token_id}.get(
        kind
    )
    made_of = {**sizes, "vocab_size": len(tokenizer), **tokens}
    if kind == "bart":
        made_of["forced_eos_token_id"] = tokenizer.eos_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, name)(getattr(transformers, config)(**made_of))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
