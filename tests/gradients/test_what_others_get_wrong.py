"""What private training gets wrong elsewhere, each as a test that it doesn't go wrong here.

The table in docs/architectures.md names every test of this file. Where it is cheap, Opacus 1.6 stands beside
and shows the defect.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.finetune.test_movement import Model, bound, schedule
from tests.gradients.conftest import (
    bert_losses,
    difference,
    norm_of,
    reference_gradients,
    tiny_batch,
    tiny_bert,
)
from tests.gradients.families import FAMILIES, Family
from tests.gradients.matrix import measure
from tests.gradients.test_layers import RelativeBias, Tokens
from torch import Tensor, nn

from confide.errors import ConfigError, ModelError, PrivacyError
from confide.finetune import methods
from confide.finetune.loop import train
from confide.finetune.settings import Settings
from confide.gradients.engine import Engine
from confide.gradients.keys import Keys
from confide.gradients.noise import add_noise
from confide.gradients.sampling import poisson_draw
from confide.privacy.streams import Clipping, ParameterGroup, Schedule

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
FLAT = Clipping("flat", 0.3)
Losses = Callable[[Any], Tensor]


def opacus_is_here() -> bool:
    """The very version whose defects these are."""
    try:
        return version("opacus") == "1.6.0"
    except PackageNotFoundError:
        return False


def per_sample(model: nn.Module, losses: Losses, inputs: Any) -> nn.Module:
    """Opacus's gradients of the samples, in `grad_sample`."""
    from opacus.grad_sample import GradSampleModule

    wrapped = GradSampleModule(model)
    losses(inputs).sum().backward()
    return wrapped


def squares(model: nn.Module) -> Losses:
    return lambda x: model(x).square().flatten(1).sum(1)


def family(name: str) -> Family:
    return next(one for one in FAMILIES if one.name == name)


def exact(model: nn.Module, losses: Callable[[Sequence[int]], Tensor], rows: int) -> None:
    """The clipped sum of all rows is that of autograd on each alone."""
    parameters = dict(model.named_parameters())
    expected = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for gradient in reference_gradients(parameters, lambda row: losses([row]), range(rows)):
        factor = min(1.0, FLAT.bound / norm_of(gradient))
        expected = {name: expected[name] + factor * value for name, value in gradient.items()}
    engine = Engine(model, parameters)
    with engine:
        engine.add(losses(range(rows)), torch.arange(rows), rows, FLAT)
    assert difference(engine.take(), expected) < 1e-9


def test_positions_without_a_batch_dimension() -> None:
    """Opacus: fully trained BERT crashes, as its position ids are (1, S)."""
    model, batch = tiny_bert(), tiny_batch(3)
    losses = bert_losses(model, torch.tensor([0, 1, 2]))
    exact(model, lambda rows: losses(batch, rows), 3)
    if opacus_is_here():
        with pytest.raises((ValueError, RuntimeError, IndexError)):
            _stepped(tiny_bert(torch.float32).train(), batch)


def _stepped(model: nn.Module, batch: dict[str, Tensor]) -> None:
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(model)
    inner = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    optimizer = DPOptimizer(inner, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=3)
    bert_losses(wrapped, torch.tensor([0, 1, 2]))(batch, [0, 1, 2]).sum().backward()
    optimizer.step()


def test_tied_weights() -> None:
    """Opacus refuses them; norms without the product of both uses would be wrong."""
    assert measure(family("GPT-2"), "full").error < 1e-9


def test_gradient_checkpointing() -> None:
    """Opacus: fails, or counts a recomputed layer twice."""
    model, batch = tiny_bert().train(), tiny_batch(3)
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    losses = bert_losses(model, torch.tensor([0, 1, 2]))
    exact(model, lambda rows: losses(batch, rows), 3)


def test_mixtures_of_experts() -> None:
    """Opacus: crashes, as an expert's input has no record dimension."""
    assert measure(family("Mixtral"), "full").error < 1e-9


def test_one_record_that_is_not_finite() -> None:
    """Opacus: one NaN record makes every weight NaN, and the step is charged all the same."""
    torch.manual_seed(0)
    x = torch.randn(6, 5)
    poisoned = x.clone()
    poisoned[2, 1] = math.nan
    model = nn.Linear(5, 3)
    engine = Engine(model, dict(model.named_parameters()))

    def total(x: Tensor) -> dict[str, Tensor]:
        with engine:
            engine.add(squares(model)(x), torch.arange(len(x)), len(x), FLAT)
        return engine.take()

    assert difference(total(poisoned), total(torch.cat([x[:2], x[3:]]))) < 1e-6
    if opacus_is_here():
        from opacus.optimizers import DPOptimizer

        wrapped = per_sample(model, squares(model), poisoned)
        inner = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        DPOptimizer(inner, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=6).step()
        assert bool(model.weight.isnan().all())


