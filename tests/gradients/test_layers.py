"""Every kind of layer and every odd use of a weight, against autograd on one record at a time."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gradients.conftest import bert_losses, difference, norm_of, reference_gradients, tiny_bert
from tests.gradients.families import FAMILIES
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from confide.errors import ModelError
from confide.gradients.engine import Engine
from confide.privacy.streams import Clipping

Loss = Callable[[nn.Module, Tensor], Tensor]


def sum_of_squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1)


def check(
    model: nn.Module,
    x: Tensor,
    loss: Loss = sum_of_squares,
    unit_of_row: Sequence[int] = (0, 1, 0, 2),
    tolerance: float = 1e-9,
) -> Engine:
    """Norms and clipped sums of units equal those of records alone."""
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    unit_of_row = [*unit_of_row, *range(max(unit_of_row) + 1, len(x))][: len(x)]
    gradients = list(reference_gradients(parameters, lambda row: loss(model, x[[row]]), range(len(x))))
    means = [
        {
            name: torch.stack(
                [g[name] for g, of in zip(gradients, unit_of_row, strict=True) if of == unit]
            ).mean(0)
            for name in parameters
        }
        for unit in range(max(unit_of_row) + 1)
    ]
    norms = [norm_of(mean) for mean in means]
    bound = sorted(norms)[len(norms) // 2]
    expected = {
        name: torch.stack([min(1.0, bound / n) * m[name] for n, m in zip(norms, means, strict=True)]).sum(0)
        for name in parameters
    }
    engine = Engine(model, parameters)
    for _ in range(2):  # the second time, the plan is there already
        with engine:
            found = engine.add(loss(model, x), torch.tensor(unit_of_row), len(norms), Clipping("flat", bound))
        assert found.tolist() == pytest.approx(norms, rel=tolerance)
        assert difference(engine.take(), expected) < tolerance
    return engine


def recomputed(engine: Engine) -> set[str]:
    return {str(site) for site in engine.sites if site.rule is None}


@pytest.fixture(autouse=True)
def _float64() -> object:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


class Scaled(nn.Linear):
    """A subclass that does not compute what its parent does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh() * 3 + self.weight.sum()


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Norm(nn.Module):
    """RMSNorm as models write it, with 1 + w."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


class Branching(nn.Module):
    """Control flow on values, which torch.func can't follow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row * self.weight if float(row.sum()) > 0 else row - self.weight for row in x])


def replaced(layer: nn.Linear) -> nn.Module:
    layer.forward = lambda x: functional.linear(x, layer.weight) ** 2  # type: ignore[method-assign]
    return layer


def frozen_statistics() -> nn.Module:
    layer = nn.BatchNorm1d(6)
    layer(torch.randn(30, 6))
    return layer.eval()


TEXT, IMAGE, SIGNAL = (4, 5, 6), (4, 6, 7, 8), (4, 6, 9)


