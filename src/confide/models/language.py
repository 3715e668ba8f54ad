"""Language models among the bases: which objective one has, and which of its tensors are its head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from confide.errors import ModelError
from confide.models.moe.families import MIXTURES
from confide.release.format import Objective, Problem
from confide.release.names import DECODERS, OUTPUT, PREFIXES

if TYPE_CHECKING:
    from torch import nn


def with_objective(problem: Problem, config: Any, folder: Path) -> Problem:
    """The problem with the objective that a base has: an encoder fills masks, a decoder goes on.

    Args:
        config: transformers' configuration of the base.

    Raises:
        ModelError: the base is no language model, or not for records of this kind.
    """
    if problem.target != "text":
        return problem
    kind = config.model_type
    objective: Objective | None = None
    if kind in DECODERS:
        objective = "seq2seq" if config.is_encoder_decoder else "causal"
    elif kind in PREFIXES and _fills_masks(kind):
        objective = "masked"
    if objective is None:
        raise ModelError(
            f"{folder} holds a {kind!r} model, which is no language model that is known here; use a decoder "
            "such as GPT-2 or Llama, an encoder and decoder such as T5, or an encoder such as BERT"
        )
    if objective == "seq2seq" and problem.inputs != "pair":
        raise ModelError(
            f"{folder} holds a {kind!r} model, which writes one text for another; name the column of what it "
            "should write (target)"
        )
    if objective == "masked" and problem.inputs == "pair":
        raise ModelError(
            f"{folder} holds a {kind!r} model, which fills masks and writes no answers; learn the texts "
            "themselves (language_model), or use a decoder"
        )
    return problem.model_copy(update={"objective": objective})


def _fills_masks(kind: str) -> bool:
    from transformers.models.auto import modeling_auto as auto

    return kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES


def writes(config: Any) -> bool:
    """Whether a model with this configuration could generate, so that it takes `use_cache`."""
    return config.model_type in DECODERS


def save_generation(model: Any, folder: Path) -> None:
    """Write down how a language model ends its texts, as its base says; others have nothing to say."""
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def body_prefix(model: Any) -> str:
    """What a model puts before its body's names; nothing for a T5, which has no body of its own."""
    prefix = f"{model.base_model_prefix}."
    return prefix if any(name.startswith(prefix) for name, _ in model.named_parameters()) else ""


def tied(model: Any) -> frozenset[str]:
    """Names of tensors that are another one; transformers ties them when it loads."""
    return frozenset(getattr(model, "all_tied_weights_keys", None) or ())


def head_of(model: nn.Module, prefix: str, problem: Problem) -> tuple[str, ...]:
    """Names of what stands outside the body; of a language model buffers too, and nothing that is tied."""
    if problem.target != "text":
        return tuple(name for name, _ in model.named_parameters() if not name.startswith(prefix))
    outside = [name for name in model.state_dict() if name not in tied(model)]
    if prefix:
        return tuple(name for name in outside if not name.startswith(prefix))
    return tuple(name for name in outside if name.startswith(OUTPUT))


def padded(tokenizer: Any, model: Any, folder: Path) -> Any:
    """The tokenizer with a padding token, which the model's configuration names too.

    Where a decoder's has none it is the end of text: masked in attention and never a target, so that only
    its place matters, which is after a text's own tokens.

    Raises:
        ModelError: it has neither, or one that the model doesn't know.
    """
    config = model.config
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError(f"{folder}: the tokenizer has neither a padding token nor one that ends a text")
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id >= config.vocab_size:
        raise ModelError(
            f"{folder}: the padding token has number {tokenizer.pad_token_id}, but the model has "
            f"{config.vocab_size} tokens; give the tokenizer one of those, such as its end of text"
        )
    if getattr(config, "pad_token_id", None) is None or config.model_type in DECODERS.keys() | MIXTURES:
        config.pad_token_id = tokenizer.pad_token_id  # by which a decoder's classifier finds a text's end
    return tokenizer
