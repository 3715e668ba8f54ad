"""RAPTOR and what it is compared with: schedules, steps by hand, prices, and that counts change nothing."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from confide.errors import ConfigError, ModelError, PrivacyError
from confide.finetune import methods
from confide.finetune.binding import Anchor, Binding
from confide.finetune.checkpoint import Begun, Unfinished
from confide.finetune.experts import attach_experts, bind_experts
from confide.finetune.history import State
from confide.finetune.loop import train
from confide.finetune.prepare import micro_batches
from confide.finetune.settings import Settings
from confide.gradients import noise
from confide.gradients.keys import Keys
from confide.gradients.sampling import poisson_draw
from confide.models.adapters import Adapted, adapt
from confide.models.backbones import load_classifier
from confide.privacy.accountant import epsilon
from confide.privacy.events import PoissonGaussian, leaves
from confide.privacy.streams import Budget, Clipping, Schedule
from confide.privacy.units import UnitMap
from confide.tasks.records import TaskData
from confide.tasks.text import Encoded

from .reference import Reference

ROWS = 12
OWNER = np.array([0, 3, 1, 1, 0, 3, 3, 0, 1, 0, 0, 1])  # nobody owns expert 2
LENGTHS = np.random.default_rng(1).integers(2, 14, ROWS)
TOKENS = np.random.default_rng(2).integers(5, 40, int(LENGTHS.sum())).astype(np.int32)
LABELS = torch.from_numpy(np.random.default_rng(3).integers(0, 2, ROWS))
KEYS = Keys.fixed(5)


def settings_of(
    trainable: dict[str, Any] | None = None, more: dict[str, Any] | None = None, **experts: Any
) -> Settings:
    return Settings.of(
        {
            "method": "raptor",
            "epsilon": 4.0,
            "expected_batch": 6,
            "steps": 3,
            "max_length": 20,
            "clipping_bound": 0.6,
            "trainable": trainable or {"rank": 2},
            "experts": {
                "layer": "2",
                "rank": 2,
                "clipping": "flat",
                "clipping_bound": 0.05,
                "learning_rate": 0.02,
                **experts,
            },
            **(more or {}),
        }
    )


class Bound:
    """The first `rows` records and a mixture of experts, in float64 unless told otherwise."""

    def __init__(
        self,
        folder: Path,
        task: TaskData,
        settings: Settings,
        rows: int = ROWS,
        dtype: torch.dtype = torch.double,
    ) -> None:
        classifier = load_classifier(folder, ("neg", "pos"), seed=0)
        layers = attach_experts(classifier, settings, task)
        self.adapted: Adapted = adapt(classifier, settings.trainable, 0, layers)
        self.model: Any = classifier.model.to(dtype)
        generator = torch.Generator().manual_seed(2)
        for name, parameter in self.model.named_parameters():
            if "lora_B" in name:
                parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator).to(dtype)
        self.offsets = np.concatenate([[0], np.cumsum(LENGTHS[:rows])]).astype(np.int64)
        encoded = Encoded(TOKENS[: self.offsets[-1]], self.offsets, pad=0)
        self.schedule = methods.schedule(settings, self.adapted, ROWS)
        named = dict(self.model.named_parameters())
        owned = any(stream.ownership == "owner" for stream in self.schedule.streams)
        self.binding = Binding(
            module=self.model,
            forward=lambda batch: self.model(**batch).logits,
            parameters={name: named[name] for name in self.schedule.parameters},
            batch=encoded.batch,
            micro_batches=micro_batches(encoded, 30),
            labels=LABELS[:rows],
            units=UnitMap.records(rows),
            anchor_gradient=Anchor(self.adapted, self.schedule.anchored).gradient,
            experts=bind_experts(self.adapted.experts, OWNER[:rows] if owned else None),
        )

    def loss(self, row: int) -> Tensor:
        ids = TOKENS[self.offsets[row] : self.offsets[row + 1]].astype(np.int64)
        logits = self.model(input_ids=torch.from_numpy(ids)[None]).logits
        return functional.cross_entropy(logits[0], LABELS[row])

    def values(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


Make = Callable[..., Bound]


@pytest.fixture
def make(sparse_base: Path, make_task: Callable[..., TaskData]) -> Make:
    return lambda settings, **options: Bound(sparse_base, make_task(), settings, **options)


def distance_of(bound: Bound) -> Callable[[], Tensor]:
    """‖W − W₀‖² over everything but the head, adapters multiplied out."""
    base, now = bound.values(), dict(bound.model.named_parameters())
    heads = {*bound.adapted.head}

    def distance() -> Tensor:
        total = torch.zeros((), dtype=torch.double)
        for name in {*bound.schedule.parameters} - heads:
            if "lora_A" in name:
                a, b = now[name], now[name.replace("lora_A", "lora_B")]
                total = total + (16.0 / a.shape[-2] * b @ a).square().sum()  # alpha is 16
            elif "lora_B" not in name:
                total = total + (now[name] - base[name]).square().sum()
        return total

    return distance


def silent(schedule: Schedule) -> Schedule:
    return schedule.with_noise(0)


MERGING = {"ascent": "paired", "ascent_radius": 0.2, "anchor": 0.05}
CASES: dict[str, dict[str, Any]] = {
    "raptor": {},
    "raptor, experts' weights": {"train": "weights"},
    "raptor, normalised": {"clipping": "normalised", "record_power": 2.0},
    "raptor, residual remembered": {
        "record_memory": 0.6,
        "record_power": 2.0,
        "steps": 5,
        "more": {"steps": 5},
    },
    "raptor, no residual, D_e = B, fewer steps": {
        "record_weight": "none",
        "denominator": "batch",
        "steps": 2,
    },
    "raptor, first layer": {"layer": "first"},
    "raptor, encoder and head apart": {
        "more": {"clipping": "per-role", "head_share": 0.3, "decay": "cosine", "warmup": 1}
    },
    "one-draw": {"variant": "one-draw"},
    "one-clip": {"variant": "one-clip"},
    "one-stream": {"variant": "one-stream"},
    "raptor, ascents and anchor": {"more": MERGING},
    "raptor, experts' weights, fresh ascents, decoupled anchor": {
        "train": "weights",
        "trainable": {"kind": "blocks", "blocks": 1},
        "more": {"ascent": "fresh", "ascent_radius": 0.2, "anchor": 0.4, "anchor_form": "decoupled"},
    },
    "one-draw, lagged ascents": {"variant": "one-draw", "more": {"ascent": "lagged", "ascent_radius": 0.2}},
    "monolithic, ascents and anchor": {"variant": "monolithic", "more": MERGING},
    "shared-only": {"variant": "shared-only"},
    "experts-only": {"variant": "experts-only"},
    "monolithic": {"variant": "monolithic"},
    "monolithic, everything": {"variant": "monolithic", "train": "weights", "trainable": {"kind": "all"}},
    "non-private": {"variant": "non-private"},
}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_autograd_record_by_record(make: Make, case: str) -> None:
    settings = settings_of(**CASES[case])
    ours, theirs = make(settings), make(settings)
    schedule = silent(ours.schedule)
    before = ours.values()
    history = train(ours.binding, schedule, KEYS)
    assert history.steps_run == {stream.name: stream.steps for stream in schedule.streams}
    for name in schedule.parameters:
        theirs.model.get_parameter(name).requires_grad_(True)
    units = [[row] for row in range(ROWS)]
    reference = Reference(
        theirs.model, theirs.loss, units, KEYS.sampling, distance_of(theirs), OWNER.tolist()
    )
    reference.run(schedule)
    found, expected = ours.values(), theirs.values()
    # A key's bias, and one that nothing reaches, have rounding for a gradient, which AdamW blows up.
    for stream in schedule.streams:
        names = [name for name in stream.parameters if not name.endswith("bias") or "head" in name]
        moved = torch.cat([(found[name] - before[name]).flatten() for name in names])
        wanted = torch.cat([(expected[name] - before[name]).flatten() for name in names])
        assert float(wanted.norm()) > 1e-3
        assert float((moved - wanted).norm()) <= 1e-6 * float(wanted.norm())
    for name in set(before) - set(schedule.parameters):
        assert torch.equal(found[name], before[name]), f"{name} is not trained, but changed"


@pytest.mark.parametrize(
    ("variant", "adaptive", "denominator"),
    [
        ("raptor", "shared", 6.0),
        ("raptor", "experts", 1.5),
        ("one-draw", "experts", 1.5),
        ("experts-only", "experts", 1.5),
        ("one-stream", "all", 6.0),
        ("one-clip", "all", 6.0),
    ],
)
def test_an_adaptive_bound_follows_a_noisy_count_over_the_expected_draw(
    make: Make, variant: str, adaptive: str, denominator: float
) -> None:
    """The experts' sum is divided by B/E, but their count by B: it is of all records in the draw."""
    more = {"count_noise": 0.4, "clipping_quantile": 0.7}
    if adaptive == "experts":
        chosen = settings_of(variant=variant, more=more, clipping="adaptive")
    else:
        more |= {"clipping": "adaptive", "clipping_bound": 0.05}
        chosen = settings_of(variant=variant, more=more)
    bound = make(chosen)
    (lead,) = (stream for stream in bound.schedule.streams if stream.name == adaptive)
    assert (lead.clipping.rule, lead.denominator, lead.expected_draw) == ("adaptive", denominator, 6.0)
    steps = train(bound.binding, bound.schedule.with_noise(0.5), KEYS).steps
    expected = 0.05
    for step, record in enumerate(record for record in steps if record.stream == lead.name):
        assert record.bound == pytest.approx(expected, rel=1e-12)
        zero = {"n": torch.zeros(1, dtype=torch.double)}
        drawn = noise.add_noise(zero, 0.4, KEYS.noise.generator(lead.name, step, "count"))["n"]
        share = (record.unclipped - record.units / 2 + float(drawn)) / 6 + 0.5
        expected *= float(np.exp(-0.2 * (share - 0.7)))
    assert all(
        len({r.bound for r in steps if r.stream == s.name}) == 1 for s in bound.schedule.streams if s != lead
    )
    counts = [event for event in leaves(bound.schedule.event()) if isinstance(event, PoissonGaussian)]
    assert any(0.8 in event.noise_multipliers for event in counts)
    (draw,) = (event for event in counts if 0.8 in event.noise_multipliers)
    streams = len([stream for stream in bound.schedule.streams if stream.draw == lead.draw])
    assert (len(draw.noise_multipliers), draw.steps) == (1 + streams, 3)


