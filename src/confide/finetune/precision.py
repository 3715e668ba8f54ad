"""bfloat16 for the forward and the backward pass, on micro-batches of one shape.

Rounding depends on the shape of a batch: the processor adds up in another order. In float32 that moves a
record's gradient by about a millionth. In bfloat16 it would be about a hundredth, and then a record that
joins a draw would move the clipped gradients of all others a little, beyond what clipping bounds. So each
micro-batch has the same rows and the same width, whatever was drawn, and what a row computes is then bitwise
the same wherever it stands and whoever stands beside it. That is asked of the real model before training
(`selfcheck.check_every_place`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from confide.errors import ModelError
from confide.models.tail import Features, Source
from confide.tasks.text import Encoded

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """Of every micro-batch.

    Attributes:
        rows: how many.
        width: tokens of each, padding included.
    """

    rows: int
    width: int

    @classmethod
    def of(cls, width: int, *, tokens: int, expected: float, rows_per_unit: int) -> Shape:
        """As many rows as fit, or as are hardly ever exceeded by a draw; all of this is public.

        Args:
            width: tokens of the longest record.
            tokens: of a micro-batch.
            expected: mean number of units in a draw.
            rows_per_unit: the most rows of a unit.
        """
        drawn = math.ceil(expected + 2 * math.sqrt(expected)) * rows_per_unit
        return cls(max(rows_per_unit, min(tokens // width, drawn)), width)

    def batch(self, inputs: Source) -> Callable[[npt.NDArray[np.int64]], Batch]:
        """Rows → inputs of this width. An image always has its own."""
        if isinstance(inputs, Encoded | Features):
            return partial(inputs.batch, width=self.width)
        return inputs.batch


def width_of(inputs: Source, max_length: int) -> int:
    """Tokens of the longest record that there could be: public, unlike that of the longest there is."""
    if isinstance(inputs, Features) and int(inputs.lengths.max(initial=1)) == 1:
        return 1  # the pooler's input
    return max_length


def in_bfloat16(module: nn.Module, forward: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
    """`forward` under autocast; what it returns is float32, and so are losses."""
    device = next(module.parameters()).device.type

    def call(batch: Batch) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            outputs = forward(batch)
        return outputs.float()

    return call


def refuse_experts(model: nn.Module) -> None:
    """A mixture of experts stays in float32.

    Raises:
        ModelError: the model has a layer of experts.
    """
    for path, module in model.named_modules():
        if "experts" in module._modules:
            raise ModelError(
                f"{path} has experts, whose routing bfloat16's rounding flips; train this base with "
                "precision float32"
            )
