"""Experts of a small layer against autograd, one unit at a time, and what the clipping must hold to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from confide.errors import ModelError
from confide.gradients.expert_engine import ExpertEngine
from confide.gradients.experts import Call, Form, Lora, OwnerExperts
from confide.gradients.residual import remembered, residual_weights
from confide.privacy.streams import Clipping

EXPERTS, WIDTH, INNER, CLASSES, TOP = 5, 6, 7, 3, 2
ROWS, LENGTH = 6, 8
LABELS = torch.tensor([0, 1, 2, 2, 1, 0])
OWNER = torch.tensor([0, 1, 1, 3, 0, 4])  # nobody owns expert 2
UNCLIPPED = Clipping("flat", 1e12)


class Weights(nn.Module):
    """Stacked weights; the layer's arithmetic is in `Plain`, so that it's told twice."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        up, down = (EXPERTS, INNER, WIDTH), (EXPERTS, WIDTH, INNER)
        if transposed:
            up, down = (EXPERTS, WIDTH, INNER), (EXPERTS, INNER, WIDTH)
        self.up_proj = nn.Parameter(torch.randn(up))
        self.down_proj = nn.Parameter(torch.randn(down))
        self.up_proj_bias = nn.Parameter(torch.randn(EXPERTS, INNER))
        self.down_proj_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))


class Toy(nn.Module):
    """Frozen mixing over a row's tokens, a router, experts, mixing again, and a head."""

    def __init__(self, transposed: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts: nn.Module = Weights(transposed)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.transposed = transposed

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        weight, expert = self.router(tokens).softmax(-1).topk(TOP, dim=-1)
        return expert, weight

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.cumsum(1) / 8
        tokens = x.reshape(-1, WIDTH)
        expert, weight = self.route(tokens)
        if isinstance(self.experts, OwnerExperts):
            out = self.experts(tokens, expert, weight)
        else:
            out = self.plain(tokens, expert, weight)
        hidden = out.view_as(x).tanh().cumsum(1)
        return self.head(hidden.mean(1))  # type: ignore[no-any-return]

    def plain(self, tokens: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
        own: Any = self.experts
        up, down = own.up_proj, own.down_proj
        if self.transposed:
            up, down = up.mT, down.mT
        hidden = torch.einsum("tki,tkoi->tko", tokens[:, None].expand(-1, TOP, -1), up[expert])
        hidden = functional.gelu(hidden + own.up_proj_bias[expert])
        out = torch.einsum("tki,tkoi->tko", hidden, down[expert]) + own.down_proj_bias[expert]
        return (out * weight[..., None]).sum(1)


def toy(lora: Lora | None, transposed: bool = False, dtype: torch.dtype = torch.float64) -> Toy:
    torch.manual_seed(0)
    return put(Toy(transposed).to(dtype), lora)


def put(model: Toy, lora: Lora | None) -> Toy:
    base = model.experts
    form = Form("up_proj", "down_proj", "up_proj_bias", "down_proj_bias", model.transposed, functional.gelu)
    parameters = dict(base.named_parameters())
    model.experts = OwnerExperts(
        base, parameters, form, lambda args, _: Call(args[0], args[1], args[2], len(args[0])), lora
    )
    for name, value in model.experts.trained().items():
        if name.endswith("_lora_B"):  # zero at first, which would hide the gradient of A
            nn.init.normal_(value, std=0.3)
    return model


def attached(model: Toy) -> OwnerExperts:
    assert isinstance(model.experts, OwnerExperts)
    return model.experts


def inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype)


def losses(model: nn.Module, x: Tensor, labels: Tensor = LABELS) -> Tensor:
    return functional.cross_entropy(model(x), labels[: len(x)], reduction="none")


def engine_of(model: Toy) -> ExpertEngine:
    return ExpertEngine(model, attached(model), attached(model).trained())


def run(
    model: Toy,
    x: Tensor,
    owner: Tensor | None,
    clipping: Clipping = UNCLIPPED,
    unit: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    unit = torch.arange(len(x)) if unit is None else unit
    with engine_of(model) as engine:
        engine.expect(len(x), owner)
        norms = engine.add(losses(model, x), unit, int(unit.max()) + 1, clipping, weights)
        return engine.take(), norms


def reference(model: Toy, x: Tensor, lora: Lora | None, owner: Tensor | None) -> list[dict[str, Tensor]]:
    """Row by row through `Toy.plain` on ordinary weights; LoRA by the chain rule of W + s·B·A."""
    experts = attached(model)
    plain = Toy(model.transposed).to(x.dtype)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "_lora_" not in k})
    if lora is not None:
        with torch.no_grad():
            for name in ("up_proj", "down_proj"):
                a, b = experts.get_parameter(f"{name}_lora_A"), experts.get_parameter(f"{name}_lora_B")
                delta = lora.scale * b @ a
                plain.experts.get_parameter(name).add_(delta.mT if model.transposed else delta)
    weights = dict(plain.experts.named_parameters())
    found = []
    for row in range(len(x)):
        loss = losses(plain, x[row : row + 1], LABELS[row : row + 1]).sum()
        values = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
        if lora is not None:
            values = factors(experts, values, lora, model.transposed)
        if owner is not None:
            keep = torch.arange(EXPERTS) == owner[row]
            values = {k: torch.where(keep.view(-1, *[1] * (v.ndim - 1)), v, 0.0) for k, v in values.items()}
        found.append(values)
    return found


