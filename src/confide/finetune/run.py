"""One private fine-tune from records to a release."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from confide.errors import ConfideError, ConfigError
from confide.finetune import methods, released
from confide.finetune.agreement import agreed
from confide.finetune.base import PublicBase
from confide.finetune.binding import Anchor, Binding
from confide.finetune.charge import charged
from confide.finetune.checkpoint import Begun, Unfinished
from confide.finetune.diagnostics import check_diagnosable, diagnose
from confide.finetune.experts import attach_experts, bind_experts, owners_for
from confide.finetune.fingerprint import fingerprint
from confide.finetune.loop import train
from confide.finetune.memory import MICRO_BATCH, micro_batch_of
from confide.finetune.precision import in_bfloat16
from confide.finetune.prepare import (
    Prepared,
    Progress,
    forward_of,
    loss_of,
    micro_batches,
    silent,
    targets,
)
from confide.finetune.published import noisy_accuracy
from confide.finetune.released import Released
from confide.finetune.selfcheck import (
    check_all_gradients,
    check_finite,
    check_noise,
    check_rows_are_independent,
)
from confide.finetune.settings import Settings
from confide.finetune.tuned import FineTuned
from confide.gradients.keys import Keys
from confide.models.adapters import Adapted, Trainable, adapt, plain_state
from confide.models.backbones import (
    Classifier,
    answer_in,
    load_classifier,
    positions_of,
)
from confide.privacy.calibration import resolve_delta
from confide.privacy.composition import new_run, training_spending, training_statement
from confide.privacy.streams import Budget, Schedule
from confide.release.format import (
    TEXT_CLASSES,
)
from confide.release.write import check_task_name
from confide.tasks.records import TaskData

if TYPE_CHECKING:
    from confide.privacy.ledger import Ledger


def prepare(task: TaskData, base: PublicBase, max_length: int) -> Prepared:
    """Read a task as a base does.

    Raises:
        ConfigError: texts may be longer than the base has positions.
        ModelError: the base has no such head, or can't read images of this size.
    """
    classifier = load_classifier(base.folder, task.labels, seed=0, problem=task.problem)
    if task.problem.inputs == "image":
        return Prepared(task, classifier, max_length)
    positions = min(positions_of(classifier.model, max_length), int(classifier.tokenizer.model_max_length))
    if max_length > positions:
        raise ConfigError(f"max_length is {max_length}, but the base reads at most {positions} tokens")
    return Prepared(task, classifier, max_length)


def public_units(task: TaskData, settings: Settings) -> int:
    """n, the public constant that q, δ and the default batch follow from: declared, or else counted."""
    return settings.declared_units or task.train.units.count


def adapted_for(task: TaskData, classifier: Classifier, settings: Settings) -> Adapted:
    """The classifier with what is trained chosen; of the task only its texts are read, to compare them with
    a public corpus.
    """
    if settings.method != "raptor":
        return adapt(classifier, settings.trainable, settings.seed)
    layers = attach_experts(classifier, settings, task)
    # Adapters beside the experts that nothing trains would be released as if something had.
    alone = settings.experts.variant == "experts-only"
    return adapt(classifier, Trainable(kind="head") if alone else settings.trainable, settings.seed, layers)


def plan(
    task: TaskData, classifier: Classifier, settings: Settings
) -> tuple[Adapted, Schedule, float | None]:
    """What would be trained and charged: the adapted model, the calibrated schedule, and δ.

    Nothing is drawn and no record is looked at; only n is, where it isn't declared.
    """
    check_task_name(task.name)
    if settings.publish_accuracy is not None and task.problem.target not in ("class", "number"):
        raise ConfigError("publish_accuracy counts rows with one label each, not labels of words nor tokens")
    if settings.publish_accuracy is not None and task.metric != "accuracy":
        raise ConfigError(
            f"publish_accuracy counts test units that are labelled rightly, but the metric is {task.metric}; "
            "only `accuracy` has a known sensitivity"
        )
    if settings.release_statistics is not None and task.problem != TEXT_CLASSES:
        raise ConfigError("release_statistics is for texts with one label each")
    if settings.experts.diagnostics:
        check_diagnosable(task.train.units)
    adapted = adapted_for(task, classifier, settings)
    units = task.train.units
    count = public_units(task, settings)
    schedule = methods.schedule(settings, adapted, count, units.name)
    if not schedule.private or settings.epsilon is None:
        return adapted, schedule, None
    delta = resolve_delta(settings.delta, count)
    return adapted, methods.with_budget(schedule, settings, Budget(settings.epsilon, delta)), delta


def finetune(
    prepared: Prepared,
    base: PublicBase,
    settings: Settings,
    *,
    dataset: str | None = None,
    simulate: int | None = None,
    ledger: Ledger | None = None,
    on_plan: Callable[[Schedule], None] = lambda schedule: None,
    progress: Progress = silent,
    unfinished: Unfinished | None = None,
) -> FineTuned:
    """Train one task privately.

    Args:
        prepared: the task's records under this base.
        dataset: the name that its owner gave the data; the task's own if None.
        simulate: None draws fresh keys from the operating system, for this run only. A number fixes noise and
            sampling, so that the run can be repeated and its statement claims nothing.
        ledger: charged for the whole schedule before the first draw, and refunded only if the run fails
            before its first noisy query; runs that claim nothing are not charged.
        on_plan: called with the calibrated schedule before anything looks at a record.
        progress: called with (what, done, total).
        unfinished: where keys and checkpoints are kept. A run that was stopped there goes on, bitwise as if
            it hadn't been: same machine, versions and threads.

    Raises:
        ConfigError, PrivacyError, ModelError, ReleaseError: before anything looks at a record.
        ResumeError: records, base, settings, versions or threads aren't those that the run began with, or
            its files are damaged; before anything looks at a record.

    Guarantee: the result's weights are (ε, δ)-DP in the training units as `statement` says, provided the
    caller publishes nothing else that was computed from them (`history` and `score` are not noised).
    """
    task, dataset = prepared.task, dataset or prepared.task.name
    keeps = agreed(settings, task, base.identity, base.folder)
    begun = unfinished.read() if unfinished else None
    if begun:
        keys, run = begun.keys, begun.run
    else:  # keys are made here, never handed in: two runs with the same noise would give it away
        keys, run = Keys.fresh() if simulate is None else Keys.fixed(simulate), new_run()
    found = fingerprint(prepared, settings, base.identity, base.folder, dataset, simulate, keys.sampling)
    found["agreement"] = str(keeps.hash if keeps else None)
    if begun:
        begun.check(found)
    classifier = load_classifier(base.folder, task.labels, settings.seed, task.problem)
    adapted, schedule, delta = plan(task, classifier, settings)
    on_plan(schedule)
    units = task.train.units
    spending = training_spending(
        schedule,
        delta=delta,
        dataset=dataset,
        units=public_units(task, settings),
        run=run,
        steps_run={},
        simulated=keys.simulated,
    )
    found["schedule"] = spending.model_dump_json()
    tokens = micro_batch_of(prepared, adapted, schedule, settings, begun)
    found[MICRO_BATCH] = str(tokens)
    if begun:
        begun.check(found)
    elif unfinished:
        unfinished.begin(Begun(run, keys, found))
    with charged(ledger, spending, unfinished) as charge:

        def first_query() -> None:
            charge.first_query()
            if unfinished:
                unfinished.asked = True

        model: Any = classifier.model
        check_finite(classifier, lambda batch: model(**batch).logits)
        inputs = prepared.inputs(classifier, adapted.first_block, "train", progress)
        module, forward = forward_of(classifier, adapted.first_block, inputs)
        named = dict(classifier.model.named_parameters())
        trained = {name: named[name] for name in schedule.parameters}
        if schedule.private:
            check_rows_are_independent(classifier, forward, inputs)
            check_all_gradients(adapted, module, forward, trained, inputs)
            for stream in schedule.streams:
                check_noise(stream.noise_multiplier * stream.clipping.bound)
            for query in schedule.queries:
                check_noise(query.noise_multipliers[0])
        owner = owners_for(prepared, adapted, schedule, settings, unfinished, progress)
        binding = Binding(
            module=module,
            forward=forward,
            parameters=trained,
            batch=inputs.batch,
            micro_batches=micro_batches(inputs, tokens),
            labels=targets(prepared),
            units=units,
            anchor_gradient=Anchor(adapted, schedule.anchored).gradient,
            loss=loss_of(classifier.problem),
            experts=bind_experts(adapted.experts, owner),
            diagnose=settings.experts.diagnostics,
        )
        if settings.precision == "bfloat16":
            binding = in_bfloat16(
                binding, classifier, inputs, schedule, tokens=tokens, max_length=prepared.max_length
            )
        start = {name: value.detach().clone() for name, value in trained.items()} if binding.diagnose else {}
        history = train(
            binding,
            schedule,
            keys,
            lambda done, total: progress(f"{settings.method}, {task.name}", done, total),
            first_query,
            unfinished.latest(run) if unfinished else None,
            partial(unfinished.after_step, run) if unfinished else lambda state: None,
        )
        published = noisy_accuracy(prepared, adapted, schedule, keys.noise)
        statistics = _statistics(prepared, base, settings, adapted, schedule, keys, progress)
    entry = charge.settle(history.steps_run)
    found_out = None
    if binding.diagnose:
        show = partial(progress, f"diagnostics, {task.name}")
        try:
            found_out = diagnose(prepared, adapted, settings, schedule, binding, start, history, show)
        except ConfideError as error:  # the run is paid for, so it is released all the same
            warnings.warn(f"the run has no diagnostics: {error}", stacklevel=2)
    if task.problem.label_range:
        answer_in(classifier, task.problem.label_range)
    statement = training_statement(
        schedule=schedule,
        delta=delta,
        dataset=dataset,
        units=public_units(task, settings),
        run=run,
        base=base.identity,
        steps_run=history.steps_run,
        labels_from=task.labels_from,
        label_range=task.problem.label_range,
        routed_text=settings.method == "raptor" and settings.experts.public is not None,
        simulated=keys.simulated,
        published=published,
        ledger=entry,
        agreement=keeps.hash if keeps else None,
    )
    return FineTuned(
        prepared,
        adapted,
        settings,
        schedule,
        history,
        statement,
        unfinished,
        statistics,
        keeps,
        owner,
        found_out,
    )


def _statistics(
    prepared: Prepared,
    base: PublicBase,
    settings: Settings,
    adapted: Adapted,
    schedule: Schedule,
    keys: Keys,
    progress: Progress,
) -> Released | None:
    """The schedule's query for statistics, on the weights as they will be released."""
    asked = [query for query in schedule.queries if query.purpose in ("gram", "fisher")]
    if not asked:
        return None
    task = prepared.task
    (query,) = asked
    progress(f"statistics, {task.name}", 0, 1)
    plain = load_classifier(base.folder, task.labels, settings.seed, task.problem)
    plain.model.load_state_dict(plain_state(adapted))
    inputs = prepared.inputs(plain, adapted.first_block, "train")
    _, forward = forward_of(plain, adapted.first_block, inputs)
    tokens = prepared.encoded("train")
    found = released.ask(
        query,
        adapted,
        plain,
        tokens,
        inputs,
        forward,
        task.train.units,
        denominator=public_units(task, settings),
        bound=settings.statistics_bound,
        noise=keys.noise.generator(query.name, 0, query.purpose),
    )
    progress(f"statistics, {task.name}", 1, 1)
    return found
