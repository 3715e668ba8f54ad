"""How far fine-tuning moved an encoder from its base, as a share of the base's length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from confide.errors import ModelError

_CHUNK = 1 << 20


def drift(base: Mapping[str, npt.NDArray[Any]], model: Mapping[str, npt.NDArray[Any]]) -> float:
    """‖w − w₀‖₂ / ‖w₀‖₂ over all tensors of an encoder together, summed in float64.

    Integer and boolean tensors are no parameters: they must be equal, and count for nothing.

    Args:
        base: w₀ by canonical name.
        model: w, the same names and shapes. bfloat16 comes as float32 (`Checkpoint.numpy`).

    Returns:
        0 for the base itself; no unit.

    Raises:
        ModelError: a tensor that only one of them has, of two shapes or kinds, or with a value that isn't
            finite; or a base that is zero everywhere.
    """
    for name in sorted(set(base) ^ set(model)):
        where = "base" if name in base else "model"
        raise ModelError(f"drift compares the same tensors, but {name} is only in the {where}")
    moved = length = 0.0
    for name in sorted(base):
        ours, theirs = model[name], base[name]
        if ours.shape != theirs.shape:
            raise ModelError(
                f"tensor {name} has shape {list(ours.shape)} in the model and "
                f"{list(theirs.shape)} in the base"
            )
        kinds = {np.issubdtype(array.dtype, np.floating) for array in (ours, theirs)}
        if kinds != {True}:
            if len(kinds) > 1 or not np.array_equal(ours, theirs):
                raise ModelError(f"tensor {name} holds integers that differ between the model and the base")
            continue
        tensor_moved, tensor_length = _squares(ours.reshape(-1), theirs.reshape(-1))
        if not math.isfinite(tensor_moved + tensor_length):
            raise ModelError(f"tensor {name} holds a value that is not finite")
        moved += tensor_moved
        length += tensor_length
    if length == 0:
        raise ModelError("drift is relative to the base, and the base is zero everywhere")
    return math.sqrt(moved / length)


def folder_drift(base: Path, model: Path) -> float:
    """`drift` of the encoder of one model folder from that of its base; heads don't count.

    A pooler that the model's classifier doesn't use, and so doesn't have, doesn't count either.

    Args:
        base: folder of the public base: config.json and safetensors.
        model: release of a task model or a merge, or any folder with the same encoder.

    Raises:
        ModelError: as in `drift`; or a folder without readable weights, or whose encoder can't be told from
            its head.
    """
    theirs, ours = _encoder(Path(base)), _encoder(Path(model))
    unused = [name for name in theirs if name.startswith("pooler.") and name not in ours]
    for name in unused:
        del theirs[name]
    return drift(theirs, ours)


def _encoder(folder: Path) -> dict[str, npt.NDArray[Any]]:
    from confide.release.names import encoder_prefix, encoder_tensors, model_type
    from confide.release.tensors import Checkpoint

    checkpoint = Checkpoint.open(folder)
    stored = encoder_tensors(checkpoint, encoder_prefix(checkpoint, model_type(folder)))
    return {name: checkpoint.numpy(where) for name, where in stored.items()}


def _squares(ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> tuple[float, float]:
    """‖w − w₀‖² and ‖w₀‖² of one flattened tensor."""
    moved = length = 0.0
    for start in range(0, ours.size, _CHUNK):
        origin = theirs[start : start + _CHUNK].astype(np.float64)
        length += float(np.dot(origin, origin))
        with np.errstate(invalid="ignore"):
            difference = ours[start : start + _CHUNK].astype(np.float64) - origin
        moved += float(np.dot(difference, difference))
    return moved, length
