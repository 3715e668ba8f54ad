"""Statistics of private records, asked once as a charged query when training is over.

Each unit contributes one array per answer, only if it is finite, scaled to a Euclidean norm of at most R²:

- `grams`: for each input of trained Linear layers the mean over the unit's rows of XᵀX / T, X the (T, in)
  tokens that enter, padding left out. Read as the vector (Gⱼⱼ, √2·Gⱼₖ for j < k), which has G's Frobenius
  norm.
- `fisher`: over all trained weights of the encoder together, the mean over the unit's rows of
  Σ_y p(y|x) (∂ log p(y|x))².

So adding or removing a unit moves the sum of an answer by at most R²: the sensitivity. Noise N(0, (σR²)²) on
the vectors is one Gaussian; of L answers each carries √L·σ, which together costs what one with σ does
(`privacy.queries`). For a Gram it is symmetric noise, σR² on the diagonal and σR²/√2 beside it. Dividing by
the public n and moving to the nearest positive semidefinite matrix, or to 0 for a Fisher, look at no record.

The energy Σ‖xₜ‖²/T bounds the Frobenius norm from above, and the sum of a diagonal its length: scaling those
would keep the same promise with up to √in times less of the statistics left beside the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from confide.errors import ConfigError
from confide.finetune.prepare import micro_batches
from confide.finetune.settings import Settings
from confide.finetune.statistics import diagonal
from confide.gradients.keys import KeyStream
from confide.gradients.noise import add_noise
from confide.merging.operators.specification import LINEAR
from confide.merging.statistics import Kind
from confide.models.adapters import Adapted
from confide.models.backbones import Classifier
from confide.models.tail import Source
from confide.privacy.queries import Query
from confide.privacy.units import UnitMap
from confide.release.names import canonical
from confide.tasks.text import Encoded

QUERY = "statistics"
"""The query's name in the schedule; with its purpose, the address of its noise."""

_TOKENS = 8192
_MADE_UP, _MADE_UP_LENGTH = 32, 32
_ROUNDING = 1 - 1e-9  # float64 sums of a unit's array are off by less
_SMALLEST = 1e-12

