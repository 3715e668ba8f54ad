"""Gaussian noise on clipped sums, drawn and added in float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

_BLOCK = 1 << 16


def add_noise(sums: Mapping[str, Tensor], std: float, generator: np.random.Generator) -> dict[str, Tensor]:
    """Add independent N(0, std²) to every value.

    Normals are float64, so the tail isn't cut where float32 ends (5.77 σ), and they are added in
    float64 before the result is rounded to the tensor's dtype.

    Args:
        sums: tensors by name; the order of the names is the order of drawing.
        std: noise standard deviation, σ·C, in gradient units.
        generator: the stream at this query's address (`Key.generator`).

    Returns:
        The noisy sums, in new tensors of the same dtypes.
    """
    noisy: dict[str, Tensor] = {}
    for name, value in sums.items():
        result = value.detach().to("cpu", copy=True).contiguous()
        if std > 0:
            flat = result.view(-1).numpy()
            for start in range(0, flat.size, _BLOCK):
                block = flat[start : start + _BLOCK]
                normal = generator.standard_normal(block.size)
                normal *= std
                normal += block
                block[:] = normal
        noisy[name] = result.to(value.device)
    return noisy