def test_streams_have_their_own_draws_bounds_and_public_denominators(make: Make) -> None:
    bound = make(settings_of())
    shared, experts = bound.schedule.streams
    assert (shared.name, shared.draw, shared.denominator, shared.ownership) == (
        "shared",
        "shared",
        6.0,
        "all",
    )
    assert (experts.name, experts.draw, experts.denominator) == ("experts", "experts", 1.5)
    assert (experts.ownership, experts.experts, experts.record_weight) == ("owner", 4, "residual")
    assert (shared.clipping.bound, experts.clipping.bound) == (0.6, 0.05)
    adapted = {name.split(".lora_")[0].split("layer.", 1)[1] for name in bound.adapted.encoder}
    parts = ("self.query", "self.key", "self.value", "output.dense")
    assert adapted == {f"{block}.attention.{part}" for block in range(3) for part in parts}
    assert all(".layer.2.mlp.experts." in name for name in experts.parameters)
    assert set(shared.parameters) == {*bound.adapted.encoder, *bound.adapted.head}
    joint = make(settings_of(variant="one-draw")).schedule
    assert {stream.draw for stream in joint.streams} == {"all"}
    (all_layers,) = make(settings_of(variant="monolithic")).schedule.streams
    assert {name.split("layer.")[1][0] for name in all_layers.parameters if ".experts." in name} == {"0", "2"}
    assert (all_layers.denominator, all_layers.ownership) == (6.0, "all")
    (free,) = {stream.clipping.rule for stream in make(settings_of(variant="non-private")).schedule.streams}
    assert free == "none"


