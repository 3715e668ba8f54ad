"""What a study found, as data: `report` draws it, `tables` prints it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from confide.models.moe.selection import Selection


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
        noise_multiplier: σ of the descent query, by task; 0 without privacy. Of the first of several streams.
        trained: number of encoder and head parameters that were trained, by task.
        seconds: wall time of training by task; the first method of a task also computes its frozen blocks,
            or who owns which record.
        memory: the most bytes that the process took meanwhile, by task; where the system can't tell that,
            since the process began.
    """

    method: str
    seed: int
    drift: dict[str, float]
    noise_multiplier: dict[str, float]
    trained: dict[str, int]
    seconds: dict[str, float]
    memory: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StreamFacts:
    """One stream of one run of `raptor`.

    Attributes:
        trained: number of its parameters.
        expected: B, units expected in a draw.
        noise_multiplier: σ; 0 without privacy.
        rule, bound: how a unit's gradient was clipped, and C.
        denominator: what the noisy sum was divided by.
        share: of the run's budget, as a share of μ²; None without privacy.
        clipped: mean over steps of the share of units whose gradient was longer than C. Private: not noised.
    """

    name: str
    trained: int
    steps: int
    expected: float
    noise_multiplier: float
    rule: str
    bound: float
    denominator: float
    share: float | None
    clipped: float


@dataclass(frozen=True)
class MixtureRun:
    """One run of `raptor`, or of what it is compared with.

    Attributes:
        variant: of its schedule.
        epsilon: ε that it aimed at; None without privacy.
        layers: numbers of the blocks whose experts were trained.
    """

    method: str
    seed: int
    task: str
    variant: str
    epsilon: float | None
    layers: tuple[int, ...]
    streams: tuple[StreamFacts, ...]


@dataclass(frozen=True)
class MixtureFacts:
    """What a study of a mixture of experts has beside its rows.

    Attributes:
        upcycled: sentences on how a dense base was made into it; none if the base was one.
        parameters: of the base.
        routing: of the base on public text, by which the layer was chosen; None if it wasn't.
        corpus: that text.
        runs: of all seeds and tasks.
    """

    upcycled: tuple[str, ...]
    parameters: int
    routing: Selection | None
    corpus: str | None
    runs: tuple[MixtureRun, ...]


@dataclass(frozen=True)
class Study:
    """A whole study.

    Attributes:
        claims: sentences: what each private row guarantees, about whose records, under which assumptions.
        findings: sentences drawn from the rows, such as that a private head does as well here.
        settings: of each method, as a reader would write them in the YAML file.
        versions: of confide, torch, transformers and Python.
        minutes: wall time of the whole run.
        mixture: of a mixture of experts; None where no method is `raptor`.
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
    mixture: MixtureFacts | None = None

    def results(self) -> list[dict[str, Any]]:
        """The content of results.json."""
        return [dataclasses.asdict(row) for row in self.rows]