@pytest.mark.parametrize(
    ("layer", "shape", "ruled"),
    [
        (lambda: nn.Linear(6, 3), TEXT, True),
        (lambda: nn.Linear(6, 3, bias=False), (4, 6), True),
        (lambda: nn.LayerNorm((5, 6)), TEXT, True),
        (lambda: nn.LayerNorm(6, bias=False), TEXT, True),
        (lambda: nn.GroupNorm(2, 6), IMAGE, True),
        (lambda: nn.GroupNorm(3, 6), (4, 6), True),
        (lambda: nn.RMSNorm(6), TEXT, False),
        (lambda: Norm(6), TEXT, False),
        (lambda: nn.Conv2d(6, 4, 2, stride=2), IMAGE, True),
        (lambda: nn.Conv2d(6, 4, (3, 2), stride=(1, 2), padding=(1, 0), bias=False), IMAGE, True),
        (lambda: nn.Conv2d(6, 12, 3, padding=1, groups=6), IMAGE, True),
        (lambda: nn.Conv2d(6, 4, 2, dilation=(2, 3), groups=2), IMAGE, True),
        (lambda: nn.Conv2d(6, 4, 3, padding="same"), IMAGE, False),
        (lambda: nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"), IMAGE, False),
        (lambda: nn.Conv1d(6, 4, 3, stride=2, padding=1, dilation=2), SIGNAL, True),
        (lambda: nn.Conv1d(6, 6, 3, groups=3), SIGNAL, True),
        (lambda: nn.ConvTranspose1d(6, 4, 3), SIGNAL, False),
        (lambda: nn.PReLU(6), (4, 6), False),
        (lambda: nn.InstanceNorm1d(6, affine=True), SIGNAL, False),
        (frozen_statistics, (4, 6), False),
        (lambda: Scaled(6, 3), TEXT, False),
        (lambda: Scale(6), TEXT, True),
        (lambda: Branching(6), (4, 6), False),
        (lambda: replaced(nn.Linear(6, 3)), TEXT, False),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), TEXT, False),
        (lambda: nn.MultiheadAttention(6, 2), TEXT, None),
        (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True).eval(), TEXT, None),
        (lambda: nn.GRU(6, 3, batch_first=True), TEXT, None),
    ],
)
def test_a_layer_of_any_kind_is_exact(
    layer: Callable[[], nn.Module], shape: tuple[int, ...], ruled: bool | None
) -> None:
    made = layer()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = made

        def forward(self, x: Tensor) -> Tensor:
            if isinstance(made, nn.MultiheadAttention):
                return made(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))[0].transpose(0, 1)
            output = made(x)
            output = output[0] if isinstance(output, tuple) else output
            output += 1  # in place, as residuals often are
            return output

    engine = check(Model(), torch.randn(shape))
    if ruled is not None:
        assert bool(recomputed(engine)) is not ruled


