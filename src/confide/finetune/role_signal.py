"""How much of each step was gradient and how much noise, for what all records share and for the experts.

Roles are `shared` (everything but the trained experts) and `experts`. RAPTOR (arXiv 2609.05770) reports such
numbers; where its definitions aren't known here, they are confide's own, as stated. All of it is private.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from confide.privacy.streams import Schedule, Stream

if TYPE_CHECKING:
    from confide.finetune.history import StepRecord

Sizes = Mapping[str, Sequence[int]]
"""Role → coordinates of each of its parts: one part of `shared`, one per expert of `experts`."""

SHARED, EXPERTS = "shared", "experts"


def role_norms(stream: Stream, sums: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Role → Euclidean norms of its parts of a clipped sum, before noise. Private.

    One norm of what is shared; one for each expert of each layer.
    """
    return {
        role: [math.sqrt(part) for part in parts]
        for role, parts in _parts(stream, sums, lambda value: value.double().square()).items()
    }


def role_sizes(schedule: Schedule, parameters: Mapping[str, Tensor]) -> dict[str, Sizes]:
    """Stream → coordinates of the parts that `role_norms` tells apart. Public."""
    return {
        stream.name: {
            role: [int(part) for part in parts]
            for role, parts in _parts(stream, parameters, torch.ones_like).items()
        }
        for stream in schedule.streams
    }


def _parts(
    stream: Stream, tensors: Mapping[str, Tensor], of: Callable[[Tensor], Tensor]
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    layers: dict[str, Tensor] = {}
    for group in stream.groups:
        for name in group.parameters:
            value = of(tensors[name].detach())
            if group.name == EXPERTS:
                layer = name.rpartition(".experts.")[0]
                layers[layer] = layers.get(layer, 0) + value.flatten(1).sum(1).double()
            else:
                found[SHARED] = [found.get(SHARED, [0.0])[0] + float(value.double().sum())]
    if layers:
        found[EXPERTS] = [part for layer in layers.values() for part in layer.tolist()]
    return found


@dataclass(frozen=True)
class RoleSignal:
    """What a role's queries were made of, as means over its steps.

    Attributes:
        role: `shared` or `experts`.
        stream: that trained it.
        parameters: coordinates in all.
        steps: how many.
        clipped: mean share of the drawn units that were clipped.
        snr: (parts,) signal over noise of each part, mean over steps of ‖clipped sum‖ / (σC√d), d the part's
            coordinates: the norm of what the records say over the norm that noise has in the root mean
            square. None without noise. (Ours.)
        share: (quarters,) the role's share of ‖shared sum‖² + ‖experts' sum‖², mean over each quarter of the
            steps that have both. None with one role. (Ours: squared, so that shares add up to 1.)
        seconds: of a step, mean.
    """

    role: str
    stream: str
    parameters: int
    steps: int
    clipped: float
    snr: tuple[float, ...] | None
    share: tuple[float, ...] | None
    seconds: float

    @property
    def mean_snr(self) -> float | None:
        """Mean over parts."""
        return None if self.snr is None else float(np.mean(self.snr))

    @property
    def snr_variation(self) -> float | None:
        """Standard deviation over parts, relative to their mean."""
        if self.snr is None or not self.mean_snr:
            return None
        return float(np.std(self.snr)) / self.mean_snr


def role_signals(
    schedule: Schedule, steps: Sequence[StepRecord], sizes: Mapping[str, Sizes]
) -> tuple[RoleSignal, ...]:
    """Signal and noise of every role, from steps whose norms were kept.

    Args:
        sizes: by stream, from `role_sizes`.
    """
    at: dict[str, dict[int, float]] = {SHARED: {}, EXPERTS: {}}
    for record in steps:
        for role, norms in record.norms.items():
            at[role][record.step] = float(np.square(norms).sum())
    both = sorted(at[SHARED].keys() & at[EXPERTS].keys())
    portions = {
        role: [at[role][step] / ((at[SHARED][step] + at[EXPERTS][step]) or 1.0) for step in both]
        for role in at
    }
    found = []
    for stream in schedule.streams:
        own = [record for record in steps if record.stream == stream.name]
        for role, parts in sizes[stream.name].items():
            snr = None
            if own and stream.noise_multiplier:
                ratios = [
                    np.array(record.norms[role])
                    / (stream.noise_multiplier * record.bound * np.sqrt(np.array(parts, dtype=np.float64)))
                    for record in own
                ]
                snr = tuple(float(value) for value in np.mean(ratios, axis=0))
            quarters = [chunk for chunk in np.array_split(np.array(portions[role]), 4) if len(chunk)]
            found.append(
                RoleSignal(
                    role=role,
                    stream=stream.name,
                    parameters=sum(parts),
                    steps=len(own),
                    clipped=float(np.mean([record.clipped for record in own])) if own else 0.0,
                    snr=snr,
                    share=tuple(float(chunk.mean()) for chunk in quarters) if both else None,
                    seconds=float(np.mean([record.seconds for record in own])) if own else 0.0,
                )
            )
    return tuple(found)


def role_mismatch(signals: Sequence[RoleSignal]) -> float | None:
    """M_role: how many times louder the shared parameters are than the experts, in signal over noise.

    The shared SNR over the mean SNR of the experts; 1 where noise bears on both roles alike. None where a
    role is missing, or there is no noise. (Ours.)
    """
    by_role = {signal.role: signal.mean_snr for signal in signals}
    shared, experts = by_role.get(SHARED), by_role.get(EXPERTS)
    return shared / experts if shared is not None and experts else None
