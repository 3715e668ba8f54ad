"""The self-check before training, on models that mix records and on one that doesn't."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from confide.errors import ModelError
from confide.finetune.selfcheck import check_rows_are_independent
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
