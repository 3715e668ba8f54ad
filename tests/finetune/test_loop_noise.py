"""The loop's noise: how much, on what, and when it repeats."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from confide.finetune import loop
from confide.finetune.loop import train
from confide.gradients.keys import Key, Keys
from confide.models.adapters import Trainable
from confide.privacy.events import queries
from confide.privacy.streams import Clipping, ParameterGroup, Schedule

from .conftest import Bound, Line, line_schedule, stream_for

MakeLine = Callable[..., Line]
SIGMA, BOUND, BATCH = 1.7, 0.6, 13.0
WIDTH, CLASSES = 400, 150
NOISY = {
    "noise_multiplier": SIGMA,
    "clipping": Clipping("flat", BOUND),
    "denominator": BATCH,
    "sampling_rate": 1e-12,  # every draw is empty
}


@pytest.fixture
def empty(line: MakeLine) -> Callable[[], Line]:
    """60,000 parameters and records that are never drawn: what moves the weights is noise."""
    return lambda: line(torch.ones(5, WIDTH, dtype=torch.double), classes=CLASSES)


def is_normal(values: torch.Tensor, std: float) -> None:
    sample = values.flatten().numpy() / std
    assert abs(sample.mean()) < 4 / len(sample) ** 0.5
    assert abs(sample.std() - 1) < 4 / (2 * len(sample)) ** 0.5
    assert stats.kstest(sample, "norm").pvalue > 1e-4


def are_independent(one: torch.Tensor, other: torch.Tensor) -> None:
    correlation = np.corrcoef(one.flatten().numpy(), other.flatten().numpy())[0, 1]
    assert abs(correlation) < 4 / one.numel() ** 0.5


def test_an_empty_draw_is_a_noise_only_step_and_counts(empty: Callable[[], Line]) -> None:
    model = empty()
    history = train(model.binding, line_schedule(**NOISY), Keys.fixed(1))
    is_normal(model.weight, SIGMA * BOUND / BATCH)
    assert history.steps_run == {"all": 1}
    assert [(step.units, step.loss, step.clipped) for step in history.steps] == [(0, 0.0, 0.0)]


def test_without_noise_an_empty_draw_moves_nothing(empty: Callable[[], Line]) -> None:
    model = empty()
    history = train(
        model.binding, line_schedule(**NOISY | {"noise_multiplier": 0.0, "steps": 2}), Keys.fixed(1)
    )
    assert not model.weight.any()
    assert history.steps_run == {"all": 2}


def test_noise_of_every_step_is_new(empty: Callable[[], Line]) -> None:
    positions = [torch.zeros(CLASSES, WIDTH, dtype=torch.double)]
    for steps in (1, 2, 3):  # the same key: a longer run starts like a shorter one
        model = empty()
        train(model.binding, line_schedule(**NOISY, steps=steps), Keys.fixed(1))
        positions.append(model.weight)
    moves = [after - before for before, after in itertools.pairwise(positions)]
    for move in moves:
        is_normal(move, SIGMA * BOUND / BATCH)
    for one, other in itertools.combinations(moves, 2):
        are_independent(one, other)


def test_noise_on_a_draw_of_records(line: MakeLine) -> None:
    """The same sums under two noise keys: their difference is √2 times the noise."""
    x = torch.randn(20, WIDTH, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    fields = NOISY | {"sampling_rate": 0.5}
    weights = []
    for sigma, seed in ((SIGMA, 1), (SIGMA, 2), (0.0, 3)):
        model = line(x, classes=CLASSES)
        keys = Keys(Key.fixed(seed), Key.fixed(100))
        train(model.binding, line_schedule(**fields | {"noise_multiplier": sigma}), keys)
        weights.append(model.weight)
    is_normal(weights[0] - weights[1], SIGMA * BOUND / BATCH * 2**0.5)
    is_normal(weights[0] - weights[2], SIGMA * BOUND / BATCH)
    assert 0 < weights[2].norm() <= BOUND * 20 / BATCH


def test_each_query_has_its_own_noise(empty: Callable[[], Line], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, torch.Tensor]] = []
    plain = loop.add_noise

    def watch(sums: Any, std: float, stream: Any) -> Any:
        before = sums["weight"].clone()
        noisy = plain(sums, std, stream)
        seen.append((std, noisy["weight"] - before))
        return noisy

    monkeypatch.setattr(loop, "add_noise", watch)
    schedule = line_schedule(**NOISY, ascent="paired", ascent_radius=0.1, ascent_noise=2 * SIGMA, steps=2)
    train(empty().binding, schedule, Keys.fixed(7))
    assert [std for std, _ in seen] == pytest.approx([2 * SIGMA * BOUND, SIGMA * BOUND] * 2)
    for std, noise in seen:
        is_normal(noise, std)
    for (_, one), (_, other) in itertools.combinations(seen, 2):
        are_independent(one, other)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("ascent", ["paired", "fresh", "lagged", "none"])
def test_no_address_is_read_twice_and_every_one_is_charged(
    empty: Callable[[], Line], monkeypatch: pytest.MonkeyPatch, ascent: str, adaptive: bool
) -> None:
    seen: list[tuple[int, str, int, str]] = []
    plain = Key.generator

    def watch(key: Key, stream: str, step: int, query: str) -> Any:
        seen.append((id(key), stream, step, query))
        return plain(key, stream, step, query)

    monkeypatch.setattr(Key, "generator", watch)
    fields: dict[str, Any] = {"ascent": ascent}
    if ascent != "none":
        fields["ascent_radius"] = 0.1
    queried = ascent in ("paired", "fresh")
    if queried:
        fields["ascent_noise"] = SIGMA
    keys = Keys.fresh()
    if adaptive:
        fields["clipping"] = Clipping("adaptive", BOUND, count_noise=1.0)
    schedule = line_schedule(**(NOISY | fields), steps=3)
    train(empty().binding, schedule, keys)
    assert len(set(seen)) == len(seen)
    noise = [address[1:] for address in seen if address[0] == id(keys.noise)]
    wanted = (["ascent"] if queried else []) + ["descent"] + (["count"] if adaptive else [])
    assert len(noise) == queries(schedule.event())
    assert noise == [("all", step, query) for step in range(3) for query in wanted]
    draws = [address[1:3] for address in seen if address[0] == id(keys.sampling)]
    assert len(draws) == (6 if ascent == "fresh" else 3)


def test_streams_have_their_own_noise(bert: Callable[..., Bound]) -> None:
    bound = bert(Trainable(kind="blocks", blocks=1))
    before = bound.values()
    schedule = Schedule(
        tuple(
            stream_for(
                bound,
                name=name,
                groups=(ParameterGroup("encoder", (parameter,), 1.0, anchored=False),),
                steps=1,
                optimizer="sgd",
                **NOISY,
            )
            for name, parameter in (
                ("one", "bert.encoder.layer.2.intermediate.dense.weight"),
                ("other", "bert.encoder.layer.2.output.dense.weight"),
            )
        )
    )
    train(bound.binding, schedule, Keys.fixed(0))
    one, other = (bound.values()[name] - before[name] for name in schedule.parameters)
    is_normal(one, SIGMA * BOUND / BATCH)
    is_normal(other, SIGMA * BOUND / BATCH)
    are_independent(one.flatten(), other.flatten())


def test_an_ascent_along_pure_noise_has_the_radius(bert: Callable[..., Bound]) -> None:
    """An empty draw's ascent moves too: whether it was empty stays hidden."""
    bound = bert(Trainable(kind="head"))
    before = torch.cat([value.flatten() for value in bound.values().values()])
    moves: list[float] = []

    runner = loop._StreamRunner(
        bound.binding,
        stream_for(bound, ascent="paired", ascent_radius=0.25, ascent_noise=1.0, **NOISY),
        Keys.fixed(0),
        lambda: None,
    )
    plain = runner._noisy_mean

    def watch(*arguments: Any) -> Any:
        now = torch.cat([value.flatten() for value in bound.values().values()])
        moves.append(float((now - before).norm()))
        return plain(*arguments)

    runner._noisy_mean = watch  # type: ignore[method-assign]
    runner.query(0)
    assert moves == pytest.approx([0.0, 0.25])