def test_rows_that_are_tokens_and_not_records() -> None:
    """Opacus: a layer that is fed (B·S, H) rows is clipped per token, so that a record adds up to S·C."""
    torch.manual_seed(0)
    model, x = Tokens(), torch.randn(2, 9, 3)
    engine = Engine(model, dict(model.named_parameters()))
    small = Clipping("flat", 1e-3)
    with engine:
        engine.add(squares(model)(x), torch.arange(2), 2, small)
        engine.take()
        engine.add(squares(model)(x[:1]), torch.arange(1), 1, small)
    assert norm_of(engine.take()) <= small.bound
    if opacus_is_here():
        lone = nn.Sequential(nn.Linear(3, 2))
        per_sample(lone, lambda x: lone(x.flatten(0, 1)).square().sum(1), x)
        assert len(lone[0].weight.grad_sample) == 2 * 9


def test_a_relative_bias_where_length_and_batch_agree() -> None:
    """Opacus: positions are taken for records, and the gradients are wrong without a word."""
    torch.manual_seed(0)
    model, x = RelativeBias().double(), torch.randn(4, 4, 3, dtype=torch.float64)
    exact(model, lambda rows: squares(model)(x[list(rows)]), 4)
    if opacus_is_here():
        alone = [
            torch.autograd.grad(squares(model)(x[[row]]).sum(), model.bias.weight)[0] for row in range(4)
        ]
        per_sample(model, squares(model), x)
        found = model.bias.weight.grad_sample
        assert found.shape == (4, *model.bias.weight.shape)
        assert not torch.allclose(found, torch.stack(alone), rtol=0.1)


def test_a_rate_of_one_over_the_number_of_batches() -> None:
    """Opacus: N = 10000 and B = 4096 train at q = 1/3 instead of .4096."""
    adapted: Any = SimpleNamespace(encoder=("w",), head=())
    planned = methods.schedule(Settings(method="dp-adamw", expected_batch=4096), adapted, 10_000)
    assert planned.streams[0].sampling_rate == 0.4096
    sizes = [len(poisson_draw(Keys.fixed(0).sampling, "all", step, 10_000, 0.4096)) for step in range(50)]
    assert abs(np.mean(sizes) - 4096) < 5 * math.sqrt(10_000 * 0.4096 * 0.5904 / 50)
    if opacus_is_here():
        from opacus.data_loader import DPDataLoader
        from torch.utils.data import DataLoader, TensorDataset

        loader = DataLoader(TensorDataset(torch.zeros(10_000, 1)), batch_size=4096)
        assert DPDataLoader.from_data_loader(loader).sample_rate == pytest.approx(1 / 3)