def test_views_that_are_changed_in_place_keep_their_gradient() -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.conv, self.scale = nn.Linear(6, 6), Conv1D(6, 6), Scale(6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            y = self.conv(x)
            y += x
            z = self.scale(y)
            z *= y
            return z

    check(Viewed(), torch.randn(4, 5, 6))


def test_two_inputs_and_a_layer_that_gets_no_gradient() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Bilinear(3, 3, 4)
            self.unused = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.unused(x[:, :3])
            return self.mix(x[:, :3], x[:, 3:])

    model = Model()
    engine = Engine(model, dict(model.named_parameters()))
    x = torch.randn(3, 6)
    with engine:
        norms = engine.add(sum_of_squares(model, x), torch.arange(3), 3, Clipping("flat", 1e9))
    for row in range(3):
        grads = torch.autograd.grad(sum_of_squares(model, x[[row]]).sum(), list(model.mix.parameters()))
        assert float(norms[row]) == pytest.approx(math.sqrt(sum(float(g.square().sum()) for g in grads)))
    assert not bool(engine.take()["unused.weight"].any())


class Positions(nn.Module):
    """A class token, positions shared by all rows, a table of token types, and a scale: all bare."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.places = nn.Parameter(torch.randn(6, 4))
        self.patch = nn.Linear(3, 4)
        self.shared = nn.Embedding(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.patch(x)], 1)
        return (x + self.places[: x.shape[1]] + self.shared(torch.arange(x.shape[1])[None])).tanh()


def test_bare_parameters_and_positions_shared_by_all_rows() -> None:
    engine = check(Positions(), torch.randn(4, 5, 3))
    assert recomputed(engine) == {"the model (Positions)"}
    assert {site.path for site in engine.sites} == {"", "patch", "shared"}


class RelativeBias(nn.Module):
    """A table looked up per pair of positions, as in T5: (S, S) indices whatever the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.bias = nn.Embedding(9, 1)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        return self.inner(x) * self.bias((place[:, None] - place[None]).abs())[..., 0].sum(1)[None, :, None]


@pytest.mark.parametrize("length", [3, 4, 5])
def test_a_relative_bias_is_exact_even_where_length_and_batch_size_agree(length: int) -> None:
    engine = check(RelativeBias(), torch.randn(4, length, 3))
    assert recomputed(engine) == {"the model (RelativeBias)"}


class Tokens(nn.Module):
    """Calls its layers on (B·S, H) rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.scale = nn.Linear(3, 2), nn.LayerNorm(2), Norm(2)
        self.table = nn.Embedding(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[..., 0] > 0).long().flatten()
        y = self.scale(self.norm(self.layer(x.flatten(0, 1)) + self.table(ids)))
        return y.view(*x.shape[:2], 2).tanh()


@pytest.mark.parametrize("length", [1, 4, 5])
def test_rows_of_flattened_tokens_know_their_record(length: int) -> None:
    assert recomputed(check(Tokens(), torch.randn(4, length, 3))) == {"scale (Norm)"}


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1).tanh()


@pytest.mark.parametrize("length", [1, 4, 5])
def test_a_layer_whose_first_dimension_is_time_is_taken_further_out(length: int) -> None:
    assert recomputed(check(SequenceFirst(), torch.randn(4, length, 3))) == {"the model (SequenceFirst)"}


def test_tokens_flattened_position_by_position_are_refused_when_there_are_several() -> None:
    class PositionFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            flat = self.layer(x.transpose(0, 1).flatten(0, 1))
            return flat.view(x.shape[1], x.shape[0], 2).transpose(0, 1)

    model = PositionFirst()
    engine = check(model, torch.randn(4, 1, 3))
    with pytest.raises(ModelError, match=r"depends on other rows at layer \(Linear\)"), engine:
        engine.add(sum_of_squares(model, torch.randn(4, 3, 3)), torch.arange(4), 4, Clipping("flat", 1.0))


class Experts(nn.Module):
    """Each expert sees the tokens that chose it, as many as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(3, 2)
        self.experts = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights = self.router(flat).softmax(1)
        output = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (chosen,) = torch.where(weights.argmax(1) == number)
            output = output.index_add(0, chosen, expert(flat[chosen]) * weights[chosen, number, None])
        return output.view_as(x)


def test_experts_are_not_mistaken_for_rows() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 3), Experts(), nn.Linear(3, 2))
    for length in (1, 2, 3):  # an expert that gets as many tokens as there are rows
        engine = check(model, torch.randn(4, length, 3))
        assert recomputed(engine) == {"1 (Experts)"}


def test_experts_inside_what_is_run_again() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.bias = Experts(), nn.Embedding(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            shared = self.bias(torch.arange(x.shape[1]))
            return self.experts(x + shared)

    assert recomputed(check(Outer(), torch.randn(4, 3, 3))) == {"the model (Outer)", "experts (Experts)"}


@pytest.mark.parametrize("method", ["dora", "ia3", "embedding", "convolution", "bias", "only B"])
def test_adapters_of_peft(method: str) -> None:
    from peft import IA3Config, LoraConfig, inject_adapter_in_model

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.conv = nn.Embedding(9, 4), nn.Conv2d(1, 3, 2, padding=1)
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.second(self.first(self.table(ids)).tanh())
            return self.conv(x[:, None])

    config = {
        "dora": LoraConfig(r=2, target_modules=["first", "second"], use_dora=True),
        "ia3": IA3Config(target_modules=["first", "second"], feedforward_modules=["second"]),
        "embedding": LoraConfig(r=2, target_modules=["table"]),
        "convolution": LoraConfig(r=2, target_modules=["conv"]),
        "bias": LoraConfig(r=2, target_modules=["first"], bias="all"),
        "only B": LoraConfig(r=2, target_modules=["first", "second"]),
    }[method]
    model = inject_adapter_in_model(config, Small()).double().eval()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn_like(parameter)
        if method == "only B" and "lora_A" in name:
            parameter.requires_grad_(False)
    check(model, torch.randint(0, 9, (4, 5)))


@pytest.mark.parametrize("width", [3, 30])
def test_a_layer_called_again_counts_the_products_of_its_calls(width: int) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.norm(self.block(x)).tanh()
            return x

    check(Again(), torch.randn(4, 2, width))


class Tied(nn.Module):
    """Embedding and output head share their table; ids are shared by all uses."""

    def __init__(self, size: int, width: int, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(size, width, padding_idx=padding)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, size, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.table(ids)).tanh())


