"""What is trained is what was asked for, and LoRA comes out as plain weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from pydantic import ValidationError

from confide.errors import ConfigError
from confide.models.adapters import Adapted, Trainable, adapt, lora_delta, plain_state
from confide.models.backbones import Classifier, load_classifier

HEAD = {"classifier.weight", "classifier.bias"}
BLOCKS = 3


@pytest.fixture
def classifier(tiny_base: Path) -> Classifier:
    return load_classifier(tiny_base, ("neg", "pos"), seed=0)


def trained(adapted: Adapted) -> set[str]:
    model = adapted.classifier.model
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def in_block(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[parts.index("layer") + 1]) if "layer" in parts else None


def randomise(adapted: Adapted) -> None:
    """Give every trained parameter a value that it hadn't."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in adapted.classifier.model.named_parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
            assert name in {*adapted.encoder, *adapted.head}


def test_head(classifier: Classifier) -> None:
    adapted = adapt(classifier, Trainable(kind="head"), seed=0)
    assert trained(adapted) == HEAD == set(adapted.head)
    assert adapted.encoder == ()
    assert adapted.first_block == BLOCKS


def test_all(classifier: Classifier) -> None:
    everything = {name for name, _ in classifier.model.named_parameters()}
    adapted = adapt(classifier, Trainable(kind="all"), seed=0)
    assert trained(adapted) == everything
    assert set(adapted.encoder) == everything - HEAD
    assert adapted.first_block == 0


@pytest.mark.parametrize(("blocks", "lowest"), [(1, 2), (2, 1), (3, 0), (0, 0)])
def test_blocks(classifier: Classifier, blocks: int, lowest: int) -> None:
    names = {name for name, _ in classifier.model.named_parameters()}
    adapted = adapt(classifier, Trainable(kind="blocks", blocks=blocks), seed=0)
    expected = {name for name in names if (block := in_block(name)) is not None and block >= lowest}
    assert trained(adapted) == expected | HEAD
    assert set(adapted.encoder) == expected
    assert adapted.first_block == lowest


@pytest.mark.parametrize(("blocks", "lowest"), [(1, 2), (2, 1), (0, 0)])
@pytest.mark.parametrize(("train_a", "factors"), [(True, "AB"), (False, "B")])
def test_lora(classifier: Classifier, blocks: int, lowest: int, train_a: bool, factors: str) -> None:
    trainable = Trainable(blocks=blocks, rank=4, train_a=train_a, targets=("query", "dense"))
    adapted = adapt(classifier, trainable, seed=0)
    expected = {
        f"bert.encoder.layer.{block}.{layer}.lora_{factor}.default.weight"
        for block in range(lowest, BLOCKS)
        for layer in ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense")
        for factor in factors
    }
    assert trained(adapted) == expected | HEAD  # the pooler's `dense` is in no block
    assert set(adapted.encoder) == expected
    assert adapted.first_block == lowest
    assert not any(module.training for module in classifier.model.modules())


