"""The layout of what leaves the house.

A task model (`kind: model`) is a folder that plain transformers loads::

    config.json, model.safetensors     the whole classifier; LoRA merged into its layers
    tokenizer.json, ...                the base's tokenizer, unchanged
    confide.json                       this format: which tensors are the head, which labels it has
    statistics.safetensors             where asked for: noisy statistics for RegMean or Fisher averaging
    adapter/                           of a mixture: the LoRA that was merged, and the head, for PEFT
    statement.json                     the privacy claim (`privacy.statement`)
    README.md                          the card: both, in words

A merge (`kind: merged`) holds one encoder in `model.safetensors`, under the names of the plain encoder class,
and a head for each task in `heads/<task>/model.safetensors`. Nothing in a release is computed from records
except through the events of its statement.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from confide.choices import Metric as Metric
from confide.errors import ReleaseError

FILE_NAME = "confide.json"
PREPROCESSOR = "preprocessor_config.json"
GENERATION = "generation_config.json"
WEIGHTS = "model.safetensors"
STATISTICS = "statistics.safetensors"
ADAPTER = "adapter"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

Objective = Literal["causal", "seq2seq", "masked"]


class Problem(BaseModel):
    """What a record is, and what a model says about it. All of it is public.

    Attributes:
        inputs: a `text`, a `pair` of texts in their order, or an `image`.
        target: a `class`, a `number`, `tokens`: a class for each word of a text; or `text`: a language model
            learns the second text of a pair, given the first, or a text itself.
        objective: how a language model learns a `text`. `causal`: each token from those before. `seq2seq`:
            the same of the second text, with an encoder for the first. `masked`: hidden tokens from all
            others. Follows from the base; None until there is one.
        label_range: (lowest, highest) label of a `number`, declared. Training sees labels scaled to [-1, 1];
            the released head is scaled back, so that a model answers in the labels' own unit.
        image_size: side of the square that an `image` is resized to, in pixels.
    """

    inputs: Literal["text", "pair", "image"] = "text"
    target: Literal["class", "number", "tokens", "text"] = "class"
    objective: Objective | None = None
    label_range: tuple[float, float] | None = None
    image_size: int | None = Field(default=None, gt=0)

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="after")
    def _complete(self) -> Problem:
        if (self.label_range is not None) != (self.target == "number"):
            raise ValueError("a label range belongs to a number")
        if self.label_range is not None and not self.label_range[0] < self.label_range[1]:
            raise ValueError("a label range goes from a lower to a higher number")
        if (self.image_size is not None) != (self.inputs == "image"):
            raise ValueError("an image size belongs to images")
        if self.target == "tokens" and self.inputs != "text":
            raise ValueError("only a text has labels per token")
        if self.objective is not None and self.target != "text":
            raise ValueError("an objective belongs to a language model")
        return self

    @property
    def loader(self) -> str:
        """The class of transformers that loads a model for it."""
        if self.inputs == "image":
            return "AutoModelForImageClassification"
        if self.objective is not None:
            return _LANGUAGE_MODELS[self.objective]
        kind = "Token" if self.target == "tokens" else "Sequence"
        return f"AutoModelFor{kind}Classification"


_LANGUAGE_MODELS: Mapping[Objective, str] = {
    "causal": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "masked": "AutoModelForMaskedLM",
}
TEXT_CLASSES = Problem()


class Head(BaseModel):
    """A task's output layer and what its numbers mean.

    Attributes:
        task: name of the task; the folder name in a merge.
        problem: what the task's records are, and what it says about them.
        labels: class names in the order of the logits; none for a number or a language model.
        labels_from: `declared` by the owner, or read from the `file`, which assumes that the set of labels
            is public.
        metric: what the task is scored with.
        max_length: longest record in tokens; longer texts are cut, and images have this many.
        tensors: names of the head's tensors, as in the whole classifier.
    """

    task: str
    problem: Problem = TEXT_CLASSES
    labels: tuple[str, ...]
    labels_from: Literal["declared", "file"]
    metric: Metric = "accuracy"
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
        names = ", ".join(head.task for head in self.heads)
        raise ReleaseError(f"this release has several heads ({names}); name the task, with --task")


def head_config(head: Head) -> dict[str, Any]:
    """What a model's config.json says about a head, as transformers reads it."""
    if head.problem.target == "number":
        return {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "problem_type": "regression"}
    if not head.labels:
        return {}
    return {
        "id2label": {str(number): label for number, label in enumerate(head.labels)},
        "label2id": {label: number for number, label in enumerate(head.labels)},
        "problem_type": "single_label_classification",
    }


def preprocessor(base: Mapping[str, Any], size: int) -> dict[str, Any]:
    """preprocessor_config.json of a model that reads images of one size: resized (bicubic) and normalised.

    Args:
        base: the base's own, of which mean and deviation of each colour are kept; ImageNet's where it has
            none.
    """
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": size, "width": size},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(base.get("image_mean", (0.485, 0.456, 0.406))),
        "image_std": list(base.get("image_std", (0.229, 0.224, 0.225))),
    }


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
