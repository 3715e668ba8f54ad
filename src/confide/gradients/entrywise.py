"""Per-row gradients of parameters that act entry by entry: a scale or a shift, broadcast over rows.

If every output entry depends on one entry of the parameter at most, that at its own place once the two are
broadcast, the Jacobian is one number per output entry, D, and the derivative along a vector of ones is D. A
row's gradient is then the sum of D·g over what the parameter was broadcast over. Covers RMSNorm in all its
spellings, layer scales, class tokens and position embeddings without knowing them. That a parameter acts in
this way is found out by a random direction t, along which the derivative must be D·t: for any other Jacobian
such t have probability zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.autograd import forward_ad

Call = Callable[[Mapping[str, Tensor]], Tensor]
"""Parameters by name → the output (rows·k, …)."""

_ROUNDINGS = 16


def gradient(call: Call, name: str, weight: Tensor, g: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Gradients (rows, *weight.shape), and the output again.

    Args:
        call: the module on its inputs.
        name: of the parameter, which acts entry by entry (`acts`).
        weight: its value.
        g: output gradient (rows·k, …).
        rows: number of rows.
    """
    output, scale = _along(call, name, weight, torch.ones_like(weight))
    if scale is None:
        return g.new_zeros((rows, *weight.shape)), output
    own = _aligned(weight.shape, g.shape)
    assert own is not None
    over = [dim for dim in range(1, g.ndim) if own[dim] == 1 and g.shape[dim] != 1]
    values = scale * g
    values = values.sum(over) if over else values
    return values.reshape(rows, -1, weight.numel()).sum(1).view(rows, *weight.shape), output


def acts(call: Call, name: str, weight: Tensor, shape: torch.Size) -> bool:
    """Whether this parameter acts entry by entry on an output of this shape."""
    if _aligned(weight.shape, shape) is None:
        return False
    random = torch.Generator().manual_seed(0)
    t = torch.randn(weight.shape, generator=random, dtype=torch.float64).to(weight.device, weight.dtype)
    try:
        scale, along = (_along(call, name, weight, to)[1] for to in (torch.ones_like(weight), t))
    except (RuntimeError, NotImplementedError):  # an operation without a forward derivative
        return False
    if scale is None or along is None:
        return scale is along
    expected = scale * t
    error = (along - expected).abs()
    return bool((error <= _ROUNDINGS * torch.finfo(expected.dtype).eps * expected.abs()).all())


def _along(call: Call, name: str, weight: Tensor, direction: Tensor) -> tuple[Tensor, Tensor | None]:
    """The output, and its derivative; None where it is zero."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weight, direction)  # type: ignore[no-untyped-call]
        value, tangent = forward_ad.unpack_dual(call({name: dual}))  # type: ignore[no-untyped-call]
        return value, tangent


def _aligned(own: torch.Size, shape: torch.Size) -> tuple[int, ...] | None:
    """A parameter's shape with ones in front, if it is broadcast to `shape`, over the first dimension too."""
    if len(own) > len(shape):
        return None
    padded = (*[1] * (len(shape) - len(own)), *own)
    fits = all(a in (1, b) for a, b in zip(padded, shape, strict=True))
    return padded if fits and padded[:1] == (1,) else None
