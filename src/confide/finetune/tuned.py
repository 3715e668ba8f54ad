"""What a fine-tune gives: the model, what its statement needs, and the release that is written of it."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from confide import files
from confide.errors import ReleaseError
from confide.finetune.checkpoint import Unfinished
from confide.finetune.diagnostics import FILE_NAME, Diagnostics, document
from confide.finetune.history import History
from confide.finetune.prepare import (
    Prepared,
    scores_on_test,
)
from confide.finetune.released import Released
from confide.finetune.settings import Settings
from confide.merging.statistics import write_statistics
from confide.models.adapters import Adapted, plain_state
from confide.models.backbones import (
    stored_names,
)
from confide.models.language import save_generation
from confide.models.moe.export import is_adapter, write_adapter
from confide.privacy.statement import Statement
from confide.privacy.streams import Schedule
from confide.release import agreement as agreements
from confide.release.agreement import Agreement
from confide.release.format import (
    ADAPTER,
    PREPROCESSOR,
    STATISTICS,
    WEIGHTS,
    Head,
    Metric,
    ReleaseInfo,
    preprocessor,
)
from confide.release.hashes import encoder_hash
from confide.release.shards import write_tensors
from confide.release.tensors import Checkpoint
from confide.release.write import write_release

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


@dataclass(frozen=True)
class FineTuned:
    """A trained task model with what its statement needs.

    Attributes:
        schedule: as executed and charged.
        history: private.
        statement: the claim; the hashes of the weights are filled in when it is released.
        unfinished: the run's keys and checkpoints on disk, private; None if there are none.
        statistics: noisy, of the training records; released with the weights. None where none were asked.
        agreement: what the run kept to; released with the weights.
        owner: (rows,) which expert owns each training record; None where none is asked for. Private.
        diagnostics: what the experts made of the records; None unless the settings ask. Private.
    """

    prepared: Prepared
    adapted: Adapted
    settings: Settings
    schedule: Schedule
    history: History
    statement: Statement
    unfinished: Unfinished | None = None
    statistics: Released | None = None
    agreement: Agreement | None = None
    owner: npt.NDArray[np.int64] | None = None
    diagnostics: Diagnostics | None = None

    def score(self) -> float:
        """Score on the test records. Not noised: for reports, never for a release."""
        return self.scores()[self.prepared.task.metric]

    def scores(self) -> dict[Metric, float]:
        """The score, and of a language model those by its other metrics."""
        return scores_on_test(self.prepared, self.adapted.classifier, self.adapted.first_block)

    def release(
        self, out: Path, *, key: Ed25519PrivateKey | None = None, overwrite: bool = False
    ) -> Statement:
        """Write the release folder; nothing appears unless all of it does. `key` signs the statement.

        The run is finished then: its keys and checkpoints are destroyed, as noise could be subtracted with
        them.
        """
        statement = write_release(
            out,
            save=self._save,
            info=self.info(),
            statement=self.statement,
            key=key,
            overwrite=overwrite,
        )
        if self.unfinished:
            self.unfinished.destroy()
        return statement

    def keep_private(self, folder: Path) -> None:
        """Write losses and clipped shares of every step, owners and diagnostics, for nobody else's eyes."""
        lines = [json.dumps(_finite(dataclasses.asdict(step))) for step in self.history.steps]
        files.write_text(folder / "steps.jsonl", "\n".join(lines) + "\n", private=True)
        if self.owner is not None:
            (layer,) = self.adapted.experts
            files.write_json(
                folder / "owners.json", {"layer": layer.name, "owner": self.owner.tolist()}, private=True
            )
        if self.diagnostics is not None:
            files.write_json(folder / FILE_NAME, document(self.diagnostics), private=True)
        folder.chmod(0o700)

    def info(self) -> ReleaseInfo:
        """What the release says about itself."""
        task = self.prepared.task
        head = Head(
            task=task.name,
            problem=self.adapted.classifier.problem,
            labels=task.labels,
            labels_from=task.labels_from,
            metric=task.metric,
            max_length=self.prepared.max_length,
            tensors=self.adapted.classifier.head,
        )
        return ReleaseInfo(kind="model", encoder_prefix=self.adapted.classifier.prefix, heads=(head,))

    def _save(self, folder: Path) -> None:
        classifier = self.adapted.classifier
        state = {**plain_state(self.adapted), **classifier.unused}
        stored = stored_names(classifier, state)
        write_tensors(folder / WEIGHTS, {name: tensor.numpy() for name, tensor in stored.items()})
        classifier.model.config.architectures = [type(classifier.model).__name__]  # type: ignore[union-attr]
        classifier.model.config.save_pretrained(folder)  # type: ignore[union-attr,operator]
        save_generation(classifier.model, folder)
        if self.agreement:
            files.write_json(folder / agreements.FILE_NAME, self.agreement.to_json())
        if classifier.tokenizer is None:
            size, colours = classifier.problem.image_size, classifier.colours
            assert size is not None
            assert colours is not None
            own = dict(zip(("image_mean", "image_std"), colours, strict=True))
            files.write_json(folder / PREPROCESSOR, preprocessor(own, size))
            return
        try:
            classifier.tokenizer.save_pretrained(folder)
        except Exception as error:  # a full disk is a bare Exception in the tokenizers library
            raise ReleaseError(f"can't write the tokenizer to {folder}: {error}") from error
        if is_adapter(self.adapted):
            (folder / ADAPTER).mkdir()
            write_adapter(self.adapted, folder / ADAPTER)
        if self.statistics:
            made = self.statistics
            model = encoder_hash(Checkpoint.open(folder), classifier.prefix, self.adapted.head)
            source = self.statement.spendings[0].dataset
            write_statistics(folder / STATISTICS, made.kind, "released", model, made.arrays, source)


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN; a loss that isn't finite is written as null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