@pytest.mark.parametrize("ascent", ["none", "paired", "fresh", "lagged"])
def test_fixed_keys_replay_bitwise_and_fresh_ones_do_not(bert: Callable[..., Bound], ascent: str) -> None:
    fields: dict[str, Any] = {"ascent": ascent, "noise_multiplier": 0.5, "steps": 2, "optimizer": "sgd"}
    if ascent != "none":
        fields["ascent_radius"] = 0.1
    if ascent in ("paired", "fresh"):
        fields["ascent_noise"] = 0.5
    results = []
    for keys in (Keys.fixed(4), Keys.fixed(4), Keys.fixed(5), Keys.fresh(), Keys.fresh()):
        bound = bert(Trainable(kind="lora", blocks=1), dtype=torch.float32)
        train(bound.binding, Schedule((stream_for(bound, **fields),)), keys)
        results.append(torch.cat([value.flatten() for value in bound.values().values()]))
    assert torch.equal(results[0], results[1])
    for one, other in itertools.combinations(results[1:], 2):
        assert not torch.equal(one, other)


def test_a_stream_may_stop_before_another(empty: Callable[[], Line]) -> None:
    model = empty()
    split = model.module
    other = torch.nn.Linear(2, 2, bias=False, dtype=torch.double)
    parameters = {"weight": split.weight, "other": other.weight}
    binding = model.binding
    whole = torch.nn.ModuleDict({"a": split, "b": other})
    streams = [
        line_schedule(
            **NOISY, name=name, steps=steps, groups=(ParameterGroup("head", (p,), 1.0, False),)
        ).streams[0]
        for name, p, steps in (("short", "other", 1), ("long", "weight", 3))
    ]
    bound = type(binding)(**{**vars(binding), "module": whole, "parameters": parameters})
    start = other.weight.detach().clone()
    history = train(bound, Schedule(tuple(streams)), Keys.fixed(1))
    assert history.steps_run == {"short": 1, "long": 3}
    is_normal(model.weight, SIGMA * BOUND / BATCH * 3**0.5)
    assert not torch.equal(other.weight, start)