@pytest.mark.parametrize(("size", "width"), [(5, 3), (60, 50)])
@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("unit_of_row", [(0, 1, 2, 3), (0, 1, 0, 1)])
def test_a_tied_head_counts_the_products_with_its_embedding(
    size: int, width: int, padding: int | None, unit_of_row: tuple[int, ...]
) -> None:
    ids = torch.randint(0, 5, (4, 6))
    ids[:, 4:] = 0
    check(Tied(size, width, padding), ids, unit_of_row=unit_of_row)


def test_a_weight_used_beside_its_module_and_through_no_module() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(self.second(self.first(x)), self.first.weight)

    engine = check(Beside(), torch.randn(4, 3))
    assert recomputed(engine) == {"the model (Beside)"}


def test_an_embedding_that_scales_what_it_looked_up_needs_no_table_per_row() -> None:
    class Larger(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 7

    class Odd(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * self.weight.mean()

    for kind, again in ((Larger, set()), (Odd, {"0 (Odd)"})):
        model = nn.Sequential(kind(9, 4, padding_idx=0), nn.Linear(4, 4))
        assert recomputed(check(model, torch.randint(0, 9, (4, 5)))) == again


def test_a_use_that_the_first_pass_did_not_have_is_refused() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.beside = nn.Linear(3, 3), False

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return functional.linear(y, self.layer.weight) if self.beside else y

    model = Changing()
    engine = check(model, torch.randn(4, 3))
    model.beside = True
    with pytest.raises(ModelError, match=r"'layer\.weight' is used where it was not"), engine:
        engine.add(sum_of_squares(model, torch.randn(4, 3)), torch.arange(4), 4, Clipping("flat", 1.0))


def test_what_mixes_rows_or_remembers_is_refused_by_name() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(0).detach()) * self.weight

    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.calls = nn.Parameter(torch.ones(3)), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.weight * self.calls

    for kind in (Mixing, Remembering):
        model = nn.Sequential(kind(), nn.Linear(3, 1))
        engine = Engine(model, dict(model.named_parameters()))
        with pytest.raises(ModelError, match=rf"0 \({kind.__name__}\) computes something else"), engine:
            engine.add(sum_of_squares(model, torch.randn(4, 3)), torch.arange(4), 4, Clipping("flat", 1.0))


def test_statistics_of_seen_records_are_refused() -> None:
    model = nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True))
    linear = nn.Linear(2, 2)
    model.append(linear)
    with (
        pytest.raises(ModelError, match=r"0 \(InstanceNorm1d\).*track_running_stats"),
        Engine(model, dict(linear.named_parameters())),
    ):
        pass


def test_gradient_checkpointing_is_exact_and_reentrant_checkpointing_is_refused() -> None:
    class Blocks(nn.Module):
        def __init__(self, reentrant: bool, first: bool) -> None:
            super().__init__()
            self.reentrant, self.first = reentrant, first
            self.lower = nn.Linear(3, 3)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), Norm(3), nn.Tanh()) for _ in range(2))
            self.upper = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.lower(x) if self.first else x
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            return self.upper(x)

    for first in (True, False):
        check(Blocks(False, first), torch.randn(4, 2, 3))
        model = Blocks(True, first)
        with (
            pytest.raises(ModelError, match="use_reentrant=False"),
            Engine(model, dict(model.named_parameters())) as engine,
        ):
            engine.add(sum_of_squares(model, torch.randn(4, 3)), torch.arange(4), 4, Clipping("flat", 1.0))


