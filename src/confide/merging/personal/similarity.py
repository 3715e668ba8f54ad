"""How similar a task is to others, from released heads or from vectors of their descriptions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from confide.errors import MergeError
from confide.merging.personal import file
from confide.merging.personal.file import Heads
from confide.merging.personal.inputs import open_model
from confide.release.tensors import decode

_HIDDEN = ("dense", "pre_classifier")


def normalised(similarities: Sequence[float]) -> tuple[float, ...]:
    """Weights from similarities: clipped at 0, summing to 1; all 0 if no similarity is positive.

    Raises:
        MergeError: a similarity that isn't finite.
    """
    if not np.isfinite(similarities).all():
        raise MergeError("a similarity isn't finite")
    clipped = np.maximum(np.asarray(similarities, np.float64), 0)
    total = float(clipped.sum())
    return tuple(float(value) / total if total else 0.0 for value in clipped)


def cosines(one: npt.NDArray[Any], others: Sequence[npt.NDArray[Any]]) -> tuple[float, ...]:
    """Cosine of one vector with each of the others; 0 with a zero vector. Shapes are flattened.

    Raises:
        MergeError: vectors of different sizes.
    """

    def unit(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        flat = values.reshape(-1).astype(np.float64)
        return flat / (float(np.linalg.norm(flat)) or 1.0)

    if any(other.size != one.size for other in others):
        raise MergeError(
            f"vectors of {one.size} and {sorted({o.size for o in others})} numbers have no cosine"
        )
    return tuple(float(unit(one) @ unit(other)) for other in others)


def head_similarities(head: Path, personal: Sequence[Path]) -> tuple[float, ...]:
    """Cosine of a new task's head with that of each personal file, by the weights of their hidden layer.

    The hidden layer (`classifier.dense` of RoBERTa) has the same shape whatever the number of classes. A
    linear head has none, and two linear heads over different labels have nothing to compare.

    Args:
        head: release folder of a model of the new task.
        personal: the files.

    Raises:
        MergeError: a head without a hidden layer, or with another shape.
    """
    task = open_model(head)
    return cosines(_hidden(head, task.heads()), [_hidden(path, file.read(path).heads) for path in personal])


def _hidden(path: Path, heads: Heads) -> npt.NDArray[Any]:
    for name, (dtype, _, stored) in heads.items():
        if name.endswith(".weight") and name.split(".")[-2] in _HIDDEN:
            return decode(stored, dtype)
    raise MergeError(
        f"the head in {path} is linear ({', '.join(sorted(heads))}): heads with other labels can't be "
        "compared by it; compare descriptions of the tasks"
    )