def test_an_empty_draw_first() -> None:
    """Opacus: raises if records are dicts. Here it is a step of noise alone."""
    model = Model()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    history = train(bound(model), schedule(model, sampling_rate=1e-9, steps=1), Keys.fixed(0))
    assert [step.units for step in history.steps] == [0]
    assert not any(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_two_micro_batches_before_a_step() -> None:
    """Opacus ghost clipping: the last one alone counts."""
    model, batch = tiny_bert(), tiny_batch(4)
    losses = bert_losses(model, torch.tensor([0, 1, 2, 1]))
    engine = Engine(model, dict(model.named_parameters()))
    with engine:
        engine.add(losses(batch, range(4)), torch.arange(4), 4, FLAT)
        whole = engine.take()
        engine.add(losses(batch, [0, 1, 2]), torch.arange(3), 3, FLAT)
        engine.add(losses(batch, [3]), torch.arange(1), 1, FLAT)
    assert difference(engine.take(), whole) < 1e-12


class Beside(nn.Module):
    """A layer, and a weight that comes into play later, through no module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.extra = nn.Linear(3, 3), nn.Parameter(torch.ones(3))
        self.late = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return nn.functional.linear(x, self.layer.weight * self.extra) + y if self.late else y


def test_a_parameter_that_the_hooks_do_not_know() -> None:
    """One published tool lets it step without noise. Here it is trained exactly, or refused, or frozen."""
    torch.manual_seed(0)
    model, x = Beside(), torch.randn(4, 3)
    engine = Engine(model, {"layer.weight": model.layer.weight, "extra": model.extra})
    with engine:
        engine.add(squares(model)(x), torch.arange(4), 4, FLAT)
        model.late = True
        with pytest.raises(ModelError, match=r"'(layer\.weight|extra)' is used where it was not"):
            engine.add(squares(model)(x), torch.arange(4), 4, FLAT)
    exact(model.double(), lambda rows: squares(model)(x[list(rows)].double()), 4)
    # What isn't in the schedule stays bitwise what it was.
    whole = Model()
    names = tuple(name for name, _ in whole.named_parameters() if not name.startswith("last"))
    planned = schedule(whole)
    groups = (ParameterGroup("encoder", names, 0.01, anchored=False),)
    before = whole.last.weight.detach().clone()
    train(bound(whole), Schedule((replace(planned.streams[0], groups=groups),)), Keys.fixed(0))
    assert torch.equal(whole.last.weight, before)


def test_one_dropout_mask_for_all_records() -> None:
    """Opacus under vmap: records share a mask. Here dropout is off, or refused by name."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)).train()
    with pytest.raises(ModelError, match=r"1 \(Dropout\) is active dropout"):
        Engine(model, dict(model.named_parameters())).__enter__()
    with Engine(model.eval(), dict(model.named_parameters())):
        pass


def test_weights_that_never_move() -> None:
    """Opacus #820: the optimizer kept the weights from before a change of device, for 45 GPU hours."""
    model = Model()

    def converted(x: Tensor) -> Tensor:
        answer: Tensor = model(x)
        model.first.weight = nn.Parameter(model.first.weight.detach().clone())
        return answer

    with pytest.raises(ModelError, match=r"first\.weight isn't part of the model any more"):
        train(bound(model, converted), schedule(model), Keys.fixed(0))


def test_an_ascent_with_every_micro_batch() -> None:
    """The code of DP-SAT: at learning rate 0 weights drift, as each micro-batch moves them again."""
    model = Model()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    binding = replace(bound(model), micro_batches=lambda rows, position: [position[:2], position[2:]])
    planned = schedule(model, rate=0.0, ascent="paired", ascent_radius=0.5, ascent_noise=1.0)
    train(binding, planned, Keys.fixed(0))
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_noise_in_half_precision() -> None:
    """bfloat16 has 256 values between two powers of two; and float32 normals stop at 5.77 σ."""
    drawn = add_noise({"sum": torch.zeros(4096)}, 1.0, Keys.fixed(0).noise.generator("all", 0, "descent"))
    assert len(drawn["sum"].unique()) > 4090
    assert len(torch.randn(4096).to(torch.bfloat16).unique()) < 2048
    large = torch.full((4096,), 2.0**20)
    added = add_noise({"sum": large}, 1.0, Keys.fixed(0).noise.generator("all", 0, "descent"))["sum"]
    assert float((added.double() - 2.0**20).std()) == pytest.approx(1.0, rel=0.05)


def test_norms_in_half_precision() -> None:
    """A sum of squares in bfloat16 stops growing at 256 equal terms."""
    model = nn.Linear(1, 4096, bias=False).to(torch.bfloat16)
    model.weight.data.zero_()
    engine = Engine(model, {"weight": model.weight})
    with engine:
        norms = engine.add(
            model(torch.ones(2, 1, dtype=torch.bfloat16)).sum(1), torch.arange(2), 2, Clipping("flat", 1.0)
        )
    assert norms.tolist() == [64.0, 64.0]
    assert norm_of(engine.take()) <= 2.0
    ones = torch.ones(4096, dtype=torch.bfloat16)
    total = torch.zeros((), dtype=torch.bfloat16)
    for one in ones:
        total += one
    assert float(total) == 256


def test_shuffled_batches_priced_as_poisson_draws() -> None:
    """Nearly everywhere: a data loader shuffles, and the accountant assumes Poisson draws."""
    with pytest.raises(ConfigError, match="Poisson"):
        Settings.of({"shuffle": True})
    with pytest.raises(PrivacyError, match="sampling"):
        replace(schedule(Model()).streams[0], sampling="shuffled")


def test_the_page_names_every_test() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    here = {name for name in vars(sys.modules[__name__]) if name.startswith("test_")}
    assert named == here - {"test_the_page_names_every_test"}
