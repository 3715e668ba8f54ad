"""The engine on MiniLM itself, against autograd on one record at a time."""

from __future__ import annotations

import math

import pytest
import torch
from tests.gradients.conftest import (
    LABELS,
    bert_losses,
    difference,
    load_minilm,
    norm_of,
    reference_gradients,
)
from torch import Tensor, nn

from confide.gradients.engine import Engine
from confide.privacy.streams import Clipping

UNCLIPPED = Clipping("flat", 1e9)


def with_lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="SEQ_CLS", r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["query", "value"]
    )
    adapted: nn.Module = get_peft_model(model, config)  # type: ignore[arg-type]
    torch.manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zero at first, which would hide the gradient of lora_A
            parameter.data.normal_(std=0.05)
    return adapted.eval()


@pytest.fixture(scope="module", params=["full", "lora"])
def trained(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def case(trained: str, dtype: torch.dtype) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    model = load_minilm(dtype)
    if trained == "lora":
        model = with_lora(model).to(dtype)
    return model, {name: p for name, p in model.named_parameters() if p.requires_grad}


def run(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    batch: dict[str, Tensor],
    clipping: Clipping,
    parts: list[list[int]],
) -> tuple[Tensor, dict[str, Tensor]]:
    engine = Engine(model, parameters)
    losses = bert_losses(model, LABELS)
    norms = []
    with engine:
        for rows in parts:
            norms.append(engine.add(losses(batch, rows), torch.arange(len(rows)), len(rows), clipping))
    return torch.cat(norms), engine.take()


def test_norms_and_sums_equal_autograd_one_record_at_a_time(
    case: tuple[nn.Module, dict[str, nn.Parameter]], batch: dict[str, Tensor], dtype: torch.dtype
) -> None:
    model, parameters = case
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    norms, plain = run(model, parameters, batch, UNCLIPPED, [[0, 1, 2, 3]])
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert all(p.grad is None for p in model.parameters())
    bound = float(norms.median())
    _, clipped = run(model, parameters, batch, Clipping("flat", bound), [[0, 1], [2, 3]])
    _, automatic = run(model, parameters, batch, Clipping("normalised", 0.5, 0.01), [[0, 1, 2, 3]])

    losses = bert_losses(model, LABELS)
    expected = {
        kind: {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
        for kind in ("plain", "clipped", "automatic")
    }
    for row, gradient in enumerate(
        reference_gradients(parameters, lambda row: losses(batch, [row]), range(4))
    ):
        norm = norm_of(gradient)
        assert float(norms[row]) == pytest.approx(norm, rel=tolerance)
        for name, value in gradient.items():
            expected["plain"][name] += value
            expected["clipped"][name] += min(1.0, bound / norm) * value
            expected["automatic"][name] += 0.5 / (norm + 0.01) * value
    assert difference(plain, expected["plain"]) < tolerance
    # The rounding guard shortens clipped float32 gradients by a few parts in ten thousand.
    guarded = 1e-9 if dtype == torch.float64 else 5e-4
    assert difference(clipped, expected["clipped"]) < guarded
    assert difference(automatic, expected["automatic"]) < guarded
    assert all(value.dtype == dtype for value in plain.values())


def test_a_lone_clipped_record_comes_out_just_below_the_bound(
    case: tuple[nn.Module, dict[str, nn.Parameter]], batch: dict[str, Tensor]
) -> None:
    model, parameters = case
    for row in (1, 3):
        norms, plain = run(model, parameters, batch, UNCLIPPED, [[row]])
        for rule in ("flat", "normalised"):
            bound = float(norms) / 7
            _, sums = run(model, parameters, batch, Clipping(rule, bound, 1e-9), [[row]])  # type: ignore[arg-type]
            length, ratio = norm_of(sums), norm_of(sums) / norm_of(plain)
            assert bound * (1 - 1e-3) < length <= bound
            scaled = {name: value.double() * ratio for name, value in plain.items()}
            assert difference(sums, scaled) < 1e-5


def test_micro_batches_add_up_to_the_batch(
    case: tuple[nn.Module, dict[str, nn.Parameter]], batch: dict[str, Tensor], dtype: torch.dtype
) -> None:
    model, parameters = case
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    clipping = Clipping("flat", 2.0)
    norms, whole = run(model, parameters, batch, clipping, [[0, 1, 2, 3]])
    norms_apart, apart = run(model, parameters, batch, clipping, [[0], [1, 2], [3]])
    assert torch.allclose(norms, norms_apart, rtol=tolerance)
    assert difference(apart, whole) < tolerance


def test_eager_and_sdpa_attention_agree(batch: dict[str, Tensor]) -> None:
    model = load_minilm(torch.float64)
    parameters = dict(model.named_parameters())
    norms, sums = run(model, parameters, batch, Clipping("flat", 1.0), [[0, 1, 2, 3]])
    model.set_attn_implementation("eager")  # type: ignore[operator]
    norms_eager, sums_eager = run(model, parameters, batch, Clipping("flat", 1.0), [[0, 1, 2, 3]])
    assert torch.allclose(norms, norms_eager, rtol=1e-10)
    assert difference(sums_eager, sums) < 1e-10


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_bad_record_costs_only_itself(batch: dict[str, Tensor], poison: float) -> None:
    model = load_minilm(torch.float32)
    parameters = dict(model.named_parameters())
    clipping = Clipping("flat", 1.0)
    embeddings = model.get_input_embeddings()(batch["input_ids"]).detach()  # type: ignore[operator]
    trained = {n: p for n, p in parameters.items() if "word_embeddings" not in n}

    def total(rows: list[int], spoil: int | None) -> tuple[Tensor, dict[str, Tensor]]:
        engine = Engine(model, trained)
        values = embeddings.clone()
        if spoil is not None:
            values[spoil, 1, 7] = poison
        with engine:
            logits = model(inputs_embeds=values[rows], attention_mask=batch["attention_mask"][rows]).logits
            losses = nn.functional.cross_entropy(logits, LABELS[rows], reduction="none")
            norms = engine.add(losses, torch.arange(len(rows)), len(rows), clipping)
        return norms, engine.take()

    norms, poisoned = total([0, 1, 2, 3], 1)
    _, without = total([0, 2, 3], None)
    assert not bool(norms[1].isfinite())
    assert all(bool(value.isfinite().all()) for value in poisoned.values())
    assert difference(poisoned, without) < 1e-5


def test_an_empty_draw_gives_zeros_and_take_starts_again(batch: dict[str, Tensor]) -> None:
    model = load_minilm(torch.float32)
    parameters = {name: p for name, p in model.named_parameters() if "classifier" in name}
    engine = Engine(model, parameters)
    empty = engine.take()
    assert {name: value.shape for name, value in empty.items()} == {n: p.shape for n, p in parameters.items()}
    assert all(not value.any() and value.dtype == torch.float32 for value in empty.values())
    with engine:
        engine.add(bert_losses(model, LABELS)(batch, [0]), torch.arange(1), 1, UNCLIPPED)
    assert norm_of(engine.take()) > 0
    assert norm_of(engine.take()) == 0
