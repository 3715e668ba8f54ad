"""Experts bound to a run: which layer, attached how, who owns which record, and which engine clips them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from confide.errors import ConfigError, ModelError, ResumeError
from confide.finetune.expert_settings import ExpertSettings
from confide.finetune.prepare import Prepared, Progress, RoutingKey, counter, forward_of, silent
from confide.finetune.public_routing import public_routing
from confide.finetune.settings import Settings
from confide.gradients.engine import Engine
from confide.gradients.expert_engine import ExpertEngine
from confide.gradients.experts import Lora, OwnerExperts
from confide.gradients.joint_engine import JointEngine
from confide.models.adapters import Adapted
from confide.models.backbones import Classifier
from confide.models.moe.attach import attach, attached
from confide.models.moe.harden import harden
from confide.models.moe.layers import SparseLayer, sparse_layers
from confide.models.moe.owners import alone, owner_maps
from confide.models.moe.selection import select
from confide.privacy.streams import Clipping, Schedule, Stream
from confide.tasks.corpus import check_public, read_corpus, sample, texts_of
from confide.tasks.records import TaskData

if TYPE_CHECKING:
    from confide.finetune.checkpoint import Unfinished

PUBLIC_TEXTS = 5000
UNCLIPPED = Clipping("flat", 1e300)
"""For streams without noise, where nothing is claimed."""


@dataclass(frozen=True)
class BoundExperts:
    """Attached experts and the records' owners.

    Attributes:
        layers: from the bottom.
        owner: (rows,) the expert of the trained layer that owns each record; None where records have none.
            Private.
    """

    layers: tuple[OwnerExperts, ...]
    owner: npt.NDArray[np.int64] | None


def attach_experts(classifier: Classifier, settings: Settings, task: TaskData) -> tuple[SparseLayer, ...]:
    """Harden the model, choose the layer on public text, and attach the experts that are trained.

    Raises:
        ConfigError: the layer is chosen by entropy, and no public corpus is named; or the task isn't one of
            texts, or pairs of them, with one class each.
        DataError: the corpus can't be read, or shares a text with the records.
        ModelError: a dense model, an unknown layer, or a family that can't be hardened.
    """
    model, own = classifier.model, settings.experts
    if task.problem.inputs == "image" or task.problem.target != "class":
        raise ConfigError(
            f"raptor is for texts, or pairs of texts, with one class each, and task {task.name} isn't"
        )
    layers = sparse_layers(model)
    harden(model, max_length=settings.max_length)
    if own.variant == "shared-only":
        return ()
    lora = Lora(own.rank, own.alpha, settings.seed) if own.train == "lora" else None
    chosen = tuple(layers) if own.variant == "monolithic" else (_layer(classifier, settings, task, layers),)
    for layer in chosen:
        attach(layer, lora)
    return chosen


def _layer(
    classifier: Classifier, settings: Settings, task: TaskData, layers: list[SparseLayer]
) -> SparseLayer:
    own = settings.experts
    texts = routing_texts(own, task)
    if not texts:
        return select(layers, own.layer)
    found = public_routing(classifier.model, classifier.tokenizer, texts, settings.max_length, own.vote)
    for warning in found.warnings:
        warnings.warn(f"the layer was chosen by entropy: {warning}", stacklevel=2)
    return select(layers, own.layer, found)


def chooses_by_entropy(own: ExpertSettings) -> bool:
    """Whether the layer is the one whose owners are most even on public text."""
    return own.layer == "entropy" and own.variant not in ("monolithic", "shared-only")


def routing_texts(own: ExpertSettings, task: TaskData) -> tuple[str, ...]:
    """The public texts by which the layer is chosen; none where it isn't chosen by entropy.

    Raises:
        ConfigError: no public corpus is named.
        DataError: the corpus can't be read, or shares a text with the task's records.
    """
    if not chooses_by_entropy(own):
        return ()
    if own.public is None:
        raise ConfigError(
            "layer entropy is measured on public text: name a corpus (experts.public, --public), or choose "
            "the layer: first, last, or the number of a block"
        )
    corpus = read_corpus(own.public)
    check_public(corpus, texts_of(task), f"task {task.name}")
    return sample(corpus, PUBLIC_TEXTS, seed=0)


def routing_key(settings: Settings) -> RoutingKey:
    """What the routing of a base on public text depends on."""
    own = settings.experts
    return own.public, settings.max_length, own.vote


def owners_of(
    prepared: Prepared, adapted: Adapted, own: ExpertSettings, progress: Progress = silent
) -> npt.NDArray[np.int64]:
    """(rows,) owners of all training records at the current weights, in float32. Private.

    To be computed once, before the first step, and kept. Each record goes through the model by itself, from
    its tokens: outputs of frozen blocks that are kept for training were rounded beside other records, and a
    near tie must not fall by who these are.
    """
    (layer,) = adapted.experts
    classifier = adapted.classifier
    if any(parameter.dtype != torch.float32 for parameter in classifier.model.parameters()):
        raise ModelError("owners are computed in float32; load the model so")
    encoded = prepared.encoded("train")
    _, forward = forward_of(classifier, 0, encoded)
    advance = counter(progress, f"owners, {prepared.task.name}", len(encoded))

    def one(rows: npt.NDArray[np.int64]) -> dict[str, Tensor]:
        advance(len(rows))
        return encoded.batch(rows, width=1)

    return owner_maps([layer], forward, alone(one, len(encoded)), len(encoded), own.vote)[layer.name]


def owners_for(
    prepared: Prepared,
    adapted: Adapted,
    schedule: Schedule,
    settings: Settings,
    unfinished: Unfinished | None,
    progress: Progress = silent,
) -> npt.NDArray[np.int64] | None:
    """The records' owners, if a stream asks for them: computed once, before the first query, and kept.

    Args:
        unfinished: where they are kept for a run that is stopped.
        progress: called with (what, records done, records).

    Raises:
        ResumeError: the run began with owners of other records.
    """
    if all(stream.ownership == "all" for stream in schedule.streams):
        return None
    (layer,) = adapted.experts
    held = unfinished.owners(layer.name) if unfinished else None
    if held is None:
        # At the base's own weights, which all runs begin with: adapters are zero until they are trained.
        key = (layer.name, settings.experts.vote)
        if key not in prepared.owners:
            prepared.owners[key] = owners_of(prepared, adapted, settings.experts, progress)
        held = prepared.owners[key]
        if unfinished:
            unfinished.note_owners(layer.name, held)
    if len(held) != len(prepared.task.train):
        raise ResumeError("the owners that the run began with are not those of these records")
    return held


def bind_experts(layers: tuple[SparseLayer, ...], owner: npt.NDArray[np.int64] | None) -> BoundExperts | None:
    """What the loop needs of attached layers; None where there are none."""
    return BoundExperts(tuple(attached(layer) for layer in layers), owner) if layers else None


def made_up_experts(adapted: Adapted, rows: int) -> BoundExperts | None:
    """Attached experts that own made-up rows in turn, for measurements without records."""
    if not adapted.experts:
        return None
    return bind_experts(adapted.experts, np.arange(rows, dtype=np.int64) % adapted.experts[0].experts)


def engine_of(
    module: nn.Module, experts: BoundExperts | None, stream: Stream, parameters: Mapping[str, nn.Parameter]
) -> Engine | ExpertEngine | JointEngine | None:
    """What clips the stream's gradients; None for a dense stream without clipping.

    Raises:
        ModelError: a parameter that can't be clipped exactly, or owners without experts.
    """
    wanted = {id(parameter) for parameter in parameters.values()}
    layers = [
        layer
        for layer in (experts.layers if experts else ())
        if wanted & {id(parameter) for parameter in layer.trained().values()}
    ]
    if stream.ownership == "owner" and (len(layers) != 1 or experts is None or experts.owner is None):
        raise ModelError(f"stream {stream.name!r} needs the experts of one layer, and the records' owners")
    roles = {name: role for role, group in enumerate(stream.groups) for name in group.parameters}
    if not layers:
        return None if stream.clipping.rule == "none" else Engine(module, parameters, roles)
    held = sum(len(layer.trained()) for layer in layers)
    if held == len(parameters) and len(layers) == 1:
        return ExpertEngine(module, layers[0], parameters)
    return JointEngine(module, parameters, layers)


def announce(
    engine: Engine | ExpertEngine | JointEngine | None,
    experts: BoundExperts | None,
    stream: Stream,
    rows: npt.NDArray[np.int64],
    batch: Mapping[str, Tensor],
) -> None:
    """Tell an engine of experts whose tokens the next forward pass will see."""
    if isinstance(engine, ExpertEngine | JointEngine):
        assert experts is not None
        owner = experts.owner[rows] if stream.ownership == "owner" and experts.owner is not None else None
        engine.expect(len(rows), owner, batch["attention_mask"])
