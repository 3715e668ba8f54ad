"""The sensitivities of RAPTOR's two streams on private records, asked once as a charged query.

A unit's value for a stream is how its own loss rises under injected noise (`finetune.sensitivity`), the
mean over its rows and over the draws of z; z is public, so more draws cost time and no budget. It is cut to
[−R, R], R public, and is 0 where it isn't finite. Units join one Poisson draw of rate q, and the values of
those that joined are added up. So one unit that is added or removed moves each stream's sum by at most R, and
one that is replaced by at most 2R. In units of R both sums together are one vector that one unit moves by at
most √2 (or 2√2): with noise N(0, (√2·σR)²) on each they are one Gaussian query, which costs what a single
sum with σ does (`privacy.queries`). Dividing by the public q·n looks at no record.

Each row goes through the model alone. A second difference magnifies rounding by 1/s², and in a batch a row's
rounding depends on its neighbours: what one unit adds would then move what the others add.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from confide.errors import ConfigError, ModelError
from confide.finetune.base import PublicBase
from confide.finetune.charge import charged
from confide.finetune.prepare import Prepared, made_up
from confide.finetune.run import public_units
from confide.finetune.selfcheck import check_noise
from confide.finetune.sensitivity import TwoStreams, rises
from confide.finetune.settings import Settings
from confide.gradients.keys import Keys
from confide.gradients.losses import classification
from confide.gradients.noise import add_noise
from confide.gradients.sampling import poisson_draw
from confide.models.backbones import Classifier, load_classifier
from confide.privacy.accountant import epsilon
from confide.privacy.calibration import noise_multiplier, resolve_delta
from confide.privacy.composition import new_run, training_spending
from confide.privacy.ledger import Ledger
from confide.privacy.queries import Query
from confide.privacy.statement import Claim, LedgerEntry, Spending
from confide.privacy.streams import Budget, Schedule
from confide.privacy.units import UnitMap
from confide.tasks.text import Encoded

QUERY = "sensitivity"
"""The query's name in the schedule; with its purpose, the address of its noise and draw."""

_STREAMS = ("shared", "experts")
_MADE_UP, _SHORTEST = 32, 8
_ROOM = 2.0  # the bound over the mean on made-up rows

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class NoisySensitivity:
    """λ of one stream, released with noise.

    Attributes:
        value: the noisy mean.
        noise: standard deviation of the noise in it.
        bound: R, which a unit's own λ was cut to.
    """

    value: float
    noise: float
    bound: float

    @property
    def clear(self) -> bool:
        """Whether noise alone would hardly give such a value: it is above three standard deviations."""
        return self.value > 3 * self.noise


@dataclass(frozen=True)
class PrivateSensitivities:
    """What noise does to either stream, and what the answer cost.

    Attributes:
        layer: block whose experts would be trained.
        experts: E.
        shared, own: of the shared stream and of that layer's experts.
        spending: what was charged.
        claim: (ε, δ) of everything here.
        entry: the charge in the ledger; None where none was named.
    """

    layer: int
    experts: int
    shared: NoisySensitivity
    own: NoisySensitivity
    spending: Spending
    claim: Claim
    entry: LedgerEntry | None


def planned(settings: Settings, expected: int, units: int, unit: str) -> tuple[Schedule, float]:
    """The schedule with the one query, whose noise spends the settings' budget, and δ.

    Args:
        settings: ε, and δ or a rule for it.
        expected: units that are expected to join the draw; n or more asks them all.
        units: n, public.
        unit: name of the protected unit.

    Raises:
        PrivacyError: a budget that no noise can meet.
    """
    assert settings.epsilon is not None  # raptor has one
    rate = min(1.0, expected / units)
    budget = Budget(settings.epsilon, resolve_delta(settings.delta, units))
    sigma = noise_multiplier(rate, 1, budget, queries=len(_STREAMS))
    query = Query(QUERY, "sensitivity", (sigma,) * len(_STREAMS), rate)
    return Schedule((), unit=unit, queries=(query,)), budget.delta


def private_sensitivities(
    prepared: Prepared,
    base: PublicBase,
    settings: Settings,
    *,
    dataset: str,
    expected: int,
    noise: float,
    draws: int,
    bounds: tuple[float | None, float | None] = (None, None),
    ledger: Ledger | None = None,
    progress: Callable[[int], None] = lambda losses: None,
) -> PrivateSensitivities:
    """Ask the training units of a task, once, with noise.

    Args:
        prepared: the task's records under this base. Private.
        settings: of `raptor`, with the query's own ε and δ.
        dataset: the name that its owner gave the data.
        expected: units that are expected to join the draw.
        noise: s of `finetune.sensitivity.rises`.
        draws: of z.
        bounds: R of the shared stream and of the experts', public. None takes twice the mean |λ| of made-up
            rows.
        ledger: charged before the first record is looked at; refunded only if no noise was drawn.
        progress: called with the number of passes over the units since the last call; there are
            `passes(draws)`.

    Raises:
        ConfigError, ModelError, PrivacyError: before any record is looked at.

    Guarantee: the result is (ε, δ)-DP in the training units, as `claim` says.
    """
    if not all(bound is None or (math.isfinite(bound) and bound > 0) for bound in bounds):
        raise ConfigError(f"the bound on a unit's sensitivity must be a positive number, not {bounds}")
    if draws < 1 or not noise > 0 or expected < 1:
        raise ConfigError("sensitivities need a positive noise, and at least 1 draw and 1 expected unit")
    task = prepared.task
    n, units = public_units(task, settings), task.train.units
    classifier = load_classifier(base.folder, task.labels, settings.seed, task.problem)
    streams = TwoStreams.of(classifier, settings, task)
    schedule, delta = planned(settings, expected, n, units.name)
    (query,) = schedule.queries
    keys = Keys.fresh()
    spending = training_spending(schedule, delta=delta, dataset=dataset, units=n, run=new_run(), steps_run={})
    claim = epsilon(schedule.event(), delta, schedule.adjacency)
    with charged(ledger, spending) as charge:
        ask = partial(unit_rises, streams, noise=noise, draws=draws, seed=settings.seed)
        chosen = _bounds(bounds, classifier, len(task.labels), streams, ask, settings.max_length)
        for sigma in query.noise_multipliers:
            check_noise(sigma)
        joined = poisson_draw(keys.sampling, query.name, 0, units.count, query.sampling_rate)
        rows, labels = prepared.encoded("train"), prepared.labels("train")
        values = ask(rows, labels, units, joined, progress=progress)
        sums = dict(zip(_STREAMS, map(bounded_sum, values, chosen), strict=True))
        charge.first_query()
        add_noise(sums, query.noise_multipliers[0], keys.noise.generator(query.name, 0, query.purpose))
    divisor = query.sampling_rate * n
    shared, own = (
        NoisySensitivity(
            value=float(sums[name]) * bound / divisor,
            noise=query.noise_multipliers[0] * bound / divisor,
            bound=bound,
        )
        for name, bound in zip(_STREAMS, chosen, strict=True)
    )
    entry = charge.settle({})
    return PrivateSensitivities(streams.layer, streams.experts, shared, own, spending, claim, entry)


