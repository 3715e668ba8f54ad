"""Opening a release again: a task model, or one task of a merge."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from confide.errors import ReleaseError
from confide.models.backbones import Classifier, load_body, load_trained
from confide.release import format
from confide.release.format import WEIGHTS, Head
from confide.release.write import verify


def load_release(folder: Path, task: str | None = None) -> tuple[Classifier, Head]:
    """The classifier of one task, checked against its statement.

    Args:
        folder: a release of `confide train` or `confide merge`.
        task: which head; may be left out when there is only one.

    Raises:
        ReleaseError: not a release, altered weights, or no such head.
    """
    folder = Path(folder)
    verify(folder)
    info = format.read(folder)
    head = info.head(task) if task is not None else info.only_head()
    if not head.labels and head.problem.target != "number":
        raise ReleaseError(
            f"{folder}: the head for {head.task} is no classifier; `confide export` writes its model, which "
            "transformers loads"
        )
    if info.kind == "model":
        return load_trained(folder, head.labels, head.problem), head
    classifier = load_body(folder, head.labels, head.problem)
    tensors = load_file(folder / "heads" / head.task / WEIGHTS)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    state = classifier.model.state_dict()
    for name in classifier.head:
        wanted = tuple(state[name].shape)
        if shapes.get(name) != wanted:
            raise ReleaseError(
                f"{folder}: the head of {head.task} needs {name} of shape {list(wanted)}, "
                f"but holds {shapes.get(name)}"
            )
        with torch.no_grad():
            state[name].copy_(tensors[name])
    return classifier, head
