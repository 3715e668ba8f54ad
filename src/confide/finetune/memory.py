"""How many tokens a micro-batch may hold within a budget of memory, measured on made-up records."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from confide.errors import ConfigError
from confide.finetune.checkpoint import Begun
from confide.finetune.experts import UNCLIPPED, BoundExperts, announce, engine_of, made_up_experts
from confide.finetune.prepare import Prepared, forward_of, kept_tokens, loss_of, made_up, made_up_targets
from confide.finetune.settings import Settings
from confide.models.adapters import Adapted
from confide.models.backbones import Classifier
from confide.models.tail import Source, features
from confide.privacy.streams import Schedule, Stream
from confide.sizes import bytes_of

STEP_TOKENS = 8192
MICRO_BATCH = "the tokens of a micro-batch"
"""What a fingerprint calls them."""

_LOGITS = 1 << 26  # of a language model at once: 256 MiB, and its gradient as much again

_FEW, _MANY = 2, 6  # rows; two points of a straight line
_MARGIN = 1.2  # what allocators and libraries take beside the tensors that are counted


def usual_tokens(classifier: Classifier) -> int:
    """Tokens of a micro-batch without a budget; fewer of a language model, whose logits are many."""
    if classifier.problem.target != "text":
        return STEP_TOKENS
    config: Any = classifier.model.config
    return max(1, min(STEP_TOKENS, _LOGITS // int(config.vocab_size)))


def micro_batch_of(
    prepared: Prepared, adapted: Adapted, schedule: Schedule, settings: Settings, begun: Begun | None
) -> int:
    """Tokens of a micro-batch; a run that goes on keeps what it measured first, as rounding depends on it."""
    if settings.memory is None:
        return usual_tokens(adapted.classifier)
    if begun and MICRO_BATCH in begun.fingerprint:
        return int(begun.fingerprint[MICRO_BATCH])
    return micro_batch_tokens(
        bytes_of(settings.memory, "memory"),
        adapted,
        schedule,
        kept=prepared.cached_bytes(adapted.classifier, adapted.first_block),
        max_length=settings.max_length,
        rows_per_unit=prepared.task.train.units.rows_per_unit,
    )


def micro_batch_tokens(
    budget: int,
    adapted: Adapted,
    schedule: Schedule,
    *,
    kept: int,
    max_length: int,
    rows_per_unit: int = 1,
) -> int:
    """Tokens of the largest micro-batch with which the process stays within the budget, about.

    Tensors that live at once are counted in clipped sums over few rows of the full length, which gives what
    the sums take and what a token adds. Then come the process as it stands, what else training keeps, and a
    margin. The weights don't change.

    Args:
        budget: bytes of the whole process.
        schedule: as it will be trained.
        kept: bytes of the frozen blocks' outputs; 0 where they aren't kept.
        max_length: tokens of the longest record, public.
        rows_per_unit: the most rows of a unit, public: a unit is never split.

    Raises:
        ConfigError: not even one unit fits; says how much would be enough.
    """
    row = made_up(adapted.classifier, np.array([max_length]))
    width = kept_tokens(adapted.classifier, adapted.first_block, row) if kept else int(row.lengths[0])
    few, many = (_peak(adapted, schedule, bool(kept), rows, max_length) for rows in (_FEW, _MANY))
    per_token = max(1.0, _MARGIN * (many - few) / ((_MANY - _FEW) * width))
    fixed = peak_bytes() + kept + _held(adapted, schedule) + max(0.0, few - per_token * _FEW * width)
    least = rows_per_unit * width
    tokens = int((budget - fixed) / per_token)
    if tokens < least:
        enough = fixed + least * per_token
        raise ConfigError(
            f"memory is {budget / 2**20:,.0f} MiB, but one unit in a micro-batch needs more in all; "
            f"allow at least {int(enough / 2**20) + 1}MiB, or shorten max_length"
        )
    return tokens


def forget_peak() -> None:
    """Give back what was freed, and let `peak_bytes` count from here on; on Linux, which alone can."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed memory otherwise
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes() -> int:
    """The most memory that the process has had, since it began or since `forget_peak`."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)


def _held(adapted: Adapted, schedule: Schedule) -> int:
    """Bytes that a step keeps beside the sums: the optimizer's state, the ascent's direction, the base."""
    named = dict(adapted.classifier.model.named_parameters())

    def size(stream: Stream) -> int:
        copies = 1 + 2 * (stream.optimizer == "adamw") + (stream.ascent != "none")
        return copies * sum(named[name].numel() * named[name].element_size() for name in stream.parameters)

    return sum(map(size, schedule.streams))


def _peak(adapted: Adapted, schedule: Schedule, cached: bool, rows: int, length: int) -> int:
    """The most bytes of tensors at once in the clipped sums of one micro-batch."""
    classifier = adapted.classifier
    inputs: Any = made_up(classifier, np.full(rows, length))
    if cached:
        inputs = features(classifier, inputs, adapted.first_block, [np.arange(rows)])
    module, forward = forward_of(classifier, adapted.first_block, inputs)
    named = dict(classifier.model.named_parameters())
    lengths = torch.from_numpy(inputs.lengths)
    experts = made_up_experts(adapted, rows)

    def losses(batch: dict[str, Tensor]) -> Tensor:
        outputs = forward(batch)
        targets = made_up_targets(classifier.problem, outputs, torch.arange(rows), lengths)
        return loss_of(classifier.problem)(outputs, targets)

    return max(
        _sums_peak(module, losses, inputs, experts, stream, {name: named[name] for name in stream.parameters})
        for stream in schedule.streams
    )


def _sums_peak(
    module: nn.Module,
    losses: Callable[[dict[str, Tensor]], Tensor],
    inputs: Source,
    experts: BoundExperts | None,
    stream: Stream,
    parameters: dict[str, nn.Parameter],
) -> int:
    rows = np.arange(len(inputs))
    engine = engine_of(module, experts, stream, parameters)
    if engine is None:
        return _counted(lambda: torch.autograd.grad(losses(inputs.batch(rows)).sum(), [*parameters.values()]))
    clipping = UNCLIPPED if stream.clipping.rule == "none" else stream.clipping

    def clipped() -> dict[str, Tensor]:
        with engine:
            batch = inputs.batch(rows)
            announce(engine, experts, stream, rows, batch)
            engine.add(losses(batch), torch.from_numpy(rows), len(rows), clipping)
        return engine.take()

    clipped()  # the first one plans, on extra rows
    return _counted(clipped)


def _counted(call: Callable[[], Any]) -> int:
    with _Live() as live:
        call()
    return int(live.most)


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages that are made inside the block, while they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._note(value.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes()
        self._now += size
        self.most = max(self.most, self._now)

        def gone() -> None:
            self._known.discard(key)
            self._now -= size

        weakref.finalize(storage, gone)
