"""Opening a release again: a task model, or one task of a merge."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from confide.models.backbones import Classifier, load_classifier
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
    classifier = load_classifier(folder, head.labels, seed=0)
    if info.kind == "merged":
        tensors = load_file(folder / "heads" / head.task / WEIGHTS)
        with torch.no_grad():
            for name in head.tensors:
                classifier.model.get_parameter(name).copy_(tensors[name])
    return classifier, head
