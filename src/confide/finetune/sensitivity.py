"""How much noise on some parameters raises the loss: what a budget's division between streams goes by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from confide.errors import ModelError
from confide.finetune.experts import attach_experts
from confide.finetune.public_routing import batches
from confide.finetune.settings import Settings
from confide.gradients.losses import classification
from confide.models.adapters import adapt
from confide.models.backbones import Classifier
from confide.tasks.records import TaskData
from confide.tasks.text import encode


@dataclass(frozen=True)
class Sensitivity:
    """λ, by which the mean loss rises per unit of noise variance on every coordinate, ½·trace of the Hessian.

    Attributes:
        value: λ.
        error: its standard error over the draws of noise.
    """

    value: float
    error: float


def sensitivity(
    parameters: Mapping[str, nn.Parameter],
    loss: Callable[[], float],
    *,
    noise: float,
    draws: int,
    seed: int = 0,
) -> Sensitivity:
    """Inject Gaussian noise into parameters, and take it out again (RAPTOR, arXiv 2609.05770).

    Args:
        parameters: of one stream, by name; bitwise as before afterwards.
        loss: mean loss over public records at the current weights, the same records each time. It must be
            public, or what comes out is a query that nobody charged.
        noise: s; small enough for the loss to be quadratic.
        draws: of z; at least 2.
        seed: of z; public.

    Raises:
        ModelError: fewer than two draws, or a loss that isn't finite.
    """
    if draws < 2:
        raise ModelError(f"{draws} draw of noise gives no error of the sensitivity; take at least 2")
    values = rises(
        parameters,
        lambda: torch.tensor(loss(), dtype=torch.float64),
        noise=noise,
        draws=draws,
        seed=seed,
    )
    if not bool(values.isfinite().all()):
        raise ModelError(f"the loss isn't finite under noise of {noise:g}; inject less")
    return Sensitivity(float(values.mean()), float(values.std()) / math.sqrt(draws))


def rises(
    parameters: Mapping[str, nn.Parameter],
    losses: Callable[[], Tensor],
    *,
    noise: float,
    draws: int,
    seed: int = 0,
) -> Tensor:
    """How losses rise per unit of variance, for each draw of noise on the parameters.

    Each draw z is added and subtracted, so that the gradient cancels:
    (L(w + sz) + L(w − sz) − 2L(w)) / 2s².

    Args:
        parameters: by name; bitwise as before afterwards.
        losses: at the current weights, of any shape, float64. What they are computed from is as private as
            what comes out.
        noise: s.
        seed: of z; public.

    Returns:
        (draws, *shape of the losses) float64.
    """
    generator = torch.Generator().manual_seed(seed)
    before = {name: parameter.data for name, parameter in parameters.items()}

    def at(z: Mapping[str, Tensor], sign: float) -> Tensor:
        for name, parameter in parameters.items():
            parameter.data = before[name].add(z[name], alpha=sign * noise)
        return losses()

    start = losses()
    found = []
    try:
        for _ in range(draws):
            z = {
                name: torch.randn(value.shape, generator=generator, dtype=value.dtype)
                for name, value in before.items()
            }
            found.append((at(z, 1) + at(z, -1) - 2 * start) / (2 * noise**2))
    finally:
        for name, parameter in parameters.items():
            parameter.data = before[name]
    return torch.stack(found)


@dataclass(frozen=True)
class TwoStreams:
    """A classifier whose head is untrained, with the parameters of RAPTOR's two streams.

    Attributes:
        model: of the classifier.
        layer: block whose experts are trained.
        experts: E.
        shared, own: parameters of the shared stream and of that layer's experts, by name.
    """

    model: Any
    layer: int
    experts: int
    shared: Mapping[str, nn.Parameter]
    own: Mapping[str, nn.Parameter]

    @classmethod
    def of(cls, classifier: Classifier, settings: Settings, task: TaskData) -> TwoStreams:
        """Attach the experts that the settings name to a classifier of its own.

        Raises:
            ConfigError, ModelError: as `attach_experts` and `adapt`.
        """
        (layer,) = layers = attach_experts(classifier, settings, task)
        adapted = adapt(classifier, settings.trainable, settings.seed, layers)
        named = dict(classifier.model.named_parameters())
        return cls(
            classifier.model,
            layer.number,
            layer.experts,
            {name: named[name] for name in (*adapted.encoder, *adapted.head)},
            {name: named[name] for name in adapted.expert_parameters},
        )


@dataclass(frozen=True)
class StreamSensitivities:
    """What noise does to either stream of RAPTOR, before training.

    Attributes:
        layer: block whose experts are trained.
        experts: E.
        shared, own: of the shared stream and of that layer's experts.
    """

    layer: int
    experts: int
    shared: Sensitivity
    own: Sensitivity


def stream_sensitivities(
    classifier: Classifier,
    settings: Settings,
    task: TaskData,
    *,
    noise: float,
    draws: int,
    progress: Callable[[int], None] = lambda draws: None,
) -> StreamSensitivities:
    """Sensitivities of a classifier whose head is untrained, on the training records of a public task.

    Args:
        classifier: of its own; experts are attached to it.
        settings: of `raptor`.
        task: public.
        progress: called with the number of losses computed since the last call.

    Raises:
        ModelError: a dense model, or an unknown layer.
    """
    streams = TwoStreams.of(classifier, settings, task)
    encoded = encode(classifier.tokenizer, task.train.texts, settings.max_length)
    labels = torch.from_numpy(task.train.labels)

    def loss() -> float:
        total = 0.0
        with torch.no_grad():
            for rows, batch in batches(encoded):
                logits = streams.model(**batch).logits.double()
                total += float(classification(logits, labels[torch.from_numpy(rows)]).sum())
        progress(1)
        return total / len(encoded)

    shared, own = (
        sensitivity(parameters, loss, noise=noise, draws=draws, seed=settings.seed)
        for parameters in (streams.shared, streams.own)
    )
    return StreamSensitivities(streams.layer, streams.experts, shared, own)