def test_experts_that_nobody_owns_get_the_noise_of_the_others(make: Make) -> None:
    bound = make(settings_of(variant="experts-only", train="weights"))
    (stream,) = bound.schedule.streams
    group = dataclasses.replace(stream.groups[0], learning_rate=1.0)
    stream = dataclasses.replace(
        stream, groups=(group,), optimizer="sgd", decay="constant", steps=1, noise_multiplier=3.0
    )
    before = bound.values()
    train(bound.binding, Schedule((stream,)), KEYS)
    after = bound.values()
    name = next(name for name in stream.parameters if name.endswith("up_proj"))
    wanted = stream.noise_multiplier * stream.clipping.bound / stream.denominator
    for expert in range(4):
        moved = (after[name] - before[name])[expert]
        assert float(moved.std()) == pytest.approx(wanted, rel=0.15), expert


def rows_of_the_paper() -> list[dict[str, str]]:
    file = Path(__file__).parents[1] / "privacy" / "data" / "accounting_reference.csv"
    with open(file, newline="", encoding="utf-8") as lines:
        return [row for row in csv.DictReader(lines) if row["label"].startswith("RAPTOR")]


def test_the_paper_s_schedules_cost_what_the_reference_says(make: Make) -> None:
    """SST-2: n = 67,349, B = 1,000, 20 epochs for each stream, δ = n^-1.1."""
    settings = settings_of().model_copy(update={"expected_batch": 1000, "steps": 1347})
    bound = make(settings_of())
    planned = methods.schedule(settings, bound.adapted, 67349)
    assert planned.streams[1].denominator == 250.0
    checked = 0
    for row in rows_of_the_paper():
        if row["mechanism"] != "two_streams":
            continue
        sigmas = [float(part.split(":")[1]) for part in row["effective"].split(";")]
        streams = tuple(
            dataclasses.replace(stream, noise_multiplier=sigma)
            for stream, sigma in zip(planned.streams, sigmas, strict=True)
        )
        claim = epsilon(dataclasses.replace(planned, streams=streams).event(), float(row["delta"]))
        assert float(row["eps_lower"]) <= claim.epsilon <= float(row["eps_upper"]) * (1 + 1e-3), row["label"]
        checked += 1
    assert checked == 6
    found = methods.with_budget(planned, settings, Budget(4.0, 67349**-1.1))
    assert [stream.noise_multiplier for stream in found.streams] == pytest.approx([0.9467, 2.2065], rel=5e-3)
    (both,) = leaves(methods.schedule(_variant(settings, "one-draw"), bound.adapted, 67349).event())
    assert isinstance(both, PoissonGaussian)
    assert both.noise_multipliers == (1.0, 1.0)


