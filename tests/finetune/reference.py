"""What a schedule means, written out by hand: one record at a time, plain autograd, textbook optimizers.

Slow and obvious on purpose, and without noise: it shares nothing with the loop but the draws' addresses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from confide.gradients.keys import Key
from confide.gradients.sampling import poisson_draw
from confide.privacy.streams import Clipping, Schedule, Stream

Vector = dict[str, Tensor]


class Reference:
    """Executes a schedule on `model`, whose trained parameters are float64."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[int], Tensor],
        units: list[list[int]],
        sampling: Key,
        distance: Callable[[], Tensor],
        owner: Sequence[int] = (),
    ) -> None:
        """`loss(row)` is one record's loss; `units` are rows by unit; `distance` is ‖w − w₀‖²."""
        self.owner = owner
        self.parameters = dict(model.named_parameters())
        self.loss = loss
        self.units = units
        self.sampling = sampling
        self.distance = distance
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.previous: dict[str, Vector] = {}
        self.remembered: dict[tuple[str, int], Tensor] = {}

    def run(self, schedule: Schedule) -> None:
        draws = list(dict.fromkeys(stream.draw for stream in schedule.streams))
        for step in range(max(stream.steps for stream in schedule.streams)):
            for draw in draws:
                streams = [s for s in schedule.streams if s.draw == draw and step < s.steps]
                gradients = [self.gradient(stream, step) for stream in streams]
                for stream, gradient in zip(streams, gradients, strict=True):
                    self.previous[stream.name] = gradient
                    self.move(stream, gradient, step)

    def gradient(self, stream: Stream, step: int) -> Vector:
        units = self.draw(stream.draw, step, stream.sampling_rate)
        if stream.ascent == "none" or (stream.ascent == "lagged" and step == 0):
            return self.mean(stream, units)
        if stream.ascent == "lagged":
            direction = self.previous[stream.name]
        elif stream.ascent == "paired":
            direction = self.mean(stream, units)
        else:
            direction = self.mean(stream, self.draw(f"{stream.name}/ascent", step, stream.sampling_rate))
        length = torch.cat([value.flatten() for value in direction.values()]).norm()
        before = {name: self.parameters[name].detach().clone() for name in direction}
        for name, value in direction.items():
            if length > 0:
                self.parameters[name].data += stream.ascent_radius * value / length
        result = self.mean(stream, units)
        for name, value in before.items():
            self.parameters[name].data = value
        return result

    def draw(self, name: str, step: int, rate: float) -> list[int]:
        return [int(u) for u in poisson_draw(self.sampling, name, step, len(self.units), rate)]

    def mean(self, stream: Stream, units: list[int]) -> Vector:
        total = {name: torch.zeros_like(self.parameters[name]) for name in stream.parameters}
        for unit in units:
            rows = [self.gradient_of(stream, row) for row in self.units[unit]]
            own = {name: sum(row[name] for row in rows) / len(rows) for name in stream.parameters}
            for bound, names in roles(stream):
                norm = torch.cat([own[name].flatten() for name in names]).norm()
                for name in names:
                    total[name] += clip_factor(stream.clipping, bound, norm) * own[name]
        return {name: value / stream.denominator for name, value in total.items()}

    def gradient_of(self, stream: Stream, row: int) -> Vector:
        tensors = [self.parameters[name] for name in stream.parameters]
        loss = self.loss(row)
        weight = torch.ones(())
        if stream.record_weight != "none":
            weight = 1 - (-loss.detach()).exp()
            before, keep = self.remembered.get((stream.name, row), weight), stream.record_memory
            weight = self.remembered[stream.name, row] = keep * before + (1 - keep) * weight
        weight = weight**stream.record_power
        found = dict(zip(stream.parameters, torch.autograd.grad(loss * weight, tensors), strict=True))
        for name in found if stream.ownership == "owner" else ():
            if ".experts." in name:
                others = torch.arange(stream.experts) != self.owner[row]
                found[name] = found[name].clone()
                found[name][others] = 0
        return found

    def move(self, stream: Stream, gradient: Vector, step: int) -> None:
        left = (stream.steps - step) / (stream.steps - stream.warmup)
        cosine = (1 + math.cos(math.pi * (1 - left))) / 2
        decay = {"constant": 1.0, "linear": left, "cosine": cosine}[stream.decay]
        if step < stream.warmup:
            decay = step / stream.warmup
        anchored = [name for group in stream.groups if group.anchored for name in group.parameters]
        pull: Vector = {}
        if stream.anchor:
            tensors = [self.parameters[name] for name in anchored]
            values = torch.autograd.grad(stream.anchor * self.distance(), tensors)
            pull = dict(zip(anchored, values, strict=True))
        for group in stream.groups:
            rate = group.learning_rate * decay
            for name in group.parameters:
                g, w = gradient[name].clone(), self.parameters[name].data
                if name in pull and stream.anchor_form == "coupled":
                    g += pull[name]
                elif name in pull:
                    w -= rate * pull[name]
                w -= rate * stream.weight_decay * w
                if stream.optimizer == "sgd":
                    w -= rate * g
                    continue
                m, v = self.moments.get(name, (torch.zeros_like(w), torch.zeros_like(w)))
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                self.moments[name] = (m, v)
                w -= rate * (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)


def roles(stream: Stream) -> list[tuple[float, tuple[str, ...]]]:
    """Bound and parameters of what is clipped together."""
    if stream.clipping.shares is None:
        return [(stream.clipping.bound, stream.parameters)]
    return [
        (stream.clipping.bound * share**0.5, group.parameters)
        for share, group in zip(stream.clipping.shares, stream.groups, strict=True)
    ]


def clip_factor(clipping: Clipping, bound: float, norm: Tensor) -> Tensor | float:
    if clipping.rule in ("flat", "per-role"):
        return min(1.0, bound / max(float(norm), 1e-300))
    if clipping.rule == "normalised":
        return clipping.bound / (norm + clipping.stability)
    return 1.0
