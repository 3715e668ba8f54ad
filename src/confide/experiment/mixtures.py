"""What a study of mixtures of experts does beside training: makes one, measures routing, notes streams."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from confide.experiment.plan import Plan
from confide.finetune.experts import routing_texts
from confide.finetune.prepare import Progress, counter
from confide.finetune.public_routing import public_routing
from confide.finetune.run import FineTuned, PublicBase, public_units
from confide.finetune.settings import Settings
from confide.finetune.upcycled import Upcycled, upcycle_base
from confide.models.backbones import load_encoder
from confide.models.moe.selection import Selection
from confide.privacy.splits import variance
from confide.report.study import MixtureRun, StreamFacts
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
        self.found: dict[tuple[str | None, int, str], Selection] = {}

    def decide(self, settings: Settings) -> Settings:
        """The same settings, with the number of the layer where they ask for the most even one.

        Raises:
            ConfigError, DataError: no public corpus, or one that shares a text with a task.
            ModelError: a dense base.
        """
        own = settings.experts
        texts = {routing_texts(own, task) for task in self._tasks} if settings.method == "raptor" else {()}
        (chosen,) = texts  # the corpus is one, whatever the task that it is compared with
        if not chosen:
            return settings
        key = (own.public, settings.max_length, own.vote)
        if key not in self.found:
            encoder, tokenizer = load_encoder(self._base.folder)
            advance = counter(self._progress, "texts for the choice of the layer", len(chosen))
            self.found[key] = public_routing(
                encoder, tokenizer, chosen, settings.max_length, own.vote, advance
            )
        layer = str(self.found[key].chosen)
        return settings.model_copy(update={"experts": own.model_copy(update={"layer": layer})})


def run_facts(trained: FineTuned, method: str) -> MixtureRun:
    """The streams of one run of `raptor` as they were trained."""
    settings, streams = trained.settings, trained.schedule.streams
    named = dict(trained.adapted.classifier.model.named_parameters())
    parts = {stream.name: variance(stream) for stream in streams} if settings.private else {}
    whole = sum(parts.values())
    steps = trained.history.steps
    return MixtureRun(
        method=method,
        seed=settings.seed,
        task=trained.prepared.task.name,
        variant=settings.experts.variant,
        epsilon=settings.epsilon if settings.private else None,
        layers=tuple(layer.number for layer in trained.adapted.experts),
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
                clipped=fmean(step.clipped for step in steps if step.stream == stream.name),
            )
            for stream in streams
        ),
    )
