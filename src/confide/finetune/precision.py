"""bfloat16 for the forward and the backward pass, on micro-batches of one shape.

Rounding depends on the shape of a batch: the processor adds up in another order. In float32 that moves a
record's gradient by about a millionth. In bfloat16 it would be about a hundredth, and then a record that
joins a draw would move the clipped gradients of all others a little, beyond what clipping bounds. So each
micro-batch has the same rows and the same width, whatever was drawn, and what a row computes is then bitwise
the same wherever it stands and whoever stands beside it. That is asked of the real model before training
(`check_every_place`). The width leaves room for padding in every row: where none has any, models leave their
mask out, and attention is another kernel, so that one short record would move all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from confide.errors import ModelError
from confide.finetune.binding import Batch, Binding
from confide.finetune.selfcheck import check_gradients, made_up_losses, rows_like
from confide.gradients.engine import Engine
from confide.models.backbones import Classifier, positions_of
from confide.models.tail import Features, Source
from confide.privacy.streams import Clipping, Schedule
from confide.tasks.text import Encoded, packs

_GRADIENT = 0.1  # relative; shapes differ, which moves a gradient by a hundredth; float32 shows what is finer
_SHORTEST = 6  # tokens


@dataclass(frozen=True)
class Shape:
    """Of every micro-batch.

    Attributes:
        rows: how many.
        width: tokens of each, padding included.
        room: most tokens of a record.
    """

    rows: int
    width: int
    room: int

    @classmethod
    def of(cls, width: int, room: int, *, tokens: int, expected: float, rows_per_unit: int) -> Shape:
        """As many rows as fit, or as are hardly ever exceeded by a draw; all of this is public.

        Args:
            width, room: of every micro-batch.
            tokens: of a micro-batch.
            expected: mean number of units in a draw.
            rows_per_unit: the most rows of a unit.
        """
        drawn = math.ceil(expected + 2 * math.sqrt(expected)) * rows_per_unit
        return cls(max(rows_per_unit, min(tokens // width, drawn)), width, room)

    def batch(self, inputs: Source) -> Callable[[npt.NDArray[np.int64]], Batch]:
        """Rows → inputs of this width. An image always has its own.

        Raises:
            ModelError: when called: a record is longer.
        """
        if not isinstance(inputs, Encoded | Features):
            return inputs.batch

        def call(rows: npt.NDArray[np.int64]) -> Batch:
            batch = inputs.batch(rows, width=self.width)
            too_wide = any(value.shape[1] != self.width for value in batch.values())
            if too_wide or bool(batch["attention_mask"][:, self.room :].any()):
                raise ModelError(
                    f"a record has more than {self.room} tokens, for which all micro-batches have room"
                )
            return batch

        return call


def width_and_room(classifier: Classifier, inputs: Source, max_length: int) -> tuple[int, int]:
    """Tokens of a micro-batch's rows, and of the longest record that there could be: public, unlike that of
    the longest there is.

    Raises:
        ModelError: the model has no position left for padding.
    """
    if isinstance(inputs, Features):  # `Tail` never leaves its mask out
        pooled = int(inputs.lengths.max(initial=1)) == 1
        return (1, 1) if pooled else (max_length, max_length)
    width = max_length + isinstance(inputs, Encoded)
    if isinstance(inputs, Encoded) and positions_of(classifier.model, width) < width:
        raise ModelError(
            f"bfloat16 needs one position more than max_length, for padding, but the model has {max_length}; "
            f"choose a max_length of {max_length - 1}"
        )
    return width, max_length


def in_bfloat16(
    binding: Binding,
    classifier: Classifier,
    inputs: Source,
    schedule: Schedule,
    *,
    tokens: int,
    max_length: int,
) -> Binding:
    """The same under autocast; with noise in micro-batches of one shape, once the model was asked about it.

    Args:
        inputs: what the binding reads.
        tokens: of a micro-batch.
        max_length: tokens of the longest record that there may be, public.

    Raises:
        ModelError: the model has experts, has no position for padding, or gives a row something else at
            another place; or the engine's gradients are far from autograd's.
    """
    refuse_experts(classifier.model)
    module, parameters = binding.module, binding.parameters
    forward = halved(module, binding.forward)
    if not schedule.private:
        return replace(binding, forward=forward)
    shape = Shape.of(
        *width_and_room(classifier, inputs, max_length),
        tokens=tokens,
        expected=max(stream.denominator for stream in schedule.streams),
        rows_per_unit=binding.units.rows_per_unit,
    )
    check_gradients(classifier, module, forward, parameters, inputs, _GRADIENT)
    check_every_place(classifier, module, forward, parameters, inputs, shape)
    return replace(
        binding,
        forward=forward,
        batch=shape.batch(inputs),
        micro_batches=lambda rows, position: packs(position, shape.rows),
        rows=shape.rows,
    )


def halved(module: nn.Module, forward: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
    """`forward` under autocast; what it returns is float32, and so are losses."""
    device = next(module.parameters()).device.type

    def call(batch: Batch) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            outputs = forward(batch)
        return outputs.float()

    return call


def check_every_place(
    classifier: Classifier,
    module: nn.Module,
    forward: Callable[[dict[str, Tensor]], Tensor],
    parameters: Mapping[str, nn.Parameter],
    inputs: Source,
    shape: Shape,
) -> None:
    """Put a made-up row first, in the middle and last in micro-batches of other rows.

    Its loss, and the norm of its gradient, must be bitwise the same: then rounding doesn't depend on who else
    was drawn. The kernels don't look at values, so that a few rows say what holds for all; but models look
    whether any row is padded, so the row is as long as can be, and so are all others of one micro-batch.

    Raises:
        ModelError: they aren't.
    """
    # The first pass is another one: there the engine finds out what acts entry by entry.
    places = [0, *sorted({0, shape.rows // 2, shape.rows - 1})]
    rng = np.random.default_rng(1)
    low = min(_SHORTEST, shape.room)
    lengths = rng.integers(low, shape.room + 1, 1 + len(places) * shape.rows)
    lengths[0] = lengths[-shape.rows :] = shape.room
    rows = rows_like(classifier, inputs, lengths)
    engine = Engine(module, parameters)
    found = []
    for number, place in enumerate(places):
        which = 1 + number * shape.rows + np.arange(shape.rows)
        which[place] = 0
        with engine:
            losses = made_up_losses(classifier, forward(shape.batch(rows)(which)), rows, which)
            norms = engine.add(losses, torch.arange(shape.rows), shape.rows, Clipping("flat", 1.0))
        engine.take()
        found.append((float(losses[place].detach()), float(norms[place])))
    if len(set(found[1:])) > 1:
        raise ModelError(
            "in bfloat16 a row's gradient depends on its place in the micro-batch on this machine (loss and "
            f"norm {found[1]} at the first place, {found[-1]} at the last), so that a record would move the "
            "gradients of others; train with precision float32"
        )


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
