"""The claim that travels with a release: what was spent on whose records, and what that guarantees.

A statement holds events, never just a number: whoever receives it recomputes ε (`accountant`). Merged models
carry every input's spendings, so claims compose through merges and merges of merges.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from confide.errors import PrivacyError
from confide.privacy.events import Composed
from confide.privacy.streams import Adjacency, Schedule

FILE_NAME = "statement.json"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Claim(_Frozen):
    """(ε, δ)-DP of the released weights: an upper bound.

    Attributes:
        epsilon: from privacy loss distributions (PLD), never an approximation from below.
        epsilon_rdp: the Rényi bound at the same δ, for comparison; None where RDP has no rule.
        epsilon_lower: an ε that is certainly exceeded, by an explicit test (`distinguisher`); None where
            nothing is proven.
        accountant: library, version and discretisation that computed `epsilon`.
    """

    epsilon: float = Field(ge=0, allow_inf_nan=False)
    delta: float = Field(gt=0, lt=1)
    epsilon_rdp: float | None = Field(ge=0, allow_inf_nan=False)
    epsilon_lower: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    accountant: str


class Spending(_Frozen):
    """What one training run spent on one named data set.

    Attributes:
        run: random identifier of the run, so that a model merged twice is counted once.
        dataset: the name its owner gave it; never derived from its content.
        units: n, a public constant declared with the data set.
        unit: `record`, or the column whose values are protected.
        adjacency: which data sets count as neighbours.
        event: everything that looked at the records; None when the run makes no claim.
        no_claim: why there is none.
        delta: the run's own δ.
        schedule: the schedule that was executed, as data.
        steps_run: how many of the planned steps ran, per stream; the planned ones are charged.
    """

    run: str
    dataset: str
    units: int = Field(gt=0)
    unit: str
    adjacency: Adjacency
    event: Composed | None
    no_claim: str | None = None
    delta: float | None
    schedule: Schedule | None
    steps_run: dict[str, int]


class Base(_Frozen):
    """The public model that was fine-tuned: its name and the hash of its encoder's content."""

    name: str
    hash: str


class LedgerEntry(_Frozen):
    """Where the ledger of the run's owner holds its charge.

    Attributes:
        entry: hash of the reservation.
        head: hash of the ledger's last entry when the run ended; it covers every entry up to there, so a
            ledger without it was cut or rewritten (`confide ledger verify --head`).
    """

    entry: str = Field(pattern="^[0-9a-f]{64}$")
    head: str = Field(pattern="^[0-9a-f]{64}$")


class Statement(_Frozen):
    """What a release claims, with everything needed to recompute it.

    Attributes:
        kind: one training run, or a merge.
        claim: the guarantee, or None.
        no_claim: why `claim` is None, in a sentence.
        weights: SHA-256 of every weight file of the release, by its path in the folder.
        spendings: one per run and data set that the weights depend on.
        disjoint: who says that the data sets share no unit; None: nobody, so spendings compose.
        assumptions: sentences under which the claim holds.
        ledger: where the run was charged; None for a merge, or a run that no ledger knows.
    """

    schema_: Literal["confide.statement/1"] = Field(default="confide.statement/1", alias="schema")
    kind: Literal["training", "merge"]
    confide: str
    claim: Claim | None
    no_claim: str | None = None
    base: Base
    weights: dict[str, str]
    spendings: tuple[Spending, ...]
    disjoint: Literal["declared"] | None = None
    assumptions: tuple[str, ...]
    ledger: LedgerEntry | None = None

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, in the order of the fields."""
        return self.model_dump(mode="json", by_alias=True)


def read(folder: Path) -> Statement:
    """The statement of a release folder.

    Raises:
        PrivacyError: no statement there, or one that is truncated, altered or of a newer schema.
    """
    file = Path(folder) / FILE_NAME
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PrivacyError(f"{folder} holds no {FILE_NAME}: no privacy is claimed for it") from None
    try:
        return Statement.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise PrivacyError(f"{file} is not a valid statement: {where}: {first['msg']}") from None
