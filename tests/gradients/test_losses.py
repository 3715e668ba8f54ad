"""One loss per record, that other records and padding can't change."""

from __future__ import annotations

import math

import pytest
import torch
from tests.gradients.families import FAMILIES
from torch import Tensor

from confide.gradients import losses


def by_hand(logits: Tensor, labels: Tensor) -> float:
    """Mean of −log p over labelled positions of one record."""
    each = [
        -math.log(math.exp(float(scores[label])) / sum(math.exp(float(x)) for x in scores))
        for scores, label in zip(logits, labels.tolist(), strict=True)
        if label != losses.IGNORED
    ]
    return sum(each) / len(each)


def test_tokens_are_averaged_within_a_record() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 5, 4, dtype=torch.float64), torch.randint(0, 4, (3, 5))
    labels[0, 2:] = labels[1, :4] = losses.IGNORED
    found = losses.tokens(logits, labels)
    assert found.tolist() == pytest.approx([by_hand(x, y) for x, y in zip(logits, labels, strict=True)])


def test_a_record_without_a_target_has_no_loss_and_no_gradient() -> None:
    logits = torch.randn(2, 3, 4, requires_grad=True)
    labels = torch.tensor([[losses.IGNORED] * 3, [1, 2, 3]])
    found = losses.tokens(logits, labels)
    found.sum().backward()
    assert found.tolist()[0] == 0
    assert logits.grad is not None
    assert not bool(logits.grad[0].any())
    short = losses.causal(torch.randn(1, 2, 4), torch.tensor([[1, 2]]), torch.tensor([[0, 1]]))
    assert short.tolist() == [0]


@pytest.mark.parametrize("left", [True, False])
def test_padding_on_either_side_changes_nothing(left: bool) -> None:
    torch.manual_seed(0)
    logits, ids = torch.randn(1, 4, 6, dtype=torch.float64), torch.randint(0, 6, (1, 4))
    alone = losses.causal(logits, ids, torch.ones(1, 4, dtype=torch.long))
    assert float(alone) == pytest.approx(by_hand(logits[0, :3], ids[0, 1:]))
    junk, zero = torch.randn(1, 3, 6, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.long)
    one = torch.ones(1, 4, dtype=torch.long)

    def pad(own: Tensor, padding: Tensor) -> Tensor:
        return torch.cat([padding, own] if left else [own, padding], 1)

    padded = losses.causal(pad(logits, junk), pad(ids, zero), pad(one, zero))
    assert float(padded) == pytest.approx(float(alone), rel=1e-14)


def test_classes_and_numbers() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 3, 1])
    expected = [by_hand(x[None], y[None]) for x, y in zip(logits, labels, strict=True)]
    assert losses.classification(logits, labels).tolist() == pytest.approx(expected)
    outputs, targets = torch.tensor([[1.0, 2.0], [0.0, 4.0]]), torch.tensor([[0.0, 2.0], [0.0, 1.0]])
    assert losses.regression(outputs, targets).tolist() == [0.5, 4.5]
    assert losses.regression(outputs[:, 0], targets[:, 0]).tolist() == [1.0, 0.0]


def test_one_record_is_what_the_models_own_loss_is() -> None:
    family = next(family for family in FAMILIES if family.name == "GPT-2")
    model, record = family.build(), family.batch([1])
    own = model(**record, labels=record["input_ids"], use_cache=False).loss
    assert family.loss(model, record).item() == pytest.approx(
        float(own), rel=1e-6
    )  # which is taken in float32
