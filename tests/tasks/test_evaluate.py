import numpy as np
import pytest
import torch

from confide.errors import ModelError
from confide.tasks.evaluate import evaluate, logits
from confide.tasks.text import Encoded


def encoded(lengths: list[int]) -> Encoded:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.random.default_rng(0).integers(1, 9, offsets[-1]).astype(np.int32)
    return Encoded(tokens, offsets, 0)


def forward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    ids = batch["input_ids"] * batch["attention_mask"]
    return torch.stack([ids.sum(1), ids[:, 0], batch["attention_mask"].sum(1) * 5], dim=1).double()


def test_rows_come_back_in_their_order_and_batches_fit() -> None:
    data = encoded(np.random.default_rng(1).integers(1, 40, 101).tolist())
    sizes = []

    def watched(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        sizes.append(batch["input_ids"].numel())
        assert torch.is_inference_mode_enabled()
        return forward(batch)

    result = logits(watched, data, batch_tokens=200)
    assert max(sizes) <= 200
    assert len(sizes) < 40
    for row in range(len(data)):
        ids = data.tokens[data.offsets[row] : data.offsets[row + 1]]
        assert result[row].tolist() == [ids.sum(), ids[0], 5 * len(ids)]
    assert result.dtype == np.float32
    labels = result.argmax(1)
    assert evaluate("accuracy", result, labels) == 1.0


def test_no_class_is_made_up() -> None:
    data = encoded([2, 3])
    with pytest.raises(ModelError, match="not finite"):
        logits(lambda batch: forward(batch) * torch.nan, data)
    with pytest.raises(ModelError, match="no row"):
        logits(forward, encoded([]))
