"""The one loop that executes every schedule: plain, DP-AdamW, DP-Merging and their ablations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from confide.errors import ModelError
from confide.finetune.binding import Binding
from confide.finetune.experts import UNCLIPPED, announce, engine_of
from confide.finetune.history import History, State, StepRecord
from confide.finetune.movement import Movement
from confide.finetune.optimizers import optimizer_of, rate_at
from confide.finetune.role_signal import role_norms
from confide.gradients.clipping import next_bound
from confide.gradients.engine import Engine
from confide.gradients.expert_engine import ExpertEngine
from confide.gradients.joint_engine import JointEngine
from confide.gradients.keys import Keys
from confide.gradients.noise import add_noise
from confide.gradients.residual import remembered, residual_weights
from confide.gradients.sampling import poisson_draw
from confide.privacy.streams import Schedule, Stream

Units = npt.NDArray[np.int64]
_MOVES = 0.5  # of the learning rate: in a warmup, or at the end of a decay, a step may be too small to see


def train(
    binding: Binding,
    schedule: Schedule,
    keys: Keys,
    progress: Callable[[int, int], None] = lambda done, total: None,
    first_query: Callable[[], None] = lambda: None,
    start: State | None = None,
    after_step: Callable[[Callable[[], State]], None] = lambda state: None,
) -> History:
    """Execute the schedule; the bound parameters hold the result.

    Guarantee: every parameter changes only through Gaussian queries that `schedule.event()` prices, and
    through functions of their answers and of public values. Weights are bitwise restored after an ascent;
    parameters outside the schedule never change.

    Args:
        keys: address noise and draws; fixed keys make the run a simulation.
        progress: called with (steps done, steps planned).
        first_query: called once, just before the first noise is drawn; if it never was, no query was
            answered.
        start: where an earlier call stood, with the same binding, schedule and keys: the result is bitwise
            the one of a single call.
        after_step: called between two steps with a function that gives the state; its tensors are those
            that the next step changes.

    Raises:
        ModelError: a parameter of the schedule is not bound, can't be clipped exactly, or doesn't move
            (`movement`): that is looked at once in each call, after the first step whose rate isn't near 0.
    """
    unbound = [name for name in schedule.parameters if name not in binding.parameters]
    if unbound:
        raise ModelError(f"the schedule trains {unbound[0]}, which the model does not have")
    known: dict[int, str] = {}
    for name in schedule.parameters:
        other = known.setdefault(id(binding.parameters[name]), name)
        if other != name:
            raise ModelError(
                f"{name} and {other} are one tied tensor, which the schedule trains twice; name it once"
            )
    report = _once(first_query)
    runners: dict[str, list[_StreamRunner]] = {}
    for stream in schedule.streams:
        runners.setdefault(stream.draw, []).append(_StreamRunner(binding, stream, keys, report))
    every = [runner for group in runners.values() for runner in group]
    history, done = History(), 0
    if start is not None:
        history, done = start.history, start.step
        for runner in every:
            runner.restore(start.tensors)
    total = max(stream.steps for stream in schedule.streams)
    for step in range(done, total):
        for group in runners.values():
            active = [runner for runner in group if step < runner.stream.steps]
            for runner in active:  # streams on one draw look at the same weights, then move together
                history.steps.append(runner.query(step))
            for runner in active:
                runner.update(step)
                history.steps_run[runner.stream.name] = step + 1
        progress(step + 1, total)
        if step + 1 < total:
            after_step(partial(_state, step + 1, every, history))
    return history


def _state(step: int, runners: list[_StreamRunner], history: History) -> State:
    tensors = {name: value for runner in runners for name, value in runner.tensors()}
    return State(step, tensors, history)


def _once(call: Callable[[], None]) -> Callable[[], None]:
    pending = [call]

    def report() -> None:
        if pending:
            pending.pop()()

    return report


class _StreamRunner:
    def __init__(self, binding: Binding, stream: Stream, keys: Keys, report: Callable[[], None]) -> None:
        self.report = report  # before every noise
        self.binding = binding
        self.stream = stream
        self.keys = keys
        self.parameters = {name: binding.parameters[name] for name in stream.parameters}
        self.engine = engine_of(binding.module, binding.experts, stream, self.parameters)
        self.clipping = stream.clipping  # with this step's bound
        self.noise_variance = 0.0  # of each value of `gradient`
        self.gradient: dict[str, Tensor] = {}
        self.optimizer = optimizer_of(stream, self.parameters)
        self.memory = (  # each row's mean weight
            torch.full((len(binding.labels),), math.nan) if stream.record_memory else None
        )
        self.movement: Movement | None = self._movement()
        self.stepped = False  # at a rate at which every weight must move

    def query(self, step: int) -> StepRecord:
        """Fill `gradient` with this step's noisy mean gradient."""
        stream, started = self.stream, time.perf_counter()
        record = StepRecord(stream.name, step, 0, 0.0, 0.0, self.clipping.bound)
        drawn = self._draw(stream.draw, step)
        direction = self._ascent_direction(step, drawn)
        with _moved(self.parameters, direction, stream.ascent_radius):
            self.gradient = self._noisy_mean(drawn, step, "descent", stream.noise_multiplier, record)
        if self.stepped:
            self._check_moved(step)  # again: a forward pass may have put something back
            self.movement, self.stepped = None, False
        self.noise_variance = (stream.noise_multiplier * self.clipping.bound / stream.denominator) ** 2
        if self.clipping.rule == "adaptive":
            self._adapt(step, record)
        if self.binding.diagnose:
            record.seconds = time.perf_counter() - started
        return record

    def _adapt(self, step: int, record: StepRecord) -> None:
        """Move the bound by the noisy share of units within it; one query, on the descent's gradients.

        Each unit counts ±½; one whose gradient isn't finite counts as longer.
        """
        assert self.clipping.count_noise is not None
        self.report()
        generator = self.keys.noise.generator(self.stream.name, step, "count")
        count = torch.tensor([record.unclipped - record.units / 2], dtype=torch.float64)
        noisy = float(add_noise({"count": count}, self.clipping.count_noise, generator)["count"])
        share = noisy / (self.stream.expected_draw or self.stream.denominator) + 0.5
        bound = next_bound(self.stream.clipping, self.clipping.bound, share)
        self.clipping = replace(self.clipping, bound=bound)

    def update(self, step: int) -> None:
        """Anchor, then the optimizer; everything here is post-processing."""
        stream = self.stream
        rate = rate_at(stream, step)
        keep = stream.ascent == "lagged"  # the next step's direction
        for group, planned in zip(self.optimizer.param_groups, stream.groups, strict=True):
            group["lr"] = planned.learning_rate * rate
            group["noise_variance"] = self.noise_variance  # read by bias correction alone
            for name in planned.parameters:
                gradient = self.gradient[name].clone() if keep else self.gradient.pop(name)
                self.parameters[name].grad = gradient
            anchored = planned.parameters if planned.anchored and stream.anchor else ()
            if stream.anchor_form == "coupled":
                for name in anchored:  # one at a time: a second copy of all weights would be slow and large
                    pull = self.binding.anchor_gradient((name,))[name]
                    self.parameters[name].grad.add_(pull, alpha=stream.anchor)  # type: ignore[union-attr]
            else:
                for name, pull in self.binding.anchor_gradient(anchored).items():
                    self.parameters[name].data.sub_(pull, alpha=group["lr"] * stream.anchor)
        if self.movement:
            self.movement.note_gradients()
        self.optimizer.step()
        if self.movement and rate >= _MOVES:
            self.stepped = True
            self._check_moved(step + 1)
        for parameter in self.parameters.values():
            parameter.grad = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that the next step reads and this one changed."""
        for name, parameter in self.parameters.items():
            yield f"weights/{name}", parameter.data
            for key, value in self.optimizer.state[parameter].items():
                yield f"optimizer/{key}/{name}", value
            if name in self.gradient:
                yield f"gradient/{name}", self.gradient[name]
        if self.clipping.rule == "adaptive":
            yield f"bound/{self.stream.name}", torch.tensor(self.clipping.bound, dtype=torch.float64)
        if self.memory is not None:
            yield f"memory/{self.stream.name}", self.memory

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Continue from what `tensors` gave."""
        for stored, value in tensors.items():
            kind, _, name = stored.partition("/")
            if kind == "optimizer":
                key, _, name = name.partition("/")
                if name in self.parameters:
                    self.optimizer.state[self.parameters[name]][key] = value.clone()
            elif kind == "weights" and name in self.parameters:
                self.parameters[name].data.copy_(value)
            elif kind == "bound" and name == self.stream.name:
                self.clipping = replace(self.clipping, bound=float(value))
            elif kind == "memory" and name == self.stream.name:
                self.memory = value.clone()
        # In this order the norm of a direction is summed.
        kept = {name: f"gradient/{name}" for name in self.parameters}
        self.gradient = {name: tensors[key].clone() for name, key in kept.items() if key in tensors}

        self.movement = self._movement()

    def _movement(self) -> Movement:
        names = [name for group in self.stream.groups if group.learning_rate for name in group.parameters]
        trained = {name: self.parameters[name] for name in names}
        return Movement(trained, noisy=self.stream.noise_multiplier > 0)

    def _check_moved(self, steps: int) -> None:
        assert self.movement is not None
        when = f"after step {steps} of stream {self.stream.name!r}"
        self.movement.check(self.binding.module, self.optimizer, when)

    def _draw(self, draw: str, step: int) -> Units:
        return poisson_draw(
            self.keys.sampling, draw, step, self.binding.units.count, self.stream.sampling_rate
        )

    def _ascent_direction(self, step: int, drawn: Units) -> dict[str, Tensor] | None:
        match self.stream.ascent:
            case "paired":
                units = drawn
            case "fresh":
                units = self._draw(self.stream.ascent_draw, step)
            case "lagged":
                return self.gradient or None
            case _:
                return None
        assert self.stream.ascent_noise is not None
        return self._noisy_mean(units, step, "ascent", self.stream.ascent_noise, None)

    def _noisy_mean(
        self, drawn: Units, step: int, query: str, sigma: float, record: StepRecord | None
    ) -> dict[str, Tensor]:
        rows, position = self.binding.units.rows_of(drawn)
        parts = self.binding.micro_batches(rows, position) if len(rows) else []
        sums = (
            self._plain_sums(rows, position, parts, record)
            if self.engine is None
            else self._clipped_sums(self.engine, rows, position, parts, record)
        )
        if record is not None:
            record.units = len(drawn)
            if self.binding.diagnose:
                record.norms = role_norms(self.stream, sums)
        if sigma:
            self.report()
            generator = self.keys.noise.generator(self.stream.name, step, query)
            sums = add_noise(sums, sigma * self.clipping.bound, generator)
        for value in sums.values():
            value.div_(self.stream.denominator)
        return sums

    def _clipped_sums(
        self,
        engine: Engine | ExpertEngine,
        rows: Units,
        position: Units,
        parts: list[Units],
        record: StepRecord | None,
    ) -> dict[str, Tensor]:
        clipping = UNCLIPPED if self.clipping.rule == "none" else self.clipping
        with engine:
            for part in parts:
                local = np.unique(position[part], return_inverse=True)[1]
                units = int(local.max()) + 1
                own, spare = rows[part], max(0, self.binding.rows - len(part))
                if spare:  # one unit more, of copies of a row; each loss times 0
                    own = np.append(own, np.repeat(own[:1], spare))
                    local = np.append(local, np.repeat(units, spare))
                losses = self._losses(own)
                weights = torch.from_numpy(local < units).to(losses)
                norms = engine.add(losses * weights, torch.from_numpy(local), units + (spare > 0), clipping)
                losses, norms = losses[: len(part)], norms[:units]
                if record is not None:
                    record.loss += float(losses.detach().nansum()) / len(rows)
                    clipped = int((norms > clipping.bound).sum())
                    record.clipped += clipped / (int(position[-1]) + 1)
                    record.unclipped += int((norms <= clipping.bound).sum())
            return engine.take()

    def _plain_sums(
        self, rows: Units, position: Units, parts: list[Units], record: StepRecord | None
    ) -> dict[str, Tensor]:
        sums = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}
        share = 1 / np.bincount(position) if len(rows) else np.empty(0)
        for part in parts:
            losses = self._losses(rows[part])
            weights = torch.from_numpy(share[position[part]]).to(losses.dtype)
            gradients = torch.autograd.grad((losses * weights).sum(), list(self.parameters.values()))
            for total, gradient in zip(sums.values(), gradients, strict=True):
                total.add_(gradient)
            if record is not None:
                record.loss += float(losses.detach().sum()) / len(rows)
        return sums

    def _losses(self, rows: Units) -> Tensor:
        return row_losses(self.binding, self.stream, self.engine, rows, self.memory)


