"""Micro-batches by a budget of memory: their size, and that it changes nothing but rounding."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from confide.errors import ConfigError
from confide.finetune import memory, run
from confide.finetune.base import PublicBase
from confide.finetune.memory import _Live, forget_peak, micro_batch_tokens, peak_bytes
from confide.finetune.run import finetune, prepare
from confide.finetune.settings import Settings
from confide.finetune.tuned import FineTuned
from confide.models.backbones import load_classifier
from confide.release.format import Problem
from confide.sizes import bytes_of
from confide.tasks.records import TaskData

MakeTask = Callable[..., TaskData]
SMALL: dict[str, Any] = {"steps": 3, "expected_batch": 20, "max_length": 16, "trainable": {"kind": "all"}}


def tune(base: Path, task: TaskData, **settings: Any) -> FineTuned:
    chosen, public = Settings.of(SMALL | settings), PublicBase.of(str(base))
    return finetune(prepare(task, public, chosen.max_length), public, chosen, simulate=3)


def plan(base: Path, task: TaskData, **settings: Any) -> tuple[Any, Any]:
    adapted, schedule, _ = run.plan(
        task, load_classifier(base, task.labels, 0), Settings.of(SMALL | settings)
    )
    return adapted, schedule


def test_what_lives_at_once_is_counted() -> None:
    with _Live() as live:
        first = torch.zeros(1000, dtype=torch.float64)
        second = first + 1  # 16,000 bytes
        view = second.view(10, 100)
        del first
        third = view * 2
    assert live.most == 16_000
    assert float(third.sum()) == 2000


def test_more_memory_gives_larger_micro_batches(
    tiny_base: Path, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "peak_bytes", lambda: 100 * 2**20)
    adapted, schedule = plan(tiny_base, make_task())
    before = [parameter.clone() for parameter in adapted.classifier.model.parameters()]

    def tokens(budget: int, **changes: Any) -> int:
        values: dict[str, Any] = {"kept": 0, "max_length": 16, "rows_per_unit": 1} | changes
        return micro_batch_tokens(budget, adapted, schedule, **values)

    small, large = tokens(110 * 2**20), tokens(130 * 2**20)
    assert 16 <= small < large
    # On a straight line: what is fixed is paid once.
    assert (tokens(150 * 2**20) - large) == pytest.approx(large - small, rel=0.01)
    for parameter, value in zip(adapted.classifier.model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def test_an_impossible_budget_says_what_would_do(
    tiny_base: Path, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "peak_bytes", lambda: 100 * 2**20)
    adapted, schedule = plan(tiny_base, make_task())
    values: dict[str, Any] = {"kept": 0, "max_length": 16, "rows_per_unit": 4}
    with pytest.raises(ConfigError, match=r"memory is 50 MiB.*at least \d+MiB") as refused:
        micro_batch_tokens(50 * 2**20, adapted, schedule, **values)
    enough = str(refused.value).split("at least ")[1].split(",")[0]
    assert micro_batch_tokens(bytes_of(enough, "memory"), adapted, schedule, **values) >= 4 * 16


def test_logits_of_a_language_model_take_a_quarter_of_a_gibibyte(tiny_base: Path) -> None:
    classifier = load_classifier(tiny_base, ("a", "b"), 0)
    config: Any = classifier.model.config
    config.vocab_size = 49_152
    assert memory.usual_tokens(classifier) == 8192
    writes = replace(classifier, problem=Problem(target="text", objective="causal"))
    assert memory.usual_tokens(writes) * 49_152 * 4 == pytest.approx(2**28, rel=1e-3)


def test_the_size_of_micro_batches_changes_rounding_only(
    tiny_base: Path, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same noise: one unit at a time, or everything at once."""
    parts: list[int] = []
    plain = run.micro_batches

    def watch(inputs: Any, budget: int) -> Any:
        split = plain(inputs, budget)

        def count(rows: Any, position: Any) -> Any:
            found = split(rows, position)
            parts.append(len(found))
            return found

        return count

    monkeypatch.setattr(run, "micro_batches", watch)
    values = []
    for tokens in (16, 10_000):
        monkeypatch.setattr(memory, "micro_batch_tokens", lambda *_, tokens=tokens, **__: tokens)
        parts.clear()
        tuned = tune(tiny_base, make_task(), memory="8GiB", optimizer="sgd", learning_rate=0.1)
        assert min(parts) > 5 if tokens == 16 else max(parts) == 1
        named = tuned.adapted.classifier.model.named_parameters()
        values.append(np.concatenate([value.detach().numpy().ravel() for _, value in named]))
    assert np.linalg.norm(values[0] - values[1]) <= 1e-6 * np.linalg.norm(values[1])
    assert not np.array_equal(*values)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can forget a peak")
def test_a_peak_is_counted_from_where_it_was_forgotten() -> None:
    size = 64 * 2**20
    before = peak_bytes()
    held = np.ones(size // 8)
    assert peak_bytes() >= min(before + size // 2, size)
    del held
    forget_peak()
    held = np.ones(size // 8)
    high = peak_bytes()
    del held
    forget_peak()
    assert peak_bytes() < high - size // 2
