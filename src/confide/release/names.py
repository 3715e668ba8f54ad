"""Which tensors of a checkpoint are the encoder, and what the plain encoder class calls them.

The same encoder is saved in several forms: alone (`encoder.layer.0…`), inside a classifier
(`bert.encoder.layer.0…` beside `classifier.weight`), by old versions with other names. All are read under one
canonical set of names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from confide.errors import ModelError
from confide.release import vl2
from confide.release.tensors import Checkpoint

PREFIXES: Mapping[str, str] = {
    "albert": "albert.",
    "bert": "bert.",
    "camembert": "roberta.",
    "deberta": "deberta.",
    "deberta-v2": "deberta.",
    "deepseek_ocr2_text": "model.",
    "deepseek_v2": "model.",
    "deepseek_v3": "model.",
    "deit": "deit.",
    "dinov2": "dinov2.",
    "distilbert": "distilbert.",
    "electra": "electra.",
    "gpt_oss": "model.",
    "granitemoe": "model.",
    "llama4_text": "model.",
    "mixtral": "model.",
    "modernbert": "model.",
    "moe_bert": "bert.",
    "mpnet": "mpnet.",
    "olmoe": "model.",
    "qwen2_moe": "model.",
    "qwen3_moe": "model.",
    "roberta": "roberta.",
    "switch_transformers": "switch_transformers.",
    "vit": "vit.",
    "xlm-roberta": "roberta.",
}
"""What a classifier of each `model_type` puts before its encoder's names (base_model_prefix)."""

DECODERS: Mapping[str, str] = {
    "bart": "model.",
    "bloom": "transformer.",
    "falcon": "transformer.",
    "gemma": "model.",
    "gemma2": "model.",
    "gemma3_text": "model.",
    "gpt2": "transformer.",
    "gpt_neo": "transformer.",
    "gpt_neox": "gpt_neox.",
    "gptj": "transformer.",
    "granite": "model.",
    "llama": "model.",
    "marian": "model.",
    "mbart": "model.",
    "mistral": "model.",
    "mt5": "",
    "olmo": "model.",
    "olmo2": "model.",
    "opt": "model.",
    "pegasus": "model.",
    "phi": "model.",
    "phi3": "model.",
    "qwen2": "model.",
    "qwen3": "model.",
    "smollm3": "model.",
    "stablelm": "model.",
    "starcoder2": "model.",
    "t5": "",
}
"""The same of models that write texts: decoders, and pairs of an encoder and a decoder."""

OUTPUT = "lm_head."
"""What the output layer's names begin with, where there is no prefix that the body's would have."""
CLASSES: Mapping[str, str] = {
    "deepseek_ocr2_text": "confide.models.moe.deepseek_vl2",
    "granitemoe": "confide.models.moe.classifiers",
    "llama4_text": "confide.models.moe.classifiers",
    "moe_bert": "confide.models.moe.bert",
    "olmoe": "confide.models.moe.classifiers",
    "switch_transformers": "confide.models.moe.classifiers",
}
"""Modules that tell the Auto classes of transformers a family's classifier, which they don't know."""

_RENAMED = (
    (re.compile(r"LayerNorm\.gamma$"), "LayerNorm.weight"),
    (re.compile(r"LayerNorm\.beta$"), "LayerNorm.bias"),
)
_CONSTANT_BUFFERS = ("position_ids", "token_type_ids")


def model_config(folder: Path) -> dict[str, Any]:
    """What a model folder's config.json says; of a DeepSeek-VL2, what it says of its language model.

    Raises:
        ModelError: no config.json, one that names no family, or a language model that can't be told.
    """
    file = Path(folder) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        family = str(config["model_type"])
    except FileNotFoundError:
        raise ModelError(f"{folder} is not a model folder: it has no config.json") from None
    except (ValueError, KeyError, TypeError):
        raise ModelError(f"{file} can't be read, or names no model_type") from None
    found: dict[str, Any] = vl2.language_model(config, file) if family == vl2.MODEL_TYPE else config
    return found


def model_type(folder: Path) -> str:
    """The `model_type` of a model folder's config.json; of a DeepSeek-VL2, that of its language model.

    Raises:
        ModelError: as `model_config`.
    """
    return str(model_config(folder)["model_type"])


def encoder_prefix(checkpoint: Checkpoint, family: str) -> str:
    """What stands before the encoder's names in a checkpoint; empty if it holds the plain encoder.

    Args:
        checkpoint: of a plain encoder, or of any model built on one.
        family: its `model_type`.

    Raises:
        ModelError: a family whose prefix isn't known here.
    """
    known = {**PREFIXES, **DECODERS}
    if family not in known:
        raise ModelError(
            f"{checkpoint.path}: model_type {family!r} isn't one whose encoder can be told from its head; "
            f"known: {', '.join(sorted(known))}"
        )
    prefix = known[family]
    for before in (prefix, vl2.PREFIX + prefix):
        if any(name.startswith(before) for name in checkpoint.names):
            return before
    return ""


def encoder_tensors(checkpoint: Checkpoint, prefix: str, heads: Collection[str] = ()) -> dict[str, str]:
    """Canonical name → name in the checkpoint, for every tensor of the encoder, in canonical order.

    With a prefix, whatever doesn't begin with it is a head; without one, everything is the encoder but
    `heads`. The pooler is the encoder's. Left out are buffers that hold nothing but a constant of the
    architecture (`embeddings.position_ids` = 0, 1, 2, …; `token_type_ids` = 0): old versions of
    transformers saved them and new ones don't, so they would make two copies of one base look different.
    A buffer of that name with any other content is kept.

    Raises:
        ModelError: two tensors with one canonical name, or no encoder at all.
    """
    found: dict[str, str] = {}
    for stored in checkpoint.names:
        if stored in heads or not stored.startswith(prefix) or _is_constant(checkpoint, stored):
            continue
        name = canonical(stored.removeprefix(prefix))
        if name in found:
            raise ModelError(f"{checkpoint.path}: tensors {found[name]} and {stored} are the same parameter")
        found[name] = stored
    if not found:
        raise ModelError(
            f"{checkpoint.path} holds no tensor of an encoder (names that begin with {prefix!r})"
        )
    return dict(sorted(found.items()))


def offset(names: Collection[str], reference: Collection[str]) -> str:
    """What stands before a reference's names in another model of the family, such as `model.`; often nothing.

    Args:
        names: of the other model's tensors, heads left out.
        reference: the names without it.
    """
    known = set(reference)
    if not known.isdisjoint(names):
        return ""
    for prefix in sorted({name.split(".", 1)[0] + "." for name in names}):
        if any(name.removeprefix(prefix) in known for name in names if name.startswith(prefix)):
            return prefix
    return ""


def canonical(name: str) -> str:
    """Today's name of an encoder tensor; LayerNorm's `gamma` and `beta` are the names TensorFlow gave."""
    for old, new in _RENAMED:
        name = old.sub(new, name)
    return name


def _is_constant(checkpoint: Checkpoint, name: str) -> bool:
    if name.rsplit(".", 1)[-1] not in _CONSTANT_BUFFERS or checkpoint.dtype(name) not in ("I64", "I32"):
        return False
    values = checkpoint.stored(name)
    return not values.any() or bool(np.array_equal(values, np.arange(len(values))))
