"""What training leaves behind as it goes: a record of each step, and where it stands between two of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class StepRecord:
    """What one step of one stream looked like, record weights included. Private: un-noised.

    Attributes:
        units: that were drawn.
        clipped: share of them whose gradient was longer than the bound.
        bound: C of this step; `adaptive` moves it.
        unclipped: number of units whose gradient was no longer.
        norms: role → norms of its parts of the clipped sum, before noise; empty unless asked for.
        seconds: that the query took; 0 unless asked for.
    """

    stream: str
    step: int
    units: int
    loss: float
    clipped: float
    bound: float
    unclipped: int = 0
    norms: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class History:
    """What happened, for `private/`; `steps_run` alone goes into the statement."""

    steps_run: dict[str, int] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)


@dataclass(frozen=True)
class State:
    """Where training stands between two steps: all that the next one reads, beside keys and records.

    Noise and draws are addressed by (stream, step, query), so their position is the step.

    Attributes:
        step: steps done.
        tensors: trained weights (`weights/NAME`), the optimizer's (`optimizer/KEY/NAME`), the last noisy
            gradient of `lagged` ascents (`gradient/NAME`), the bound of `adaptive` clipping
            (`bound/STREAM`), and what is remembered of records (`memory/STREAM`). Private.
        history: so far. Private.
    """

    step: int
    tensors: dict[str, Tensor]
    history: History
