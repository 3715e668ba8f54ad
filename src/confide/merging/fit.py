"""Whether models fit one another and their base: heads, base, and vocabulary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from confide.errors import MergeError

if TYPE_CHECKING:
    from confide.merging.inputs import Input, PublicBase

LOGITS = ("classifier.out_proj.weight", "classifier.weight", "score.weight")
"""What the layer that gives the logits is called."""


def check_heads(inputs: Sequence[Input]) -> None:
    """One head a task, as many logits as labels, and one family.

    Raises:
        MergeError: it isn't so; names the models.
    """
    owner: dict[str, Path] = {}
    for item in inputs:
        for head, weights in item.heads:
            if head.task in owner:
                raise MergeError(
                    f"two heads for task {head.task!r}, in {owner[head.task]} and {item.path}; a merge has "
                    "one head a task"
                )
            owner[head.task] = item.path
            logits = next((name for name in LOGITS if name in weights.names), None)
            if logits and head.labels and weights.shape(logits)[0] != len(head.labels):
                raise MergeError(
                    f"the head for task {head.task!r} in {item.path} gives {weights.shape(logits)[0]} logits "
                    f"({logits}), but its label space has {len(head.labels)}: {', '.join(head.labels)}"
                )
    prefixes = {item.prefix: item.path for item in inputs if item.heads}
    if len(prefixes) > 1:
        pairs = ", ".join(f"{name!r} in {path}" for name, path in prefixes.items())
        raise MergeError(f"the models are of different families: {pairs}")


def check_base(inputs: Sequence[Input], public: PublicBase) -> None:
    """Compare hashes: task vectors from another base mean nothing.

    Raises:
        MergeError: a model was trained from another base.
    """
    for item in inputs:
        if item.statement is None or item.statement.base.hash == public.hash:
            continue
        theirs = item.statement.base
        raise MergeError(
            f"{item.path} was trained from base {theirs.name} ({theirs.hash}), but the base of this merge is "
            f"{public.folder} ({public.hash}); models of different bases can't be merged"
        )


def check_vocabulary(inputs: Sequence[Input], base: Path) -> None:
    """Compare tokenizers, where they are in a form that tells.

    Raises:
        MergeError: a model's isn't the base's.
    """
    expected = _vocabulary(base)
    for item in inputs:
        theirs = _vocabulary(item.path)
        if expected is None or theirs is None or theirs == expected:
            continue
        odd = sorted(set(expected.items()) ^ set(theirs.items()))[0][0]
        raise MergeError(
            f"the tokenizer of {item.path} ({len(theirs)} tokens) isn't that of base {base} "
            f"({len(expected)} tokens): {odd!r} differs, so their embeddings can't be merged"
        )


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Token → id, where the tokenizer is in a form that tells; None otherwise."""
    file = folder / "tokenizer.json"
    if not file.exists():
        return None
    try:
        vocabulary = json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
    except (ValueError, KeyError, TypeError):
        raise MergeError(f"{file} can't be read as a tokenizer") from None
    if isinstance(vocabulary, list):
        return {str(token[0]): number for number, token in enumerate(vocabulary)}
    return dict(vocabulary)
