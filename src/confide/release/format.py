"""The layout of what leaves the house.

A task model (`kind: model`) is a folder that plain transformers loads::

    config.json, model.safetensors     the whole classifier; LoRA merged into its layers
    tokenizer.json, ...                the base's tokenizer, unchanged
    confide.json                       this format: which tensors are the head, which labels it has
    statistics.safetensors             where asked for: noisy statistics for RegMean or Fisher averaging
    statement.json                     the privacy claim (`privacy.statement`)
    README.md                          the card: both, in words

A merge (`kind: merged`) holds one encoder in `model.safetensors`, under the names of the plain encoder class,
and a head for each task in `heads/<task>/model.safetensors`. Nothing in a release is computed from records
except through the events of its statement.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from confide.errors import ReleaseError

FILE_NAME = "confide.json"
WEIGHTS = "model.safetensors"
STATISTICS = "statistics.safetensors"


class Head(BaseModel):
    """A task's output layer and what its numbers mean.

    Attributes:
        task: name of the task; the folder name in a merge.
        labels: class names in the order of the logits.
        labels_from: `declared` by the owner, or read from the `file`, which assumes that the set of labels
            is public.
        metric: what the task is scored with.
        max_length: longest text in tokens; longer ones are cut.
        tensors: names of the head's tensors, as in the whole classifier.
    """

    task: str
    labels: tuple[str, ...]
    labels_from: Literal["declared", "file"]
    metric: Literal["accuracy", "macro-f1"] = "accuracy"
    max_length: int = Field(gt=0)
    tensors: tuple[str, ...]

    model_config = ConfigDict(frozen=True, extra="forbid")


class ReleaseInfo(BaseModel):
    """Contents of `confide.json`.

    Attributes:
        kind: one task's whole classifier, or a merged encoder with several heads.
        encoder_prefix: what the whole classifier puts before the plain encoder's tensor names (`bert.`);
            a merge keeps its inputs', so that a head can be put back.
        heads: one for a model, one per task for a merge.
    """

    format: Literal["confide.release/1"] = "confide.release/1"
    kind: Literal["model", "merged"]
    encoder_prefix: str
    heads: tuple[Head, ...]

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def weights_prefix(self) -> str:
        """What stands before the encoder's names in this folder's own weights; a merge holds it plain."""
        return self.encoder_prefix if self.kind == "model" else ""

    def head(self, task: str) -> Head:
        """The head of one task.

        Raises:
            ReleaseError: the release has no such task; the message lists those it has.
        """
        for head in self.heads:
            if head.task == task:
                return head
        raise ReleaseError(f"no head for task {task!r}; this release has {[h.task for h in self.heads]}")

    def only_head(self) -> Head:
        """The head, where there is one.

        Raises:
            ReleaseError: there are several, so the task must be named.
        """
        if len(self.heads) == 1:
            return self.heads[0]
        raise ReleaseError(f"this release has several heads, {[h.task for h in self.heads]}; name the task")


def read(folder: Path) -> ReleaseInfo:
    """The `confide.json` of a release folder.

    Raises:
        ReleaseError: not a release of confide, or a truncated or newer file.
    """
    file = Path(folder) / FILE_NAME
    try:
        return ReleaseInfo.model_validate_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ReleaseError(f"{folder} is not a confide release: it has no {FILE_NAME}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ReleaseError(f"{file} can't be read: {where}: {first['msg']}") from None
