"""Whether a merge is what its report says: some of its tensors are merged again from the inputs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from confide.errors import MergeError
from confide.merging.assign import Group
from confide.merging.inputs import Input, read_inputs, task_vectors
from confide.merging.merge import body
from confide.merging.operators import find
from confide.merging.plan import Plan, plan_inputs
from confide.merging.statistics import Kind
from confide.merging.stream import TensorLine
from confide.release.format import STATISTICS
from confide.release.tensors import Checkpoint, decode
from confide.release.write import MERGE_REPORT

_EPSILON = {"F64": 2**-52, "F32": 2**-23, "F16": 2**-10, "BF16": 2**-7}


@dataclass(frozen=True)
class Rederived:
    """What came out.

    Attributes:
        checked: tensors that were merged again and are the same, bit for bit.
        differing: tensors that aren't, in the merge or in its report's line; empty where all is well.
        of: how many tensors the merge has.
    """

    checked: tuple[str, ...]
    differing: tuple[str, ...]
    of: int


def rederive(
    folder: Path,
    inputs: Sequence[Path],
    base: Path,
    sample: int = 5,
    seed: int | None = None,
    statistics: Sequence[Path] = (),
) -> Rederived:
    """Merge some tensors again, as the merge report says, and compare them with the merge's own.

    An operator that looks at whole models (TIES) looks at them again; then only the sampled tensors are
    computed. On another machine a matrix product may round in another way: operators of whole matrices may
    differ there in the last bits, and are compared up to rounding and 1e-5 of a task vector's mean entry.

    Statistics that were released with the inputs are found there.

    Args:
        folder: the merge.
        inputs: what was merged, in any order; told apart by their weights, or their tasks.
        base: folder of the public base.
        sample: how many tensors, drawn at random; those that no model changed are drawn too.
        seed: fixes the draw; None draws afresh, so that nobody knows what will be checked.
        statistics: files of the operator's statistics, if it needs public ones.

    Raises:
        MergeError: no report of a merge there, or other inputs than it names.
    """
    report = _report(Path(folder))
    paths = [Path(path) for path in inputs]
    if not statistics and any(each["origin"] == "released" for each in report.get("statistics", ())):
        statistics = [path / STATISTICS for path in paths]
    plan = _plan(report, paths, Path(base), statistics)
    merged = Checkpoint.open(Path(folder))
    lines = {line["name"]: line for line in report["tensors"]}
    names = sorted(plan.vectors.base.names)
    if set(names) != set(merged.names) or set(names) != set(lines):
        odd = sorted((set(names) ^ set(merged.names)) | (set(names) ^ set(lines)))[0]
        raise MergeError(f"{folder}: tensor {odd} is not in all of the merge, its report and its base")
    drawn = random.Random(seed).sample(names, min(sample, len(names)))
    rule = plan.rule()
    again: dict[str, TensorLine] = {}
    differing = []
    for name, (dtype, shape, parts) in body(
        plan, rule, lambda line: again.update({line.name: line}), drawn
    ).items():
        same = (merged.dtype(name), merged.shape(name)) == (dtype, shape)
        place = 0
        for part in parts:
            size = np.size(part)
            stored = merged.stored(name)[place : place + size]
            place += size
            same = same and _same(np.ravel(part), stored, dtype, plan, lines[name])
        same = (
            same and lines[name]["rule"] == again[name].rule and _near(lines[name]["norm"], again[name].norm)
        )
        if not same:
            differing.append(name)
    return Rederived(tuple(sorted(set(drawn) - set(differing))), tuple(sorted(differing)), len(names))


def needs(folder: Path) -> Kind | None:
    """Which statistics of the inputs a merge was made by, as its report says.

    Raises:
        MergeError: no report of a merge there.
    """
    return find(str(_report(Path(folder)).get("operator"))).needs


def _same(ours: Any, theirs: Any, dtype: str, plan: Plan, line: dict[str, Any]) -> bool:
    if plan.operator.takes != "matrices" or dtype not in _EPSILON:
        return bool(np.array_equal(ours, theirs))
    spread = line["norm"] / math.sqrt(max(1, math.prod(line["shape"])))
    ours, theirs = decode(ours, dtype).astype(np.float64), decode(theirs, dtype).astype(np.float64)
    return bool((abs(ours - theirs) <= 2 * _EPSILON[dtype] * abs(theirs) + 1e-5 * spread).all())


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-6 * max(abs(one), abs(other))


def _report(folder: Path) -> dict[str, Any]:
    file = folder / MERGE_REPORT
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        known = report["format"] == "confide.merge-report/1"
    except FileNotFoundError:
        raise MergeError(f"{folder} is no merge: it has no {MERGE_REPORT}") from None
    except (OSError, ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise MergeError(f"{file} can't be read as the report of a merge")
    return dict(report)


def _plan(report: dict[str, Any], paths: Sequence[Path], base: Path, statistics: Sequence[Path]) -> Plan:
    """The plan of the merge that a report tells of."""
    public, inputs = read_inputs(paths, base, report["heads"])
    ordered = _ordered(report, inputs)
    if report["base"]["hash"] != public.hash:
        raise MergeError(f"the merge's base is {report['base']['hash']}, and {base} is {public.hash}")
    vectors = task_vectors(ordered, public)
    groups = tuple(
        Group(_settings(group["parameters"]), tuple(group["tensors"])) for group in report["groups"]
    ) or (Group(_settings(report["parameters"]), vectors.names),)
    return plan_inputs(
        find(report["operator"]),
        groups,
        public,
        ordered,
        vectors,
        statistics,
        dtype=report["dtype"],
        heads=report["heads"],
        disjoint=False,
    )


def _ordered(report: dict[str, Any], inputs: Sequence[Input]) -> tuple[Input, ...]:
    """The inputs in the report's order: told by their weights, without a statement by their tasks.

    A recipe may have called a release's task something else, so that its name alone says nothing.
    """
    left = list(inputs)
    found = []
    for model in report["models"]:
        same = [item for item in left if item.statement and model["weights"] == item.statement.weights]
        same = same or [item for item in left if item.tasks == model["tasks"]]
        if not same:
            break
        found.append(same[0])
        left.remove(same[0])
        if (
            model["weights"] is not None
            and same[0].statement
            and model["weights"] != same[0].statement.weights
        ):
            raise MergeError(
                f"{same[0].path} holds other weights than those that were merged for {model['tasks']}"
            )
    if left or len(found) < len(report["models"]):
        named = ", ".join(model["tasks"] for model in report["models"])
        raise MergeError(
            f"the merge is of {named}, but the inputs are {', '.join(item.tasks for item in inputs)}; name "
            "exactly those"
        )
    return tuple(found)


def _settings(written: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in written.items()}
