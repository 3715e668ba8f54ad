"""A task's inputs: computed once, shared, and the same for the model as token ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from confide.finetune import prepare
from confide.finetune.prepare import Prepared, forward_of, loss_of, micro_batches, targets
from confide.gradients import losses
from confide.models.adapters import Trainable, adapt
from confide.models.backbones import Classifier, answer_in, load_classifier
from confide.models.tail import Features
from confide.privacy.units import UnitMap
from confide.release.format import Problem
from confide.tasks.evaluate import logits
from confide.tasks.records import Records, TaskData
from confide.tasks.text import Encoded

Sentences = Callable[[int, int], list[tuple[str, str]]]


@pytest.fixture
def classifier(tiny_base: Path) -> Classifier:
    return load_classifier(tiny_base, ("neg", "pos"), seed=0)


@pytest.fixture
def prepared(classifier: Classifier, sentences: Sentences) -> Prepared:
    def records(count: int, seed: int) -> Records:
        rows = sentences(count, seed)
        return Records.of([text for text, _ in rows], [("neg", "pos").index(label) for _, label in rows])

    task = TaskData("films", ("neg", "pos"), "declared", "accuracy", records(20, 1), records(9, 2), "made up")
    return Prepared(task, classifier, 20)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("first_block", [0, 1, 2, 3])
def test_same_logits_from_whatever_is_cached(
    prepared: Prepared, classifier: Classifier, split: str, first_block: int
) -> None:
    for lower in (1, first_block):  # higher features are made from lower ones that are there
        prepared.inputs(classifier, lower, split)  # type: ignore[arg-type]
    inputs = prepared.inputs(classifier, first_block, split)  # type: ignore[arg-type]
    assert isinstance(inputs, Features if first_block else Encoded)
    _, forward = forward_of(classifier, first_block, inputs)
    task = prepared.task
    texts = (task.train if split == "train" else task.test).texts
    with torch.inference_mode():
        expected = torch.cat(
            [
                classifier.model(
                    **classifier.tokenizer(text, truncation=True, max_length=20, return_tensors="pt")
                ).logits
                for text in texts
            ]
        )
    np.testing.assert_allclose(logits(forward, inputs, 100), expected.numpy(), rtol=1e-4, atol=1e-5)


def test_computed_once_until_forgotten(prepared: Prepared, classifier: Classifier) -> None:
    first = prepared.inputs(classifier, 2, "train")
    assert prepared.inputs(classifier, 2, "train") is first
    test = prepared.inputs(classifier, 2, "test")
    prepared.forget("train")
    assert prepared.inputs(classifier, 2, "train") is not first
    assert prepared.inputs(classifier, 2, "test") is test


def test_progress_reaches_the_number_of_records(prepared: Prepared, classifier: Classifier) -> None:
    seen: list[tuple[str, int, int]] = []
    prepared.inputs(classifier, 1, "train", lambda *step: seen.append(step))
    assert seen[-1] == ("frozen blocks, films", 20, 20)


def test_token_ids_where_features_do_not_fit(
    prepared: Prepared, classifier: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_CACHE_BYTES", 20 * 32 * 4)  # one token of each of 20 records
    assert isinstance(prepared.inputs(classifier, 2, "train"), Encoded)
    assert isinstance(prepared.inputs(classifier, 3, "train"), Features)
    monkeypatch.setattr(prepare, "_CACHE_BYTES", 20 * 32 * 4 - 1)
    assert isinstance(prepared.inputs(classifier, 3, "test"), Features)
    prepared.forget("train")
    assert isinstance(prepared.inputs(classifier, 3, "train"), Encoded)


def test_token_ids_for_a_model_that_the_tail_does_not_know(
    prepared: Prepared, make_base: Callable[..., Path]
) -> None:
    other = load_classifier(make_base(hidden_act="relu"), ("neg", "pos"), seed=0)
    inputs = prepared.inputs(other, 2, "train")
    assert isinstance(inputs, Encoded)
    module, _ = forward_of(other, 2, inputs)
    assert module is other.model


def test_what_is_trained_is_reached_through_the_module(prepared: Prepared, classifier: Classifier) -> None:
    adapted = adapt(classifier, Trainable(blocks=1), seed=0)
    module, _ = forward_of(classifier, adapted.first_block, prepared.inputs(classifier, 2, "train"))
    reached = {id(parameter) for parameter in module.parameters()}
    named = dict(classifier.model.named_parameters())
    assert all(id(named[name]) in reached for name in (*adapted.encoder, *adapted.head))


@pytest.mark.parametrize(("low", "high"), [(0.0, 5.0), (-300.0, 100.0)])
def test_numbers_are_learned_in_one_scale_and_answered_in_their_own(
    tiny_base: Path, sentences: Sentences, low: float, high: float
) -> None:
    texts = tuple(text for text, _ in sentences(8, 1))
    labels = np.linspace(low, high, 8)
    problem = Problem(target="number", label_range=(low, high))
    records = Records(texts, labels, UnitMap.records(8))
    task = TaskData("prices", (), "declared", "rmse", records, records, "made up", problem)
    model = load_classifier(tiny_base, (), seed=0, problem=problem)
    prepared = Prepared(task, model, 20)
    wanted = targets(prepared)
    torch.testing.assert_close(wanted, torch.linspace(-1, 1, 8)[:, None])
    _, forward = forward_of(model, 0, prepared.inputs(model, 0, "train"))
    batch = prepared.inputs(model, 0, "train").batch(np.arange(8))
    with torch.inference_mode():
        before = forward(batch)
        answer_in(model, (low, high))
        after = forward(batch)
    torch.testing.assert_close(after, (before + 1) / 2 * (high - low) + low, rtol=1e-5, atol=1e-4)
    # Errors are scaled alike: the loss is the squared error over half the range's square.
    scaled = losses.regression(before, wanted)
    own = losses.regression(after, torch.from_numpy(labels).float()[:, None])
    torch.testing.assert_close(scaled * ((high - low) / 2) ** 2, own, rtol=1e-4, atol=1e-3)


def test_a_words_loss_depends_on_its_own_record_alone(tiny_base: Path) -> None:
    texts = (("fine", "films"), ("a", "very", "dull", "plot", "was", "here", "today"))
    labels = np.empty(2, dtype=object)
    labels[:] = [np.array([1, 0]), np.array([0, 0, 1, 0, 0, 0, 1])]
    problem = Problem(target="tokens")
    records = Records(texts, labels, UnitMap.records(2))
    task = TaskData("words", ("O", "X"), "declared", "accuracy", records, records, "made up", problem)
    model = load_classifier(tiny_base, task.labels, seed=0, problem=problem)
    prepared = Prepared(task, model, 20)
    inputs, wanted, loss = prepared.inputs(model, 0, "train"), targets(prepared), loss_of(problem)
    _, forward = forward_of(model, 0, inputs)
    with torch.inference_mode():
        both = loss(forward(inputs.batch(np.arange(2))), wanted)
        alone = [loss(forward(inputs.batch(np.array([row]))), wanted[[row]]) for row in range(2)]
        tokens = model.tokenizer([list(texts[0])], is_split_into_words=True, return_tensors="pt")
        odds = model.model(**tokens).logits[0].log_softmax(-1)  # [CLS] fine film ##s [SEP]
    torch.testing.assert_close(both, torch.cat(alone), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(both[0], -(odds[1, 1] + odds[2, 0]) / 2, rtol=1e-5, atol=1e-6)


def test_micro_batches_split_no_unit(prepared: Prepared, classifier: Classifier) -> None:
    inputs = prepared.inputs(classifier, 0, "train")
    rows = np.arange(20)
    position = np.repeat(np.arange(5), 4)
    parts = micro_batches(inputs, 60)(rows, position)
    assert len(parts) > 1
    assert sorted(np.concatenate(parts)) == list(rows)
    owners = [set(position[part]) for part in parts]
    assert sum(len(units) for units in owners) == 5
