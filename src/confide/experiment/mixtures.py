"""What a study of mixtures of experts does beside training: makes one, measures routing, notes streams."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from confide.experiment.plan import Plan
from confide.finetune.base import PublicBase
from confide.finetune.diagnostics import Diagnostics
from confide.finetune.experts import chooses_by_entropy, routing_key, routing_texts
from confide.finetune.prepare import Progress, RoutingKey, counter
from confide.finetune.public_routing import public_routing
from confide.finetune.run import public_units
from confide.finetune.settings import Settings
from confide.finetune.tuned import FineTuned
from confide.finetune.upcycled import Upcycled, upcycle_base
from confide.models.backbones import load_encoder
from confide.models.moe.selection import Selection
from confide.privacy.splits import variance
from confide.report.study import MixtureRun, PrivateRun, RecordFacts, StreamFacts
from confide.tasks.corpus import check_public, read_corpus, sample, texts_of
from confide.tasks.records import TaskData

_LENGTH = 128


def upcycled(plan: Plan, tasks: Sequence[TaskData], out: Path, progress: Progress) -> Upcycled | None:
    """The mixture that a study makes of its base, in `out`/base; None if it makes none.

    Raises:
        DataError: no such corpus, or one of its texts is a record of a task.
        ModelError: a base that can't get experts, or not in those blocks.
    """
    wish = plan.upcycle
    if wish is None:
        return None
    texts = sample(read_corpus(wish.corpus), wish.texts, seed=0)
    for task in tasks:
        check_public(texts, texts_of(task), f"task {task.name}")
    name = plan.base.rstrip("/").rsplit("/", 1)[-1].removeprefix("package:")
    return upcycle_base(
        PublicBase.of(plan.base),
        texts,
        out / "base" / f"{name}-moe",
        experts=wish.experts,
        blocks=wish.blocks,
        max_length=_LENGTH,
        progress=counter(progress, "texts for the routers", len(texts)),
    )


class Routings:
    """Routing of one base on public text: measured once for all runs that choose their layer by it."""

    def __init__(self, base: PublicBase, tasks: Sequence[TaskData], progress: Progress) -> None:
        self._base, self._tasks, self._progress = base, tasks, progress
        self.found: dict[RoutingKey, Selection] = {}

    def decide(self, settings: Settings) -> Settings:
        """The same settings, with the number of the layer where they ask for the most even one.

        Raises:
            ConfigError, DataError: no public corpus, or one that shares a text with a task.
            ModelError: a dense base.
        """
        own, key = settings.experts, routing_key(settings)
        if settings.method != "raptor" or not chooses_by_entropy(own):
            return settings
        if key not in self.found:
            for task in self._tasks:
                texts = routing_texts(own, task)
            encoder, tokenizer = load_encoder(self._base.folder)
            advance = counter(self._progress, "texts for the choice of the layer", len(texts))
            self.found[key] = public_routing(
                encoder, tokenizer, texts, settings.max_length, own.vote, advance
            )
        layer = str(self.found[key].chosen)
        return settings.model_copy(update={"experts": own.model_copy(update={"layer": layer})})


def run_facts(trained: FineTuned, method: str) -> MixtureRun:
    """The streams of one run of `raptor` as they were trained."""
    settings, streams = trained.settings, trained.schedule.streams
    named = dict(trained.adapted.classifier.model.named_parameters())
    parts = {stream.name: variance(stream) for stream in streams} if settings.private else {}
    whole = sum(parts.values())
    return MixtureRun(
        method=method,
        seed=settings.seed,
        task=trained.prepared.task.name,
        variant=settings.experts.variant,
        epsilon=settings.epsilon if settings.private else None,
        layers=_blocks(trained),
        streams=tuple(
            StreamFacts(
                name=stream.name,
                trained=sum(named[name].numel() for name in stream.parameters),
                steps=stream.steps,
                expected=stream.sampling_rate * public_units(trained.prepared.task, settings),
                noise_multiplier=stream.noise_multiplier,
                rule=stream.clipping.rule,
                bound=stream.clipping.bound,
                denominator=stream.denominator,
                share=parts[stream.name] / whole if parts else None,
            )
            for stream in streams
        ),
    )


def private_facts(trained: FineTuned, method: str) -> PrivateRun:
    """What one run of `raptor` showed of its training records, without noise."""
    steps = trained.history.steps
    return PrivateRun(
        method=method,
        seed=trained.settings.seed,
        task=trained.prepared.task.name,
        clipped={
            stream.name: 1.0  # each gradient is brought to length C
            if stream.clipping.rule == "normalised"
            else fmean(step.clipped for step in steps if step.stream == stream.name)
            for stream in trained.schedule.streams
            if stream.clipping.rule != "none"
        },
        diagnostics=_record_facts(trained.diagnostics, _blocks(trained)) if trained.diagnostics else None,
    )


def _blocks(trained: FineTuned) -> tuple[int, ...]:
    return tuple(layer.number for layer in trained.adapted.experts)


def _record_facts(found: Diagnostics, blocks: tuple[int, ...]) -> RecordFacts:
    values: dict[str, Any] = {}
    experts = next((role for role in found.roles if role.role == "experts"), None)
    if experts and experts.share:
        values["experts_share"] = experts.share[0], experts.share[-1]
    if found.estimator and found.simulated:
        scale = found.estimator.scale
        with np.errstate(divide="ignore", invalid="ignore"):  # draws of all records don't differ
            gaps = np.abs(found.simulated.scale - scale) / found.simulated.scale_error
        values |= {"scales": (float(scale.min()), float(scale.max()))}
        values |= {"scale_gap": max((float(gap) for gap in gaps if np.isfinite(gap)), default=None)}
    if found.imbalance:
        values |= {"bias": found.imbalance.mean_bias, "bias_bound": found.imbalance.mean_bound}
    if found.stability:
        values |= {"changed": found.stability.changed, "kept": found.stability.kept_for_sure}
    if found.drift and found.drift.norm:
        bound = found.drift.stale_bound
        values |= {"stale": found.drift.stale / found.drift.norm}
        values |= {"stale_bound": None if bound is None else bound / found.drift.norm}
    if moved := found.transfer:
        values |= {"public_choice": moved.public_choice, "private_choice": moved.private_choice}
        for side in ("public", "private"):
            own = [layer for layer in getattr(moved, side) if (layer.block,) == blocks]
            values |= {f"{side}_evenness": layer.evenness for layer in own}
    return RecordFacts(
        records=found.records,
        mismatch=found.mismatch,
        signals={role.role: (role.mean_snr, role.snr_variation) for role in found.roles if role.mean_snr},
        **values,
    )
