"""From squared norms to the factor that bounds a unit's contribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from confide.errors import PrivacyError
from confide.privacy.streams import Clipping

# Sums of up to a million float64 terms are exact to this relative error (Higham 2002, section 4.2).
_FLOAT64_SUM = 2.0**-33

_RANGE = 1e4  # adaptive bounds stay between C/1e4 and C·1e4 of the first one

_LARGEST = 2.0**20  # so that scaling a finite gradient can't overflow; a smaller factor is always safe


def clip_factors(squares: Tensor, slack: Tensor, clipping: Clipping, dtype: torch.dtype) -> Tensor:
    """Factor by which each unit's gradient enters the sum; its contribution never exceeds C.

    Args:
        squares: (units,) float64, computed squared norms.
        slack: (units,) float64, proven bounds on how far the true squared norms lie above.
        clipping: rule and bound C.
        dtype: in which the gradients are scaled.

    Returns:
        (units,) float64; exactly 0 where the norm isn't finite, exactly 1 where `flat` doesn't clip.
    """
    norm = ((squares.clamp(min=0) + slack) * (1 + _FLOAT64_SUM)).sqrt()
    # Scaling rounds once per value, and the factor itself once more.
    shrink = 1 - 4 * torch.finfo(dtype).eps
    match clipping.rule:
        case "flat" | "adaptive":
            factor = torch.where(norm <= clipping.bound, 1.0, clipping.bound / norm * shrink)
        case "normalised":
            factor = (clipping.bound / (norm + clipping.stability) * shrink).clamp(max=_LARGEST)
        case "per-role":
            raise PrivacyError("per-role clipping has one factor per group; take them from `role_factors`")
        case "none":
            raise PrivacyError(
                "an unclipped gradient has no bounded sensitivity; it never enters a private sum"
            )
    return torch.where(norm.isfinite(), factor, 0.0)


def role_factors(
    squares: Sequence[Tensor], slacks: Sequence[Tensor], clipping: Clipping, dtype: torch.dtype
) -> list[Tensor]:
    """`clip_factors` of each group under `per-role`: what a unit adds in all is at most Σ C_g² = C² long.

    A unit whose gradient isn't finite in one group adds nothing to any.
    """
    whole = torch.stack([square.isfinite() for square in squares]).all(0)
    flat = [Clipping("flat", bound) for bound in clipping.bounds]
    return [
        torch.where(whole, clip_factors(square, slack, own, dtype), 0.0)
        for square, slack, own in zip(squares, slacks, flat, strict=True)
    ]


def next_bound(clipping: Clipping, bound: float, share: float) -> float:
    """C of the next step: C·exp(−η(share − quantile)) (Andrew et al. 2021, arXiv 1905.03871, algorithm 1).

    Args:
        clipping: `adaptive`, as planned; its own bound is the first step's, and limits all others.
        bound: C of this step.
        share: noisy share of units that weren't longer; nothing else about the records comes in.
    """
    by = -clipping.quantile_rate * (share - clipping.quantile)
    moved = bound * math.exp(min(max(by, -99.0), 99.0))  # more leaves the range anyway
    return min(max(moved, clipping.bound / _RANGE), clipping.bound * _RANGE)


def round_down(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert float64 `values` ≥ 0 to `dtype`, never upwards."""
    rounded = values.to(dtype)
    above = rounded.to(torch.float64) > values
    return torch.where(above, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)
