"""The self-check before training, on models that mix records and on one that doesn't."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from confide.errors import ModelError, PrivacyError
from confide.finetune import selfcheck
from confide.finetune.selfcheck import (
    check_finite,
    check_gradients,
    check_noise,
    check_rows_are_independent,
)
from confide.gradients.noise import add_noise
from confide.gradients.rules import _RULES
from confide.models.backbones import Classifier
from confide.models.tail import Features
from confide.tasks.text import Encoded

TABLE = torch.nn.functional.normalize(torch.randn(50, 8, generator=torch.Generator().manual_seed(0)))
ENCODED = Encoded(np.arange(10, dtype=np.int32), np.array([0, 4, 10]), 0)


@pytest.fixture
def classifier() -> Classifier:
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=50))
    return Classifier(model, SimpleNamespace(pad_token_id=0), "bert.", ())  # type: ignore[arg-type]


def masked_mean(batch: dict[str, Tensor]) -> Tensor:
    mask = batch["attention_mask"][..., None]
    return (TABLE[batch["input_ids"]] * mask).sum(1) / mask.sum(1)


def plain_mean(batch: dict[str, Tensor]) -> Tensor:
    return TABLE[batch["input_ids"]].mean(1)


def centred(batch: dict[str, Tensor]) -> Tensor:
    values = masked_mean(batch)
    return values - values.mean(0) / 2


def random(batch: dict[str, Tensor]) -> Tensor:
    return masked_mean(batch) * (1 + 0.01 * torch.rand(()))


def diverged(batch: dict[str, Tensor]) -> Tensor:
    return masked_mean(batch) * torch.nan


def test_a_model_that_masks_its_padding_passes(classifier: Classifier) -> None:
    check_rows_are_independent(classifier, masked_mean, ENCODED)


@pytest.mark.parametrize("forward", [plain_mean, centred, random, diverged])
def test_a_row_that_depends_on_others_is_refused(classifier: Classifier, forward: object) -> None:
    with pytest.raises(ModelError, match="can't be trained privately"):
        check_rows_are_independent(classifier, forward, ENCODED)  # type: ignore[arg-type]


def test_features_are_checked_too(classifier: Classifier) -> None:
    inputs = Features(torch.zeros(10, 8), np.array([0, 4, 10]))

    def first(batch: dict[str, Tensor]) -> Tensor:
        return batch["hidden"][:, 0]

    def last(batch: dict[str, Tensor]) -> Tensor:
        return batch["hidden"][:, -1]

    check_rows_are_independent(classifier, first, inputs)
    with pytest.raises(ModelError):
        check_rows_are_independent(classifier, last, inputs)


class Model(nn.Module):
    """Mean of masked embeddings, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["attention_mask"][..., None]
        return self.head((self.table(batch["input_ids"]) * mask).sum(1) / mask.sum(1))


def test_gradients_are_compared_with_autograd(
    classifier: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    parameters = dict(model.named_parameters())
    check_gradients(classifier, model, model, parameters, ENCODED)
    monkeypatch.setitem(_RULES, nn.Embedding, lambda *_: [])  # a rule that forgets its table
    with pytest.raises(ModelError, match=r"gradient of table\.weight is off"):
        check_gradients(classifier, model, model, parameters, ENCODED)


def test_a_model_that_is_broken_from_the_start_is_refused(classifier: Classifier) -> None:
    model = Model()
    model.head.weight.data[0, 0] = torch.nan
    with pytest.raises(ModelError, match="isn't finite"):
        check_gradients(classifier, model, model, dict(model.named_parameters()), ENCODED)


def test_noise_has_the_standard_deviation_that_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    for std in (1e-3, 0.7, 40.0):
        check_noise(std)
    monkeypatch.setattr(selfcheck, "add_noise", lambda sums, std, key: add_noise(sums, std * 0.9, key))
    with pytest.raises(PrivacyError, match=r"0\.6\d+ instead of 0\.7"):
        check_noise(0.7)


def test_a_loss_that_is_nan_from_the_start(classifier: Classifier) -> None:
    check_finite(classifier, masked_mean)
    with pytest.raises(ModelError, match="NaN from the start"):
        check_finite(classifier, diverged)
