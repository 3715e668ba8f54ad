"""A study's merges: statistics of public text where an operator needs them, the merge, its scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from confide.errors import DataError
from confide.experiment.plan import MergePlan, PublicText
from confide.finetune.base import PublicBase
from confide.finetune.prepare import Prepared, score_test
from confide.finetune.statistics import public_statistics
from confide.merging.merge import MergeReport, merge
from confide.merging.operators import find
from confide.models.releases import load_release
from confide.release.format import STATISTICS
from confide.tasks.corpus import check_public, read_corpus, sample, texts_of
from confide.tasks.records import TaskData

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def model_folder(out: Path, method: str, seed: int, task: str) -> Path:
    """Where a study puts a task model's release."""
    return out / "models" / method / f"seed-{seed}" / task


def merged_folder(out: Path, method: str, seed: int, merge: MergePlan) -> Path:
    """Where a study puts a merge."""
    return out / "merged" / f"{method}-{merge.label}-seed-{seed}"


def public_texts(plan: PublicText, tasks: Sequence[TaskData]) -> tuple[str, ...]:
    """The public text of a study, which shares none with its tasks.

    Raises:
        DataError: no such corpus, or one of its texts is a record of a task.
    """
    texts = sample(read_corpus(plan.corpus), plan.texts, seed=0)
    for task in tasks:
        if task.problem.inputs != "image":
            check_public(texts, texts_of(task), task.name)
    return texts


def merge_models(
    models: Mapping[str, Path],
    merge_plan: MergePlan,
    out: Path,
    *,
    base: PublicBase,
    disjoint: bool,
    texts: Sequence[str] = (),
    statistics: Path | None = None,
    key: Ed25519PrivateKey | None = None,
) -> MergeReport:
    """One merge of a study.

    Args:
        models: releases by task. With `statistics: released` each holds its own.
        out: the folder to make.
        texts: public, for other operators that need statistics.
        statistics: folder where these are kept, for the next operator that needs the same.

    Raises:
        DataError: the operator needs statistics, and there is no public text.
    """
    operator = find(merge_plan.operator)
    files: list[Path] = []
    if merge_plan.statistics == "released":
        files = [folder / STATISTICS for folder in models.values()]
    elif operator.needs:
        if not texts or statistics is None:
            raise DataError(f"operator {operator.name} needs public text")
        source = f"{len(texts)} public texts of the study"
        files = public_statistics(models, texts, statistics, operator.needs, source=source, base=base.folder)
    return merge(
        list(models.values()),
        base=base.folder,
        operator=operator.name,
        parameters=merge_plan.parameters,
        statistics=files,
        out=out,
        disjoint=disjoint,
        key=key,
    )


def score_merge(folder: Path, prepared: Mapping[str, Prepared], first_block: int) -> dict[str, float]:
    """Score of every task of a merge; blocks that no model trained are the base's, their outputs at hand."""
    return {
        name: score_test(task, load_release(folder, name)[0], first_block) for name, task in prepared.items()
    }
