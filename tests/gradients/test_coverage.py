"""What the engine refuses, by name, and what it does with shapes, units and bad records."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gradients.conftest import (
    bert_losses,
    difference,
    norm_of,
    reference_gradients,
    tiny_batch,
    tiny_bert,
)
from torch import Tensor, nn
from torch.nn import functional

from confide.errors import ModelError
from confide.gradients.engine import Engine
from confide.privacy.streams import Clipping

FLAT = Clipping("flat", 1.0)


def engine_of(model: nn.Module) -> Engine:
    return Engine(model, dict(model.named_parameters()))


def add(engine: Engine, model: nn.Module, *inputs: Tensor, rows: int) -> Tensor:
    with engine:
        return engine.add(model(*inputs).flatten(1).sum(1), torch.arange(rows), rows, FLAT)


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (nn.Embedding(3, 3, max_norm=1.0), "max_norm"),
        (nn.Embedding(3, 3, scale_grad_by_freq=True), "by_freq"),
    ],
)
def test_tables_without_a_gradient_per_row_are_refused(module: nn.Module, named: str) -> None:
    model = nn.Sequential()
    model.add_module("encoder", nn.Linear(3, 3))
    model.add_module("odd", module)
    with pytest.raises(ModelError, match=named) as caught:
        engine_of(model)
    assert "'odd." in str(caught.value)
    Engine(model, {"weight": model.get_submodule("encoder").weight})  # frozen, the layer is no obstacle


def test_foreign_doubled_and_missing_parameters_are_refused() -> None:
    model = nn.Linear(3, 5)
    with pytest.raises(ModelError, match="'other' belongs to no module"):
        Engine(model, {"other": nn.Parameter(torch.ones(1))})
    weight = nn.Parameter(torch.ones(1, 1))
    with pytest.raises(ModelError, match="are two names of one parameter"):
        Engine(model, {"a": weight, "b": weight})
    with pytest.raises(ModelError, match="no parameter"):
        Engine(model, {})


def test_layers_that_mix_records_or_roll_dice_are_refused_on_entry() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1), nn.BatchNorm1d(3))
    engine = Engine(model, {"weight": model[0].weight})
    with pytest.raises(ModelError, match=r"1 \(Dropout\)"), engine:
        pass
    model[1].p = 0.0
    with pytest.raises(ModelError, match=r"2 \(BatchNorm1d\).*GroupNorm"), engine:
        pass
    model.eval()
    with engine:
        pass
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ModelError, match="precision"), engine:
            pass
    finally:
        torch.set_float32_matmul_precision("highest")


class Centred(nn.Module):
    """Subtracts the batch mean: one row's loss depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return (y - y.mean(0)).square()


def test_rows_that_mix_are_refused() -> None:
    model = Centred()
    engine = engine_of(model)
    with pytest.raises(ModelError, match=r"depends on other rows at layer"):
        add(engine, model, torch.randn(4, 4, 3), rows=4)
    assert norm_of(engine.take()) == 0


def test_inputs_changed_in_place_are_refused() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            y = self.layer(x)
            x.zero_()
            return y

    model = InPlace()
    with pytest.raises(ModelError, match=r"input of layer \(Linear\) was changed in place"):
        add(engine_of(model), model, torch.randn(2, 3), rows=2)


def test_in_place_activations_after_a_layer_are_exact() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.ReLU(inplace=True), nn.Linear(5, 2)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    parameters = dict(model.named_parameters())
    engine = Engine(model, parameters)
    with engine:
        norms = engine.add(model(x).square().sum(1), torch.arange(6), 6, Clipping("flat", 1e9))
    gradients = list(reference_gradients(parameters, lambda row: model(x[[row]]).square().sum(1), range(6)))
    assert norms.tolist() == pytest.approx([norm_of(g) for g in gradients], rel=1e-12)
    total = {name: torch.stack([g[name] for g in gradients]).sum(0) for name in parameters}
    assert difference(engine.take(), total) < 1e-12