def passes(draws: int) -> int:
    """How many times the units go through the model."""
    return len(_STREAMS) * (2 * draws + 1)


def unit_rises(
    streams: TwoStreams,
    encoded: Encoded,
    labels: npt.NDArray[np.int64],
    units: UnitMap,
    joined: npt.NDArray[np.int64],
    *,
    noise: float,
    draws: int,
    seed: int,
    progress: Callable[[int], None] = lambda passes: None,
) -> tuple[Array, Array]:
    """λ of each unit under noise on the shared stream, and on the experts'. Not noised: private as the rows.

    Args:
        labels: (rows,) classes.
        joined: (m,) numbers of the units.

    Returns:
        Two arrays (m,).
    """
    rows, position = units.rows_of(joined)
    counts = np.bincount(position, minlength=len(joined))

    def losses() -> Tensor:
        found = [_loss(streams, encoded, row, labels) for row in rows]
        progress(1)
        return torch.stack(found) if found else torch.zeros(0, dtype=torch.float64)

    def values(parameters: Mapping[str, nn.Parameter]) -> Array:
        each = rises(parameters, losses, noise=noise, draws=draws, seed=seed).mean(0).numpy()
        return np.bincount(position, weights=each, minlength=len(joined)) / counts

    return values(streams.shared), values(streams.own)


def bounded_sum(values: Array, bound: float) -> Tensor:
    """Σ of the values, each cut to [−R, R], in units of R; what isn't finite adds 0. Private.

    Returns:
        (1,) float64.
    """
    cut = np.where(np.isfinite(values), values.clip(-bound, bound) / bound, 0.0)
    return torch.tensor([cut.sum()], dtype=torch.float64)


def check_alone(streams: TwoStreams, rows: Encoded) -> None:
    """Whether a row's loss is the same, bit for bit, whatever went through the model before it.

    Raises:
        ModelError: it isn't, so that one record would show in another's value.
    """
    labels = np.zeros(len(rows), dtype=np.int64)
    first = _loss(streams, rows, 0, labels)
    _loss(streams, rows, len(rows) - 1, labels)
    if not torch.equal(first, _loss(streams, rows, 0, labels)):
        raise ModelError(
            "a row's loss depends on what the model read before, so one record's sensitivity would depend on "
            "others; this base can't be asked privately"
        )


def _loss(streams: TwoStreams, encoded: Encoded, row: int, labels: npt.NDArray[np.int64]) -> Tensor:
    """One row's loss, float64; the row is alone in its batch."""
    one = np.array([row])
    with torch.no_grad():
        logits = streams.model(**encoded.batch(one)).logits.double()
    return classification(logits, torch.from_numpy(labels[one]))[0]


def _bounds(
    wished: tuple[float | None, float | None],
    classifier: Classifier,
    classes: int,
    streams: TwoStreams,
    ask: Callable[..., tuple[Array, Array]],
    max_length: int,
) -> tuple[float, ...]:
    """R of each stream, as wished, or from made-up rows.

    Raises:
        ModelError: those give none, or a row isn't alone.
    """
    lengths = np.linspace(min(_SHORTEST, max_length), max_length, _MADE_UP).round().astype(np.int64)
    public = made_up(classifier, lengths)
    assert isinstance(public, Encoded)
    check_alone(streams, public)
    if None not in wished:
        return tuple(bound for bound in wished if bound is not None)
    labels = np.arange(_MADE_UP, dtype=np.int64) % classes
    found = ask(public, labels, UnitMap.records(_MADE_UP), np.arange(_MADE_UP))
    return tuple(bound or _default(values) for bound, values in zip(wished, found, strict=True))


def _default(values: Array) -> float:
    """R from the values of made-up rows.

    Raises:
        ModelError: they give none.
    """
    bound = _ROOM * float(np.abs(values).mean())
    if not (math.isfinite(bound) and bound > 0):
        raise ModelError(
            "made-up rows don't say how large a sensitivity may be (noise changes their loss by nothing, or "
            "without limit); name a bound, or inject another noise"
        )
    return bound
