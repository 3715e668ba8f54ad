"""Executing a study: train every task with every method, merge, score."""

from __future__ import annotations

import dataclasses
import math
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from confide import files
from confide.errors import ConfideError, ConfigError, ModelError
from confide.experiment.claims import claims_of, largest_of
from confide.experiment.finished import Desk, Finished, desk, is_unfinished
from confide.experiment.merges import (
    merge_models,
    merged_folder,
    model_folder,
    public_texts,
    score_merge,
)
from confide.experiment.mixtures import Routings, private_facts, run_facts, upcycled
from confide.experiment.plan import MergePlan, Plan, TaskPlan
from confide.finetune.base import PublicBase
from confide.finetune.checkpoint import Unfinished
from confide.finetune.fingerprint import fingerprint
from confide.finetune.memory import forget_peak, peak_bytes
from confide.finetune.methods import schedule
from confide.finetune.prepare import Prepared, Progress
from confide.finetune.run import adapted_for, finetune, prepare, public_units
from confide.finetune.settings import Settings
from confide.finetune.tuned import FineTuned
from confide.finetune.upcycled import Upcycled
from confide.geometry.drift import folder_drift
from confide.models.backbones import load_classifier
from confide.privacy.composition import check
from confide.privacy.statement import Claim, Statement
from confide.release.tensors import Checkpoint
from confide.release.write import verify
from confide.report.findings import findings
from confide.report.mixtures import mixture_findings
from confide.report.scores import INDIVIDUAL, PRETRAINED
from confide.report.study import MethodFacts, MixtureFacts, MixtureRun, PrivateRun, Row, Study, TaskFacts
from confide.tasks import registry
from confide.tasks.files import read_task
from confide.tasks.overlap import check_disjoint
from confide.tasks.records import TaskData

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from confide.privacy.ledger import Ledger

_PRIVATE = """\
Scores under report/ come from test records without noise. They are for whoever ran this study.
What lies in this folder comes from training records without noise. It is for whoever holds those alone.
Only what lies under models/ and merged/ is covered by a privacy statement.
"""


@dataclass
class _Seen:
    """What training left behind for merging and reporting."""

    scores: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)
    facts: dict[tuple[str, int], MethodFacts] = field(default_factory=dict)
    statements: dict[tuple[str, int], list[Statement]] = field(default_factory=dict)
    first_blocks: dict[str, int] = field(default_factory=dict)
    mixtures: list[MixtureRun] = field(default_factory=list)
    private: list[PrivateRun] = field(default_factory=list)


def run(
    plan: Plan,
    out: Path,
    progress: Progress,
    ledger: Ledger | None = None,
    key: Ed25519PrivateKey | None = None,
    *,
    resume: bool = False,
) -> Study:
    """Run a study; releases land in `out`/models and `out`/merged, a mixture made of the base in `out`/base.

    Args:
        plan: from `experiment.plan.read`.
        out: a folder without an earlier study in it, or with `resume` one that was not finished.
        progress: called with (what, done, total).
        ledger: charged for every private run on a task from somebody's own file, under the task's name; the
            registered tasks are public corpora and are not charged.
        key: signs every statement.
        resume: go on with a study that was stopped. Runs that are finished are used as they are, if they
            were trained from the same records, base and settings; one that was broken off goes on from its
            checkpoint under its charge (`finetune.checkpoint`). Merges are made anew.

    Raises:
        ConfigError: `out` holds a study already, or nothing to go on with.
        ResumeError: a finished or broken-off run began with something else, which is named.
        DataError: two tasks share a record although the plan declares them disjoint.
    """
    _check_place(out, resume=resume)
    with desk(out) as kept:
        for name in ("base", "merged", "statistics"):  # made anew
            shutil.rmtree(out / name, ignore_errors=True)
        return _run(plan, out, progress, ledger, key, kept)


def _check_place(out: Path, *, resume: bool) -> None:
    """Make sure that nothing is overwritten."""
    present = [name for name in ("base", "models", "merged", "statistics", "report") if (out / name).exists()]
    if resume:
        if not is_unfinished(out):
            raise ConfigError(f"{out} holds no unfinished study; leave --resume out, or choose another --out")
    elif present or is_unfinished(out):
        what = f" ({present[0]}/)" if present else ""
        more = "go on with it by --resume, " if is_unfinished(out) else ""
        raise ConfigError(f"{out} holds a study already{what}; {more}choose another --out or remove it")