def test_both_streams_pay_for_their_ascents(make: Make) -> None:
    adapted = make(settings_of()).adapted

    def planned(more: dict[str, Any]) -> Schedule:
        settings = settings_of(more={**more, "expected_batch": 1000, "steps": 100})
        return methods.with_budget(methods.schedule(settings, adapted, 67349), settings, Budget(4.0, 1e-6))

    found, plain = planned(MERGING), planned({})
    events = [event for event in leaves(found.event()) if isinstance(event, PoissonGaussian)]
    assert [len(event.noise_multipliers) for event in events] == [2, 2]
    assert 3.99 <= epsilon(found.event(), 1e-6).epsilon <= 4.0
    for stream, single in zip(found.streams, plain.streams, strict=True):
        assert stream.ascent_noise == stream.noise_multiplier
        assert stream.noise_multiplier == pytest.approx(2**0.5 * single.noise_multiplier, rel=1e-3)
    assert {*found.anchored} == {*found.parameters} - {*adapted.head}
    assert not plain.anchored


def _variant(settings: Settings, name: str) -> Settings:
    return settings.model_copy(update={"experts": settings.experts.model_copy(update={"variant": name})})


@dataclasses.dataclass
class Trace:
    """Everything of a run that somebody could see without knowing values."""

    noise: list[tuple[Any, ...]]
    addresses: list[tuple[Any, ...]]
    state: dict[str, Any]
    steps: dict[str, int]


