"""Tiny bases of every family on disk, with a tokenizer that has been trained on a few sentences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tests.models.moe import vl2
from tests.models.moe.families import FAMILIES

from confide.models.moe.layers import sparse_layers


def save_base(family: str, texts: Sequence[str], folder: Path, seed: int = 0) -> Path:
    """A folder like any published base of the family.

    Args:
        texts: what the tokenizer is trained on.
    """
    words = tokenizer(texts, switch=family == "Switch")
    if family in vl2.SIZES:
        return vl2.write(folder, {**vl2.SIZES[family], "vocab_size": len(words)}, words, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = FAMILIES[family](vocab_size=len(words))
        with torch.no_grad():
            for layer in sparse_layers(model):  # some start at zero
                for parameter in layer.router.parameters():
                    parameter.normal_(std=0.5)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def tokenizer(texts: Sequence[str], *, switch: bool = False) -> Any:
    """Byte pairs as decoders have them, without a padding token; Switch has one, and ends its texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<pad>", "</s>"] if switch else ["</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(texts, trainer)
    if not switch:
        return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", made.token_to_id("</s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="<pad>")