def _run(
    plan: Plan,
    out: Path,
    progress: Progress,
    ledger: Ledger | None,
    key: Ed25519PrivateKey | None,
    kept: Desk,
) -> Study:
    started = time.monotonic()
    tasks = [load_task(task) for task in plan.tasks]
    if plan.disjoint:
        check_disjoint(tasks)
    texts = public_texts(plan.statistics, tasks) if plan.statistics else ()
    made = upcycled(plan, tasks, out, progress)
    base = PublicBase.of(str(made.folder) if made else plan.base)
    routings = Routings(base, tasks, progress)
    runs = [(method, seed) for seed in plan.seeds for method in _methods(plan)]
    try:
        decided = {run: routings.decide(plan.settings_of(*run)) for run in runs}
        _check_before_training({method: decided[method, plan.seeds[0]] for method, _ in runs}, tasks, base)
    except ConfideError:
        if made:
            shutil.rmtree(out / "base")
        raise
    files.write_text(out / "private" / "README.txt", _PRIVATE)  # a folder that can't be written costs nothing
    prepared: dict[str, Prepared] = {}
    seen = _Seen()
    for number, task in enumerate(tasks):
        for count, (method, seed) in enumerate(runs):
            progress("models trained", number * len(runs) + count, len(tasks) * len(runs))
            settings = decided[method, seed]
            if task.name not in prepared:
                prepared[task.name] = prepare(task, base, settings.max_length)
                prepared[task.name].routings = routings.found
            book = ledger if plan.tasks[number].data is not None else None
            _train(out, base, prepared[task.name], method, settings, seen, kept, book, key, progress)
        prepared[task.name].forget("train")
    progress("models trained", len(tasks) * len(runs), len(tasks) * len(runs))
    rows = [
        _row(method, INDIVIDUAL, seed, seen.scores[method, seed], largest_of(seen.statements[method, seed]))
        for method, seed in runs
    ]
    merges = [(m, s, operator) for m, s in runs if m != PRETRAINED for operator in plan.merges_of(m)]
    for count, (method, seed, operator) in enumerate(merges):
        progress("merges scored", count, len(merges))
        rows.append(_merge_and_score(plan, out, base, prepared, texts, seen, method, seed, operator, key))
    progress("merges scored", len(merges), len(merges))
    mixture = _mixture(made, base, routings, seen)
    return Study(
        title=plan.title,
        base=plan.base,
        tasks=tuple(_task_facts(task) for task in tasks),
        rows=tuple(rows),
        methods=tuple(seen.facts.values()),
        claims=claims_of(plan, seen.statements),
        findings=(*(mixture_findings(rows, mixture) if mixture else ()), *findings(rows)),
        settings={m: _public(plan.settings_of(m, plan.seeds[0])) for m in _methods(plan)},
        versions={
            **{name: version(name) for name in ("confide", "torch", "transformers", "dp-accounting")},
            "Python": platform.python_version(),
        },
        minutes=(time.monotonic() - started) / 60,
        mixture=mixture,
        private=tuple(seen.private),
    )


def load_task(plan: TaskPlan) -> TaskData:
    """The records of a task, cut to the plan's numbers."""
    if plan.data is None:
        task = registry.load(plan.name)
    else:
        assert plan.text is not None
        assert plan.label is not None
        task = read_task(
            plan.data,
            text=plan.text,
            label=plan.label,
            labels=list(plan.labels) if plan.labels else None,
            name=plan.name,
            unit=plan.unit,
            test_size=plan.test_size,
        )
    if plan.records is not None:
        task = task.limit(plan.records, seed=0)
    if plan.test_records is not None:
        task = dataclasses.replace(task, test=task.test.limit(plan.test_records, seed=0))
    return task


def _check_before_training(
    decided: Mapping[str, Settings], tasks: Sequence[TaskData], base: PublicBase
) -> None:
    """What would stop a later run of the study stops it before the first one spends anything."""
    for settings in decided.values():
        # Which blocks and layers there are is the base's matter: the same for every task.
        adapted = adapted_for(tasks[0], load_classifier(base.folder, tasks[0].labels, 0), settings)
        for task in tasks:
            schedule(settings, adapted, public_units(task, settings), task.train.units.name)


def _methods(plan: Plan) -> list[str]:
    # The head comes last: what it reads is computed from what the others read, not from the tokens again.
    return [*plan.methods, *([PRETRAINED] if plan.pretrained is not None else [])]


