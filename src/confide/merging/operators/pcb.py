"""PCB: coordinates compete within a task by magnitude, between tasks by agreement; the winners are averaged.

The published repository holds three formulas that differ. This is the one of its stand-alone function, which
other libraries took over: magnitudes are clamped to their quantiles before they are normalised.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from confide.merging.operators.parameters import Number
from confide.merging.operators.specification import Rule, Vector, operator
from confide.merging.selection import order_statistics, signed_order_statistics
from confide.merging.vectors import TaskVectors

# Below this, tanh x is x − x³/3 in float64.
_SMALL = 1e-4


@dataclass(frozen=True)
class Range:
    """Where a model's values lie.

    Attributes:
        low, high: they are clamped to.
    """

    low: float
    high: float

    def normalise(self, values: Vector) -> Vector:
        """(x − low)/(high − low) within [0, 1]; if low is high, 1 from there on, but 0 for zeros."""
        share: Vector
        if self.high > self.low:
            share = np.clip((values - self.low) / (self.high - self.low), 0, 1)
        else:
            share = ((values >= self.high) & (values != 0)).astype(np.float64)
        return share


def balance(vectors: Vector, ranges: Sequence[Range]) -> npt.NDArray[np.float32]:
    """How well each coordinate competes, up to a factor that all share (Du et al. 2024, section 3).

    exp(T·norm(|D_t|)²) · tanh(D_t Σ D) · e^(−T/2): what is normalised afterwards may carry any factor, and
    this one keeps it within float32, in which it is compared: a weight is exactly 0 at the quantile, and
    next to no others a weight of rounding would count whole.

    Args:
        vectors: (T, n) task vectors.
        ranges: of each model's magnitudes.

    Returns:
        (T, n) float32
    """
    count = len(vectors)
    agreement: Vector = vectors * vectors.sum(axis=0)
    if np.abs(agreement).max(initial=0) < _SMALL:
        agreement *= 1 - agreement * agreement / 3
    else:
        np.tanh(agreement, out=agreement)
    for entries, own, out in zip(vectors, ranges, agreement, strict=True):
        intra = own.normalise(np.clip(np.abs(entries), own.low, own.high))
        out *= np.exp(count * (intra * intra - 0.5))
    return agreement.astype(np.float32)


def merge(vectors: Vector, magnitudes: Sequence[Range], balances: Sequence[Range], scale: float) -> Vector:
    """λ Σ s_t Dc_t / max(Σ s_t, 1e-12) (Du et al. 2024, section 3).

    Args:
        vectors: (T, n) task vectors.
        magnitudes: ranges of |D_t| between the quantiles.
        balances: ranges of the balance from its quantile up; what lies below has no weight.
        scale: λ.

    Returns:
        (n,)
    """
    weights = balance(vectors, magnitudes)
    total, merged = np.zeros(vectors.shape[1]), np.zeros(vectors.shape[1])
    for entries, weight, size, own in zip(vectors, weights, magnitudes, balances, strict=True):
        share = own.normalise(weight.astype(np.float64))
        total += share
        clamped = np.copysign(np.clip(np.abs(entries), size.low, size.high), entries)
        merged += share * np.where(entries == 0, 0.0, clamped)
    merged *= scale / np.maximum(total, 1e-12)
    return merged


@operator(
    "pcb",
    about="θ = θ₀ + λ Σ s_t D_t / Σ s_t, s_t the normalised competition of each coordinate",
    paper="Du et al. 2024, Parameter competition balancing for model merging",
    takes="model",
    parameters=(
        Number("density", 0.1, 0.0, 1.0, "r: part of each task vector's coordinates that has a weight."),
        Number("scale", 1.0, -math.inf, math.inf, "λ; 1.2 with density 0.05 in the paper's vision study."),
        Number("clamp", 1e-4, 0.0, 0.49, "p: magnitudes are clamped to their p and 1 − p quantiles."),
    ),
)
def pcb(vectors: TaskVectors, density: float, scale: float, clamp: float) -> Rule:
    """Look up the quantiles of magnitudes and of balances over all tensors that some model changed."""
    trained = sum(vectors.size(name) for name in vectors.changed)
    if not trained or not density:
        facts = {"trained": trained, "kept": [0] * vectors.count}
        return Rule(lambda name: lambda chunk, start: np.zeros(chunk.shape[1]), facts)
    # As the published code counts: ranks from 1, quantiles rounded down.
    ends = [int(trained * clamp) + 1, max(int(trained * (1 - clamp)), 1)]
    found = order_statistics(vectors, vectors.changed, [ends] * vectors.count)
    magnitudes = [Range(low.value, high.value) for low, high in found]

    def balances() -> Iterator[npt.NDArray[np.float32]]:
        for name in vectors.changed:
            for _, chunk in vectors.chunks(name):
                with np.errstate(invalid="ignore", over="ignore"):
                    yield balance(chunk, magnitudes)

    ends = [min(int(trained * (1 - density)) + 1, trained), trained]
    found = signed_order_statistics(balances, [ends] * vectors.count)
    ranges = [Range(low.value, high.value) for low, high in found]
    facts = {
        "trained": trained,
        "magnitudes": [[own.low, own.high] for own in magnitudes],
        "balances": [[own.low, own.high] for own in ranges],
    }
    return Rule(lambda name: lambda chunk, start: merge(chunk, magnitudes, ranges, scale), facts)