def traced(
    make: Make, monkeypatch: pytest.MonkeyPatch, folder: Path, settings: Settings, rows: int, owner: Any
) -> Trace:
    bound = make(settings, rows=rows, dtype=torch.float32)
    if bound.binding.experts is not None and bound.binding.experts.owner is not None:
        experts = dataclasses.replace(bound.binding.experts, owner=owner[:rows])
        bound.binding = dataclasses.replace(bound.binding, experts=experts)
    schedule = bound.schedule.with_noise(1.5)
    seen = Trace([], [], {}, {})
    plain, generator = noise.add_noise, type(KEYS.noise).generator

    def add(sums: dict[str, Tensor], std: float, source: Any) -> dict[str, Tensor]:
        before = {name: value.clone() for name, value in sums.items()}
        found = plain(sums, std, source)
        for name, value in found.items():
            touched = ((value - before[name]) != 0).flatten(1) if value.ndim > 1 else None
            every = None if touched is None else tuple(touched.any(1).tolist())
            seen.noise.append((name, tuple(value.shape), value.dtype, std, every))
        return found

    def address(key: Any, *place: Any) -> Any:
        seen.addresses.append(place)
        return generator(key, *place)

    monkeypatch.setattr("confide.finetune.loop.add_noise", add)
    monkeypatch.setattr(type(KEYS.noise), "generator", address)
    with closing(Unfinished.open(folder, every=0)) as unfinished:
        unfinished.begin(Begun("r", KEYS, {}))

        def after(state: Callable[[], State]) -> None:
            if not seen.state:
                unfinished.after_step("r", state)
            seen.state = {name: (tuple(v.shape), v.dtype) for name, v in state().tensors.items()}
            seen.state["files"] = sorted(path.name for path in folder.rglob("*"))

        history = train(bound.binding, schedule, KEYS, after_step=after)
    monkeypatch.undo()
    seen.steps = dict(history.steps_run)
    return seen


@pytest.mark.parametrize(
    "variant",
    ["raptor", *(pytest.param(v, marks=pytest.mark.slow) for v in ("one-draw", "one-clip", "one-stream"))],
)
def test_a_record_more_or_another_owner_changes_values_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variant: str
) -> None:
    """Queries, addresses, shapes, denominators, who gets noise, and files are all the same."""
    settings = settings_of(variant=variant)
    others = [(ROWS, OWNER), (ROWS - 1, OWNER), (1, OWNER), (ROWS, np.full(ROWS, 2))]
    first, *rest = [
        traced(make, monkeypatch, tmp_path / str(number), settings, rows, owner)
        for number, (rows, owner) in enumerate(others)
    ]
    assert all(every is None or all(every) for *_, every in first.noise)
    assert len(first.noise) == sum(len(s.parameters) * s.steps for s in make(settings).schedule.streams)
    for other in rest:
        assert other == first


