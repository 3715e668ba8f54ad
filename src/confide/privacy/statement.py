"""The claim that travels with a release: what was spent on whose records, and what that guarantees.

A statement holds events, never just a number: whoever receives it recomputes ε (`accountant`). Merged models
carry every input's spendings, and the inputs' own statements as they were signed, so claims compose through
merges and merges of merges, and who asserted which noise stays checkable (`signature`).

The JSON as it was written is what is signed and carried on, never a model of it dumped again: a later confide
may know more fields.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from confide.errors import PrivacyError
from confide.privacy.chain import canonical
from confide.privacy.events import Composed
from confide.privacy.streams import Adjacency, Schedule

FILE_NAME = "statement.json"
SCHEMA = "confide.statement/1"

_LARGEST = 64 << 20  # bytes of a file; a statement has some thousand, and one for each thing merged

Said = dict[str, Any]
"""A statement as JSON, as its author wrote it."""


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


class OwnersChecked(_Frozen):
    """The owners compared their data sets and found that no unit is in two of them.

    Attributes:
        how: the method, in their words.
        when: the day on which they finished.
    """

    by: Literal["owners-checked"] = "owners-checked"
    how: str = Field(min_length=1, max_length=1000, pattern=r"^\S")
    when: datetime.date


class Published(_Frozen):
    """A number about the records that is released beside the weights, for which a query paid.

    Attributes:
        query: name of the schedule's query.
        metric: what the number is.
        value: noisy count of rightly labelled test units over `units`; the noise may push it out of [0, 1].
        units: number of test units, a public constant.
        noise: standard deviation of the noise on the count, in units.
    """

    query: str
    metric: Literal["accuracy"]
    value: float = Field(allow_inf_nan=False)
    units: int = Field(gt=0)
    noise: float = Field(gt=0, allow_inf_nan=False)


class Signature(_Frozen):
    """Whose word a statement is.

    Attributes:
        key: public Ed25519 key, `ed25519:` and 64 hexadecimal digits.
        value: signature of the statement's canonical JSON without this field, 128 hexadecimal digits.
    """

    key: str = Field(pattern="^ed25519:[0-9a-f]{64}$")
    value: str = Field(pattern="^[0-9a-f]{128}$")


class Statement(_Frozen):
    """What a release claims, with everything needed to recompute it.

    Attributes:
        kind: one training run, or a merge.
        claim: the guarantee, or None.
        no_claim: why `claim` is None, in a sentence.
        weights: SHA-256 of every weight file of the release, by its path in the folder.
        files: SHA-256 of every other file of the release but the statement itself.
        spendings: one per run and data set that the weights depend on.
        disjoint: who says that no unit is in data sets of two inputs of this merge; None: nobody, so
            what was spent on them composes.
        assumptions: sentences under which the claim holds.
        published: noisy numbers about the records, of a training run.
        ledger: where the run was charged; None for a merge, or a run that no ledger knows.
        agreement: hash of what the run's owner agreed with others before training, or of what all inputs
            of a merge were trained under; None where there is none.
        inputs: the statements of what was merged, each as its author wrote and signed it.
        signature: None: nobody answers for the statement.
    """

    schema_: Literal["confide.statement/1"] = Field(default="confide.statement/1", alias="schema")
    kind: Literal["training", "merge"]
    confide: str
    claim: Claim | None
    no_claim: str | None = None
    base: Base
    weights: dict[str, str]
    files: dict[str, str] = Field(default_factory=dict)
    spendings: tuple[Spending, ...]
    disjoint: Literal["declared"] | OwnersChecked | None = None
    assumptions: tuple[str, ...]
    published: tuple[Published, ...] = ()
    ledger: LedgerEntry | None = None
    agreement: str | None = Field(default=None, pattern="^sha256:[0-9a-f]{64}$")
    inputs: tuple[Said, ...] = ()
    signature: Signature | None = None

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def to_json(self) -> Said:
        """Plain JSON values, in the order of the fields."""
        return self.model_dump(mode="json", by_alias=True)

    @property
    def merged(self) -> tuple[Statement, ...]:
        """The inputs' statements, read; PrivacyError where one can't be."""
        return tuple(parse(said, f"the statement of input {n}") for n, said in enumerate(self.inputs, 1))


def common_adjacency(spendings: Sequence[Spending]) -> Adjacency:
    """The one to price all under: the costlier if they differ, as the mechanisms hold under both."""
    kinds = {spending.adjacency for spending in spendings}
    return "replace-one" if "replace-one" in kinds else "add-or-remove-one"


def parse(said: Mapping[str, Any], where: str) -> Statement:
    """Read a statement's JSON.

    Args:
        said: the JSON object.
        where: what a message calls it.

    Raises:
        PrivacyError: it is altered, incomplete, or of a newer schema.
    """
    schema = said.get("schema", SCHEMA)
    if schema != SCHEMA:
        raise PrivacyError(
            f"{where} is not a valid statement: it is of schema {str(schema)[:60]!r}, and this confide reads "
            f"{SCHEMA!r}; install the confide that wrote it"
        )
    try:
        return Statement.model_validate(said)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole"
        newer = "; was it written by a newer confide?" if first["type"] == "extra_forbidden" else ""
        raise PrivacyError(f"{where} is not a valid statement: {place}: {first['msg']}{newer}") from None
    except RecursionError:
        raise PrivacyError(f"{where} is not a valid statement: it is nested too deeply") from None


def load(folder: Path) -> Said:
    """The JSON of a release folder's statement, as it was written.

    Raises:
        PrivacyError: no statement there, or one that is truncated or no JSON object.
    """
    file = Path(folder) / FILE_NAME
    try:
        if file.stat().st_size > _LARGEST:
            raise PrivacyError(f"{file} is not a valid statement: it is larger than {_LARGEST >> 20} MiB")
        said = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_object)
        canonical(said).encode()  # infinite numbers and half characters have no canonical form
    except FileNotFoundError:
        raise PrivacyError(f"{folder} holds no {FILE_NAME}: no privacy is claimed for it") from None
    except OSError as error:
        raise PrivacyError(f"can't read {file}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise PrivacyError(
            f"{file} is not a valid statement: it is truncated, or no JSON ({error}); get it anew from its "
            "author"
        ) from None
    if not isinstance(said, dict):
        raise PrivacyError(f"{file} is not a valid statement: it holds no JSON object")
    return said


def read(folder: Path) -> Statement:
    """The statement of a release folder.

    Raises:
        PrivacyError: no statement there, or one that is truncated, altered or of a newer schema.
    """
    return parse(load(folder), str(Path(folder) / FILE_NAME))


def _object(pairs: list[tuple[str, Any]]) -> Said:
    """A JSON object in which no key hides another."""
    said = dict(pairs)
    if len(said) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return said