def test_wrong_use_is_explained() -> None:
    model = nn.Linear(3, 1)
    engine = engine_of(model)
    x = torch.randn(2, 3)
    with pytest.raises(ModelError, match="with engine"):
        engine.add(model(x)[:, 0], torch.arange(2), 2, FLAT)
    with engine:
        losses = model(x)[:, 0]
        with pytest.raises(ModelError, match="one loss and one unit per row"):
            engine.add(losses.mean(), torch.arange(2), 2, FLAT)
        with pytest.raises(ModelError, match="one loss and one unit per row"):
            engine.add(losses, torch.arange(3), 3, FLAT)
        with pytest.raises(ModelError, match="between 0 and 0"):
            engine.add(losses, torch.arange(2), 1, FLAT)
    with engine:
        losses = model(x)[:, 0]
        with pytest.raises(ModelError, match="not by backward"):
            losses.sum().backward()
    with engine:
        model(x)
        with pytest.raises(ModelError, match="don't depend"):
            engine.add(torch.zeros(2), torch.arange(2), 2, FLAT)
    with engine, pytest.raises(ModelError, match="engine's own model"):
        engine.add(nn.Linear(3, 1)(x)[:, 0], torch.arange(2), 2, FLAT)
    with engine, pytest.raises(ModelError, match="requires gradients"):
        model(x.clone().requires_grad_())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_evaluation_inside_the_block_leaves_no_trace() -> None:
    model = nn.Linear(3, 1)
    engine = engine_of(model)
    x = torch.randn(2, 3)
    with engine:
        with torch.no_grad():
            model(x)
            model(x)
        engine.add(model(x)[:, 0], torch.arange(2), 2, FLAT)


def test_flags_come_back_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.requires_grad_(False)
    engine = Engine(model, {"w": model[0].weight})
    with pytest.raises(RuntimeError, match=r"mat1 and mat2"), engine:
        model(torch.randn(2, 4))
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, True]
    with engine:
        engine.add(model(torch.randn(2, 3)).sum(1), torch.arange(2), 2, FLAT)
    assert norm_of(engine.take()) > 0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=7), st.integers(0, 1000), st.integers(0, 2))
def test_units_with_several_rows_average_them(unit_of_row: list[int], seed: int, kind: int) -> None:
    model = tiny_bert()
    parameters = dict(model.named_parameters())
    if kind == 1:  # short sequences choose other forms of the norm
        parameters = {n: p for n, p in parameters.items() if "classifier" in n or "query" in n}
    rows, units = len(unit_of_row), 4
    batch = tiny_batch(rows, length=7 if kind < 2 else 3, seed=seed)
    labels = torch.arange(rows) % 3
    losses = bert_losses(model, labels)
    gradients = list(reference_gradients(parameters, lambda row: losses(batch, [row]), range(rows)))
    expected = {name: torch.zeros_like(p) for name, p in parameters.items()}
    norms = []
    for unit in range(units):
        own = [gradients[row] for row in range(rows) if unit_of_row[row] == unit]
        if not own:
            norms.append(0.0)
            continue
        mean = {name: torch.stack([g[name] for g in own]).mean(0) for name in parameters}
        norms.append(norm_of(mean))
        for name in parameters:
            expected[name] += min(1.0, 0.3 / norms[-1]) * mean[name]
    engine = Engine(model, parameters)
    with engine:
        found = engine.add(losses(batch, range(rows)), np.array(unit_of_row), units, Clipping("flat", 0.3))
    assert found.tolist() == pytest.approx(norms, rel=1e-9)
    assert difference(engine.take(), expected) < 1e-9


def test_row_order_does_not_matter_and_positions_of_any_shape_are_right() -> None:
    model = tiny_bert()
    labels = torch.tensor([0, 1, 2, 0])
    losses = bert_losses(model, labels)
    batch = tiny_batch(4)
    parameters = {n: p for n, p in model.named_parameters() if "embeddings" in n}
    totals = []
    for positions in (
        None,
        torch.arange(7)[None],
        torch.arange(7).expand(4, 7),
        torch.arange(7).repeat(4, 1),
    ):
        given_batch = batch if positions is None else batch | {"position_ids": positions}
        engine = Engine(model, parameters)
        with engine:
            logits = model(**given_batch).logits
            own = functional.cross_entropy(logits, labels, reduction="none")
            engine.add(own, torch.arange(4), 4, Clipping("flat", 0.1))
        totals.append(engine.take())
    assert all(difference(total, totals[0]) < 1e-12 for total in totals[1:])
    engine = Engine(model, parameters)
    with engine:
        engine.add(losses(batch, [3, 1, 0, 2]), torch.arange(4), 4, Clipping("flat", 0.1))
    assert difference(engine.take(), totals[0]) < 1e-12


class Record(nn.Module):
    """A model whose per-row gradient is whatever its input says: Σ_s u_s xᵀ_s."""

    def __init__(self, p: int, d: int) -> None:
        super().__init__()
        self.layer = nn.Linear(p, d, bias=False)

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        return (self.layer(x) * u).sum((1, 2))


