"""The loop without noise, against a reference that does everything by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from confide.errors import ModelError
from confide.finetune import loop
from confide.finetune.binding import Binding
from confide.finetune.loop import train
from confide.gradients.keys import Keys
from confide.models.adapters import Trainable
from confide.privacy.streams import Clipping, ParameterGroup, Schedule, Stream
from confide.privacy.units import UnitMap

from .conftest import ROWS, Bound, Line, line_schedule, stream_for
from .reference import Reference

Make = Callable[..., Bound]
MakeLine = Callable[..., Line]
LORA = Trainable(kind="lora", blocks=1, rank=2, train_a=True, targets=("query", "value", "dense"))
FIXED_A = Trainable(kind="lora", blocks=2, rank=2, train_a=False)
BLOCKS = Trainable(kind="blocks", blocks=1)
ALL = Trainable(kind="all")
ASCENT = {"ascent_radius": 0.3}
QUERIED = {**ASCENT, "ascent_noise": 0.0}


def dense_distance(bound: Bound) -> Callable[[], Tensor]:
    base = bound.values()
    named = dict(bound.model.named_parameters())
    return lambda: sum(  # type: ignore[return-value]
        ((named[name] - base[name]).square().sum() for name in bound.adapted.encoder), torch.zeros(())
    )


def lora_distance(bound: Bound) -> Callable[[], Tensor]:
    def distance() -> Tensor:
        total = torch.zeros((), dtype=torch.double)
        for layer in bound.adapted.lora.values():
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight  # type: ignore[index,union-attr]
            total = total + (layer.scaling["default"] * b @ a).square().sum()  # type: ignore[index]
        return total

    return distance


def check(
    make: Make, trainable: Trainable, schedule_of: Callable[[Bound], Schedule], **options: Any
) -> Bound:
    """Train with the loop and with the reference; every parameter's movement must agree."""
    keys = Keys.fixed(11)
    ours, theirs = make(trainable, **options), make(trainable, **options)
    units = options.get("units") or UnitMap.records(ROWS)
    rows = [[int(r) for r in units.rows_of(np.array([unit]))[0]] for unit in range(units.count)]
    distance = (lora_distance if theirs.adapted.lora else dense_distance)(theirs)
    before = ours.values()
    schedule = schedule_of(ours)
    history = train(ours.binding, schedule, keys)
    Reference(theirs.model, theirs.loss, rows, keys.sampling, distance).run(schedule)
    assert history.steps_run == {stream.name: stream.steps for stream in schedule.streams}
    found, expected = ours.values(), theirs.values()
    # A key's bias shifts all scores of a query alike, so its gradient is rounding, which AdamW blows up.
    compared = [name for name in schedule.parameters if not name.endswith("key.bias")]
    moved = torch.cat([(found[n] - before[n]).flatten() for n in compared])
    wanted = torch.cat([(expected[n] - before[n]).flatten() for n in compared])
    assert float(wanted.norm()) > 1e-3
    assert float((moved - wanted).norm()) <= 1e-8 * float(wanted.norm())
    for name in set(before) - set(schedule.parameters):
        assert torch.equal(found[name], before[name]), f"{name} is not trained, but changed"
    return ours


