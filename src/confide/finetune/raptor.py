"""RAPTOR (arXiv 2609.05770) and what it is compared with, as schedules of a shared and an experts' stream."""

from __future__ import annotations

import dataclasses

from confide.errors import ConfigError
from confide.finetune.ascent import ascent_and_anchor
from confide.finetune.clipping import clipping_of, expert_clipping_of
from confide.finetune.settings import Settings
from confide.models.adapters import Adapted
from confide.privacy.calibration import calibrate
from confide.privacy.splits import split
from confide.privacy.streams import Budget, ParameterGroup, Schedule, Stream

SHARED, EXPERTS, ALL = "shared", "experts", "all"
JOINT = ("one-stream", "one-clip", "monolithic")
"""Variants with one norm over experts and all else."""


def schedule(settings: Settings, adapted: Adapted, units: int, batch: int, unit: str = "record") -> Schedule:
    """The streams of `settings.experts.variant`, with noise multiplier 1 (0 for `non-private`).

    Args:
        adapted: with experts attached, unless the variant is `shared-only`.
        units: n, public.
        batch: B, the expected draw of every stream.
        unit: name of the protected unit.

    Raises:
        ConfigError: more experts than expected units in a draw, or per-role clipping of a variant that has
            one stream over everything.

    Ascents and anchor are those of DP-Merging in every stream, so that private mixtures merge too; neither
    paper has that.
    """
    own, private = settings.experts, settings.private
    if settings.clipping == "per-role" and own.variant in JOINT:
        raise ConfigError(
            f"clipping per-role divides C² between encoder and head, and variant {own.variant} clips the "
            "experts with them; choose another rule"
        )
    groups = _shared_groups(settings, adapted)
    shared = Stream(
        name=SHARED,
        groups=groups,
        steps=settings.steps,
        draw=SHARED,
        sampling_rate=batch / units,
        clipping=clipping_of(settings, groups, batch),
        noise_multiplier=float(private),
        denominator=float(batch),
        expected_draw=float(batch),
        optimizer=settings.optimizer,
        bias_correction=settings.bias_correction if private else 0.0,
        decay=settings.decay,
        warmup=settings.warmup,
        **ascent_and_anchor(settings, encoder=True),
    )
    if own.variant == "shared-only":
        return Schedule((shared,), unit=unit)
    count = adapted.experts[0].experts
    if own.denominator == "even" and own.variant not in JOINT:
        denominator = batch / count
        if denominator < 1:
            raise ConfigError(
                f"the layer has {count} experts, but only {batch} {unit}s are expected in a draw: less than "
                f"one for each expert. Raise expected_batch to {count} or more"
            )
    else:
        denominator = float(batch)
    rate = own.learning_rate or settings.learning_rate
    group = ParameterGroup("experts", adapted.expert_parameters, rate, anchored=True)
    experts = dataclasses.replace(
        shared,
        name=EXPERTS,
        groups=(group,),
        steps=own.steps or settings.steps,
        draw=EXPERTS,
        clipping=expert_clipping_of(settings, batch),
        denominator=denominator,
        record_weight=own.record_weight,
        record_power=own.record_power,
        record_memory=own.record_memory,
        ownership="owner",
        experts=count,
    )
    match own.variant:
        case "experts-only":
            streams: tuple[Stream, ...] = (experts,)
        case "one-draw":
            streams = (dataclasses.replace(shared, draw=ALL), dataclasses.replace(experts, draw=ALL))
        case "one-stream" | "monolithic" | "one-clip":
            owned = own.variant == "one-clip"
            together = dataclasses.replace(
                shared,
                name=ALL,
                draw=ALL,
                groups=(*shared.groups, group),
                experts=count,
                ownership="owner" if owned else "all",
                record_weight=own.record_weight if owned else "none",
                record_power=own.record_power if owned else 1.0,
                record_memory=own.record_memory if owned else 0.0,
            )
            streams = (together,)
        case _:
            streams = (shared, experts)
    return Schedule(streams, unit=unit)


def with_budget(planned: Schedule, settings: Settings, budget: Budget) -> Schedule:
    """The schedule with noise that spends the budget, divided between its streams as the settings say."""
    if len(planned.streams) == 1:
        return calibrate(planned, budget)
    share = settings.experts.shared_share
    return split(planned, budget, {SHARED: share, EXPERTS: 1 - share}, settings.experts.split)


def _shared_groups(settings: Settings, adapted: Adapted) -> tuple[ParameterGroup, ...]:
    groups = (
        ParameterGroup("encoder", adapted.encoder, settings.learning_rate, anchored=True),
        ParameterGroup("head", adapted.head, settings.head_learning_rate, anchored=False),
    )
    return tuple(group for group in groups if group.parameters)