def test_checkpointed_transformers_give_what_they_give_without() -> None:
    def total(checkpointed: bool) -> tuple[Tensor, dict[str, Tensor]]:
        model = tiny_bert()
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        losses = bert_losses(model, torch.tensor([0, 1, 2]))
        engine = Engine(model, dict(model.named_parameters()))
        ids = torch.randint(1, 40, (3, 6), generator=torch.Generator().manual_seed(0))
        with engine:
            norms = engine.add(
                losses({"input_ids": ids}, range(3)), torch.arange(3), 3, Clipping("flat", 1.0)
            )
        return norms, engine.take()

    norms, sums = total(True)
    expected_norms, expected = total(False)
    assert torch.equal(norms, expected_norms)
    assert difference(sums, expected) < 1e-15


def test_checkpointing_still_saves_memory() -> None:
    """Inputs are held as autograd holds them, so those inside a checkpoint are gone after the forward."""
    seen: list[weakref.ref[Tensor]] = []

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = x.sin()
            seen.append(weakref.ref(y.untyped_storage()))
            return self.layer(y).cos()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lower, self.inner = nn.Linear(3, 3), Inner()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.lower(x), use_reentrant=False)

    model = Outer()
    engine = Engine(model, dict(model.named_parameters()))
    with engine:
        losses = sum_of_squares(model, torch.randn(2, 3))
        assert seen[-1]() is None
        engine.add(losses, torch.arange(2), 2, Clipping("flat", 1.0))


class Maskable(nn.Module):
    """As in MPNet: the layers get no mask where nothing is padded."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.bias = nn.Linear(3, 3), nn.Embedding(9, 1)

        def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
            place = torch.arange(x.shape[1])
            bias = self.bias((place[:, None] - place[None]).abs())[..., 0]
            if mask is not None:
                x = x * mask[..., None]
            return self.layer(torch.einsum("st,bth->bsh", bias, x)).tanh()

    def __init__(self) -> None:
        super().__init__()
        self.inner = Maskable.Inner()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.inner(x, None if bool(mask.all()) else mask) * mask[..., None]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("length", [3, 4, 8])
def test_a_mask_that_is_left_out_where_nothing_is_padded(first: bool, length: int) -> None:
    """Whichever comes first, a batch with padding or one without, and if there is one row only."""
    torch.manual_seed(0)
    model = Maskable().double()
    names = dict(model.named_parameters())
    engine = Engine(model, names)
    padded = torch.ones(4, length, dtype=torch.float64)
    padded[1, 2:], padded[3, 1:] = 0, 0
    whole = torch.ones(4, length, dtype=torch.float64)
    masks = [padded, whole[:1], whole, padded[1:3]] if first else [whole[:1], whole, padded, whole[1:]]
    for mask in masks:
        x = torch.randn(len(mask), length, 3, dtype=torch.float64)
        expected = {name: torch.zeros_like(value) for name, value in names.items()}
        for row in range(len(mask)):
            loss = model(x[[row]], mask[[row]]).square().sum()
            grads = dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))
            factor = min(1.0, 0.3 / norm_of(grads))
            expected = {name: value + factor * grads[name] for name, value in expected.items()}
        with engine:
            losses = model(x, mask).square().sum((1, 2))
            engine.add(losses, torch.arange(len(x)), len(x), Clipping("flat", 0.3))
        assert difference(engine.take(), expected) < 1e-9


RULES = {
    "flat": Clipping("flat", 0.25),
    "normalised": Clipping("normalised", 0.25, 1e-3),
    "per-role": Clipping("per-role", 0.25, shares=(0.3, 0.7)),
    "adaptive": Clipping("adaptive", 0.25, count_noise=1.0),
}


class Spoiled(nn.Module):
    """Every new kind of contribution, fed with rows of any magnitude."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 40)
        self.head = nn.Linear(40, 30, bias=False)
        self.head.weight = self.table.weight
        self.conv, self.depthwise = nn.Conv1d(4, 4, 2), nn.Conv1d(4, 4, 3, groups=4)
        self.norm, self.group, self.scale = Norm(40), nn.GroupNorm(2, 4), Scale(40)
        self.again = nn.Linear(40, 40)

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        ids = torch.arange(4).expand(len(x), 4)
        y = self.scale(self.table(ids) * u) + self.norm(x) + x
        y = self.again(self.again(y) * u)
        y = self.group(y) + functional.pad(self.conv(y), (0, 1)) + functional.pad(self.depthwise(y), (1, 1))
        return (self.head(y) * u).flatten(1).sum(1)


