"""How much an event certainly reveals: a lower bound on ε from an explicit test.

The test adds up the privacy losses of all steps, each rounded down to a grid, and rejects when the sum is
large. Its two error probabilities are computed by Fourier transform, less a generous bound on its rounding
error, so that an accountant that claims less than this is wrong, and a reader sees how tight a claim is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import fft, special

from confide.errors import PrivacyError
from confide.privacy.events import Composed, Mechanism, PoissonGaussian, RandomSelection, effective
from confide.privacy.streams import Adjacency

_Array = npt.NDArray[np.float64]
_ROUNDING = 2.0**-53
_LARGEST_WINDOW = 2**21


def epsilon_lower(
    event: Mechanism | Composed,
    delta: float,
    adjacency: Adjacency = "add-or-remove-one",
    interval: float = 1e-4,
) -> float:
    """An ε below which the event is certainly not (ε, δ)-DP; 0 where the test proves nothing.

    Args:
        event: what looked at the records.
        delta: δ in (0, 1).
        adjacency: which data sets are neighbours. Under add-or-remove-one the pair tested is removal.
        interval: grid of the rounded loss; a coarser one is faster and less tight, never wrong.

    Of a random selection it is taken to be known which event was drawn. Truncated draws and repetitions are
    left out of the test. At extreme losses (σ below 0.03) probabilities underflow and nothing is proven.

    Raises:
        PrivacyError: a query without noise (every ε is exceeded).
    """
    branches = [(p, groups) for p, groups in _branches(event) if groups]
    if any(group.noise_multipliers[0] == 0 for _, groups in branches for group in groups):
        raise PrivacyError("a query has no noise (noise multiplier 0); no epsilon bounds it")
    with np.errstate(all="ignore"):
        tests = [(p, *_error_probabilities(groups, delta, adjacency, interval)) for p, groups in branches]
        value = _largest_epsilon(tests, delta)
    return value if math.isfinite(value) and value > 0 else 0.0


def _branches(event: Mechanism | Composed) -> list[tuple[float, tuple[PoissonGaussian, ...]]]:
    """Gaussian parts for each outcome of a random selection, with its probability.

    What isn't Gaussian is left out, and so are further selections: whoever sees less, tells less.
    """
    mechanisms = effective(event)
    always = tuple(part for part in mechanisms if isinstance(part, PoissonGaussian))
    for selection in mechanisms:
        if isinstance(selection, RandomSelection):
            return [
                (p, tuple(m for m in effective(Composed((*always, part))) if isinstance(m, PoissonGaussian)))
                for p, part in zip(selection.probabilities, selection.events, strict=True)
            ]
    return [(1.0, always)]


def _largest_epsilon(tests: Sequence[tuple[float, _Array, _Array]], delta: float) -> float:
    """Largest ε with Σ pᵢ·maxₜ(Pᵢ(t) − e^ε Qᵢ(t)) ≥ δ: each branch has its own test."""
    if len(tests) == 1 and tests[0][0] == 1:
        _, p_tail, log_q = tests[0]
        excess = p_tail - delta
        useful = excess > 0
        return float(np.max(np.log(excess[useful]) - log_q[useful])) if useful.any() else 0.0
    # Fewer thresholds are still a test.
    thinned = [
        (p, tail[:: len(tail) // 2**14 + 1], log_q[:: len(tail) // 2**14 + 1]) for p, tail, log_q in tests
    ]

    def proven(epsilon: float) -> float:
        return sum(p * max(0.0, float(np.max(tail - np.exp(log_q + epsilon)))) for p, tail, log_q in thinned)

    low, high = 0.0, 1.0
    if proven(low) < delta:
        return 0.0
    while proven(high) >= delta and high < 1e6:
        low, high = high, 2 * high
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if proven(middle) >= delta else (low, middle)
    return low


@dataclass(frozen=True)
class _Losses:
    """Probabilities of one step's loss, rounded down to `first`, `first`+1, … grid steps.

    `p` is (m,), with the unit; `tilted` is (m,), without it but times e^loss, which is near `p`, so that
    tiny probabilities keep their digits.
    """

    first: int
    p: _Array
    tilted: _Array
    steps: int


def _error_probabilities(
    groups: Sequence[PoissonGaussian], delta: float, adjacency: Adjacency, interval: float
) -> tuple[_Array, _Array]:
    """For each threshold: the probability of rejection with the unit, at least, and the log of that without,
    at most."""
    steps = sum(group.steps for group in groups)
    widest = max(_largest_loss(g, 1e-4 * delta / steps, adjacency) for g in groups)
    interval = max(interval, widest / (_LARGEST_WINDOW / 4))
    losses = [_round_loss(g, 1e-4 * delta / steps, adjacency, interval) for g in groups]
    low, high, outside = _window(losses, interval, 1e-6 * delta)
    if high - low > _LARGEST_WINDOW:
        factor = math.ceil((high - low) / _LARGEST_WINDOW)
        interval *= factor
        losses = [_round_loss(g, 1e-4 * delta / steps, adjacency, interval) for g in groups]
        low, high, outside = _window(losses, interval, 1e-6 * delta)
    if high - low > 2 * _LARGEST_WINDOW:  # more steps than grid points: nothing is proven
        return np.zeros(1), np.zeros(1)
    size = fft.next_fast_len(high - low + 1, real=True)
    p, p_error = _convolve([(part.first, part.p, part.steps) for part in losses], low, size)
    log_mass = sum(part.steps * math.log(float(part.tilted.sum())) for part in losses)
    normalised = [(part.first, part.tilted / part.tilted.sum(), part.steps) for part in losses]
    tilted, tilted_error = _convolve(normalised, low, size)

    sums = (low + np.arange(size)) * interval
    # Suffix sums. Mass from outside the window wraps into it: that is taken off P, and only adds to Q.
    p_tail = np.cumsum(p[::-1])[::-1] - outside - p_error
    # Q of a set of sums ≥ t: weights e^−s fall with s, so partial-sum errors count with e^−t at most.
    log_q = np.logaddexp.accumulate((np.log(np.maximum(tilted, 0.0)) - sums)[::-1])[::-1]
    return p_tail, np.logaddexp(log_q, math.log(2 * tilted_error) - sums) + log_mass


def _largest_loss(group: PoissonGaussian, tail: float, adjacency: Adjacency) -> float:
    """A loss that a step exceeds with probability about `tail`; larger ones are rounded down to it."""
    q, sigma = group.sampling_rate, group.noise_multipliers[0]
    x = 1 + sigma * float(-special.ndtri(min(0.5, tail / q)))
    return float(_loss(np.array([x]), q, sigma, adjacency)[0])


def _loss(x: _Array, q: float, sigma: float, adjacency: Adjacency) -> _Array:
    """(n,) log density ratio at x of the output with the unit to that without (or with the other one)."""
    stay = math.log1p(-q) if q < 1 else -math.inf
    up = np.logaddexp(stay, math.log(q) + (2 * x - 1) / (2 * sigma**2))
    if adjacency == "add-or-remove-one":
        return up
    down: _Array = np.logaddexp(stay, math.log(q) + (-2 * x - 1) / (2 * sigma**2))
    return up - down


def _inverse_loss(loss: _Array, q: float, sigma: float, adjacency: Adjacency) -> _Array:
    """(n,) the x at which `_loss` takes the given values; −∞ below its range."""
    if q == 1:
        half = 0.5 if adjacency == "add-or-remove-one" else 0.0
        scale = 1.0 if adjacency == "add-or-remove-one" else 2.0
        return half + loss * sigma**2 / scale
    if adjacency == "add-or-remove-one":
        inside = np.where(loss > math.log1p(-q), np.expm1(loss) + q, 0.0) / q
        return np.asarray(sigma**2 * np.log(inside) + 0.5)
    # (1 + cy)/(1 + c/y) = eˡ with y = e^(x/σ²); the loss is odd in x, so solve for |l| without cancellation.
    log_c = math.log(q) - math.log1p(-q) - 1 / (2 * sigma**2)
    size = np.abs(loss)
    b = np.expm1(size)
    root = np.log((b + np.sqrt(b**2 + 4 * np.exp(2 * log_c + size))) / 2) - log_c
    return np.asarray(np.sign(loss) * sigma**2 * np.maximum(root, 0.0))


def _round_loss(group: PoissonGaussian, tail: float, adjacency: Adjacency, interval: float) -> _Losses:
    q, sigma = group.sampling_rate, group.noise_multipliers[0]
    top = _largest_loss(group, tail, adjacency)
    if adjacency == "replace-one":
        bottom = -top
    elif q < 1:
        bottom = math.log1p(-q)
    else:
        bottom = float(_loss(np.array([sigma * special.ndtri(min(0.5, tail))]), q, sigma, adjacency)[0])
    first, last = math.floor(bottom / interval), math.floor(top / interval)
    inner: _Array = np.arange(first + 1, last + 1, dtype=np.float64) * interval
    edges = _inverse_loss(inner, q, sigma, adjacency)
    edges = np.concatenate([np.array([-np.inf]), edges, np.array([np.inf])])
    zero, plus = _between(edges / sigma), _between((edges - 1) / sigma)
    p = (1 - q) * zero + q * plus
    reference = zero
    if adjacency == "replace-one":
        reference = (1 - q) * zero + q * _between((edges + 1) / sigma)
    losses: _Array = np.arange(first, last + 1, dtype=np.float64) * interval
    return _Losses(first, p, reference * np.exp(losses), group.steps)


def _between(z: _Array) -> _Array:
    """(n,) standard normal probability between consecutive entries of z (n+1,), accurate in both tails."""
    below, above = special.ndtr(z), special.ndtr(-z)
    between: _Array = np.where(z[:-1] > 0, above[:-1] - above[1:], below[1:] - below[:-1])
    return np.maximum(between, 0.0)


def _window(losses: Sequence[_Losses], interval: float, tail: float) -> tuple[int, int, float]:
    """Grid range that holds the composed loss under P but for `outside` ≤ 2·tail (Chernoff)."""
    low = sum(part.steps * part.first for part in losses)
    high = sum(part.steps * (part.first + len(part.p) - 1) for part in losses)
    grids = [(part.first + np.arange(len(part.p))) * interval for part in losses]
    for order in (0.1, 0.3, 0.6, 1.0, 1.5, 2.5, 4.0, 7.0, 12.0, 25.0, 50.0, 100.0):
        for sign in (1, -1):
            moment = 0.0
            for part, grid in zip(losses, grids, strict=True):
                shift = float(np.max(sign * order * grid))
                mass = float(np.dot(part.p, np.exp(sign * order * grid - shift)))
                moment += part.steps * (shift + math.log(mass) if mass > 0 else math.inf)
            bound = (moment - math.log(tail)) / (order * interval)
            if math.isfinite(bound):
                if sign > 0:
                    high = min(high, math.ceil(bound))
                else:
                    low = max(low, math.floor(-bound))
    return low, max(high, low + 1), 2 * tail


def _convolve(parts: Sequence[tuple[int, _Array, int]], low: int, size: int) -> tuple[_Array, float]:
    """Probabilities of the sum on the window from `low`, and a bound on the error of any partial sum."""
    frequencies = np.arange(size // 2 + 1)
    log_size = math.log2(size)
    spectrum = np.ones(len(frequencies), dtype=np.complex128)
    magnitude = np.ones(len(frequencies))
    shift = -low
    relative = 0.0
    for first, probabilities, steps in parts:
        folded: _Array = probabilities
        if len(folded) > size:
            folded = np.asarray(np.bincount(np.arange(len(folded)) % size, folded, size), np.float64)
        transform = fft.rfft(folded, size)
        spectrum *= transform**steps
        # |z + e|^T ≤ |z|^T (1 + e/|z|)^T, with e the transform's rounding error for mass 1.
        modulus = np.minimum(np.abs(transform) + 8 * _ROUNDING * log_size, 1.0)
        magnitude *= modulus ** max(steps - 1, 0)
        relative += 8 * _ROUNDING * log_size * steps
        shift += first * steps
    turn = (frequencies * (shift % size)) % size
    spectrum *= np.exp(-2j * math.pi * turn / size)
    result = fft.irfft(spectrum, size)
    # A partial sum weighs frequency k by at most min(1, 1/2k), and both signs of k count.
    weight = np.minimum(2.0, 1 / np.maximum(frequencies, 1))
    error = relative * float(np.dot(magnitude, weight))
    # The inverse transform rounds every entry; a partial sum may hold all of them.
    error += 16 * _ROUNDING * log_size * float(magnitude.sum())
    return result, error
