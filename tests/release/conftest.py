"""A small real BERT, released the way a training run does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from confide.privacy.statement import Base, Claim, Spending, Statement
from confide.privacy.streams import Clipping, ParameterGroup, Schedule, Stream
from confide.release.format import Head, ReleaseInfo
from confide.release.hashes import base_hash

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=12,
    )
    BertModel(config).save_pretrained(folder)
    vocab = folder / "words.txt"
    vocab.write_text("\n".join(WORDS))
    BertTokenizerFast(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    vocab.unlink()
    return folder


@pytest.fixture(scope="session")
def save(base: Path) -> Callable[[Path], None]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    labels = {0: "neg", 1: "pos"}
    model = AutoModelForSequenceClassification.from_pretrained(
        base, id2label=labels, label2id={name: number for number, name in labels.items()}
    )
    tokenizer = AutoTokenizer.from_pretrained(base)

    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return write


@pytest.fixture(scope="session")
def info() -> ReleaseInfo:
    head = Head(
        task="films",
        labels=("neg", "pos"),
        labels_from="declared",
        max_length=12,
        tensors=("classifier.bias", "classifier.weight"),
    )
    return ReleaseInfo(kind="model", encoder_prefix="bert.", heads=(head,))


@pytest.fixture(scope="session")
def statement(base: Path) -> Statement:
    group = ParameterGroup("head", ("classifier.bias", "classifier.weight"), 1e-3, anchored=False)
    stream = Stream("all", (group,), 50, "all", 0.01, Clipping("flat", 1.0), 1.0, 100.0)
    schedule = Schedule((stream,))
    spending = Spending(
        run="0123",
        dataset="films-2026",
        units=10000,
        unit="record",
        adjacency="add-or-remove-one",
        event=schedule.event(),
        delta=1e-6,
        schedule=schedule,
        steps_run={"all": 50},
    )
    return make_statement(base, (spending,))


def make_statement(base: Path, spendings: tuple[Spending, ...], **changes: Any) -> Statement:
    values: dict[str, Any] = {
        "kind": "training",
        "confide": "0.1.0",
        "claim": Claim(epsilon=1.23456, delta=1e-6, epsilon_rdp=1.5, accountant="an accountant"),
        "base": Base(name="someone/encoder", hash=base_hash(base)),
        "weights": {},
        "spendings": spendings,
        "assumptions": ("Hyper-parameters were not chosen on these records.",),
    }
    return Statement(**(values | changes))
