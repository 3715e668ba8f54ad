"""A base large enough for personal files, models of it in any dtype and family, and their merge."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from confide.merging.merge import merge
from confide.release.format import Head, ReleaseInfo
from confide.release.shards import write_tensors
from confide.release.tensors import Checkpoint, encode
from confide.release.write import write_release

from ..conftest import make_statement

TOUCHED = [5, 6, 7, 20]
"""Rows of the word embeddings that every model moves; the others stay the base's."""

Arrays = dict[str, np.ndarray]
Build = Callable[..., Path]


def arrays(folder: Path) -> Arrays:
    """Every tensor in float64, whatever its dtype."""
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.numpy(name).astype(np.float64) for name in checkpoint.names}


def save(path: Path, tensors: Mapping[str, np.ndarray], dtype: str = "F32") -> None:
    write_tensors(path, {name: (dtype, t.shape, [encode(t, dtype)]) for name, t in tensors.items()})


def as_dtype(base: Path, folder: Path, dtype: str) -> Path:
    """The base with its weights in another dtype."""
    folder.mkdir()
    for file in base.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    save(folder / "model.safetensors", arrays(base), dtype)
    return folder


def build(
    folder: Path,
    base: Path,
    task: str,
    labels: tuple[str, ...] = ("neg", "pos"),
    dtype: str = "F32",
    change: Callable[[Arrays], None] = lambda tensors: None,
    dense: bool = False,
) -> Path:
    """A release: every tensor of the base moved, of the word embeddings a few rows; seeded by the task."""
    random = np.random.default_rng(zlib.crc32(task.encode()))
    config = json.loads((base / "config.json").read_text())
    prefix, width = f"{config['model_type']}.", config["hidden_size"]
    tensors: Arrays = {}
    for name, values in arrays(base).items():
        if dense and name.startswith("pooler."):
            continue  # a RoBERTa classifier has none
        move = random.normal(size=values.shape) / 100
        if name == "embeddings.word_embeddings.weight":
            move[[row for row in range(len(move)) if row not in TOUCHED]] = 0
        tensors[prefix + name] = values + move
    head = "classifier.out_proj" if dense else "classifier"
    if dense:
        tensors["classifier.dense.weight"] = random.normal(size=(width, width))
        tensors["classifier.dense.bias"] = random.normal(size=width)
    tensors[f"{head}.weight"] = random.normal(size=(len(labels), width))
    tensors[f"{head}.bias"] = random.normal(size=len(labels))
    change(tensors)

    def write(side: Path) -> None:
        save(side / "model.safetensors", tensors, dtype)
        (side / "config.json").write_text(json.dumps(config))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (base / name).exists():
                (side / name).write_bytes((base / name).read_bytes())

    info = ReleaseInfo(
        kind="model",
        encoder_prefix=prefix,
        heads=(
            Head(
                task=task,
                labels=labels,
                labels_from="declared",
                max_length=12,
                tensors=tuple(sorted(name for name in tensors if name.startswith("classifier."))),
            ),
        ),
    )
    write_release(folder, save=write, info=info, statement=make_statement(base, task))
    return folder


@pytest.fixture(scope="session")
def base(make_base: Callable[..., Path]) -> Path:
    return make_base(hidden_size=48, num_hidden_layers=2, intermediate_size=80)


@pytest.fixture(scope="session")
def releases(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("releases")
    films = build(folder / "films", base, "films")
    return films, build(folder / "tweets", base, "tweets", ("bad", "even", "good"))


@pytest.fixture(scope="session")
def merged(base: Path, releases: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("merged") / "merged"
    merge(releases, base=base, operator="ties", out=out, disjoint=True)
    return out