def factors(
    experts: OwnerExperts, gradients: dict[str, Tensor], lora: Lora, transposed: bool
) -> dict[str, Tensor]:
    found = {}
    for name in ("up_proj", "down_proj"):
        dw = gradients[name].mT if transposed else gradients[name]
        a, b = experts.get_parameter(f"{name}_lora_A"), experts.get_parameter(f"{name}_lora_B")
        found[f"{name}_lora_A"] = (lora.scale * b.mT @ dw).detach()
        found[f"{name}_lora_B"] = (lora.scale * dw @ a.mT).detach()
    return found


def norm(gradient: dict[str, Tensor]) -> float:
    return float(torch.stack([value.double().square().sum() for value in gradient.values()]).sum().sqrt())


def added(
    gradients: list[dict[str, Tensor]], scale: Callable[[int], float] = lambda _: 1.0
) -> dict[str, Tensor]:
    return {
        name: torch.stack([scale(row) * record[name] for row, record in enumerate(gradients)]).sum(0)
        for name in gradients[0]
    }


def close(found: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    # Clipping leaves room for rounding, 10⁻¹⁰ of a norm.
    assert found.keys() == truth.keys()
    largest = max(float(value.abs().max()) for value in truth.values())
    for name, value in truth.items():
        assert found[name].shape == value.shape, name
        assert float((found[name] - value).abs().max()) <= tolerance * largest, name


@pytest.fixture(scope="module", params=[None, Lora(2, 4.0)], ids=["full", "lora"])
def lora(request: pytest.FixtureRequest) -> Lora | None:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("owner", [OWNER, None], ids=["owner", "all"])
def test_clipped_sums_and_norms_are_autograds(
    lora: Lora | None, transposed: bool, owner: Tensor | None
) -> None:
    model = toy(lora, transposed)
    truth = reference(model, inputs(), lora, owner)
    norms = [norm(record) for record in truth]
    bound = sorted(norms)[2]
    found, measured = run(model, inputs(), owner, Clipping("flat", bound))
    assert measured.tolist() == pytest.approx(norms, rel=1e-9)
    close(found, added(truth, lambda row: min(1.0, bound / norms[row])))


def test_outputs_are_those_of_the_layer(lora: Lora | None) -> None:
    torch.manual_seed(0)
    model = Toy().to(torch.float64)
    before = model(inputs())
    base = model.experts
    put(model, None if lora is None else Lora(2, 4.0))
    for name, value in attached(model).trained().items():
        if name.endswith("_lora_B"):
            nn.init.zeros_(value)
    assert float((model(inputs()) - before).detach().abs().max()) < 1e-13
    assert attached(model).base is base
    names = {name for name, _ in attached(model).named_parameters() if "_lora_" not in name}
    assert names == {name for name, _ in base.named_parameters()}


def test_an_expert_that_nobody_owns_is_zero(lora: Lora | None) -> None:
    found, _ = run(toy(lora), inputs(), OWNER)
    for value in found.values():
        assert len(value) == EXPERTS
        assert not value[2].any()
        assert value[1].any()


def test_no_row_at_all_gives_zeros_of_every_shape(lora: Lora | None) -> None:
    model = toy(lora)
    with engine_of(model) as engine:
        found = engine.take()
    assert {name: value.shape for name, value in found.items()} == {
        name: value.shape for name, value in attached(model).trained().items()
    }
    assert not any(value.any() for value in found.values())


def test_a_record_more_changes_nothing_but_values(lora: Lora | None) -> None:
    model = toy(lora)
    kinds = []
    for rows in (0, 1, ROWS - 1, ROWS):
        with engine_of(model) as engine:
            engine.expect(rows, OWNER[:rows])
            if rows:
                engine.add(losses(model, inputs()[:rows]), torch.arange(rows), rows, Clipping("flat", 0.1))
            kinds.append([(name, v.shape, v.dtype, v.stride()) for name, v in engine.take().items()])
    assert all(kind == kinds[0] for kind in kinds)


def test_a_user_is_the_mean_of_its_rows_over_several_owners(lora: Lora | None) -> None:
    unit = torch.tensor([1, 0, 0, 1, 1, 2])
    model = toy(lora)
    rows = reference(model, inputs(), lora, OWNER)
    members = ([1, 2], [0, 3, 4], [5])
    units = [added([{n: v / len(own) for n, v in rows[row].items()} for row in own]) for own in members]
    norms = [norm(value) for value in units]
    bound = sorted(norms)[1]
    found, measured = run(model, inputs(), OWNER, Clipping("flat", bound), unit)
    assert measured.tolist() == pytest.approx(norms, rel=1e-9)
    close(found, added(units, lambda number: min(1.0, bound / norms[number])))


def test_residual_weights_come_before_clipping_and_carry_no_gradient(lora: Lora | None) -> None:
    model = toy(lora)
    weights = residual_weights(model(inputs()), LABELS)
    truth = reference(model, inputs(), lora, OWNER)
    norms = [norm(record) * float(weights[row]) for row, record in enumerate(truth)]
    bound = sorted(norms)[2]
    found, measured = run(model, inputs(), OWNER, Clipping("flat", bound), weights=weights)
    assert measured.tolist() == pytest.approx(norms, rel=1e-9)
    close(found, added(truth, lambda row: float(weights[row]) * min(1.0, bound / norms[row])))


def test_residual_weight_is_what_the_model_still_gets_wrong() -> None:
    logits = torch.tensor([[0.0, 0.0], [40.0, 0.0], [0.0, 40.0]], requires_grad=True)
    weights = residual_weights(logits, torch.tensor([0, 0, 0]))
    assert not weights.requires_grad
    assert weights.tolist() == pytest.approx([0.5, 4.248354255291589e-18, 1.0])
    assert residual_weights(logits, torch.tensor([0, 0, 0]), power=2.0)[0] == pytest.approx(0.25)
    assert residual_weights(logits, torch.tensor([0, 0, 0]), power=0.0).tolist() == [1, 1, 1]


def test_a_row_s_mean_is_of_its_own_draws() -> None:
    memory = torch.full((4,), math.nan)
    first = remembered(memory, torch.tensor([2, 0]), torch.tensor([0.8, 0.5]), keep=0.75)
    assert first.tolist() == pytest.approx([0.8, 0.5])  # begins with its first weight
    second = remembered(memory, torch.tensor([2, 3]), torch.tensor([0.4, 0.1]), keep=0.75)
    assert second.tolist() == pytest.approx([0.75 * 0.8 + 0.25 * 0.4, 0.1])
    assert memory.tolist() == pytest.approx([0.5, math.nan, 0.7, 0.1], nan_ok=True)
    spoilt = remembered(memory, torch.tensor([0, 3]), torch.tensor([math.nan, 0.3]), keep=0.75)
    assert spoilt.tolist() == pytest.approx([math.nan, 0.15], nan_ok=True)
    assert memory[2] == pytest.approx(0.7)


def test_micro_batches_add_up(lora: Lora | None) -> None:
    model = toy(lora)
    clipping = Clipping("normalised", 0.5)
    whole, _ = run(model, inputs(), OWNER, clipping)
    with engine_of(model) as engine:
        for part in (torch.tensor([0, 1]), torch.tensor([2, 3, 4, 5])):
            engine.expect(len(part), OWNER[part])
            value = functional.cross_entropy(model(inputs()[part]), LABELS[part], reduction="none")
            engine.add(value, torch.arange(len(part)), len(part), clipping)
        close(engine.take(), whole)
        assert not any(value.any() for value in engine.take().values())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
def test_a_bad_record_adds_exactly_nothing(lora: Lora | None, bad: float) -> None:
    model = toy(lora)
    x = inputs()
    x[1, 3] = bad
    kept = torch.tensor([0, 2, 3, 4, 5])
    with engine_of(model) as engine:
        engine.expect(len(kept), OWNER[kept])
        value = functional.cross_entropy(model(x[kept]), LABELS[kept], reduction="none")
        engine.add(value, torch.arange(5), 5, Clipping("flat", 0.1))
        truth = engine.take()
    found, norms = run(model, x, OWNER, Clipping("flat", 0.1))
    if not norms[1].isfinite():
        close(found, truth)
    assert all(bool(value.isfinite().all()) for value in found.values())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    log_scale=st.floats(-12, 12),
    log_bound=st.floats(-6, 3),
    rule=st.sampled_from(["flat", "normalised"]),
    low_rank=st.booleans(),
    everyone=st.booleans(),
    cancel=st.booleans(),
)
def test_a_clipped_contribution_never_exceeds_the_bound(
    seed: int, log_scale: float, log_bound: float, rule: Any, low_rank: bool, everyone: bool, cancel: bool
) -> None:
    torch.manual_seed(seed)
    model = put(Toy().to(torch.float32), Lora(2, 4.0) if low_rank else None)
    x = torch.randn(1, LENGTH, WIDTH) * 10.0**log_scale
    if cancel:  # neighbouring tokens that nearly undo each other
        x[:, 1::2] = -x[:, ::2] * (1 + 1e-6)
    clipping = Clipping(rule, 10.0**log_bound)
    owner = None if everyone else torch.tensor([seed % EXPERTS])
    found, _ = run(model, x, owner, clipping)
    assert norm(found) <= clipping.bound