Array = npt.NDArray[np.float64]
Forward = Callable[[dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Released:
    """Noisy statistics, public from here on.

    Attributes:
        kind: what they are.
        arrays: by canonical name of the encoder's tensor.
    """

    kind: Kind
    arrays: Mapping[str, Array]


def queries(settings: Settings, adapted: Adapted) -> tuple[Query, ...]:
    """The query that the settings ask for, to be charged with the schedule.

    Raises:
        ConfigError: no encoder weight is trained, so that a merge has no use for statistics.
    """
    if settings.release_statistics is None:
        return ()
    if not trained(adapted):
        raise ConfigError(
            "release_statistics needs trained weights of the encoder; with a head alone there is nothing to "
            "merge by them"
        )
    if settings.release_statistics == "fisher":
        return (Query(QUERY, "fisher", (settings.statistics_noise,)),)
    count = len(shared_inputs(adapted))
    if not count:
        raise ConfigError("release_statistics: grams needs trained Linear weights of attention or MLP")
    return (Query(QUERY, "gram", (math.sqrt(count) * settings.statistics_noise,) * count),)


def trained(adapted: Adapted) -> tuple[str, ...]:
    """Names, in the plain model, of the encoder's weights that training changes; others need none."""
    if adapted.lora:
        return tuple(sorted(adapted.lora))
    return adapted.encoder


def shared_inputs(adapted: Adapted) -> tuple[tuple[str, ...], ...]:
    """Trained Linear weights that RegMean merges; those that read one input share one Gram.

    Query, key and value do. Found by a forward pass over a made-up text.
    """
    classifier = adapted.classifier
    modules = dict(classifier.model.named_modules())
    weights = [
        name
        for name in trained(adapted)
        if _is_linear(modules.get(name.removesuffix(".weight")))
        and LINEAR.match(canonical(name.removeprefix(classifier.prefix)), (1, 1))
    ]
    with _inputs_of(classifier, weights) as seen, torch.no_grad():
        classifier.model(**_made_up(classifier, 1, 4).batch(np.array([0])))
    groups: list[tuple[Tensor, list[str]]] = []
    for name in weights:
        if name not in seen:
            continue
        value = seen[name]
        group = next((names for other, names in groups if other is value), None)
        if group is None:
            groups.append((value, [name]))
        else:
            group.append(name)
    return tuple(tuple(names) for _, names in groups)


def ask(
    query: Query,
    adapted: Adapted,
    plain: Classifier,
    tokens: Encoded,
    inputs: Source,
    forward: Forward,
    units: UnitMap,
    *,
    denominator: int,
    bound: float | None,
    noise: KeyStream,
) -> Released:
    """Take the query.

    Args:
        query: from `queries`, charged.
        adapted: as trained.
        plain: the same classifier with the weights that are released; what is trained here is frozen after.
        tokens: all training rows. Private.
        inputs: the same rows as `forward` reads them.
        forward: `inputs` → logits, through `plain`.
        units: which rows belong to which unit.
        denominator: n, public.
        bound: R, whose square bounds the norm of a unit's array. None takes the mean norm of made-up texts
            under the released weights, which is public, for each answer.
        noise: the stream at this query's address; used here only.
    """
    if query.purpose == "gram":
        groups = shared_inputs(adapted)
        made_up = _made_up(plain, _MADE_UP, _MADE_UP_LENGTH)
        found = norms(plain, groups, made_up)
        bounds = {name: _bound(bound, values) for name, values in found.items()}
        sums = gram_sums(plain, groups, tokens, units, bounds)
        noisy = noisy_grams(sums, query.noise_multipliers[0], noise)
        means = {name: nearest(value) * (bounds[name] / denominator) for name, value in noisy.items()}
        arrays = {_canonical(plain, name): means[group[0]] for group in groups for name in group}
        return Released("grams", arrays)
    named = dict(plain.model.named_parameters())
    wanted = {name: named[name] for name in trained(adapted)}
    for name, parameter in named.items():
        parameter.requires_grad_(name in wanted)
    made_up = _made_up(plain, _MADE_UP, _MADE_UP_LENGTH)
    lengths = [
        _length(values)
        for values in unit_diagonals(
            lambda batch: plain.model(**batch).logits, wanted, made_up, UnitMap.records(len(made_up))
        )
    ]
    scale = _bound(bound, np.array(lengths))
    total = fisher_sum(forward, wanted, inputs, units, scale)
    (sigma,) = query.noise_multipliers
    add_noise(total, sigma, noise)
    return Released(
        "fisher",
        {
            _canonical(plain, name): value.clamp(min=0).numpy() * (scale / denominator)
            for name, value in total.items()
        },
    )


def gram_sums(
    classifier: Classifier,
    groups: Sequence[tuple[str, ...]],
    tokens: Encoded,
    units: UnitMap,
    bounds: Mapping[str, float],
) -> dict[str, Tensor]:
    """Σ over units of their bounded Grams, without noise. Private.

    Args:
        groups: from `shared_inputs`.
        bounds: R² of each group, by its first name.

    Returns:
        First name of each group → (in, in) float64, in units of R².
    """
    sums: dict[str, Tensor] = {}
    for seen, mask, owner, share in _forwards(classifier, groups, tokens, units):
        for name, value in seen.items():
            rows, lengths = _rows(value, mask)
            norm = torch.zeros(int(owner.max()) + 1, dtype=torch.float64)
            norm.index_add_(0, owner, share * lengths)
            factor = (_ROUNDING * bounds[name] / norm).clamp(max=1.0)
            good = norm.isfinite()[owner]
            weight = (factor[owner] * share)[good] / bounds[name]
            kept = (rows[good] * weight.sqrt()[:, None, None]).flatten(0, 1)
            sums[name] = sums.get(name, 0) + kept.T @ kept
    return sums


def norms(classifier: Classifier, groups: Sequence[tuple[str, ...]], texts: Encoded) -> dict[str, Array]:
    """Frobenius norms of the Gram of each text, by the first name of a group."""
    found: dict[str, list[Array]] = {}
    for seen, mask, _, _ in _forwards(classifier, groups, texts, UnitMap.records(len(texts))):
        for name, value in seen.items():
            found.setdefault(name, []).append(_rows(value, mask)[1].numpy())
    return {name: np.concatenate(values) for name, values in found.items()}


def noisy_grams(sums: Mapping[str, Tensor], sigma: float, noise: KeyStream) -> dict[str, Array]:
    """Add noise of standard deviation σ to the vectors (Gⱼⱼ, √2·Gⱼₖ for j < k), and read them as matrices."""
    places = {name: np.triu_indices(len(value)) for name, value in sums.items()}
    scales = {name: np.where(j == k, 1.0, math.sqrt(2.0)) for name, (j, k) in places.items()}
    vectors = {
        name: torch.from_numpy(value.numpy()[places[name]] * scales[name]) for name, value in sums.items()
    }
    noisy = {}
    for name, vector in add_noise(vectors, sigma, noise).items():
        matrix = np.zeros(tuple(sums[name].shape))
        matrix[places[name]] = vector.numpy() / scales[name]
        noisy[name] = matrix + np.triu(matrix, 1).T
    return noisy


def nearest(matrix: Array) -> Array:
    """The positive semidefinite matrix next to a symmetric one, in Frobenius norm (Higham 1988)."""
    values, vectors = np.linalg.eigh(matrix)
    root = vectors * np.sqrt(values.clip(min=0))
    return np.asarray(root @ root.T)


def fisher_sum(
    forward: Forward, parameters: Mapping[str, nn.Parameter], inputs: Source, units: UnitMap, bound: float
) -> dict[str, Tensor]:
    """Σ over units of their bounded Fisher diagonals, without noise, in units of `bound`. Private."""
    total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters.items()}
    for values in unit_diagonals(forward, parameters, inputs, units):
        length = _length(values)
        if math.isfinite(length):
            factor = min(1.0, _ROUNDING * bound / length) if length else 0.0
            for name, value in values.items():
                total[name].add_(value, alpha=factor / bound)
    return total


def unit_diagonals(
    forward: Forward, parameters: Mapping[str, nn.Parameter], inputs: Source, units: UnitMap
) -> Iterator[dict[str, Tensor]]:
    """For each unit the mean of its rows' Fisher diagonals, float64."""
    for unit in range(units.count):
        rows, _ = units.rows_of(np.array([unit]))
        mean = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters.items()}
        for row in rows:
            logits = forward(inputs.batch(np.array([row])))[0]
            for total, value in zip(mean.values(), diagonal(logits, list(parameters.values())), strict=True):
                total.add_(value, alpha=1 / len(rows))
        yield mean


