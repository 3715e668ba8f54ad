"""What the experts made of the records: signal, bias, imbalance, stable owners, transfer, cost. All private.

`confide train --method raptor --diagnostics` (`experts.diagnostics`) measures after training and writes
`private/diagnostics.json`; `confide moe diagnose RUN` prints it. In Python, `FineTuned.diagnostics` is a
`Diagnostics`, and `document` makes of it what the file holds.

Nothing is drawn from the run's keys and no weight changes, so that the release is the same bits with and
without. Nothing is charged either: whoever shares a number from here shares something that no claim covers.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from confide.errors import ConfigError
from confide.finetune.binding import Binding
from confide.finetune.experts import UNCLIPPED, BoundExperts, engine_of, routing_key, routing_texts
from confide.finetune.history import History
from confide.finetune.loop import row_losses
from confide.finetune.memory import peak_bytes
from confide.finetune.owner_estimator import (
    DriftError,
    Estimator,
    OwnerMoments,
    Simulated,
    drift_error,
    estimator,
    simulate,
)
from confide.finetune.prepare import Prepared
from confide.finetune.public_routing import public_routing
from confide.finetune.role_signal import RoleSignal, role_mismatch, role_signals, role_sizes
from confide.finetune.settings import Settings
from confide.gradients.clipping import clip_factors
from confide.gradients.expert_engine import ExpertEngine
from confide.models.adapters import Adapted
from confide.models.moe.attach import attached
from confide.models.moe.layers import SparseLayer, sparse_layers
from confide.models.moe.owners import vote_tables
from confide.models.moe.ownership import (
    Imbalance,
    Stability,
    Transfer,
    Votes,
    imbalance,
    stability,
    transfer,
    vote_shares,
)
from confide.models.moe.selection import LayerRouting, Selection
from confide.privacy.streams import Schedule, Stream
from confide.privacy.units import UnitMap
from confide.tasks.text import buckets

FILE_NAME = "diagnostics.json"
SCHEMA = "confide.diagnostics/1"
NOTE = "Private: never share. Computed from the records without noise; no privacy claim covers it."
RECORDS = 1024
"""What needs a pass over records looks at this many at most, picked at random with a public seed."""
DRAWS = 32

_TOKENS = 4096
_SEED = 0
Rows = npt.NDArray[np.int64]
Advance = Callable[[], None]


@dataclass(frozen=True)
class Diagnostics:
    """Everything that was measured; None where the variant has no such thing.

    Attributes:
        layer: path of the trained layer.
        records: how many the passes looked at.
        roles: signal and noise of each role over training.
        mismatch: M_role (`role_signal.role_mismatch`).
        imbalance: of the owners of all training records.
        estimator, simulated: bias and variance of each expert's gradient at the last weights, in closed form
            and by draws; over the records looked at, as if they were all.
        silent: share of them whose gradient at their owner is exactly 0 at the last weights: none of the
            tokens that went to the owner has a say in the loss. In the last layer of a model that reads its
            first token only, that is every record whose first token went elsewhere.
        stability: of their owners.
        drift: error by stale owners and drifting weights.
        transfer: routing of the public corpus and of the records, at the first weights.
        seconds: of all queries, by stream.
        peak_bytes: the most memory that the process has had, diagnostics included.
        parameters: by role: `shared` and `head` are trained by all records, `experts` by owners (`each
            expert` is one's part), `model` is everything.
    """

    layer: str | None
    records: int
    roles: tuple[RoleSignal, ...]
    mismatch: float | None
    imbalance: Imbalance | None
    estimator: Estimator | None
    simulated: Simulated | None
    silent: float | None
    stability: Stability | None
    drift: DriftError | None
    transfer: Transfer | None
    seconds: Mapping[str, float]
    peak_bytes: int
    parameters: Mapping[str, int]


def check_diagnosable(units: UnitMap) -> None:
    """Owners are a record's; a unit of several records has no single one.

    Raises:
        ConfigError: units with several rows.
    """
    if units.rows_per_unit > 1:
        raise ConfigError(
            f"diagnostics are about records that have one owner each, but up to {units.rows_per_unit} rows "
            f"of a {units.name} are used; leave the diagnostics out"
        )


def diagnose(
    prepared: Prepared,
    adapted: Adapted,
    settings: Settings,
    schedule: Schedule,
    binding: Binding,
    start: Mapping[str, Tensor],
    history: History,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Diagnostics:
    """Measure on the training records, after training. Weights are bitwise as before afterwards.

    Args:
        binding: as trained, with `diagnose`.
        start: trained parameters as they were before the first step.
        progress: called with (passes done, passes planned).
    """
    signals = role_signals(schedule, history.steps, role_sizes(schedule, binding.parameters))
    owner = binding.experts.owner if binding.experts else None
    model = adapted.classifier.model
    rows = np.arange(len(binding.labels), dtype=np.int64)
    if len(rows) > RECORDS:
        rows = np.sort(np.random.default_rng(_SEED).permutation(rows)[:RECORDS])
    found: dict[str, Any] = {}
    advance = _counter(progress, 9)
    layers = sparse_layers(model)
    with _weights(binding.parameters, start, 0.0):
        first = _votes(prepared, adapted, settings, layers, rows)
        advance()
        public = _public_routing(prepared, adapted, settings)
        if public is not None:
            private = [
                LayerRouting(x.number, x.name, _counts(first[x.name].argmax(1), x.experts)) for x in layers
            ]
            found["transfer"] = transfer(public.layers, private)
        advance()
    stream = next((s for s in schedule.streams if s.ownership == "owner"), None)
    if owner is not None and stream is not None:
        (layer,) = adapted.experts
        found["imbalance"] = imbalance(_counts(owner, layer.experts))
        with _weights(binding.parameters, start, 0.5):
            halfway = _votes(prepared, adapted, settings, [layer], rows)[layer.name]
        advance()
        last = _votes(prepared, adapted, settings, [layer], rows)[layer.name]
        advance()
        before = first[layer.name]
        drift = _distance(binding.parameters, start, [n for n in adapted.encoder if n in start])
        found["stability"] = stability(before, halfway, last, drift)
        if set(stream.parameters) == set(adapted.expert_parameters):
            bound = [record.bound for record in history.steps if record.stream == stream.name]
            clipping = dataclasses.replace(stream.clipping, bound=bound[-1]) if bound else stream.clipping
            stream = dataclasses.replace(stream, clipping=clipping)
            found |= _gradients(binding, stream, start, rows, owner[rows], last.argmax(1), advance)
    return Diagnostics(
        layer=adapted.experts[0].name if len(adapted.experts) == 1 else None,
        records=len(rows),
        roles=signals,
        mismatch=role_mismatch(signals),
        imbalance=found.get("imbalance"),
        estimator=found.get("estimator"),
        simulated=found.get("simulated"),
        silent=found.get("silent"),
        stability=found.get("stability"),
        drift=found.get("drift"),
        transfer=found.get("transfer"),
        seconds={
            s.name: math.fsum(x.seconds for x in history.steps if x.stream == s.name)
            for s in schedule.streams
        },
        peak_bytes=peak_bytes(),
        parameters=_parameters(adapted, model, binding.parameters),
    )


def document(found: Diagnostics) -> dict[str, Any]:
    """What `private/diagnostics.json` holds; NaN becomes null."""
    value = {"schema": SCHEMA, "note": NOTE, **dataclasses.asdict(found)}
    for role, signal in zip(value["roles"], found.roles, strict=True):
        role |= {"mean_snr": signal.mean_snr, "snr_variation": signal.snr_variation}
    if found.estimator:
        value["estimator"]["error"] = found.estimator.error
    if found.transfer:
        for side in ("public", "private"):
            for layer, routing in zip(value["transfer"][side], getattr(found.transfer, side), strict=True):
                layer |= {"entropy": routing.entropy, "evenness": routing.evenness}
    return dict(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value


def _gradients(
    binding: Binding,
    stream: Stream,
    start: Mapping[str, Tensor],
    rows: Rows,
    owner: Rows,
    last_owner: Rows,
    advance: Advance,
) -> dict[str, Any]:
    """Bias, variance and drift of the experts' gradients over some rows, which stand for all records."""
    assert binding.experts is not None
    experts = binding.experts.layers[0].experts
    # One engine for all passes: it asks only once whether rows depend on each other.
    parameters = {name: binding.parameters[name] for name in stream.parameters}
    engine = engine_of(binding.module, binding.experts, stream, parameters)
    assert isinstance(engine, ExpertEngine)
    # The public denominator is a multiple of n, and so are sums over a draw.
    denominator = stream.denominator * len(rows) / len(binding.labels)
    with _weights(binding.parameters, start, 0.0):
        first, _ = _sums(engine, binding, stream, rows)
    advance()
    with _weights(binding.parameters, start, 0.5):
        halfway, _ = _sums(engine, binding, stream, rows)
    advance()
    last, contributions = _sums(engine, binding, stream, rows)
    advance()
    owners = np.array(binding.experts.owner)
    owners[rows] = last_owner
    moved = BoundExperts(binding.experts.layers, owners)
    own, _ = _sums(engine, dataclasses.replace(binding, experts=moved), stream, rows)
    advance()
    moments = owner_moments(last, contributions, owner, experts)
    noise = stream.noise_multiplier * stream.clipping.bound
    simulated = simulate(
        lambda drawn: _sums(engine, binding, stream, rows[drawn])[0],
        moments,
        records=len(rows),
        sampling_rate=stream.sampling_rate,
        denominator=denominator,
        draws=DRAWS,
        rng=np.random.default_rng(_SEED),
    )
    advance()
    return {
        "estimator": estimator(
            moments,
            sampling_rate=stream.sampling_rate,
            denominator=denominator,
            noise=noise * len(rows) / len(binding.labels),  # so that σC/D is what it was
        ),
        "simulated": simulated,
        "silent": float((contributions == 0).mean()),
        "drift": drift_error(
            first,
            halfway,
            last,
            own,
            changed=int((owner != last_owner).sum()),
            drift=_distance(binding.parameters, start, tuple(start)),
            weight=stream.sampling_rate / denominator,
            bound=None if stream.clipping.rule == "none" else stream.clipping.bound,
        ),
    }


def owner_moments(
    sums: Tensor, contributions: npt.NDArray[np.float64], owner: Rows, experts: int
) -> OwnerMoments:
    """Mean and mean square of what the records of each expert contribute.

    Args:
        sums: (E, d) over all records.
        contributions: (records,) norms of what each added.
        owner: (records,).
    """
    counts = np.bincount(owner, minlength=experts)
    squares = np.bincount(owner, contributions**2, minlength=experts)
    some = np.maximum(counts, 1)
    return OwnerMoments(counts, sums / torch.from_numpy(some)[:, None], squares / some)


def _sums(
    engine: ExpertEngine, binding: Binding, stream: Stream, rows: Rows
) -> tuple[Tensor, npt.NDArray[np.float64]]:
    """((E, d) float64 clipped sums, (rows,) norms of what each row added), no noise."""
    clipping = UNCLIPPED if stream.clipping.rule == "none" else stream.clipping
    added = np.zeros(len(rows))
    with engine:
        for part in binding.micro_batches(rows, np.arange(len(rows))) if len(rows) else []:
            losses = row_losses(binding, stream, engine, rows[part])
            norms = engine.add(losses, torch.arange(len(part)), len(part), clipping)
            squares = norms.square()
            factors = clip_factors(squares, torch.zeros_like(squares), clipping, losses.dtype)
            added[part] = (norms.nan_to_num(0, 0, 0) * factors).numpy()
        sums = engine.take()
    return torch.cat([value.double().flatten(1) for value in sums.values()], 1), added


def _votes(
    prepared: Prepared, adapted: Adapted, settings: Settings, layers: Sequence[SparseLayer], rows: Rows
) -> dict[str, Votes]:
    """Vote shares of some training records in some layers, at the weights as they are."""
    model: Any = adapted.classifier.model
    encoded = prepared.encoded("train")
    parts = buckets(encoded.lengths[rows], np.arange(len(rows)), _TOKENS)
    batches = ((part, encoded.batch(rows[part])) for part in parts)
    tables = vote_tables(layers, lambda batch: model(**batch), batches, len(rows), settings.experts.vote)
    return {name: vote_shares(table) for name, table in tables.items()}


def _public_routing(prepared: Prepared, adapted: Adapted, settings: Settings) -> Selection | None:
    """At the base's weights, which are the model's in this moment; None without a public corpus."""
    own, key = settings.experts, routing_key(settings)
    if own.public is None:
        return None
    if key not in prepared.routings:
        texts = routing_texts(own.model_copy(update={"layer": "entropy"}), prepared.task)
        if not texts:
            return None
        classifier = adapted.classifier
        tokenizer = copy.deepcopy(classifier.tokenizer)  # one keeps how it last cut texts, and is released
        prepared.routings[key] = public_routing(
            classifier.model, tokenizer, texts, settings.max_length, own.vote
        )
    return prepared.routings[key]


def _counts(owner: npt.NDArray[Any], experts: int) -> tuple[int, ...]:
    return tuple(np.bincount(owner, minlength=experts).tolist())


def _parameters(adapted: Adapted, model: nn.Module, trained: Collection[str]) -> dict[str, int]:
    named = dict(model.named_parameters())

    def size(names: Sequence[str]) -> int:
        return sum(named[name].numel() for name in names if name in trained)

    whole = sum(value.numel() for value in named.values())
    found = {"model": whole, "shared": size(adapted.encoder), "head": size(adapted.head)}
    if adapted.experts:
        experts = sum(attached(layer).experts for layer in adapted.experts)
        found |= {
            "experts": size(adapted.expert_parameters),
            "each expert": size(adapted.expert_parameters) // experts,
        }
    return found


def _distance(now: Mapping[str, Tensor], then: Mapping[str, Tensor], names: Sequence[str]) -> float:
    return math.sqrt(sum(float((now[n].detach() - then[n]).double().square().sum()) for n in names))


@contextmanager
def _weights(
    parameters: Mapping[str, nn.Parameter], start: Mapping[str, Tensor], share: float
) -> Iterator[None]:
    """Within the block, weights that far from the start to where they are; afterwards bitwise these."""
    now = {name: parameters[name].data for name in start}
    try:
        for name, value in now.items():
            parameters[name].data = torch.lerp(start[name], value, share)
        yield
    finally:
        for name, value in now.items():
            parameters[name].data = value


def _counter(progress: Callable[[int, int], None], total: int) -> Advance:
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    return advance
