"""Parameters that all rows read through one map over positions, such as interpolated position embeddings.

If an output (rows, T, C) depends on a parameter (P, C) as Σ_p K_tp w_pc, a row's gradient is Kᵀg, so that K
and the output gradient g are its factors and no gradient is formed per row. Channels don't mix, so one
backward pass on one row, with another position in each channel, shows K for C positions at once. It is taken
anew every time, and checked on all rows along a random direction: a parameter that acts otherwise on any row
would agree with probability zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import vjp

Call = Callable[[Mapping[str, Tensor]], Tensor]
"""Parameters by name → the output (rows·k, …, C)."""

_ROUNDINGS = 64


def maps(one: Call, every: Call, weights: Mapping[str, Tensor], rows: int) -> dict[str, Tensor] | None:
    """K (T, P) of each parameter, T over all positions of a row; None where one acts in another way.

    Args:
        one: the module on one row's inputs.
        every: on all rows' inputs.
        weights: float32 or wider, (…, C).
        rows: number of rows.
    """
    try:
        found = _maps(one, weights)
        return found if found is not None and _hold(found, every, weights, rows) else None
    except (RuntimeError, NotImplementedError):  # no derivative, or a shape of another kind
        return None


def _maps(one: Call, weights: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    output, pull = vjp(one, dict(weights))  # type: ignore[misc]
    width = output.shape[-1]
    if any(weight.shape[-1:] != (width,) or weight.dtype != output.dtype for weight in weights.values()):
        return None
    positions = output.numel() // width
    pieces: dict[str, list[Tensor]] = {name: [] for name in weights}
    for start in range(0, positions, width):
        count = min(width, positions - start)
        place = torch.arange(count, device=output.device)
        at = output.new_zeros(positions, width)
        at[start + place, place] = 1
        for name, gradient in pull(at.view(output.shape))[0].items():
            pieces[name].append(gradient.reshape(-1, width).T[:count])
    return {name: torch.cat(each) for name, each in pieces.items()}


def _hold(found: Mapping[str, Tensor], every: Call, weights: Mapping[str, Tensor], rows: int) -> bool:
    random = torch.Generator().manual_seed(0)
    expected: Tensor | float = 0.0
    size: Tensor | float = 0.0
    with forward_ad.dual_level():
        duals = {}
        for name, weight in weights.items():
            t = torch.randn(weight.shape, generator=random, dtype=weight.dtype).to(weight.device)
            duals[name] = forward_ad.make_dual(weight, t)  # type: ignore[no-untyped-call]
            flat = t.view(-1, t.shape[-1])
            expected = expected + found[name] @ flat
            size = size + found[name].abs() @ flat.abs()
        along = forward_ad.unpack_dual(every(duals)).tangent  # type: ignore[no-untyped-call]
    if along is None or not isinstance(size, Tensor):
        return False
    error = (along.reshape(rows, *size.shape) - expected).abs()
    return bool(((error <= _ROUNDINGS * torch.finfo(size.dtype).eps * size) & size.isfinite()).all())