def _train(
    out: Path,
    base: PublicBase,
    prepared: Prepared,
    method: str,
    settings: Settings,
    seen: _Seen,
    kept: Desk,
    ledger: Ledger | None,
    key: Ed25519PrivateKey | None,
    progress: Progress,
) -> None:
    """Train and release one task's model, or find that it is there already, and note what it is."""
    task, seed = prepared.task.name, settings.seed
    folder = model_folder(out, method, seed, task)
    now = fingerprint(prepared, settings, base.identity, base.folder, task, None, kept.key)
    if folder.exists():
        found = kept.finished(method, seed, task, now)
        statement = verify(folder)
        check(statement)
    else:
        forget_peak()
        before = time.monotonic()
        with closing(Unfinished.open(kept.unfinished(method, seed, task), every=kept.every)) as unfinished:
            trained = finetune(
                prepared, base, settings, ledger=ledger, progress=progress, unfinished=unfinished
            )
            found = _found(trained, method, now, time.monotonic() - before, peak_bytes())
            if trained.diagnostics is not None:
                trained.keep_private(out / "private" / method / f"seed-{seed}" / task)
            kept.note(method, seed, task, found)
            trained.release(folder, key=key)
        statement = trained.statement
    if found.score is None:
        raise ModelError(
            f"the model of {method}, seed {seed}, for task {task} has no finite score, as its training "
            "diverged. It is released, and its charge stays; leave the method out and go on with --resume"
        )
    run = (method, seed)
    seen.scores.setdefault(run, {})[task] = found.score
    seen.statements.setdefault(run, []).append(statement)
    seen.first_blocks[method] = found.first_block
    facts = seen.facts.setdefault(run, MethodFacts(method, seed, {}, {}, {}, {}))
    facts.drift[task] = folder_drift(base.folder, folder)
    facts.noise_multiplier[task] = found.noise_multiplier
    facts.trained[task] = found.trained
    facts.seconds[task] = found.seconds
    facts.memory[task] = found.memory
    if found.mixture:
        seen.mixtures.append(found.mixture)
    if found.private:
        seen.private.append(found.private)


def _found(trained: FineTuned, method: str, now: Mapping[str, str], seconds: float, memory: int) -> Finished:
    named = dict(trained.adapted.classifier.model.named_parameters())
    mixture = trained.settings.method == "raptor"
    return Finished(
        fingerprint=dict(now),
        score=_score(trained),
        first_block=trained.adapted.first_block,
        noise_multiplier=trained.schedule.streams[0].noise_multiplier,
        trained=sum(named[name].numel() for name in trained.schedule.parameters),
        seconds=seconds,
        memory=memory,
        mixture=run_facts(trained, method) if mixture else None,
        private=private_facts(trained, method) if mixture else None,
    )


def _score(trained: FineTuned) -> float | None:
    """None where it isn't finite: what was paid for is released all the same."""
    try:
        score = trained.score()
    except ModelError:
        return None
    return score if math.isfinite(score) else None


def _mixture(made: Upcycled | None, base: PublicBase, routings: Routings, seen: _Seen) -> MixtureFacts | None:
    if not seen.mixtures:
        return None
    (corpus, _, _), routing = next(iter(routings.found.items()), ((None, 0, ""), None))
    return MixtureFacts(
        upcycled=made.in_words() if made else (),
        parameters=made.parameters if made else _parameters(base.folder),
        routing=routing,
        corpus=corpus,
        runs=tuple(seen.mixtures),
    )


def _parameters(folder: Path) -> int:
    weights = Checkpoint.open(folder)
    return sum(math.prod(weights.shape(name)) for name in weights.names)


def _merge_and_score(
    plan: Plan,
    out: Path,
    base: PublicBase,
    prepared: Mapping[str, Prepared],
    texts: Sequence[str],
    seen: _Seen,
    method: str,
    seed: int,
    operator: MergePlan,
    key: Ed25519PrivateKey | None,
) -> Row:
    folder = merged_folder(out, method, seed, operator)
    report = merge_models(
        {name: model_folder(out, method, seed, name) for name in prepared},
        operator,
        folder,
        base=base,
        disjoint=plan.disjoint is not None,
        texts=texts,
        statistics=out / "statistics" / method / f"seed-{seed}",
        key=key,
    )
    scores = score_merge(folder, prepared, seen.first_blocks[method])
    return _row(method, operator.label, seed, scores, report.statement.claim)


def _row(method: str, operator: str, seed: int, scores: dict[str, float], claim: Claim | None) -> Row:
    average = float(np.mean(list(scores.values())))
    epsilon, delta = (claim.epsilon, claim.delta) if claim else (None, None)
    return Row(method, operator, seed, dict(scores), average, epsilon, delta)


def _task_facts(task: TaskData) -> TaskFacts:
    return TaskFacts(
        task.name, task.train.units.count, len(task.test), len(task.labels), task.metric, task.source
    )


def _public(settings: Settings) -> dict[str, object]:
    return dict(settings.model_dump(mode="json"))
