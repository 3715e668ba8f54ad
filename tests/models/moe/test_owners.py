from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.moe.families import FAMILIES, batch, build
from torch import Tensor, nn

from confide.errors import ModelError
from confide.models.moe.harden import harden
from confide.models.moe.layers import SparseLayer, sparse_layers
from confide.models.moe.owners import owner_maps, votes, winners
from confide.models.moe.routing import Routing, routings

LENGTHS = [5, 9, 3, 7]
THREE = SparseLayer("block", 0, nn.Module(), nn.Linear(1, 1), "fused", 3, 2)


def by_hand(model: nn.Module, layer: SparseLayer, inputs: dict[str, Tensor]) -> np.ndarray[Any, Any]:
    """Owners from the router's logits of each row alone, by the paper's sum written out."""
    found = []
    for row, length in enumerate(LENGTHS):
        seen: list[Any] = []
        handle = layer.router.register_forward_hook(lambda m, a, out, seen=seen: seen.append(out))
        with torch.no_grad():
            model(**{name: value[row : row + 1, :length] for name, value in inputs.items()})
        handle.remove()
        total = np.zeros(layer.experts)
        if layer.kind == "listed":
            for choice, weight in zip(seen[0][0][0], seen[0][1][0], strict=True):
                total += choice.numpy() * float(weight) / float(weight)
        elif layer.kind == "scaled":
            for score in seen[0][0]:
                total += score.numpy() / float(score.sum())
        else:
            _, weights, experts = seen[0]
            for weight, expert in zip(weights, experts, strict=True):
                total[expert.numpy()] += weight.numpy() / float(weight.sum())
        found.append(int(total.argmax()))
    return np.array(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_owners_are_the_papers_plurality(family: str) -> None:
    model = build(family, torch.float32)
    harden(model, max_length=16)
    layers = sparse_layers(model)
    inputs = batch(LENGTHS)
    halves = [
        (np.array([2, 0]), {name: value[[2, 0]] for name, value in inputs.items()}),
        (np.array([1, 3]), {name: value[[1, 3]] for name, value in inputs.items()}),
    ]
    found = owner_maps(layers, lambda b: model(**b), halves, 4)
    for layer in layers:
        assert found[layer.name].tolist() == by_hand(model, layer, inputs).tolist()


def test_padding_does_not_vote_and_gates_are_normalised() -> None:
    expert = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0]])
    weight = torch.tensor([[0.3, 0.1], [0.2, 0.2], [9.0, 1.0], [0.5, 0.5]])
    routing = Routing(expert, weight)
    mask = torch.tensor([[1, 1], [0, 1]])
    cast = votes(routing, mask, THREE)
    assert cast.numpy() == pytest.approx(np.array([[0.75, 0.75, 0.5], [0.5, 0.5, 0.0]]))
    assert winners(cast).tolist() == [0, 0]  # ties go to the lowest
    first = votes(routing, mask, THREE, "majority")
    assert first.tolist() == [[1, 1, 0], [0, 1, 0]]


def test_a_token_without_expert_or_with_weight_zero_does_not_vote() -> None:
    routing = Routing(torch.tensor([[3], [1], [2], [3]]), torch.tensor([[0.5], [0.0], [0.1], [0.2]]))
    assert votes(routing, torch.ones(2, 2), THREE).tolist() == [[0, 0, 0], [0, 0, 1]]
    assert winners(votes(routing, torch.ones(2, 2), THREE)).tolist() == [0, 2]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(2, 40))
def test_votes_do_not_depend_on_the_order_of_tokens_nor_on_padding(seed: int, rows: int, length: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    expert = torch.rand(rows * length, 3, generator=generator).argsort(1)[:, :2]
    weight = torch.rand(rows * length, 2, generator=generator)
    mask = (torch.rand(rows, length, generator=generator) < 0.7).long()
    cast = votes(Routing(expert, weight), mask, THREE)
    order = torch.randperm(length, generator=generator)
    at = (torch.arange(rows)[:, None] * length + order).flatten()
    assert torch.equal(votes(Routing(expert[at], weight[at]), mask[:, order], THREE), cast)
    assert cast.sum(1).tolist() == pytest.approx(mask.sum(1).tolist(), abs=1e-4)


def test_tokens_that_are_not_the_batchs_are_refused() -> None:
    with pytest.raises(ModelError, match="saw 3 tokens in a batch of 2 × 2"):
        votes(Routing(torch.zeros(3, 1).long(), torch.ones(3, 1)), torch.ones(2, 2), THREE)


def test_a_record_in_no_batch_or_a_model_that_skips_the_layer_is_refused() -> None:
    model = build("Mixtral")
    layers = sparse_layers(model)
    inputs = batch(LENGTHS)
    with pytest.raises(ModelError, match=r"1 record\(s\) were in no batch"):
        owner_maps(layers, lambda b: model(**b), [(np.arange(4), inputs)], 5)
    with pytest.raises(ModelError, match="did not call the experts of"):
        owner_maps(layers, lambda b: None, [(np.arange(4), inputs)], 4)


def test_the_watch_is_gone_after_the_block() -> None:
    model = build("Llama-4")
    layers = sparse_layers(model)
    with routings(layers) as seen:
        pass
    model(**batch(LENGTHS))
    assert not seen