CASES: dict[str, tuple[Trainable, dict[str, Any]]] = {
    "blocks, adamw": (BLOCKS, {}),
    "all, sgd, linear decay": (ALL, {"optimizer": "sgd", "decay": "linear"}),
    "lora, adamw, linear decay": (LORA, {"decay": "linear"}),
    "head only": (Trainable(kind="head"), {}),
    "normalised clipping": (LORA, {"clipping": Clipping("normalised", 0.4)}),
    "per-role clipping": (BLOCKS, {"clipping": Clipping("per-role", 0.5, shares=(0.7, 0.3))}),
    "per-role clipping, paired": (
        LORA,
        {"clipping": Clipping("per-role", 0.5, shares=(0.2, 0.6)), "ascent": "paired"} | QUERIED,
    ),
    "cosine decay with warmup": (BLOCKS, {"decay": "cosine", "warmup": 2, "optimizer": "sgd"}),
    "a bound that nobody reaches": (BLOCKS, {"clipping": Clipping("flat", 1e6), "optimizer": "sgd"}),
    "no clipping": (ALL, {"clipping": Clipping("none", 1.0)}),
    "weight decay": (BLOCKS, {"weight_decay": 0.3}),
    "weight decay, sgd": (LORA, {"weight_decay": 0.3, "optimizer": "sgd", "decay": "linear"}),
    "paired": (BLOCKS, {"ascent": "paired", **QUERIED}),
    "paired, lora, sgd": (LORA, {"ascent": "paired", "optimizer": "sgd", **QUERIED}),
    "paired, no clipping": (ALL, {"ascent": "paired", "clipping": Clipping("none", 1.0), **QUERIED}),
    "fresh": (BLOCKS, {"ascent": "fresh", **QUERIED}),
    "fresh, fixed A": (FIXED_A, {"ascent": "fresh", "decay": "linear", **QUERIED}),
    "lagged": (BLOCKS, {"ascent": "lagged", **ASCENT}),
    "lagged, lora, sgd": (LORA, {"ascent": "lagged", "optimizer": "sgd", **ASCENT}),
    "coupled anchor, dense": (BLOCKS, {"anchor": 0.8}),
    "coupled anchor, lora": (LORA, {"anchor": 0.8}),
    "coupled anchor, fixed A, sgd": (FIXED_A, {"anchor": 0.8, "optimizer": "sgd"}),
    "decoupled anchor, dense": (BLOCKS, {"anchor": 2.0, "anchor_form": "decoupled", "decay": "linear"}),
    "decoupled anchor, lora": (LORA, {"anchor": 2.0, "anchor_form": "decoupled", "decay": "linear"}),
    "dp-merging": (
        FIXED_A,
        {"ascent": "paired", "anchor": 0.5, "decay": "linear", "clipping": Clipping("normalised", 1.0)}
        | QUERIED,
    ),
    "everything at once": (BLOCKS, {"ascent": "fresh", "anchor": 0.5, "anchor_form": "decoupled", **QUERIED}),
}


@pytest.mark.parametrize("case", CASES, ids=list(CASES))
def test_update_is_the_one_by_hand(bert: Make, case: str) -> None:
    trainable, fields = CASES[case]

    check(bert, trainable, lambda bound: Schedule((stream_for(bound, **fields),)))


@pytest.mark.parametrize("ascent", ["none", "paired"])
def test_a_unit_is_the_mean_of_its_rows_and_is_clipped_whole(bert: Make, ascent: str) -> None:
    owners = ["ann", "bob", "ann", "cy", "ann", "dee", "bob", "eve", "eve", "fay", "ann", "gus", "gus", "hal"]
    units = UnitMap.column("user", owners, rows_per_unit=3)
    fields = QUERIED if ascent == "paired" else {}
    check(
        bert,
        LORA,
        lambda bound: Schedule((stream_for(bound, ascent=ascent, denominator=4.0, **fields),), unit="user"),
        units=units,
        budget=30,
    )


def halves(bound: Bound, draws: tuple[str, ...], **fields: Any) -> Schedule:
    """The encoder's stream and the head's, and the last one's bias apart if there are three draws."""
    head = bound.adapted.head
    parts = [(bound.adapted.encoder, True), (head[:1], False), (head[1:], False)]
    if len(draws) == 2:
        parts = [parts[0], (head, False)]
    return Schedule(
        tuple(
            stream_for(
                bound,
                name=f"s{number}",
                draw=draw,
                groups=(ParameterGroup("encoder" if anchored else "head", names, 0.05, anchored),),
                steps=4 - number,
                **fields,
            )
            for number, (draw, (names, anchored)) in enumerate(zip(draws, parts, strict=True))
        )
    )


@pytest.mark.parametrize("fields", [{}, {"ascent": "paired", **QUERIED}, {"ascent": "lagged", **ASCENT}])
@pytest.mark.parametrize("draws", [("x", "x"), ("x", "y"), ("x", "y", "x")])
def test_streams_on_one_draw_step_together_and_others_alternate(
    bert: Make, draws: tuple[str, ...], fields: dict[str, Any]
) -> None:
    check(bert, BLOCKS, lambda bound: halves(bound, draws, **fields))


