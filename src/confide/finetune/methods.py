"""From settings to the schedule that is trained and charged."""

from __future__ import annotations

import dataclasses

from confide.errors import ConfigError
from confide.finetune import raptor, released
from confide.finetune.ascent import ascent_and_anchor
from confide.finetune.clipping import clipping_of
from confide.finetune.idle import refuse_idle_head
from confide.finetune.settings import Settings
from confide.models.adapters import Adapted
from confide.privacy.calibration import calibrate
from confide.privacy.queries import Query
from confide.privacy.streams import Budget, ParameterGroup, Schedule, Stream

DEFAULT_BATCH = 1024
ACCURACY = "accuracy"
"""Name of the query that is published with a release."""


def schedule(settings: Settings, adapted: Adapted, units: int, unit: str = "record") -> Schedule:
    """One stream over everything that is trained, or those of `raptor`.

    Beside them the queries that the settings ask for. Noise multipliers of streams are 1, or 0 without
    privacy; `with_budget` scales them to what the queries leave of the budget.

    Args:
        units: n, public.
        unit: name of the protected unit.

    Raises:
        ConfigError: more expected units in a draw than there are, or anchor and decay together.
    """
    batch = settings.expected_batch or max(1, min(DEFAULT_BATCH, units // 4))
    if batch > units:
        raise ConfigError(
            f"expected_batch is {batch}, but there are only {units} {unit}s to draw from; "
            f"choose at most {units}"
        )
    if settings.method == "raptor":
        planned = raptor.schedule(settings, adapted, units, batch, unit)
        return dataclasses.replace(planned, queries=_queries(settings))
    if not adapted.head:
        refuse_idle_head(settings)
    every = (
        ParameterGroup("encoder", adapted.encoder, settings.learning_rate, anchored=True),
        ParameterGroup("head", adapted.head, settings.head_learning_rate, anchored=False),
    )
    groups = tuple(group for group in every if group.parameters)
    stream = Stream(
        name="all",
        groups=groups,
        steps=settings.steps,
        draw="all",
        sampling_rate=batch / units,
        clipping=clipping_of(settings, groups, batch),
        noise_multiplier=float(settings.private),
        denominator=float(batch),
        optimizer=settings.optimizer,
        bias_correction=settings.bias_correction if settings.private else 0.0,
        decay=settings.decay,
        warmup=settings.warmup,
        **ascent_and_anchor(settings, encoder=bool(adapted.encoder)),
    )
    queries = (*_queries(settings), *released.queries(settings, adapted))
    return Schedule((stream,), unit=unit, queries=queries)


def with_budget(planned: Schedule, settings: Settings, budget: Budget) -> Schedule:
    """The schedule with noise that spends the budget."""
    if settings.method == "raptor":
        return raptor.with_budget(planned, settings, budget)
    return calibrate(planned, budget)


def _queries(settings: Settings) -> tuple[Query, ...]:
    if settings.publish_accuracy is None:
        return ()
    return (Query(ACCURACY, "accuracy", (settings.publish_accuracy,)),)
