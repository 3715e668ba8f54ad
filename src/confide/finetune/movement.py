"""After the first steps: did every weight that is trained move?"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from confide.errors import ModelError

_LOOKED_AT = 256  # values of a tensor
_SEEN = 1e-4  # of the largest gradient; what is below may be rounding, as that of a key's bias


class Movement:
    """Where trained weights began, at a few values of each.

    A weight that stands still is trained by nothing, though every step is charged: the model computes with
    another tensor than the optimizer has, something puts it back, or its steps are smaller than its dtype
    can hold. At least half of the values must differ from the start. With noise that goes for every tensor,
    as noise reaches all of it; without, for what the gradient reached.

    Args:
        parameters: trained, by name.
        noisy: whether noise reaches all of them.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, noisy: bool) -> None:
        self._parameters = parameters
        self._start = {name: _sample(parameter) for name, parameter in parameters.items()}
        self._pushed = {name: torch.full_like(v, noisy, dtype=torch.bool) for name, v in self._start.items()}

    def note_gradients(self) -> None:
        """Remember what `.grad` will push."""
        found = {name: _sample(p.grad) for name, p in self._parameters.items() if p.grad is not None}
        largest = max((float(value.abs().max()) for value in found.values()), default=0.0)
        for name, value in found.items():
            self._pushed[name] |= value.abs() > _SEEN * largest

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer, when: str) -> None:
        """Compare with the start.

        Args:
            model: that computes the losses.
            when: for the message.

        Raises:
            ModelError: names the first tensor that stood still, and what can be seen of the reason.
        """
        held = {id(parameter) for parameter in model.parameters()}
        stepped = {id(value) for group in optimizer.param_groups for value in group["params"]}
        for name, parameter in self._parameters.items():
            if id(parameter) not in held:
                raise ModelError(
                    f"{name} isn't part of the model any more ({when}): its place was taken by another "
                    "tensor, so that training would move a copy; tie, move and convert models before training"
                )
            if id(parameter) not in stepped:
                raise ModelError(f"{name} isn't among what the optimizer moves ({when})")
            pushed = self._pushed[name]
            moved = (_sample(parameter) != self._start[name]) & pushed
            if 2 * int(moved.sum()) < int(pushed.sum()):
                raise ModelError(
                    f"{name} doesn't move: {when}, {int(moved.sum())} of {int(pushed.sum())} of its values "
                    "that were looked at differ from where they began. Its steps are smaller than "
                    f"{_name(parameter.dtype)} can hold (raise the learning rate), or something puts it back "
                    "(leave it out of what is trained)"
                )


def _sample(value: Tensor) -> Tensor:
    """A copy of at most `_LOOKED_AT` values, evenly spaced."""
    flat = value.detach().reshape(-1)
    return flat[:: -(-max(1, len(flat)) // _LOOKED_AT)].clone()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
