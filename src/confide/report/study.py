"""What a study found, as data: `report` draws it, `tables` prints it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """Scores of one method, one operator and one seed: an entry of results.json.

    Attributes:
        method: `non-private`, `dp-adamw`, `dp-merging`, or `pretrained` (untouched encoder, private head).
        operator: a merge operator, or `individual` for the task models before merging.
        scores: by task, in [0, 1], on test records and not noised.
        average: unweighted mean of the scores.
        epsilon, delta: the claim of what was scored; None where nothing is claimed.
    """

    method: str
    operator: str
    seed: int
    scores: dict[str, float]
    average: float
    epsilon: float | None
    delta: float | None


@dataclass(frozen=True)
class TaskFacts:
    """What a task is: numbers of records, classes, where they come from."""

    name: str
    train: int
    test: int
    classes: int
    metric: str
    source: str


@dataclass(frozen=True)
class MethodFacts:
    """How one method trained under one seed.

    Attributes:
        drift: ‖w − w₀‖ / ‖w₀‖ over the encoder, by task.
        noise_multiplier: σ of the descent query, by task; 0 without privacy.
        trained: number of encoder and head parameters that were trained, by task.
        seconds: wall time of training by task; the first method of a task also computes its frozen blocks.
    """

    method: str
    seed: int
    drift: dict[str, float]
    noise_multiplier: dict[str, float]
    trained: dict[str, int]
    seconds: dict[str, float]


@dataclass(frozen=True)
class Study:
    """A whole study.

    Attributes:
        claims: sentences: what each private row guarantees, about whose records, under which assumptions.
        findings: sentences drawn from the rows, such as that a private head does as well here.
        settings: of each method, as a reader would write them in the YAML file.
        versions: of confide, torch, transformers and Python.
        minutes: wall time of the whole run.
    """

    title: str
    base: str
    tasks: tuple[TaskFacts, ...]
    rows: tuple[Row, ...]
    methods: tuple[MethodFacts, ...]
    claims: tuple[str, ...]
    findings: tuple[str, ...]
    settings: dict[str, dict[str, Any]]
    versions: dict[str, str]
    minutes: float

    def results(self) -> list[dict[str, Any]]:
        """The content of results.json."""
        return [dataclasses.asdict(row) for row in self.rows]