def row_losses(
    binding: Binding,
    stream: Stream,
    engine: Engine | ExpertEngine | JointEngine | None,
    rows: Units,
    memory: Tensor | None = None,
) -> Tensor:
    """(rows,) losses as the stream weighs them, with what its engine needs of the forward pass. Private.

    Args:
        memory: (all rows,) mean weights, which remember these rows' (`gradients.residual.remembered`); None
            takes the weights as they are.
    """
    batch = binding.batch(rows)
    announce(engine, binding.experts, stream, rows, batch)
    outputs, labels = binding.forward(batch), binding.labels[torch.from_numpy(rows)]
    losses = binding.loss(outputs, labels)
    if stream.record_weight == "none":
        return losses
    if memory is None:
        weights = residual_weights(outputs, labels, stream.record_power)
    else:
        now = residual_weights(outputs, labels)
        kept = remembered(memory, torch.from_numpy(rows), now, stream.record_memory)
        weights = kept**stream.record_power
    return losses * weights.to(losses.dtype)


@contextmanager
def _moved(
    parameters: dict[str, torch.nn.Parameter], direction: dict[str, Tensor] | None, radius: float
) -> Iterator[None]:
    """Within the block, w + radius·direction/‖direction‖; afterwards bitwise the weights from before.

    The direction's own memory holds the moved weights; it is spent afterwards.
    """
    if direction is None:
        yield
        return
    length = _norm(direction)
    if not length > 0:
        yield
        return
    before = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            moved = direction[name]
            parameter.data = torch.add(before[name], moved, alpha=radius / length, out=moved)
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = before[name]


def _norm(tensors: dict[str, Tensor]) -> float:
    """Euclidean norm of all values together, in float64; in pieces, which a processor's cache holds."""
    pieces = (piece.double() for x in tensors.values() for piece in torch.split(x.reshape(-1), 1 << 15))
    return math.sqrt(sum(float(torch.dot(piece, piece)) for piece in pieces))
