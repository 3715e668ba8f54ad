"""What merging costs: scores of the task models against those of the one model made from them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from confide.errors import ConfigError


def task_gaps(individual: Mapping[str, float], merged: Mapping[str, float]) -> dict[str, float]:
    """individual − merged, task by task; negative where the merge scores higher.

    Args:
        individual: score of each task's own model, by task.
        merged: score of the merged model on the same tasks, in the same unit.

    Raises:
        ConfigError: no tasks, a task that only one of them has, or a score that isn't finite.
    """
    if not individual:
        raise ConfigError("a merge gap needs at least one task")
    for task in sorted(set(individual) ^ set(merged)):
        raise ConfigError(f"a merge gap compares the same tasks, but {task!r} is scored in one of them only")
    gaps = {task: individual[task] - merged[task] for task in individual}
    for task, gap in gaps.items():
        if not math.isfinite(gap):
            raise ConfigError(f"task {task!r} has a score that is not finite")
    return gaps


def merge_gap(individual: Mapping[str, float], merged: Mapping[str, float]) -> float:
    """The merge gap of the DP-Merging paper: mean over tasks of individual − merged.

    Arguments and errors as in `task_gaps`; the unit is that of the scores.
    """
    gaps = task_gaps(individual, merged)
    return math.fsum(gaps.values()) / len(gaps)