def test_lora_changes_nothing_at_first_and_its_start_is_the_seeds(tiny_base: Path) -> None:
    ids = torch.tensor([[2, 5, 9, 14, 3]])
    plain = load_classifier(tiny_base, ("neg", "pos"), seed=0)
    before = plain.model(input_ids=ids).logits
    state = torch.random.get_rng_state()
    adapt(plain, Trainable(), seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(plain.model(input_ids=ids).logits, before)
    name = next(name for name, _ in plain.model.named_parameters() if "lora_A" in name)

    def start(seed: int) -> torch.Tensor:
        other = load_classifier(tiny_base, ("neg", "pos"), seed=0)
        adapt(other, Trainable(), seed)
        return other.model.get_parameter(name)

    assert torch.equal(plain.model.get_parameter(name), start(1))
    assert not torch.equal(plain.model.get_parameter(name), start(2))


def test_plain_state_is_pefts_own_merge(classifier: Classifier) -> None:
    """PEFT wraps, trains and merges a copy of the model by itself."""
    twin = copy.deepcopy(classifier.model)
    config = LoraConfig(
        r=4, lora_alpha=6.0, lora_dropout=0.0, target_modules=["query", "value"], layers_to_transform=[1, 2]
    )
    theirs = get_peft_model(twin, config)
    adapted = adapt(classifier, Trainable(blocks=2, rank=4, alpha=6.0, train_a=True), seed=0)
    randomise(adapted)
    ours = dict(classifier.model.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(ours[name.removeprefix("base_model.model.")])
    merged = theirs.merge_and_unload().state_dict()
    state = plain_state(adapted)
    assert set(state) == set(merged)
    for name, value in merged.items():
        torch.testing.assert_close(state[name], value, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", ["lora", "blocks", "head", "all"])
def test_what_is_not_trained_stays_bitwise(tiny_base: Path, kind: str) -> None:
    before = load_classifier(tiny_base, ("neg", "pos"), seed=0).model.state_dict()
    adapted = adapt(
        load_classifier(tiny_base, ("neg", "pos"), seed=0), Trainable(kind=kind, blocks=1), seed=0
    )
    randomise(adapted)
    state = plain_state(adapted)
    assert set(state) == set(before)
    adapted_weights = set(adapted.lora) if kind == "lora" else set(adapted.encoder)
    changed = {name for name in before if not torch.equal(before[name], state[name])}
    assert changed == adapted_weights | HEAD


def test_plain_state_computes_the_same(tiny_base: Path, classifier: Classifier) -> None:
    ids = torch.tensor([[2, 5, 9, 14, 3], [2, 7, 7, 8, 3]])
    adapted = adapt(
        classifier, Trainable(blocks=0, rank=2, targets=("query", "key", "value", "dense")), seed=0
    )
    randomise(adapted)
    plain = load_classifier(tiny_base, ("neg", "pos"), seed=9).model
    plain.load_state_dict(plain_state(adapted), strict=True)
    torch.testing.assert_close(
        plain(input_ids=ids).logits, classifier.model(input_ids=ids).logits, rtol=1e-5, atol=1e-5
    )


def test_plain_state_is_a_copy(classifier: Classifier) -> None:
    adapted = adapt(classifier, Trainable(kind="all"), seed=0)
    state = plain_state(adapted)
    weight = classifier.model.get_parameter("classifier.weight")
    kept = state["classifier.weight"].clone()
    weight.data.add_(1)
    assert torch.equal(state["classifier.weight"], kept)
    assert all(not value.requires_grad and value.is_contiguous() for value in state.values())


def test_lora_delta(classifier: Classifier) -> None:
    adapted = adapt(classifier, Trainable(blocks=1, rank=2, alpha=5.0, targets=("query",)), seed=0)
    randomise(adapted)
    ((name, layer),) = adapted.lora.items()
    assert name == "bert.encoder.layer.2.attention.self.query.weight"
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight  # type: ignore[index,union-attr]
    torch.testing.assert_close(lora_delta(layer), 5.0 / 2 * b @ a, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["lora", "blocks"])
def test_too_many_blocks(classifier: Classifier, kind: str) -> None:
    with pytest.raises(ConfigError, match="blocks is 4, but the base has 3"):
        adapt(classifier, Trainable(kind=kind, blocks=4), seed=0)


@pytest.mark.parametrize("kind", ["head", "all"])
def test_blocks_mean_nothing_to_head_and_all(make_base: Callable[..., Path], kind: str) -> None:
    shallow = load_classifier(make_base(num_hidden_layers=1), ("neg", "pos"), seed=0)
    adapt(shallow, Trainable(kind=kind, blocks=2), seed=0)


def test_bad_targets(classifier: Classifier) -> None:
    with pytest.raises(ConfigError, match=r"\['q_proj'\] match no layer.*'query'"):
        adapt(classifier, Trainable(targets=("q_proj",)), seed=0)


@pytest.mark.parametrize(
    "bad", [{"rank": 0}, {"alpha": 0}, {"alpha": math.inf}, {"blocks": -1}, {"kind": "some"}, {"rnk": 3}]
)
def test_bad_settings(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Trainable.model_validate(bad)