VALUES = st.sampled_from(
    [0.0, 1.0, -1.0, 1e-45, 1e-38, 1e-30, 1e-20, 1e12, 1e19, 1e30, -1e30, 3e38, math.inf, -math.inf, math.nan]
)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.lists(VALUES, min_size=4, max_size=4),
    VALUES,
    st.sampled_from(sorted(RULES)),
    st.booleans(),
)
def test_no_extreme_record_moves_the_sum_further_than_the_bound(
    seed: int, xs: list[float], u: float, rule: str, whole: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed % 7)
    model = Spoiled().float()
    x = torch.randn(1, 4, 40, generator=generator, dtype=torch.float32)
    x = x * torch.tensor(xs, dtype=torch.float32)[None, :, None]
    factor = torch.full((1, 1, 1), u, dtype=torch.float32)
    others = torch.randn(2, 4, 40, generator=generator, dtype=torch.float32)
    ones = torch.ones(2, 1, 1, dtype=torch.float32)
    bound, clipping = 0.25, RULES[rule]
    names = dict(model.named_parameters())
    engine = Engine(model, names, {name: number % 2 for number, name in enumerate(names)})

    def total(x: Tensor, u: Tensor) -> dict[str, Tensor]:
        with engine:
            norms = engine.add(model(x, u), torch.arange(len(x)), len(x), clipping)
        assert norms.dtype == torch.float64
        return engine.take()

    total(others, ones)  # the plan and its checks
    if whole:
        batch = total(x.expand(3, -1, -1).contiguous(), factor.expand(3, -1, -1).contiguous())
        assert norm_of(batch) <= 3 * bound
        return
    alone = total(x, factor)
    assert all(bool(value.isfinite().all()) for value in alone.values())
    assert norm_of(alone) <= bound
    without = total(others, ones)
    together = total(torch.cat([others[:1], x, others[1:]]), torch.cat([ones[:1], factor, ones[1:]]))
    moved = norm_of({name: together[name].double() - without[name].double() for name in without})
    assert moved <= bound * (1 + 1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["T5", "GPT-2", "Llama", "DeBERTa-v3", "ViT", "ConvNeXt"])
def test_a_bad_record_costs_only_itself_in_every_kind_of_model(name: str, poison: float) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    model = family.build()
    engine = Engine(model, dict(model.named_parameters()))

    def total(rows: Sequence[int], spoil: int | None) -> tuple[Tensor, dict[str, Tensor]]:
        with engine:
            losses = family.loss(model, family.batch(rows))
            if spoil is not None:
                factor = torch.ones(len(rows))
                factor[spoil] = poison
                losses = losses * factor
            norms = engine.add(losses, torch.arange(len(rows)), len(rows), Clipping("flat", 0.1))
        return norms, engine.take()

    total([0, 1, 2], None)
    norms, spoiled = total([0, 1, 2], 1)
    _, without = total([0, 2], None)
    assert not bool(norms[1].isfinite())
    assert difference(spoiled, without) < 1e-7
