"""Making an agreement from settings, and refusing to train what contradicts one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from confide.errors import ConfigError
from confide.finetune.ascent import anchor_of
from confide.finetune.settings import Settings
from confide.privacy.statement import Base
from confide.release.agreement import Agreement, read
from confide.release.hashes import file_hash
from confide.release.write import TOKENIZER_FILES
from confide.tasks.records import TaskData


def agreement(settings: Settings, base: Base, folder: Path, tasks: Mapping[str, Sequence[str]]) -> Agreement:
    """The agreement to train with these settings.

    Args:
        base: the public model's identity.
        folder: where it is.
        tasks: labels by task; empty leaves them open.
    """
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
    ours = agreement(settings, base, folder, {}).terms()
    for key, value in found.terms().items():
        if ours.get(key) != value:
            raise ConfigError(
                f"{path}: {key} is agreed to be {value}, and this run has {ours.get(key)}; train as agreed, "
                "or agree anew"
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


def tokenizer_hash(folder: Path) -> str:
    """SHA-256 over names and content of the tokenizer's files."""
    total = hashlib.sha256(b"confide.tokenizer/1\n")
    for name in sorted(TOKENIZER_FILES):
        if (folder / name).exists():
            total.update(f"{name} {file_hash(folder / name)}\n".encode())
    return "sha256:" + total.hexdigest()
