"""Releases of small real BERTs that were fine-tuned from one base."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from confide.privacy.composition import training_statement
from confide.privacy.statement import Base, Statement
from confide.privacy.streams import Clipping, ParameterGroup, Schedule, Stream
from confide.release.format import Head, ReleaseInfo
from confide.release.hashes import base_hash
from confide.release.write import write_release

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]
FROZEN = "embeddings."

Change = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


def make_base(folder: Path, seed: int = 0, words: list[str] = WORDS) -> Path:
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=12,
    )
    BertModel(config).save_pretrained(folder)
    BertTokenizerFast(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder)
    return folder


def make_statement(base: Path, task: str) -> Statement:
    group = ParameterGroup("head", ("classifier.weight",), 1e-3, anchored=False)
    stream = Stream("all", (group,), 1, "all", 0.01, Clipping("flat", 1.0), 4.0, 100.0)
    schedule = Schedule((stream,))
    return training_statement(
        schedule,
        delta=1e-6,
        dataset=f"{task}-2026",
        units=10000,
        run=f"run-{task}",
        base=Base(name="package:tiny", hash=base_hash(base)),
        weights={},
        steps_run={"all": 1},
    )


def make_release(
    folder: Path,
    base: Path,
    task: str,
    labels: tuple[str, ...] = ("neg", "pos"),
    change: Change = lambda tensors: tensors,
) -> Path:
    """A release of `task`: all but the embeddings is moved from the base, seeded by the task."""
    rng = np.random.default_rng(zlib.crc32(task.encode()))
    tensors = {}
    for name, values in load_file(base / "model.safetensors").items():
        move = 0 if name.startswith(FROZEN) else rng.normal(size=values.shape) / 100
        tensors[f"bert.{name}"] = (values + move).astype(np.float32)
    tensors["classifier.weight"] = rng.normal(size=(len(labels), 8)).astype(np.float32)
    tensors["classifier.bias"] = rng.normal(size=len(labels)).astype(np.float32)

    def save(side: Path) -> None:
        save_file(change(tensors), side / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((base / "config.json").read_text())
        config["architectures"] = ["BertForSequenceClassification"]
        config["id2label"] = dict(enumerate(labels))
        config["label2id"] = {label: number for number, label in enumerate(labels)}
        (side / "config.json").write_text(json.dumps(config))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (side / name).write_bytes((base / name).read_bytes())

    head = Head(
        task=task,
        labels=labels,
        labels_from="declared",
        max_length=12,
        tensors=("classifier.bias", "classifier.weight"),
    )
    info = ReleaseInfo(kind="model", encoder_prefix="bert.", heads=(head,))
    write_release(folder, save=save, info=info, statement=make_statement(base, task))
    return folder


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def releases(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("releases")
    films = make_release(folder / "films", base, "films")
    return films, make_release(folder / "tweets", base, "tweets", ("bad", "even", "good"))


@pytest.fixture
def release(base: Path, tmp_path: Path) -> Callable[..., Path]:
    def make(task: str, **options: Any) -> Path:
        return make_release(tmp_path / f"release-{task}", options.pop("base", base), task, **options)

    return make