@pytest.mark.parametrize("memory", [0.0, 0.6])
def test_a_stopped_run_goes_on_bitwise(make: Make, tmp_path: Path, memory: float) -> None:
    class StoppedError(Exception):
        pass

    def go(folder: Path, last: int) -> dict[str, Tensor]:
        bound = make(settings_of(record_memory=memory, more={"steps": 6}), dtype=torch.float32)
        with closing(Unfinished.open(folder, every=0)) as unfinished:
            if unfinished.read() is None:
                unfinished.begin(Begun("r", KEYS, {}))

            def after(state: Callable[[], State]) -> None:
                unfinished.after_step("r", state)
                if state().step == last:
                    raise StoppedError

            schedule = bound.schedule.with_noise(1.5)
            with suppress(StoppedError):
                train(bound.binding, schedule, KEYS, start=unfinished.latest("r"), after_step=after)
        return bound.values()

    whole = go(tmp_path / "whole", -1)
    half = go(tmp_path / "parts", 3)
    (state,) = (tmp_path / "parts").glob("checkpoint-*")
    kept = load_file(state / "state.safetensors")
    assert ("memory/experts" in kept) == bool(memory)
    assert (state / "state.safetensors").stat().st_mode & 0o077 == 0
    if memory:
        drawn = {
            int(row)
            for step in range(3)
            for row in poisson_draw(KEYS.sampling, "experts", step, ROWS, 6 / ROWS)
        }
        assert set(np.flatnonzero(~kept["memory/experts"].isnan())) == drawn != set(range(ROWS))
    assert any(not torch.equal(half[name], value) for name, value in whole.items())
    for name, value in go(tmp_path / "parts", -1).items():
        assert torch.equal(value, whole[name]), name


def test_refusals(make: Make, sparse_base: Path, tiny_base: Path, make_task: Callable[..., TaskData]) -> None:
    few = settings_of().model_copy(update={"expected_batch": 3})
    with pytest.raises(ConfigError, match=r"4 experts, but only 3 records .* Raise expected_batch to 4"):
        make(few)
    with pytest.raises(ConfigError, match="name a corpus"):
        make(settings_of(layer="entropy"))
    with pytest.raises(ModelError, match="sparse layers are 0, 2"):
        make(settings_of(layer="1"))
    with pytest.raises(ModelError, match="it is a dense model"):
        Bound(tiny_base, make_task(), settings_of())
    bound = make(settings_of())
    unowned = dataclasses.replace(bound.binding, experts=None)
    with pytest.raises(ModelError, match="needs the experts of one layer"):
        train(unowned, bound.schedule, KEYS)
    with pytest.raises(ConfigError, match="belong to method raptor"):
        Settings.of({"method": "dp-adamw", "experts": {"layer": "last"}})
    with pytest.raises(ConfigError, match="weight_decay pulls to 0"):
        make(settings_of(more={"anchor": 0.1, "weight_decay": 0.1}))
    with pytest.raises(ConfigError, match="did you mean 'shared_share'"):
        Settings.of({"method": "raptor", "experts": {"shared_shar": 0.8}})
    with pytest.raises(ConfigError, match="release_statistics knows none of experts"):
        Settings.of({"method": "raptor", "release_statistics": "grams"})
    with pytest.raises(ConfigError, match="Input should be 'flat', 'normalised' or 'adaptive'"):
        Settings.of({"method": "raptor", "experts": {"clipping": "per-role"}})
    with pytest.raises(ConfigError, match="clips the experts with them"):
        make(settings_of(variant="one-stream", more={"clipping": "per-role"}))


def test_a_stream_of_owners_says_how_many_experts(make: Make) -> None:
    experts = make(settings_of()).schedule.streams[1]
    for fields, message in (
        ({"experts": 0}, "needs the number of experts"),
        ({"denominator": 0.75}, "raise the batch"),
        ({"record_power": 0.0}, "record_power"),
        ({"record_memory": 1.0}, "record_memory must lie in"),
        ({"record_memory": 0.5, "record_weight": "none"}, "for residual weights"),
        (
            {"clipping": Clipping("adaptive", 1.0, count_noise=1.0), "expected_draw": None},
            "state expected_draw",
        ),
        ({"expected_draw": 0.0}, "expected draw must be a positive number"),
        ({"clipping": Clipping("none", 1.0), "noise_multiplier": 1.0}, "protects nobody"),
    ):
        with pytest.raises(PrivacyError, match=message):
            dataclasses.replace(experts, **fields)
