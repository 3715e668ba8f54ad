"""What personal files are made of: a merge and a task's model, opened and checked against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from confide.errors import MergeError
from confide.merging.personal.file import Heads
from confide.merging.vectors import Encoder
from confide.privacy.composition import check, compose
from confide.privacy.statement import Statement
from confide.release import format
from confide.release.format import Head, ReleaseInfo
from confide.release.hashes import encoder_hash
from confide.release.names import encoder_tensors
from confide.release.tensors import STORAGE, Checkpoint
from confide.release.write import verify


@dataclass(frozen=True)
class Opened:
    """A release whose weights are what its statement says.

    Attributes:
        path: its folder.
        info: its confide.json.
        statement: its claim.
        checkpoint: its weights.
        weights: the encoder in them, under canonical names.
    """

    path: Path
    info: ReleaseInfo
    statement: Statement
    checkpoint: Checkpoint
    weights: Encoder

    @property
    def head(self) -> Head:
        """The one head of a task's model."""
        return self.info.only_head()

    def heads(self) -> Heads:
        """The tensors of a task's head, as they are stored.

        Raises:
            MergeError: a value that isn't finite.
        """
        found = {}
        for name in self.head.tensors:
            if not np.isfinite(self.checkpoint.numpy(name)).all():
                raise MergeError(f"tensor {name} of {self.path} holds values that aren't finite (NaN or ∞)")
            checkpoint = self.checkpoint
            found[name] = (checkpoint.dtype(name), checkpoint.shape(name), checkpoint.stored(name))
        return found

    def hash(self) -> str:
        """Of the encoder's content (`release.hashes`)."""
        return encoder_hash(self.checkpoint, self.info.weights_prefix)

    def size(self) -> int:
        """Bytes of the encoder's weights: of a merge, those of its base."""
        return sum(
            STORAGE[self.weights.dtype(name)].itemsize * self.checkpoint.size(self.weights.stored[name])
            for name in self.weights.names
        )


def open_merge(path: Path) -> Opened:
    """A release of `confide merge`.

    Raises:
        MergeError: it is a task's model.
        ReleaseError, PrivacyError, ModelError: no release, altered, or with a claim that doesn't hold.
    """
    return _open(path, "merged", "a merge")


def open_model(path: Path) -> Opened:
    """A release of `confide train`.

    Raises:
        MergeError: it is a merge.
        ReleaseError, PrivacyError, ModelError: no release, altered, or with a claim that doesn't hold.
    """
    return _open(path, "model", "one task's model")


def check_base(merge: Opened, label: Path, statement: Statement) -> None:
    """Make sure that something was made from the same base as the merge.

    Raises:
        MergeError: it was not; names both.
    """
    ours, theirs = merge.statement.base, statement.base
    if ours.hash != theirs.hash:
        raise MergeError(
            f"{label} was made from base {theirs.name} ({theirs.hash}), but {merge.path} from {ours.name} "
            f"({ours.hash}); they don't belong together"
        )


def composed(statements: Sequence[Statement], *, disjoint: bool = False) -> Statement:
    """What a function of a merge and other releases claims.

    What earlier merges declared of their inputs stays so (`privacy.disjointness`).

    Args:
        statements: the merge's first.
        disjoint: the caller declares that no unit is in data sets of two of them.

    Raises:
        PrivacyError: two inputs disagree about what one run spent.
    """
    return compose(statements, disjoint=disjoint, base=statements[0].base)


def _open(path: Path, kind: str, what: str) -> Opened:
    path = Path(path)
    statement = verify(path)
    check(statement)
    info = format.read(path)
    if info.kind != kind:
        raise MergeError(f"{path} is a release of kind {info.kind!r}, but {what} ({kind!r}) is needed here")
    checkpoint = Checkpoint.open(path)
    own = [name for head in info.heads for name in head.tensors] if kind == "model" else []
    stored = encoder_tensors(checkpoint, info.weights_prefix, own)
    return Opened(path, info, statement, checkpoint, Encoder(str(path), checkpoint, stored))
