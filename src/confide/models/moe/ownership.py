"""How evenly owners are spread, and how firmly records belong to them.

RAPTOR (arXiv 2609.05770) asks these questions in its theorems 2 and 3. The statements here are confide's own:
each holds for every input, and its proof is in the docstring. Of private records all numbers are private.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from confide.models.moe.selection import LayerRouting

Votes = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Imbalance:
    """What uneven owner counts do to sums that are all divided by the same B/E.

    Expert e's expected gradient is E·p_e times the mean of its records', with p_e its share of the records;
    E·p_e − 1 is its relative bias. With Δ = log E − H, the divergence of the shares from even ones:

    - mean over experts of |E·p_e − 1| ≤ √(2Δ): Pinsker's inequality, Σ|p_e − 1/E| ≤ √(2Δ);
    - largest |E·p_e − 1| ≤ E·√(Δ/2): one share is off by at most half of that sum, as they add up to 0;
    - root mean square of E·p_e − 1, the coefficient of variation, ≥ √(e^Δ − 1): by Jensen's inequality,
      Δ = Σ p log(E·p) ≤ log Σ E·p² = log(1 + CV²).

    Attributes:
        counts: (E,) records that each expert owns. Private.
        deficit: Δ, in nats.
        mean_bias, mean_bound: the first line's two sides.
        largest_bias, largest_bound: the second's.
        variation, least_variation: the third's.
    """

    counts: tuple[int, ...]
    deficit: float
    mean_bias: float
    mean_bound: float
    largest_bias: float
    largest_bound: float
    variation: float
    least_variation: float


def imbalance(counts: Sequence[int]) -> Imbalance:
    """Relative biases of all experts, and what the entropy of the owners says about them.

    Args:
        counts: (E,), at least one record in all.
    """
    layer = LayerRouting(0, "", tuple(int(count) for count in counts))
    experts = len(layer.counts)
    off = np.abs(experts * np.array(layer.counts) / sum(layer.counts) - 1)
    deficit = max(layer.deficit, 0.0)
    return Imbalance(
        counts=layer.counts,
        deficit=deficit,
        mean_bias=float(off.mean()),
        mean_bound=math.sqrt(2 * deficit),
        largest_bias=float(off.max()),
        largest_bound=experts * math.sqrt(deficit / 2),
        variation=layer.variation,
        least_variation=math.sqrt(math.expm1(deficit)),
    )


def vote_shares(votes: Votes) -> Votes:
    """(rows, E) votes → shares of each record's votes; even ones where nobody voted."""
    total = votes.sum(1, keepdims=True)
    return np.where(total > 0, votes / np.where(total > 0, total, 1), 1 / votes.shape[1])


def margins(shares: Votes) -> npt.NDArray[np.float64]:
    """(rows,) by how much the owner's share of the votes leads the next expert's; 0 at a tie."""
    ordered = np.sort(shares, axis=1)
    return np.asarray(ordered[:, -1] - ordered[:, -2])


@dataclass(frozen=True)
class Stability:
    """Whether owners at the first weights still own their records at the last ones.

    With v and v′ a record's vote shares before and after, its owner stays if |v′ − v|₁ is less than its
    margin: for expert j to reach owner a, v_a − v′_a + v′_j − v_j ≥ v_a − v_j, which is at least the margin,
    and the left side is at most |v′ − v|₁. If κ·‖Δw‖ bounds |v′ − v|₁, then at most the records whose margin
    is no more than that change owners.

    κ is an **estimate** from the weights half way: |v(w₀ + Δw/2) − v(w₀)|₁ / ‖Δw/2‖, its largest and its mean
    value over the records. Votes change by jumps, so there is no true constant behind the largest one, and a
    prediction by either may be wrong.

    Attributes:
        records: how many were looked at.
        drift: ‖Δw‖ over the trained parameters of the encoder, LoRA's factors as they are.
        margin, low_margin: mean and 10 % quantile.
        changed: share of the records with another owner at the last weights.
        kept_for_sure: share with |v′ − v|₁ below the margin; none of them is among `changed`.
        kappa, mean_kappa: κ, the largest and the mean estimate; 0 without drift.
        changed_at_most: share predicted by `kappa`: margins of at most κ·‖Δw‖.
        changed_by_mean: the same by `mean_kappa`; no bound.
        changed_along_line: share whose owner changes if votes go on as they did up to half way.
    """

    records: int
    drift: float
    margin: float
    low_margin: float
    changed: float
    kept_for_sure: float
    kappa: float
    mean_kappa: float
    changed_at_most: float
    changed_by_mean: float
    changed_along_line: float


def stability(before: Votes, halfway: Votes, after: Votes, drift: float) -> Stability:
    """Predicted and observed changes of owners.

    Args:
        before, halfway, after: (rows, E) vote shares at the first weights, at those half way to the last
            ones, and at the last ones.
        drift: ‖Δw‖ between the first and the last weights.
    """
    lead = margins(before)
    moved = np.abs(after - before).sum(1)
    kappa = np.abs(halfway - before).sum(1) / (drift / 2) if drift else np.zeros(len(before))
    owner = before.argmax(1)
    changed = after.argmax(1) != owner
    return Stability(
        records=len(before),
        drift=drift,
        margin=float(lead.mean()),
        low_margin=float(np.quantile(lead, 0.1)),
        changed=float(changed.mean()),
        kept_for_sure=float((moved < lead).mean()),
        kappa=float(kappa.max()),
        mean_kappa=float(kappa.mean()),
        changed_at_most=float((lead <= kappa.max() * drift).mean()) if drift else 0.0,
        changed_by_mean=float((lead <= kappa.mean() * drift).mean()) if drift else 0.0,
        changed_along_line=float(((2 * halfway - before).argmax(1) != owner).mean()),
    )


@dataclass(frozen=True)
class Transfer:
    """Whether public text ranks the layers as the private records do.

    Attributes:
        public, private: routing of every layer, from the bottom.
        agreement: Spearman's correlation of the layers' entropies; None with fewer than two layers, or where
            all are equal.
        public_choice, private_choice: block with the highest entropy, the lowest of equals.
    """

    public: tuple[LayerRouting, ...]
    private: tuple[LayerRouting, ...]
    agreement: float | None
    public_choice: int
    private_choice: int


def transfer(public: Sequence[LayerRouting], private: Sequence[LayerRouting]) -> Transfer:
    """Compare the routing of public texts with that of private records, in the same layers."""
    scores = [np.array([layer.entropy for layer in side]) for side in (public, private)]
    ranks = [_ranks(score) for score in scores]
    centred = [rank - rank.mean() for rank in ranks]
    length = math.sqrt(float((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    return Transfer(
        public=tuple(public),
        private=tuple(private),
        agreement=float((centred[0] * centred[1]).sum()) / length if length else None,
        public_choice=public[int(scores[0].argmax())].block,
        private_choice=private[int(scores[1].argmax())].block,
    )


def _ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Ranks from 1, equal values sharing the mean of theirs."""
    below = (values[:, None] > values).sum(1)
    equal = (values[:, None] == values).sum(1)
    return np.asarray(below + (equal + 1) / 2)
