"""A mixture of experts from records to a release: claim, owners that are kept, and plain loading."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from confide.errors import ConfigError, DataError, ResumeError
from confide.finetune import experts, run
from confide.finetune import prepare as prepare_module
from confide.finetune.base import PublicBase
from confide.finetune.checkpoint import Unfinished
from confide.finetune.history import State
from confide.finetune.run import finetune, prepare
from confide.finetune.settings import Settings
from confide.finetune.tuned import FineTuned
from confide.models.backbones import load_classifier, load_trained
from confide.models.moe.layers import sparse_layers
from confide.models.moe.owners import owner_maps
from confide.privacy.accountant import epsilon
from confide.privacy.composition import check
from confide.release.format import Problem
from confide.release.write import verify
from confide.tasks.evaluate import logits
from confide.tasks.records import Records, TaskData
from confide.tasks.text import encode


@pytest.fixture(scope="module")
def base(sparse_base: Path) -> PublicBase:
    return PublicBase.of(str(sparse_base))


def settings_of(corpus: Path, more: dict[str, Any] | None = None, **experts: Any) -> Settings:
    return Settings.of(
        {
            "method": "raptor",
            "epsilon": 3.0,
            "expected_batch": 15,
            "steps": 2,
            "max_length": 20,
            "trainable": {"rank": 2},
            "experts": {"public": str(corpus), "rank": 2, **experts},
            **(more or {}),
        }
    )


def tune(base: PublicBase, task: TaskData, settings: Settings, **options: Any) -> FineTuned:
    return finetune(prepare(task, base, settings.max_length), base, settings, **options)


@pytest.mark.parametrize("train", ["lora", "weights"])
def test_from_records_to_a_release(
    base: PublicBase, make_task: Callable[..., TaskData], corpus: Path, tmp_path: Path, train: str
) -> None:
    task = make_task()
    tuned = tune(base, task, settings_of(corpus, train=train, learning_rate=0.05))
    statement = tuned.statement
    check(statement)
    assert statement.claim is not None
    assert 2.99 < statement.claim.epsilon <= 3.0
    assert statement.claim.epsilon == epsilon(tuned.schedule.event(), statement.claim.delta).epsilon
    (spending,) = statement.spendings
    assert spending.schedule == tuned.schedule
    assert spending.steps_run == {"shared": 2, "experts": 2}

    tuned.release(tmp_path / "release")
    verify(tmp_path / "release")
    loaded = load_trained(tmp_path / "release", task.labels)
    texts = task.test.texts
    encoded = encode(loaded.tokenizer, texts, 20)
    found = logits(lambda batch: loaded.model(**batch).logits, encoded)
    trained = logits(lambda batch: tuned.adapted.classifier.model(**batch).logits, encoded)
    assert np.abs(found - trained).max() < 1e-4
    assert not any("lora" in name for name in loaded.model.state_dict())
    before = load_classifier(base.folder, task.labels, seed=0).model
    assert [x.name for x in sparse_layers(before)] == [x.name for x in sparse_layers(loaded.model)]
    for old, layer in zip(sparse_layers(before), sparse_layers(loaded.model), strict=True):
        moved = [not torch.equal(x, y) for x, y in zip(old.base.up_proj, layer.base.up_proj, strict=True)]
        assert moved == [layer.name == tuned.adapted.experts[0].name] * 4
        assert torch.equal(old.router.weight, layer.router.weight)

    tuned.keep_private(tmp_path / "private")
    kept = json.loads((tmp_path / "private" / "owners.json").read_text(encoding="utf-8"))
    assert kept["layer"] == tuned.adapted.experts[0].name
    assert len(kept["owner"]) == len(task.train)
    assert set(kept["owner"]) <= set(range(4))
    assert (tmp_path / "private" / "owners.json").stat().st_mode & 0o077 == 0
    text = "".join(path.read_text(errors="replace") for path in (tmp_path / "release").glob("*.json"))
    assert str(kept["owner"])[1:-1] not in text


class StoppedError(Exception):
    """Stands for a kill."""


def test_owners_are_computed_once_and_a_stopped_run_goes_on(
    base: PublicBase,
    make_task: Callable[..., TaskData],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, settings = make_task(), settings_of(corpus)
    folder = tmp_path / "resume"
    whole = tune(base, task, settings, simulate=4)

    def stop(self: Unfinished, run: str, state: Callable[[], State]) -> None:
        raise StoppedError

    with closing(Unfinished.open(folder, every=0)) as unfinished, monkeypatch.context() as patched:
        patched.setattr(Unfinished, "after_step", stop)
        with pytest.raises(StoppedError):
            tune(base, task, settings, simulate=4, unfinished=unfinished)
        # Another rounding would give other owners: those of the first time are what counts.
        patched.undo()
    monkeypatch.setattr(experts, "owners_of", lambda *args: pytest.fail("owners are computed a second time"))
    with closing(Unfinished.open(folder)) as unfinished:
        again = tune(base, task, settings, simulate=4, unfinished=unfinished)
    assert whole.owner is not None
    assert again.owner is not None
    assert whole.owner.tolist() == again.owner.tolist()
    for name, value in whole.adapted.classifier.model.state_dict().items():
        assert torch.equal(value, again.adapted.classifier.model.state_dict()[name]), name

    file = folder / "owners.json"
    value = json.loads(file.read_text(encoding="utf-8"))
    value["owner"][0] = (value["owner"][0] + 1) % 4
    file.write_text(json.dumps(value), encoding="utf-8")
    with (
        closing(Unfinished.open(folder)) as unfinished,
        pytest.raises(ResumeError, match=r"owners\.json is damaged"),
    ):
        tune(base, task, settings, simulate=4, unfinished=unfinished)


@pytest.mark.parametrize("vote", ["plurality", "majority"])
def test_owners_are_those_of_the_whole_model_whatever_is_cached(
    base: PublicBase, make_task: Callable[..., TaskData], corpus: Path, vote: Any
) -> None:
    task = make_task()
    settings = settings_of(corpus, {"trainable": {"rank": 2, "blocks": 1}}, layer="last", vote=vote)
    prepared = prepare(task, base, settings.max_length)
    classifier = load_classifier(base.folder, task.labels, seed=0)
    adapted = run.adapted_for(task, classifier, settings)
    assert adapted.first_block == 2
    found = experts.owners_of(prepared, adapted, settings.experts)
    model: Any = classifier.model
    encoded = prepared.encoded("train")
    rows = [np.array([row]) for row in range(len(encoded))]
    batches = [(row, encoded.batch(row)) for row in rows]
    whole = owner_maps(adapted.experts, lambda batch: model(**batch), batches, len(encoded), vote)
    assert found.tolist() == whole[adapted.experts[0].name].tolist()
    assert len(set(found.tolist())) > 1


@pytest.mark.parametrize("variant", ["raptor", "one-stream"])
def test_what_is_cached_of_frozen_blocks_changes_rounding_only(
    base: PublicBase,
    make_task: Callable[..., TaskData],
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
) -> None:
    more = {"trainable": {"rank": 2, "blocks": 1}, "memory": "64GiB"}
    settings = settings_of(corpus, more, layer="last", public=None, variant=variant)
    cached = tune(base, make_task(), settings, simulate=4)
    monkeypatch.setattr(prepare_module, "caches", lambda *args: False)
    whole = tune(base, make_task(), settings, simulate=4)
    for name in whole.schedule.parameters:
        found, expected = (t.adapted.classifier.model.get_parameter(name) for t in (cached, whole))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    assert cached.score() == whole.score()


def test_without_noise_nothing_is_claimed(
    base: PublicBase, make_task: Callable[..., TaskData], corpus: Path
) -> None:
    tuned = tune(base, make_task(), settings_of(corpus, variant="non-private", layer="last"))
    assert tuned.statement.claim is None
    assert not tuned.schedule.private


@pytest.mark.parametrize("kind", ["all", "blocks"])
def test_without_a_stream_of_experts_routers_and_experts_stay_frozen(
    base: PublicBase, make_task: Callable[..., TaskData], kind: str
) -> None:
    settings = Settings.of(
        {"method": "raptor", "trainable": {"kind": kind}, "experts": {"variant": "shared-only"}}
    )
    task = make_task()
    classifier = load_classifier(base.folder, task.labels, seed=0)
    adapted = run.adapted_for(task, classifier, settings)
    assert any(".attention." in name for name in adapted.encoder)
    assert not any(".mlp." in name for name in adapted.encoder)


def test_a_corpus_with_a_private_text_is_refused(
    base: PublicBase, make_task: Callable[..., TaskData], corpus: Path
) -> None:
    task = make_task()
    with open(corpus, "a", encoding="utf-8") as file:
        file.write(f"\n{task.train.texts[3].upper()}\n")
    with pytest.raises(DataError, match="must be public"):
        tune(base, task, settings_of(corpus))


def test_every_rule_and_query_beside_two_streams(
    base: PublicBase, make_task: Callable[..., TaskData], corpus: Path
) -> None:
    """Adaptive clipping of the shared stream, a published accuracy and a budget of memory, in one claim."""
    more = {
        "clipping": "adaptive",
        "bias_correction": 1e-4,
        "warmup": 1,
        "publish_accuracy": 4.0,
        "memory": "64GiB",
    }
    tuned = tune(base, make_task(), settings_of(corpus, more))
    shared, own = tuned.schedule.streams
    assert (shared.clipping.rule, shared.clipping.count_noise, own.clipping.rule) == (
        "adaptive",
        0.75,
        "normalised",
    )
    assert (shared.bias_correction, own.bias_correction, shared.warmup, own.warmup) == (1e-4, 1e-4, 1, 1)
    assert [query.noise_multipliers for query in tuned.schedule.queries] == [(4.0,)]
    check(tuned.statement)
    assert tuned.statement.claim is not None
    claim = tuned.statement.claim
    assert 2.99 < claim.epsilon == epsilon(tuned.schedule.event(), claim.delta).epsilon <= 3.0
    assert [number.query for number in tuned.statement.published] == ["accuracy"]
    bounds = {
        name: {s.bound for s in tuned.history.steps if s.stream == name} for name in ("shared", "experts")
    }
    assert (len(bounds["shared"]), bounds["experts"]) == (2, {1.0})


def test_pairs_are_compared_with_the_corpus_text_by_text(
    base: PublicBase, make_task: Callable[..., TaskData], corpus: Path
) -> None:
    def paired(records: Records) -> Records:
        texts = tuple((text, "and so on") for text in records.texts)
        return dataclasses.replace(records, inputs=texts)

    plain = make_task()
    task = dataclasses.replace(
        plain, train=paired(plain.train), test=paired(plain.test), problem=Problem(inputs="pair")
    )
    tuned = tune(base, task, settings_of(corpus))
    assert tuned.owner is not None
    assert len(tuned.owner) == len(task.train)
    corpus.write_text(corpus.read_text(encoding="utf-8") + "\nAnd so on", encoding="utf-8")
    with pytest.raises(DataError, match="are also records of task reviews"):
        tune(base, task, settings_of(corpus))


def test_other_kinds_of_tasks_are_refused(
    base: PublicBase, make_task: Callable[..., TaskData], corpus: Path
) -> None:
    task = dataclasses.replace(make_task(), problem=Problem(target="number", label_range=(0.0, 1.0)))
    classifier = load_classifier(base.folder, task.labels, seed=0)
    with pytest.raises(ConfigError, match="with one class each, and task reviews isn't"):
        run.plan(task, classifier, settings_of(corpus))
