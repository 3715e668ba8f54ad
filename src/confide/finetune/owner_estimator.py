"""How far each expert's gradient, divided by a public number, is from the mean over the records it owns.

RAPTOR (arXiv 2609.05770) asks this in its theorems 1 and 4. The statements here are confide's own and exact;
no record's gradient is assumed to be like another's. All numbers are private.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class OwnerMoments:
    """Clipped gradients of the records that each expert owns.

    Attributes:
        counts: (E,) n_e.
        means: (E, d) float64 ḡ_e, the mean over the records that e owns; 0 where there are none.
        squares: (E,) mean ‖g‖² over them; 0 where there are none.
    """

    counts: npt.NDArray[np.int64]
    means: Tensor
    squares: Array


@dataclass(frozen=True)
class Estimator:
    """Bias and variance of every expert's noisy gradient Ĝ_e = (Σ_{drawn, owned by e} g + σC·z) / D.

    Each record is in a draw with probability q, apart from all others, so against the mean ḡ_e:

    - E Ĝ_e = s_e·ḡ_e with the scale s_e = q·n_e / D, which is E·n_e/n for D = B/E;
    - the bias is (s_e − 1)·ḡ_e, of norm |s_e − 1|·‖ḡ_e‖;
    - the variances of all coordinates add up to q(1 − q)·Σ‖g‖²/D² by sampling, and d·σ²C²/D² by noise;
    - E‖Ĝ_e − ḡ_e‖² is the bias² and both.

    Attributes:
        scale: (E,) s_e; 1 is unbiased.
        bias: (E,) its norm.
        sampling, noise: (E,) variances, summed over coordinates.
    """

    scale: Array
    bias: Array
    sampling: Array
    noise: Array

    @property
    def error(self) -> Array:
        """(E,) mean squared error."""
        return np.asarray(self.bias**2 + self.sampling + self.noise)


def estimator(
    moments: OwnerMoments, *, sampling_rate: float, denominator: float, noise: float = 0.0
) -> Estimator:
    """The closed form.

    Args:
        sampling_rate: q.
        denominator: D.
        noise: σC, standard deviation of the noise on each coordinate of a sum.
    """
    counts: Array = moments.counts.astype(np.float64)
    scale = sampling_rate * counts / denominator
    norms: Array = torch.linalg.vector_norm(moments.means, dim=1).numpy()
    spread = sampling_rate * (1 - sampling_rate) * counts * moments.squares / denominator**2
    added: Array = np.full(len(scale), moments.means.shape[1] * (noise / denominator) ** 2)
    return Estimator(scale, np.abs(scale - 1) * norms, spread, added)


@dataclass(frozen=True)
class Simulated:
    """What draws gave, to compare with an `Estimator` without noise.

    Attributes:
        draws: how many.
        scale, scale_error: (E,) mean of ⟨Ĝ_e, ḡ_e⟩/‖ḡ_e‖², which is s_e in expectation, and its standard
            error; NaN where ḡ_e is 0.
        error, error_error: (E,) mean of ‖Ĝ_e − ḡ_e‖², and its standard error.
    """

    draws: int
    scale: Array
    scale_error: Array
    error: Array
    error_error: Array


def simulate(
    sums: Callable[[npt.NDArray[np.int64]], Tensor],
    moments: OwnerMoments,
    *,
    records: int,
    sampling_rate: float,
    denominator: float,
    draws: int,
    rng: np.random.Generator,
) -> Simulated:
    """Draw as training does, but from a generator of its own, and without noise.

    Args:
        sums: drawn records, in order → (E, d) sums of their clipped gradients.
        moments: of the same records at the same weights.
        records: n; `sums` gets numbers below.
        draws: at least 2.
    """
    own = moments.means.square().sum(1)
    found = []
    for _ in range(draws):
        drawn = np.flatnonzero(rng.random(records) < sampling_rate)
        mean = sums(drawn).double() / denominator
        along = (mean * moments.means).sum(1) / own
        found.append(torch.stack([along, (mean - moments.means).square().sum(1)]))
    table = torch.stack(found)
    centre = table.mean(0).numpy()
    spread = table.std(0).numpy() / math.sqrt(draws)
    return Simulated(draws, centre[0], spread[0], centre[1], spread[1])


@dataclass(frozen=True)
class DriftError:
    """What training with the first weights' owners costs at the last weights, in expected expert gradients.

    G(w, a) is the expected gradient of all experts at weights w under owners a, Σ over records of q·g/D, g in
    the owner's block. A record that changes owners leaves one block and enters another, with a gradient of at
    most C each time, so ‖G(w, a) − G(w, a′)‖ ≤ √2·C·q/D · (changed records).
    The rest is the drift of the weights: ‖G(w, a) − G(w₀, a)‖ ≤ L·‖Δθ‖ for a Lipschitz constant L, of which
    ‖G(w₀ + Δθ/2, a) − G(w₀, a)‖ / ‖Δθ/2‖ is an **estimate**: no bound, as the second half may be steeper.

    Attributes:
        changed: records with another owner.
        stale: ‖G(w, a₀) − G(w, a)‖ at the last weights, a their own owners.
        stale_bound: the bound on it; None without clipping.
        lipschitz: L, estimated; 0 without drift.
        drift: ‖Δθ‖ over all trained parameters.
        moved: ‖G(w, a₀) − G(w₀, a₀)‖.
        moved_estimate: L·‖Δθ‖.
        total: ‖G(w, a) − G(w₀, a₀)‖, at most `stale` + `moved`.
        norm: ‖G(w, a₀)‖, for comparison.
    """

    changed: int
    stale: float
    stale_bound: float | None
    lipschitz: float
    drift: float
    moved: float
    moved_estimate: float
    total: float
    norm: float


def drift_error(
    first: Tensor,
    halfway: Tensor,
    last: Tensor,
    last_owners: Tensor,
    *,
    changed: int,
    drift: float,
    weight: float,
    bound: float | None,
) -> DriftError:
    """Errors of stale owners and of drifting weights, from sums over all records.

    Args:
        first, halfway, last: (E, d) sums of clipped gradients under the first owners, at the first weights,
            at those half way, and at the last ones.
        last_owners: (E, d) at the last weights under their own owners.
        changed: records with another owner.
        drift: ‖Δθ‖.
        weight: q/D.
        bound: C; None where nothing is clipped.
    """

    def length(of: Tensor) -> float:
        return weight * float(torch.linalg.vector_norm(of.double()))

    steepness = length(halfway - first) / (drift / 2) if drift else 0.0
    return DriftError(
        changed=changed,
        stale=length(last - last_owners),
        stale_bound=None if bound is None else math.sqrt(2) * bound * weight * changed,
        lipschitz=steepness,
        drift=drift,
        moved=length(last - first),
        moved_estimate=steepness * drift,
        total=length(last_owners - first),
        norm=length(last),
    )