def test_joint_and_alternating_differ(bert: Make) -> None:
    results = []
    for draws in (("x", "x"), ("x", "y")):
        bound = bert(BLOCKS)
        train(bound.binding, halves(bound, draws, sampling_rate=1.0), Keys.fixed(0))
        results.append(bound.values()["classifier.weight"])
    assert not torch.allclose(*results, rtol=1e-6)


def test_micro_batches_change_nothing_but_rounding(bert: Make) -> None:
    results = []
    for budget in (14, 60, 10_000):
        bound = bert(LORA, budget=budget)
        train(bound.binding, Schedule((stream_for(bound, ascent="paired", **QUERIED),)), Keys.fixed(3))
        results.append(torch.cat([bound.values()[name].flatten() for name in bound.adapted.encoder]))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("ascent", ["paired", "fresh", "lagged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_are_bitwise_restored_after_an_ascent(bert: Make, ascent: str, dtype: torch.dtype) -> None:
    """With rates of zero nothing may move, and between the ascent and its end the distance is the radius."""
    bound = bert(LORA, budget=20, dtype=dtype)
    before = bound.values()
    distances: list[float] = []
    parts: list[int] = []
    plain = bound.binding.forward

    def watch(batch: dict[str, Tensor]) -> Tensor:
        now = bound.values()
        distances.append(float(torch.cat([(now[n] - before[n]).flatten() for n in before]).double().norm()))
        parts.append(len(batch["input_ids"]))
        return plain(batch)

    binding = Binding(**{**vars(bound.binding), "forward": watch})
    groups = tuple(
        ParameterGroup(group.name, group.parameters, 0.0, group.anchored)
        for group in stream_for(bound).groups
    )
    fields = ASCENT if ascent == "lagged" else QUERIED
    schedule = Schedule((stream_for(bound, groups=groups, ascent=ascent, sampling_rate=1.0, **fields),))
    train(binding, schedule, Keys.fixed(0))
    after = bound.values()
    for name, value in before.items():
        assert torch.equal(after[name], value)
    assert len(parts) > 4 * schedule.streams[0].steps  # several micro-batches a query
    moved = [d for d in distances if d]
    assert moved
    assert len(moved) < len(distances)
    np.testing.assert_allclose(moved, 0.3, rtol=1e-5)


def test_weights_are_restored_when_something_fails(bert: Make) -> None:
    bound = bert(LORA)
    before = bound.values()
    plain = bound.binding.forward
    calls = 0

    def fail(batch: dict[str, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        if not torch.equal(
            dict(bound.model.named_parameters())["classifier.weight"], before["classifier.weight"]
        ):
            raise KeyboardInterrupt
        return plain(batch)

    binding = Binding(**{**vars(bound.binding), "forward": fail})
    schedule = Schedule((stream_for(bound, ascent="paired", **QUERIED),))
    with pytest.raises(KeyboardInterrupt):
        train(binding, schedule, Keys.fixed(0))
    assert calls > 1
    for name, value in bound.values().items():
        assert torch.equal(value, before[name])


def test_base_weights_never_change(bert: Make) -> None:
    bound = bert(BLOCKS)
    base = bound.values()
    train(
        bound.binding, Schedule((stream_for(bound, anchor=0.5, ascent="paired", **QUERIED),)), Keys.fixed(0)
    )
    now = bound.values()
    pull = bound.binding.anchor_gradient(bound.adapted.encoder)
    for name in bound.adapted.encoder:
        assert torch.equal(pull[name], 2 * (now[name] - base[name]))
    assert any(bool(value.any()) for value in pull.values())


def watch_draws(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, tuple[int, ...]]]:
    seen: list[tuple[str, int, tuple[int, ...]]] = []
    plain = loop.poisson_draw

    def draw(key: Any, name: str, step: int, count: int, rate: float) -> Any:
        units = plain(key, name, step, count, rate)
        seen.append((name, step, tuple(int(unit) for unit in units)))
        return units

    monkeypatch.setattr(loop, "poisson_draw", draw)
    return seen


def watch_rows(line: Line) -> tuple[Binding, list[tuple[int, ...]]]:
    """The rows of every query: the linear model takes them all in one part."""
    seen: list[tuple[int, ...]] = []

    def batch(rows: Any) -> Any:
        seen.append(tuple(int(row) for row in rows))
        return line.binding.batch(rows)

    return Binding(**{**vars(line.binding), "batch": batch}), seen


def test_the_pair_shares_its_draw(line: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = watch_draws(monkeypatch)
    binding, rows = watch_rows(line(torch.randn(40, 3, dtype=torch.double)))
    train(binding, line_schedule(steps=30, sampling_rate=0.5, ascent="paired", **QUERIED), Keys.fresh())
    assert [(name, step) for name, step, _ in draws] == [("all", step) for step in range(30)]
    assert rows == [units for _, _, units in draws for _ in range(2)]


def test_fresh_draws_are_independent(line: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = watch_draws(monkeypatch)
    steps, count, rate = 150, 40, 0.3
    binding, rows = watch_rows(line(torch.randn(count, 3, dtype=torch.double)))
    schedule = line_schedule(steps=steps, sampling_rate=rate, ascent="fresh", **QUERIED)
    train(binding, schedule, Keys.fixed(5))
    addresses = [(name, step) for name, step, _ in draws]
    assert sorted(addresses) == sorted(
        (name, step) for name in ("all", "all/ascent") for step in range(steps)
    )
    units = {(name, step): set(drawn) for name, step, drawn in draws}
    asked = [set(drawn) for drawn in rows]
    assert asked == [units[name, step] for step in range(steps) for name in ("all/ascent", "all")]
    # Independent draws overlap in Binomial(n, q²) units.
    both = sum(len(units["all", step] & units["all/ascent", step]) for step in range(steps))
    total, chance = steps * count, rate**2
    assert abs(both - total * chance) < 4 * (total * chance * (1 - chance)) ** 0.5


def test_draws_repeat_only_with_a_fixed_key(line: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = watch_draws(monkeypatch)
    runs = []
    for keys in (Keys.fixed(1), Keys.fixed(1), Keys.fixed(2), Keys.fresh(), Keys.fresh()):
        train(line(torch.ones(60, 2)).binding, line_schedule(steps=3, sampling_rate=0.5), keys)
        runs.append(tuple(draws))
        draws.clear()
    assert runs[0] == runs[1]
    assert len(set(runs)) == 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("part", [None, 2])
def test_a_bad_record_costs_itself(line: MakeLine, bad: float, part: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 3, dtype=torch.double, generator=generator)
    x[7] = 0.1
    x[7, 1] = bad
    spoiled, clean = line(x, part=part), line(x[:7], part=part)
    schedule = line_schedule(steps=3, denominator=8.0, clipping=Clipping("normalised", 1.0))
    if bad == 1e300:  # finite, and its norm isn't
        x[7] = 1e300
    history = train(spoiled.binding, schedule, Keys.fixed(0))
    train(clean.binding, schedule, Keys.fixed(0))
    assert spoiled.weight.isfinite().all()
    torch.testing.assert_close(spoiled.weight, clean.weight, rtol=1e-12, atol=1e-14)
    assert [step.units for step in history.steps] == [8, 8, 8]


RULES = {
    "flat": Clipping("flat", 0.5),
    "normalised": Clipping("normalised", 0.5),
    "per-role": Clipping("per-role", 0.5, shares=(1.0,)),
    "adaptive": Clipping("adaptive", 0.5, count_noise=0.3),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [1e-30, 1e30, 1e-45, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("cancels", [False, True])
def test_a_whole_batch_of_extreme_records(line: MakeLine, rule: str, value: float, cancels: bool) -> None:
    """Sums stay within what six records may add, weights finite, and an adaptive bound in its range."""
    x = torch.full((6, 3), value, dtype=torch.float32)
    labels = torch.arange(6) % 2 if cancels else None
    spoiled = line(x, labels=labels)
    schedule = line_schedule(steps=1, denominator=6.0, clipping=RULES[rule])
    train(spoiled.binding, schedule, Keys.fixed(0))
    assert float(spoiled.weight.double().norm()) <= 0.5
    history = train(spoiled.binding, line_schedule(steps=3, clipping=RULES[rule]), Keys.fixed(0))
    assert spoiled.weight.isfinite().all()
    assert all(5e-5 <= step.bound <= 5e3 for step in history.steps)


def test_one_tensor_under_two_names(line: MakeLine) -> None:
    tied = line(torch.ones(4, 2))
    weight = tied.module.weight
    binding = Binding(**{**vars(tied.binding), "parameters": {"table": weight, "head": weight}})
    (stream,) = line_schedule().streams
    streams = tuple(
        replace(stream, name=name, groups=(ParameterGroup("head", (name,), 1.0, anchored=False),))
        for name in ("table", "head")
    )
    with pytest.raises(ModelError, match="head and table are one tied tensor"):
        train(binding, Schedule(streams), Keys.fixed(0))


def test_a_text_that_overflows_costs_itself(bert: Make) -> None:
    """The same through the BERT: one record's hidden state is infinite."""
    bound = bert(LORA, budget=10_000)
    plain = bound.binding.forward
    rows = bound.binding.batch

    def batch(which: Any) -> dict[str, Tensor]:
        return {**rows(which), "spoil": torch.from_numpy(which == 5)}

    def forward(given: dict[str, Tensor]) -> Tensor:
        # Times infinity: the record's gradients are infinite or NaN, the others' stay as they are.
        inputs = {name: value for name, value in given.items() if name != "spoil"}
        values = plain(inputs)
        scale = torch.where(given["spoil"], torch.inf, 1.0)[:, None]
        return values * scale

    schedule = Schedule((stream_for(bound, steps=2, sampling_rate=1.0, optimizer="sgd"),))
    train(Binding(**{**vars(bound.binding), "batch": batch, "forward": forward}), schedule, Keys.fixed(0))

    others = bert(LORA, budget=10_000)
    keep = np.array([row for row in range(ROWS) if row != 5])
    without = Binding(
        **{
            **vars(others.binding),
            "batch": lambda which: others.binding.batch(keep[which]),
            "labels": others.binding.labels[torch.from_numpy(keep)],
            "units": UnitMap.records(ROWS - 1),
        }
    )
    train(without, schedule, Keys.fixed(0))
    found, expected = bound.values(), others.values()
    for name in schedule.parameters:
        assert found[name].isfinite().all()
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-12)


def test_history(line: MakeLine) -> None:
    x = torch.tensor([[0.1], [10.0]], dtype=torch.double)  # gradient norms .05·√2 and 5·√2
    history = train(line(x).binding, line_schedule(steps=2), Keys.fixed(0))
    first = history.steps[0]
    assert (first.stream, first.step, first.units) == ("all", 0, 2)
    assert first.loss == pytest.approx(np.log(2))
    assert first.clipped == 0.5
    assert history.steps_run == {"all": 2}


def test_progress(line: MakeLine) -> None:
    seen: list[tuple[int, int]] = []
    train(
        line(torch.ones(2, 1)).binding,
        line_schedule(steps=3),
        Keys.fixed(0),
        lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_parameter_that_is_not_there(line: MakeLine) -> None:
    groups = (ParameterGroup("head", ("weight", "missing.bias"), 1.0, anchored=False),)
    with pytest.raises(ModelError, match=r"missing\.bias"):
        train(line(torch.ones(2, 1)).binding, line_schedule(groups=groups), Keys.fixed(0))


def test_a_stream_alone_is_enough(bert: Make) -> None:
    """Parameters that require gradients but are in no stream stay as they are."""
    bound = bert(BLOCKS)
    before = bound.values()
    groups = (ParameterGroup("head", bound.adapted.head, 0.1, anchored=False),)
    streams: tuple[Stream, ...] = (stream_for(bound, groups=groups),)
    train(bound.binding, Schedule(streams), Keys.fixed(0))
    changed = {name for name, value in bound.values().items() if not torch.equal(value, before[name])}
    assert changed == set(bound.adapted.head)
