"""Gaussian noise on clipped sums, drawn and added in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from confide.errors import PrivacyError
from confide.gradients.keys import KeyStream

_PAIRS = 1 << 13  # per block: what fits the processor's second-level cache
_NORMALS = 2 * _PAIRS

Floats = npt.NDArray[np.float64]


def add_noise(sums: Mapping[str, Tensor], std: float, stream: KeyStream) -> dict[str, Tensor]:
    """Add independent N(0, std²) to every value, in place.

    The noise is one long float64 vector that depends on the stream alone, laid over the tensors in the
    order of their names; not on threads, device or dtype. It is added in float64 before the result is
    rounded to the tensor's dtype.

    Args:
        sums: tensors by name, overwritten.
        std: noise standard deviation, σ·C, in gradient units.
        stream: the stream at this query's address (`Key.generator`). Used for this one call only.

    Returns:
        The noisy sums: the same tensors.

    Raises:
        PrivacyError: a standard deviation that is negative or not finite.
    """
    if not (math.isfinite(std) and std >= 0):
        raise PrivacyError(f"the noise's standard deviation must be finite and not negative, not {std}")
    if std == 0:
        return dict(sums)
    local = {name: value.detach().to("cpu").contiguous() for name, value in sums.items()}
    targets = [value.view(-1).numpy() for value in local.values()]
    ends = np.cumsum([target.size for target in targets])
    blocks = range(-(-int(ends[-1]) // _NORMALS) if targets else 0)
    workers = min(torch.get_num_threads(), len(blocks))

    def fill(worker: int) -> None:
        for block in blocks[worker::workers]:
            noise = normals(stream, block)
            noise *= std
            _lay(noise, block * _NORMALS, targets, ends)

    if workers > 1:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(fill, range(workers)))
    elif workers:
        fill(0)
    for name, value in sums.items():
        if value.data_ptr() != local[name].data_ptr():
            value.detach().copy_(local[name])
    return dict(sums)


def normals(stream: KeyStream, block: int) -> Floats:
    """Values block·2¹⁴ … of the stream's standard normal vector: (2¹⁴,) float64.

    Box and Muller (1958), from 64 bits for the radius and 64 for the angle of each pair. The largest value
    is 9.5, which an ideal normal exceeds once in 10²⁰ draws.
    """
    words = stream.words(block * _NORMALS, _NORMALS)
    radius = words[:_PAIRS].astype(np.float64)
    radius += 0.5
    radius *= 2.0**-64
    np.log(radius, out=radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    angle = words[_PAIRS:].view(np.int64).astype(np.float64)
    angle *= math.pi * 2.0**-63
    # torch's sine and cosine are vectorised in float64, numpy's are not.
    turn = torch.from_numpy(angle)
    pair = np.empty((2, _PAIRS))
    torch.cos(turn, out=torch.from_numpy(pair[0]))
    torch.sin(turn, out=torch.from_numpy(pair[1]))
    pair *= radius
    return pair.reshape(-1)


def _lay(noise: Floats, start: int, targets: list[Floats], ends: npt.NDArray[np.int64]) -> None:
    """Add `noise`, whose first value has index `start`, to whatever lies there."""
    stop = min(start + noise.size, int(ends[-1]))
    which = int(np.searchsorted(ends, start, side="right"))
    while start < stop:
        target, end = targets[which], int(ends[which])
        upto = min(stop, end)
        offset = end - target.size
        piece = target[start - offset : upto - offset]
        drawn, noise = noise[: upto - start], noise[upto - start :]
        drawn += piece
        piece[:] = drawn
        start, which = upto, which + 1