VALUES = st.sampled_from(
    [0.0, 1.0, -1.0, 1e-45, 1e-38, 1e-30, 1e-20, 1e12, 1e19, 1e30, -1e30, 3e38, math.inf, -math.inf, math.nan]
)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**31),
    st.lists(VALUES, min_size=6, max_size=6),
    st.lists(VALUES, min_size=6, max_size=6),
    st.sampled_from(["flat", "normalised"]),
    st.sampled_from([1, 2, 6]),
)
def test_no_record_however_extreme_moves_the_sum_further_than_the_bound(
    seed: int, xs: list[float], us: list[float], rule: str, length: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, length, 40, generator=generator) * torch.tensor(xs[:length])[None, :, None]
    u = torch.randn(1, length, 30, generator=generator) * torch.tensor(us[:length])[None, :, None]
    if length == 6:  # pairs that cancel
        x[:, 3:], u[:, 3:] = x[:, :3], -u[:, :3]
    others_x, others_u = torch.randn(3, length, 40), torch.randn(3, length, 30)
    model = Record(40, 30)
    model.layer.weight.data.zero_()
    bound = 0.25
    clipping = Clipping(rule, bound, 1e-3)  # type: ignore[arg-type]

    def total(x: Tensor, u: Tensor) -> dict[str, Tensor]:
        engine = engine_of(model)
        with engine:
            engine.add(model(x, u), torch.arange(len(x)), len(x), clipping)
        return engine.take()

    alone = total(x, u)["layer.weight"].double()
    assert bool(alone.isfinite().all())
    assert float(alone.norm()) <= bound
    without = total(others_x, others_u)["layer.weight"].double()
    together = total(torch.cat([others_x[:1], x, others_x[1:]]), torch.cat([others_u[:1], u, others_u[1:]]))
    moved = float((together["layer.weight"].double() - without).norm())
    assert moved <= bound * (1 + 1e-5)


def test_a_huge_finite_record_is_clipped_not_dropped() -> None:
    model = Record(5, 4)
    engine = engine_of(model)
    x, u = torch.randn(2, 3, 5), torch.randn(2, 3, 4)
    x[0] *= 1e30
    with engine:
        norms = engine.add(model(x, u), torch.arange(2), 2, FLAT)
    assert 1e29 < float(norms[0]) < 1e33
    alone = engine_of(model)
    with alone:
        alone.add(model(x[1:], u[1:]), torch.arange(1), 1, FLAT)
    left = {n: v - alone.take()[n] for n, v in engine.take().items()}
    assert norm_of(left) == pytest.approx(1.0, rel=1e-4)


def test_half_precision_models_are_measured_and_summed_in_float32() -> None:
    model = tiny_bert(torch.bfloat16)
    parameters = dict(model.named_parameters())
    losses = bert_losses(model, torch.tensor([0, 1, 2]))
    engine = Engine(model, parameters)
    with engine:
        norms = engine.add(losses(tiny_batch(3), [1]), torch.arange(1), 1, Clipping("flat", 0.01))
    sums = engine.take()
    assert {value.dtype for value in sums.values()} == {torch.float32}
    assert norms.dtype == torch.float64
    assert 0.0099 < norm_of(sums) <= 0.01


def test_a_head_on_constant_features_takes_thousands_of_rows() -> None:
    torch.manual_seed(0)
    model = nn.Linear(384, 5)
    x, y = torch.randn(4096, 384), torch.randint(0, 5, (4096,))
    engine = engine_of(model)
    with engine:
        losses = functional.cross_entropy(model(x), y, reduction="none")
        norms = engine.add(losses, torch.arange(4096), 4096, FLAT)
    error = torch.softmax(model(x), 1) - functional.one_hot(y, 5)
    expected = error.norm(dim=1) * (x.square().sum(1) + 1).sqrt()
    assert torch.allclose(norms, expected.double(), rtol=1e-5)
    factors = (1 / expected).clamp(max=1)[:, None]
    sums = engine.take()
    assert torch.allclose(sums["weight"], (error * factors).T @ x, atol=2e-3)
    assert torch.allclose(sums["bias"], (error * factors).sum(0), atol=2e-3)


def test_autocast_is_refused() -> None:
    model = nn.Linear(3, 2)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ModelError, match="autocast"), engine_of(model):
        pass
