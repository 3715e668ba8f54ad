"""A privacy filter: what several runs spent, when later ones were chosen after seeing earlier ones.

At one fixed order α, Rényi divergences of queries add up even if each query and its noise depend on earlier
answers, as long as their sum stays below a bound (Feldman and Zrnic 2021, arXiv 2008.11193, theorem 4.3);
concurrent runs change nothing (Haney et al. 2023, arXiv 2309.05901). Which order is best depends on the
queries, hence on the answers, so taking the minimum over orders at one δ is not covered. Here every order
gets δ/|ORDERS|: an outcome is charged to the first order whose bound held to the end, and over the outcomes
of one order the process is one that this order's filter alone would have let through. Summing over orders
gives δ in total.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

from confide.errors import PrivacyError
from confide.privacy import renyi
from confide.privacy.events import Composed
from confide.privacy.streams import Adjacency

ORDERS: tuple[float, ...] = (1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 14, 20, 32, 64, 128, 256)
"""Fixed for good: an order chosen after looking would void the filter. Few, as each costs a share of δ."""


def epsilon(events: Sequence[Composed], delta: float, adjacency: Adjacency) -> float:
    """The ε, at this δ, that a filter must have allowed for all of `events` to pass.

    A filter that admits an event only while this is at most its ε makes everything admitted together
    (ε, δ)-DP, however the events were chosen. Infinite where no order gives a finite bound.

    Raises:
        PrivacyError: δ out of range, or an event for which RDP has no rule (truncated draws).
    """
    if not 0 < delta < 1:
        raise PrivacyError(f"delta must lie between 0 and 1, not {delta}")
    if not events:
        return 0.0
    divergences = renyi.divergences(Composed(tuple(events)), adjacency, ORDERS)
    finite = np.isfinite(divergences)
    if not finite.any():
        return float("inf")
    # Rounding can leave a divergence a hair below 0; the conversion would take it for ε = 0.
    kept = np.maximum(divergences[finite], 0.0)
    return float(compute_epsilon(np.asarray(ORDERS)[finite], kept, delta / len(ORDERS))[0])