def _forwards(
    classifier: Classifier, groups: Sequence[tuple[str, ...]], tokens: Encoded, units: UnitMap
) -> Iterator[tuple[dict[str, Tensor], Tensor, Tensor, Tensor]]:
    """Inputs by the first name of a group, mask, unit of each row, share of each row; no unit is split."""
    rows, position = units.rows_of(np.arange(units.count))
    shares = 1 / np.bincount(position)[position]
    for part in micro_batches(tokens, _TOKENS)(rows, position):
        batch = tokens.batch(rows[part])
        with _inputs_of(classifier, [group[0] for group in groups]) as seen, torch.inference_mode():
            classifier.model(**batch)
        owner = torch.from_numpy(np.unique(position[part], return_inverse=True)[1])
        yield seen, batch["attention_mask"].bool(), owner, torch.from_numpy(shares[part])


def _rows(value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, T, in) tokens over √T, padding 0, and the Frobenius norms ‖XᵀX‖ = ‖XXᵀ‖ of each row."""
    if value.ndim == 2:  # one token a row
        value, mask = value[:, None], mask[:, :1]
    count = mask.sum(1).clamp(min=1).double()
    rows = value.double().masked_fill(~mask[..., None], 0.0) / count.sqrt()[:, None, None]
    return rows, (rows @ rows.transpose(1, 2)).square().sum((1, 2)).sqrt()


@contextmanager
def _inputs_of(classifier: Classifier, weights: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Within the block, what enters the modules of these weights in a forward pass."""
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[name] = inputs[0]

        return hook

    handles = [
        classifier.model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(watch(name))
        for name in weights
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _made_up(classifier: Classifier, rows: int, length: int) -> Encoded:
    """Random tokens, the same ones always."""
    config: Any = classifier.model.config
    pad = int(classifier.tokenizer.pad_token_id)
    length = min(length, int(getattr(config, "max_position_embeddings", length)) // 2)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, rows * length).astype(np.int32)
    tokens[tokens == pad] = (pad + 1) % config.vocab_size
    return Encoded(tokens, np.arange(rows + 1, dtype=np.int64) * length, pad)


def _bound(chosen: float | None, lengths: Array) -> float:
    """R²: chosen, or the mean of public lengths; 1 where a model that diverged has none."""
    if chosen is not None:
        return chosen**2
    mean = float(lengths.mean())
    return mean if math.isfinite(mean) and mean > _SMALLEST else 1.0


def _length(values: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in values.values()))


def _canonical(classifier: Classifier, name: str) -> str:
    return canonical(name.removeprefix(classifier.prefix))


def _is_linear(module: nn.Module | None) -> bool:
    return isinstance(getattr(module, "base_layer", module), nn.Linear)
