"""What an event costs: an upper bound on ε at a given δ.

Privacy loss distributions (PLD) from dp-accounting, rounded pessimistically by connect-the-dots (Doroshenko
et al. 2022, arXiv 2207.04380), with the Rényi bound (RDP) beside them; RDP alone, and labelled so, where PLD
has no rule or can't be trusted. Queries on one draw are first replaced by the one Gaussian of
σ_eff = (Σσᵢ⁻²)^−½, which holds for adaptive queries too:

- add or remove one: given the other members of a draw, both the answers without the unit and those with it
  are images of N(0, 1) and N(1/σ_eff, 1) under one random map, so the mixture over its membership is too.
- replace one: for any weights the pair with opposite shifts of full length is hardest to tell apart (the best
  test set is convex and stays inside itself when moved away from the other shift), so it is at every query,
  whatever was answered before. The pair is (1−q)N(0)+qN(+1) against (1−q)N(0)+qN(−1).
"""

from __future__ import annotations

import math
from functools import lru_cache
from importlib.metadata import version

from confide.errors import PrivacyError
from confide.privacy.events import (
    Composed,
    Mechanism,
    PoissonGaussian,
    TruncatedPoissonGaussian,
    effective,
    walk,
)
from confide.privacy.statement import Claim
from confide.privacy.streams import Adjacency

_ADJACENCIES = ("add-or-remove-one", "replace-one")


def epsilon(event: Mechanism | Composed, delta: float, adjacency: Adjacency = "add-or-remove-one") -> Claim:
    """The (ε, δ) that everything in `event` satisfies together.

    ε is the larger of both directions after composition, from PLD. Where PLD has no rule (repeat-and-select)
    or floating point can't be trusted (δ near the rounding of the Fourier transform, overflow at tiny noise,
    a result that contradicts the certified lower bound), it is the RDP bound instead, and `accountant` says
    so.

    Args:
        event: what looked at the records.
        delta: δ in (0, 1).
        adjacency: which data sets are neighbours.

    Raises:
        PrivacyError: a query without noise, an unknown event, events that no one accountant can price
            together, a δ out of range, or no finite bound: nothing can be claimed.
    """
    if not 0 < delta < 1:
        raise PrivacyError(f"delta must lie between 0 and 1, not {delta}")
    if adjacency not in _ADJACENCIES:
        raise PrivacyError(f"unknown adjacency {adjacency!r}; use one of {list(_ADJACENCIES)}")
    try:
        # In one order, so that the order of events changes no digit; remembered, as merges price the same
        # runs again.
        return _price(Composed(effective(event)), delta, adjacency)
    except (ArithmeticError, ValueError, MemoryError, RecursionError) as error:
        raise PrivacyError(
            f"nothing can be claimed: the event's numbers can't be computed with ({type(error).__name__}); "
            "check its noise multipliers, rates and steps"
        ) from None


@lru_cache(maxsize=512)
def _price(event: Composed, delta: float, adjacency: Adjacency) -> Claim:
    # These load dp-accounting and SciPy, two seconds that a command with nothing to price needn't spend.
    from confide.privacy import losses, renyi
    from confide.privacy.distinguisher import epsilon_lower

    if any(_silent(part) for part in walk(event)):
        raise PrivacyError("a query has no noise (noise multiplier 0), so no privacy can be claimed")
    if not (losses.has_rule(event) or renyi.has_rule(event)):
        raise PrivacyError(
            "repeat-and-select has no rule by PLD, and truncated draws none by RDP: nothing prices both "
            "together"
        )
    bound = renyi.epsilon(event, delta, adjacency) if renyi.has_rule(event) else None
    if bound is not None and not math.isfinite(bound):
        raise PrivacyError("the noise is so small that no finite epsilon bounds the privacy loss; add noise")
    library = f"dp-accounting {version('dp-accounting')}"
    lower = epsilon_lower(event, delta, adjacency) or None
    if losses.has_rule(event):
        interval = losses.interval_of(event)
        value, problem = losses.epsilon(event, delta, adjacency, interval)
        used = f"{library} PLD, connect-the-dots, interval {interval:.3g}"
    else:
        value, problem, used = math.inf, "PLD has no rule for repeat-and-select", ""
    if problem is None and bound is not None and value > bound:
        problem = "the PLD bound is not below it"
    if problem is None and lower is not None and value < lower - 1e-6:
        problem = "the PLD bound lies below a certified lower bound"
    if problem is not None:
        if bound is None:
            raise PrivacyError(f"nothing can be claimed: {problem}, and RDP has no rule for truncated draws")
        value, used = bound, f"{library} RDP alone: {problem}"
    if lower is not None and value < lower - 1e-6:
        raise PrivacyError("nothing can be claimed: the bounds contradict a certified lower bound")
    return Claim(epsilon=value, delta=delta, epsilon_rdp=bound, epsilon_lower=lower, accountant=used)


def _silent(part: Mechanism) -> bool:
    match part:
        case PoissonGaussian():
            return min(part.noise_multipliers) == 0
        case TruncatedPoissonGaussian():
            return part.noise_multiplier == 0
        case _:
            return False