def test_padding_that_is_masked_adds_nothing(lora: Lora | None) -> None:
    model = toy(lora)
    mask = torch.ones(ROWS, LENGTH)
    mask[:, -2:] = 0
    with engine_of(model) as engine:
        engine.expect(ROWS, OWNER, mask)
        value = losses(model, inputs())
        engine.add(value, torch.arange(ROWS), ROWS, UNCLIPPED)
        masked = engine.take()
        # The same loss, of a forward pass through whose last tokens no gradient flows.
        engine.expect(ROWS, OWNER)
        value = losses(model, inputs())
        watch = attached(model).watch
        assert watch is not None
        assert watch.output is not None
        watch.output.register_hook(lambda g: (g.view(ROWS, LENGTH, WIDTH) * mask[..., None]).view_as(g))
        engine.add(value, torch.arange(ROWS), ROWS, UNCLIPPED)
        close(engine.take(), masked)


def test_a_batch_whose_owners_saw_no_token_is_zero(lora: Lora | None) -> None:
    model = toy(lora)
    with engine_of(model) as engine:
        engine.expect(ROWS, OWNER, torch.zeros(ROWS, LENGTH))
        norms = engine.add(losses(model, inputs()), torch.arange(ROWS), ROWS, UNCLIPPED)
        assert norms.tolist() == [0.0] * ROWS
        assert not any(value.any() for value in engine.take().values())


