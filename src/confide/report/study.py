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


@dataclass(frozen=True)
class RecordFacts:
    """What diagnostics of one run found on training records (`finetune.diagnostics`). Private: not noised.

    Attributes:
        records: how many were looked at.
        mismatch: M_role; None where there is only one role.
        signals: by role, mean signal over noise of a step, and its variation over the role's parts.
        experts_share: of the squared norm of both roles' sums, in the first and in the last quarter.
        scales: least and largest s_e, what an expert's expected gradient is multiplied by.
        scale_gap: largest distance of simulated scales from s_e, in their standard errors.
        bias, bias_bound: mean relative bias of experts, and what the owners' entropy allows.
        changed, kept: share of records with another owner after training, and of those that could have none.
        stale, stale_bound: error by stale owners, and its bound, over the norm of the expected gradient.
        public_evenness, private_evenness: H/log E of the trained layer's owners.
        public_choice, private_choice: the most even block.
    """

    records: int
    mismatch: float | None
    signals: dict[str, tuple[float, float | None]]
    experts_share: tuple[float, float] | None = None
    scales: tuple[float, float] | None = None
    scale_gap: float | None = None
    bias: float | None = None
    bias_bound: float | None = None
    changed: float | None = None
    kept: float | None = None
    stale: float | None = None
    stale_bound: float | None = None
    public_evenness: float | None = None
    private_evenness: float | None = None
    public_choice: int | None = None
    private_choice: int | None = None


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
class PrivateRun:
    """What one run of `raptor` showed of training records, without noise: for whoever holds them alone.

    Attributes:
        clipped: by stream, the mean over steps of the share of units whose gradient was cut to C; a
            stream that clips nothing is left out.
        diagnostics: None unless the settings ask.
    """

    method: str
    seed: int
    task: str
    clipped: dict[str, float]
    diagnostics: RecordFacts | None = None


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
        private: of training records without noise, which no report holds: `report.html.write_private`.
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
    private: tuple[PrivateRun, ...] = ()

    def facts(self) -> dict[str, Any]:
        """The content of study.json: everything but what is private."""
        return dataclasses.asdict(dataclasses.replace(self, private=()))

    def results(self) -> list[dict[str, Any]]:
        """The content of results.json."""
        return [dataclasses.asdict(row) for row in self.rows]
