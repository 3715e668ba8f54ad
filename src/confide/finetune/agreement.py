"""Making an agreement from settings, and refusing to train what contradicts one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from confide.errors import ConfigError
from confide.finetune.ascent import anchor_of
from confide.finetune.experts import chooses_by_entropy
from confide.finetune.settings import Settings
from confide.privacy.statement import Base
from confide.release.agreement import Agreement, read
from confide.release.hashes import file_hash
from confide.release.write import TOKENIZER_FILES
from confide.tasks.records import TaskData

_OWN = {"public", "steps", "learning_rate", "diagnostics"}
"""Settings of experts that stay everybody's own."""


def agreement(settings: Settings, base: Base, folder: Path, tasks: Mapping[str, Sequence[str]]) -> Agreement:
    """The agreement to train with these settings.

    Args:
        base: the public model's identity.
        folder: where it is.
        tasks: labels by task; empty leaves them open.

    Raises:
        ConfigError: each would choose the layer whose experts are trained, and they may choose others.
    """
    experts = None
    if settings.method == "raptor":
        if chooses_by_entropy(settings.experts):
            raise ConfigError(
                "an agreement names the layer whose experts are trained: first, last, or the number of a "
                "block. By entropy everybody might choose another; find it once, with `confide moe routing`"
            )
        experts = settings.experts.model_dump(mode="json", exclude=_OWN)
    return Agreement(
        base=base.name,
        base_hash=base.hash,
        tokenizer=tokenizer_hash(folder),
        max_length=settings.max_length,
        trainable=settings.trainable.model_dump(mode="json"),
        clipping=settings.clipping,
        clipping_bound=settings.clipping_bound,
        anchor=anchor_of(settings, encoder=True),
        anchor_form=settings.anchor_form,
        experts=experts,
        tasks={task: tuple(labels) for task, labels in tasks.items()},
    )


def agreed(settings: Settings, task: TaskData, base: Base, folder: Path) -> Agreement | None:
    """The agreement that the settings name, if this run keeps to it.

    Raises:
        ConfigError: it doesn't; names the key and both values.
    """
    if settings.agreement is None:
        return None
    path = settings.agreement
    found = read(path)
    made = agreement(settings, base, folder, {})
    if (found.experts is None) != (made.experts is None):
        raise ConfigError(
            f"{path} is about {_kind(found)}, and this run trains {_kind(made)}; choose the method that was "
            "agreed, or agree anew"
        )
    ours, theirs = made.terms(), found.terms()
    for key in (*theirs, *(key for key in ours if key.startswith("experts.") and key not in theirs)):
        if ours.get(key) != theirs.get(key):
            raise ConfigError(
                f"{path}: {key} is agreed to be {theirs.get(key)}, and this run has {ours.get(key)}; train "
                "as agreed, or agree anew"
            )
    if not found.tasks:
        return found
    if task.name not in found.tasks:
        raise ConfigError(f"{path}: tasks are agreed to be {', '.join(found.tasks)}, and this is {task.name}")
    if found.tasks[task.name] != task.labels:
        raise ConfigError(
            f"{path}: tasks.{task.name} is agreed to have the labels {', '.join(found.tasks[task.name])}, in "
            f"this order, and this run has {', '.join(task.labels)}"
        )
    return found


def _kind(agreement: Agreement) -> str:
    return "a dense model" if agreement.experts is None else "a mixture of experts"


def tokenizer_hash(folder: Path) -> str:
    """SHA-256 over names and content of the tokenizer's files."""
    total = hashlib.sha256(b"confide.tokenizer/1\n")
    for name in sorted(TOKENIZER_FILES):
        if (folder / name).exists():
            total.update(f"{name} {file_hash(folder / name)}\n".encode())
    return "sha256:" + total.hexdigest()
