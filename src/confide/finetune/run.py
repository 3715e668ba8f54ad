"""One private fine-tune from records to a release."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from confide import files
from confide.errors import ConfigError, ModelError, ReleaseError, ResumeError
from confide.finetune import methods
from confide.finetune.binding import Anchor, Binding
from confide.finetune.charge import charged
from confide.finetune.checkpoint import Begun, Unfinished
from confide.finetune.experts import attach_experts, bind_experts, owners_of
from confide.finetune.fingerprint import fingerprint
from confide.finetune.loop import History, train
from confide.finetune.prepare import (
    Prepared,
    Progress,
    forward_of,
    labels_of,
    micro_batches,
    score_test,
    silent,
)
from confide.finetune.selfcheck import check_gradients, check_noise, check_rows_are_independent
from confide.finetune.settings import Settings
from confide.gradients.keys import Keys
from confide.models.adapters import Adapted, adapt, plain_state
from confide.models.backbones import Classifier, load_classifier, resolve
from confide.models.moe.selfcheck import self_check
from confide.models.tail import Source
from confide.privacy import statement as statements
from confide.privacy.calibration import resolve_delta
from confide.privacy.composition import new_run, training_spending, training_statement
from confide.privacy.statement import Base, Statement
from confide.privacy.streams import Budget, Schedule
from confide.release.format import WEIGHTS, Head, ReleaseInfo
from confide.release.hashes import base_hash
from confide.release.tensors import write_tensors
from confide.release.write import check_task_name, write_release
from confide.tasks.records import TaskData

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from confide.privacy.ledger import Ledger

STEP_TOKENS = 8192


@dataclass(frozen=True)
class PublicBase:
    """A base model on disk, named and hashed."""

    folder: Path
    identity: Base

    @classmethod
    def of(cls, name: str) -> PublicBase:
        """Resolve a folder, `package:NAME` or hub id, and hash its encoder.

        Raises:
            ModelError: nothing is there, or it is a release, whose weights depend on records.
        """
        folder = resolve(name)
        if (folder / statements.FILE_NAME).exists():
            raise ModelError(
                f"{name} is a release that states what it spent on records, not a public base; training "
                "on it would leave that out of the claim. Train from the public model underneath"
            )
        # A release tells the world the model's name, not where it lies on its owner's machine.
        public = folder.resolve().name if Path(name).expanduser().is_dir() else name
        return cls(folder, Base(name=public, hash=base_hash(folder)))


@dataclass(frozen=True)
class FineTuned:
    """A trained task model with what its statement needs.

    Attributes:
        schedule: as executed and charged.
        history: private.
        statement: the claim; the hashes of the weights are filled in when it is released.
        unfinished: the run's keys and checkpoints on disk, private; None if there are none.
        owner: (rows,) which expert owns each training record; None where none is asked for. Private.
    """

    prepared: Prepared
    adapted: Adapted
    settings: Settings
    schedule: Schedule
    history: History
    statement: Statement
    unfinished: Unfinished | None = None
    owner: npt.NDArray[np.int64] | None = None

    def score(self) -> float:
        """Score on the test records. Not noised: for reports, never for a release."""
        return score_test(self.prepared, self.adapted.classifier, self.adapted.first_block)

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
        """Write losses and clipped shares of every step, and owners, for whoever ran it and nobody else."""
        lines = [json.dumps(_finite(dataclasses.asdict(step))) for step in self.history.steps]
        files.write_text(folder / "steps.jsonl", "\n".join(lines) + "\n", private=True)
        if self.owner is not None:
            (layer,) = self.adapted.experts
            files.write_json(
                folder / "owners.json", {"layer": layer.name, "owner": self.owner.tolist()}, private=True
            )
        folder.chmod(0o700)

    def info(self) -> ReleaseInfo:
        """What the release says about itself."""
        task = self.prepared.task
        head = Head(
            task=task.name,
            labels=task.labels,
            labels_from=task.labels_from,
            metric=task.metric,
            max_length=self.prepared.max_length,
            tensors=self.adapted.head,
        )
        return ReleaseInfo(kind="model", encoder_prefix=self.adapted.classifier.prefix, heads=(head,))

    def _save(self, folder: Path) -> None:
        classifier = self.adapted.classifier
        state = plain_state(self.adapted)
        write_tensors(folder / WEIGHTS, {name: tensor.numpy() for name, tensor in state.items()})
        classifier.model.config.architectures = [type(classifier.model).__name__]  # type: ignore[union-attr]
        classifier.model.config.save_pretrained(folder)  # type: ignore[union-attr,operator]
        try:
            classifier.tokenizer.save_pretrained(folder)
        except Exception as error:  # a full disk is a bare Exception in the tokenizers library
            raise ReleaseError(f"can't write the tokenizer to {folder}: {error}") from error


def prepare(task: TaskData, base: PublicBase, max_length: int) -> Prepared:
    """Tokenise a task for a base.

    Raises:
        ConfigError: texts may be longer than the base has positions.
    """
    classifier = load_classifier(base.folder, task.labels, seed=0)
    positions = min(
        int(getattr(classifier.model.config, "max_position_embeddings", max_length)),
        int(classifier.tokenizer.model_max_length),
    )
    if max_length > positions:
        raise ConfigError(f"max_length is {max_length}, but the base reads at most {positions} tokens")
    return Prepared(task, classifier.tokenizer, max_length)


def public_units(task: TaskData, settings: Settings) -> int:
    """n, the public constant that q, δ and the default batch follow from: declared, or else counted."""
    return settings.declared_units or task.train.units.count


def adapted_for(task: TaskData, classifier: Classifier, settings: Settings) -> Adapted:
    """The classifier with what is trained chosen; of the task only its texts are read, to compare them with
    a public corpus.
    """
    layers = attach_experts(classifier, settings, task) if settings.method == "raptor" else ()
    return adapt(classifier, settings.trainable, settings.seed, layers)


def plan(
    task: TaskData, classifier: Classifier, settings: Settings
) -> tuple[Adapted, Schedule, float | None]:
    """What would be trained and charged: the adapted model, the calibrated schedule, and δ.

    Nothing is drawn and no record is looked at; only n is, where it isn't declared.
    """
    check_task_name(task.name)
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
    begun = unfinished.read() if unfinished else None
    if begun:
        keys, run = begun.keys, begun.run
    else:  # keys are made here, never handed in: two runs with the same noise would give it away
        keys, run = Keys.fresh() if simulate is None else Keys.fixed(simulate), new_run()
    found = fingerprint(prepared, settings, base.identity, base.folder, dataset, simulate, keys.sampling)
    if begun:
        begun.check(found)
    classifier = load_classifier(base.folder, task.labels, settings.seed)
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
    if begun:
        begun.check(found)
    elif unfinished:
        unfinished.begin(Begun(run, keys, found))
    with charged(ledger, spending, unfinished) as charge:

        def first_query() -> None:
            charge.first_query()
            if unfinished:
                unfinished.asked = True

        inputs = prepared.inputs(classifier, adapted.first_block, "train", progress)
        module, forward = forward_of(classifier, adapted.first_block, inputs)
        named = dict(classifier.model.named_parameters())
        trained = {name: named[name] for name in schedule.parameters}
        if schedule.private:
            check_rows_are_independent(classifier, forward, inputs)
            _check_gradients(classifier, adapted, module, forward, trained, inputs)
            for stream in schedule.streams:
                check_noise(stream.noise_multiplier * stream.clipping.bound)
        owner = _owners(prepared, adapted, schedule, settings, unfinished)
        binding = Binding(
            module=module,
            forward=forward,
            parameters=trained,
            batch=inputs.batch,
            micro_batches=micro_batches(inputs, STEP_TOKENS),
            labels=labels_of(task),
            units=units,
            anchor_gradient=Anchor(adapted).gradient,
            experts=bind_experts(adapted.experts, owner),
        )
        history = train(
            binding,
            schedule,
            keys,
            lambda done, total: progress(f"{settings.method}, {task.name}", done, total),
            first_query,
            unfinished.latest(run) if unfinished else None,
            partial(unfinished.after_step, run) if unfinished else lambda state: None,
        )
    entry = charge.settle(history.steps_run)
    statement = training_statement(
        schedule=schedule,
        delta=delta,
        dataset=dataset,
        units=public_units(task, settings),
        run=run,
        base=base.identity,
        steps_run=history.steps_run,
        labels_from=task.labels_from,
        simulated=keys.simulated,
        ledger=entry,
    )
    return FineTuned(prepared, adapted, settings, schedule, history, statement, unfinished, owner)


def _owners(
    prepared: Prepared,
    adapted: Adapted,
    schedule: Schedule,
    settings: Settings,
    unfinished: Unfinished | None,
) -> npt.NDArray[np.int64] | None:
    """The records' owners, if a stream asks for them: computed once, before the first query, and kept."""
    if all(stream.ownership == "all" for stream in schedule.streams):
        return None
    (layer,) = adapted.experts
    held = unfinished.owners(layer.name) if unfinished else None
    if held is None:
        held = owners_of(adapted.classifier, layer, prepared.encoded("train"), settings.experts)
        if unfinished:
            unfinished.note_owners(layer.name, held)
    if len(held) != len(prepared.task.train):
        raise ResumeError("the owners that the run began with are not those of these records")
    return held


def _check_gradients(
    classifier: Classifier,
    adapted: Adapted,
    module: nn.Module,
    forward: Callable[[dict[str, Tensor]], Tensor],
    trained: Mapping[str, nn.Parameter],
    inputs: Source,
) -> None:
    """Dense parameters and experts, each against autograd on made-up rows."""
    apart = set(adapted.expert_parameters)
    dense = {name: parameter for name, parameter in trained.items() if name not in apart}
    if dense:
        check_gradients(classifier, module, forward, dense, inputs)
    config: Any = classifier.model.config
    for layer in adapted.experts:
        self_check(
            module,
            forward,
            layer,
            vocabulary=int(config.vocab_size),
            pad=int(classifier.tokenizer.pad_token_id),
        )


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN; a loss that isn't finite is written as null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