def test_half_precision_weights_are_summed_in_float32(lora: Lora | None) -> None:
    model = toy(lora).to(torch.bfloat16)
    found, norms = run(model, inputs(torch.bfloat16), OWNER, Clipping("flat", 0.1))
    assert {value.dtype for value in found.values()} == {torch.float32}
    truth, exact = run(toy(lora), inputs(), OWNER, Clipping("flat", 0.1))
    assert norms.tolist() == pytest.approx(exact.tolist(), rel=0.1)
    assert all(found[name].shape == truth[name].shape for name in truth)


def test_the_model_is_left_as_it_was(lora: Lora | None) -> None:
    model = toy(lora)
    model.head.requires_grad_(False)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    run(model, inputs(), OWNER)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert all(p.grad is None for p in model.parameters())
    assert attached(model).watch is None


def test_gradients_also_flow_below_when_asked(lora: Lora | None) -> None:
    model = toy(lora)
    x = inputs().requires_grad_()
    plain = reference(model, inputs(), lora, None)
    values = torch.autograd.grad(losses(model, x).sum(), [x, *attached(model).trained().values()])
    assert values[0].abs().max() > 0
    close(dict(zip(attached(model).trained(), values[1:], strict=True)), added(plain))


def test_refusals() -> None:
    model = toy(None)
    experts = attached(model)
    with pytest.raises(ModelError, match="nothing to train"):
        ExpertEngine(model, experts, {})
    with pytest.raises(ModelError, match="'router' is no trained parameter"):
        ExpertEngine(model, experts, {"router": model.router.weight})
    with pytest.raises(ModelError, match="not attached"):
        ExpertEngine(Toy().to(torch.float64), experts, experts.trained())
    low = toy(Lora(2, 4.0))
    with pytest.raises(ModelError, match="no trained parameter"):
        ExpertEngine(low, attached(low), {"up_proj": attached(low).get_parameter("up_proj")})

    engine = engine_of(model)
    with pytest.raises(ModelError, match="with engine"):
        engine.expect(ROWS)
    with engine:
        with pytest.raises(ModelError, match="active already"), engine:
            pass
        with pytest.raises(ModelError, match="between 0 and 4"):
            engine.expect(2, torch.tensor([0, 5]))
        with pytest.raises(ModelError, match="one owner per row"):
            engine.expect(2, torch.tensor([0]))
        value = losses(model, inputs())
        with pytest.raises(ModelError, match="must come before"):
            engine.add(value, torch.arange(ROWS), ROWS, UNCLIPPED)
        engine.expect(ROWS, OWNER)
        with pytest.raises(ModelError, match="don't depend"):
            engine.add(torch.zeros(ROWS), torch.arange(ROWS), ROWS, UNCLIPPED)
        engine.expect(5, OWNER[:5])
        with pytest.raises(ModelError, match="48 tokens in a batch of 5 rows"):
            model(inputs())
        engine.expect(ROWS, OWNER, torch.ones(ROWS, 3))
        with pytest.raises(ModelError, match="mask has shape"):
            model(inputs())
        engine.expect(ROWS, OWNER)
        model(inputs())
        with pytest.raises(ModelError, match="called twice"):
            model(inputs())
        with pytest.raises(ModelError, match="one loss and one unit per row"):
            engine.add(value, torch.arange(2), 2, UNCLIPPED)
        with pytest.raises(ModelError, match="between 0 and 0"):
            engine.add(value, torch.arange(ROWS), 1, UNCLIPPED)


def test_a_parameter_with_a_second_use_is_refused() -> None:
    model = toy(None)
    model.head.second = attached(model).up_proj
    with pytest.raises(ModelError, match="is used by head too"):
        engine_of(model)


def test_a_loss_that_reads_other_rows_is_refused() -> None:
    model = toy(None)
    with engine_of(model) as engine:
        engine.expect(ROWS, OWNER)
        value = losses(model, inputs())
        with pytest.raises(ModelError, match="depends on other rows"):
            engine.add(value + value.mean(), torch.arange(ROWS), ROWS, UNCLIPPED)


def test_reduced_precision_is_refused() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(ModelError, match="reduced precision"), engine_of(toy(None)):
            pass
    finally:
        torch.set_float32_matmul_precision("highest")
