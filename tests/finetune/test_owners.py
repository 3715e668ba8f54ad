"""A record's owner is that record's alone: bit for bit whatever other records there are, in any order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.moe.bases import save_base

from confide.finetune import experts, run
from confide.finetune.base import PublicBase
from confide.finetune.run import prepare
from confide.finetune.settings import Settings
from confide.models.backbones import load_classifier
from confide.models.moe.layers import sparse_layers
from confide.models.moe.owners import alone
from confide.privacy.units import UnitMap
from confide.tasks.records import Records, TaskData
from confide.tasks.text import encode

SETTINGS = Settings.of(
    {
        "method": "raptor",
        "epsilon": 3.0,
        "expected_batch": 15,
        "steps": 2,
        "max_length": 24,
        "trainable": {"rank": 2, "blocks": 1},
        "experts": {"layer": "last", "rank": 2},
    }
)
WORDS = ("a", "fine", "play", "dull", "film", "good", "bad", "night", "long", "short")


def texts(count: int) -> list[str]:
    """From one word to more than are read, and back to one."""
    rng = np.random.default_rng(5)
    return [" ".join(rng.choice(WORDS, 1 + 7 * row % 31)) for row in range(count)]


def rows_of(records: list[str]) -> Records:
    labels = np.arange(len(records), dtype=np.int64) % 2
    return Records(tuple(records), labels, UnitMap.records(len(records)))


Bits = dict[str, tuple[bytes, ...]]


def owned(base: Path, records: list[str]) -> tuple[dict[str, int], Bits]:
    """Owner of every text, and all that the routers said of it on the way, bit for bit."""
    task = TaskData(
        name="made-up",
        labels=("no", "yes"),
        labels_from="declared",
        metric="accuracy",
        train=rows_of(records),
        test=rows_of(["a"]),
        source="made up",
    )
    prepared = prepare(task, PublicBase.of(str(base)), 24)
    adapted = run.adapted_for(task, load_classifier(base, task.labels, seed=0), SETTINGS)
    said: list[bytes] = []

    def note(_: Any, __: Any, output: Any) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        said.append(b"".join(part.contiguous().numpy().tobytes() for part in parts))

    model = adapted.classifier.model
    routers = [layer.router for layer in sparse_layers(model)]
    handles = [router.register_forward_hook(note) for router in routers]
    found = experts.owners_of(prepared, adapted, SETTINGS.experts)
    for handle in handles:
        handle.remove()
    calls = len(said) // len(records)
    bits = {text: tuple(said[n * calls : (n + 1) * calls]) for n, text in enumerate(records)}
    return dict(zip(records, found.tolist(), strict=True)), bits


@pytest.fixture(params=["upcycled", "DeepSeek-VL2-Small", pytest.param("Switch", marks=pytest.mark.slow)])
def base(request: pytest.FixtureRequest, sparse_base: Path, tmp_path: Path) -> Path:
    if request.param == "upcycled":
        return sparse_base
    return save_base(request.param, texts(20), tmp_path / "base")


def test_no_other_record_has_a_say_in_an_owner(base: Path) -> None:
    every = texts(24)
    owner, bits = owned(base, every)
    assert len(set(owner.values())) > 1
    order = np.random.default_rng(2).permutation(len(every))
    others = {
        "in another order": [every[n] for n in order],
        "without the longest": sorted(every, key=len)[:-1],
        "with a longer one first": ["film " * 90, *every],
        "by itself": every[3:4],
    }
    for which, records in others.items():
        theirs, heard = owned(base, records)
        for text in set(records) & set(every):
            assert heard[text] == bits[text], which
            assert theirs[text] == owner[text], which


def test_in_a_batch_rounding_follows_the_neighbours(tmp_path: Path) -> None:
    """Why records go one by one: of some texts the router's numbers are others when they meet others."""
    classifier = load_classifier(save_base("OLMoE", texts(20), tmp_path / "base"), ("no", "yes"), seed=0)
    model: Any = classifier.model
    router = sparse_layers(model)[-1].router
    encoded = encode(classifier.tokenizer, texts(24), 24)
    heard: list[torch.Tensor] = []
    router.register_forward_hook(lambda module, inputs, output: heard.append(output[0]))
    with torch.no_grad():
        model(**encoded.batch(np.arange(24)))
        for _, batch in alone(encoded.batch, 24):
            model(**batch)
    together = heard[0].view(24, -1, heard[0].shape[1])
    pairs = [(together[row, : len(own)], own) for row, own in enumerate(heard[1:])]
    assert all(torch.allclose(beside, own, atol=1e-4) for beside, own in pairs)
    assert not all(torch.equal(beside, own) for beside, own in pairs)
