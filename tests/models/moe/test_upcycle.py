from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import MakeBase
from tests.gradients.conftest import minilm_folder
from torch import Tensor
from torch.nn import functional

from confide.errors import ModelError, ReleaseError
from confide.finetune.public_routing import batches
from confide.gradients.experts import Lora
from confide.models.backbones import load_classifier, load_encoder
from confide.models.moe.attach import attach
from confide.models.moe.harden import harden
from confide.models.moe.layers import sparse_layers
from confide.models.moe.selfcheck import self_check
from confide.models.moe.upcycle import directions, feed_forward_inputs, save, upcycle
from confide.tasks.text import encode

TEXTS = [
    f"the {word} film was quite {end} {n}"
    for n, word in enumerate(["dull", "warm", "grim"] * 8)
    for end in "0123"
]


@pytest.fixture(scope="module")
def dense(tiny_base: Path) -> tuple[Any, Any]:
    return load_encoder(tiny_base)


@pytest.fixture(scope="module")
def sparse(dense: tuple[Any, Any]) -> Any:
    model, tokenizer = dense
    inputs = [batch for _, batch in batches(encode(tokenizer, TEXTS, 20), 256)]
    return upcycle(model, inputs, blocks=[2, 0], experts=4)


def test_outputs_are_the_dense_models_bit_for_bit(dense: tuple[Any, Any], sparse: Any) -> None:
    model, tokenizer = dense
    assert [(layer.number, layer.experts, layer.kind) for layer in sparse_layers(sparse)] == [
        (0, 4, "fused"),
        (2, 4, "fused"),
    ]
    used = set()
    layer = sparse_layers(sparse)[1]
    layer.router.register_forward_hook(lambda m, a, out: used.update(out[2].flatten().tolist()))
    with torch.no_grad():
        for _, batch in batches(encode(tokenizer, TEXTS, 20), 300):
            found, want = sparse(**batch), model(**batch)
            assert torch.equal(found.last_hidden_state, want.last_hidden_state)
            assert torch.equal(found.pooler_output, want.pooler_output)
    assert used == {0, 1, 2, 3}


def test_tokens_go_to_the_nearest_direction(dense: tuple[Any, Any], sparse: Any) -> None:
    model, tokenizer = dense
    inputs = [batch for _, batch in batches(encode(tokenizer, TEXTS[:8], 20))]
    tokens = feed_forward_inputs(model, inputs, [0], lambda rows: None)[0]
    router: Any = sparse_layers(sparse)[0].router
    _, weight, expert = router(tokens)
    cosine = functional.normalize(tokens, dim=-1) @ functional.normalize(router.weight, dim=-1).T
    assert torch.equal(expert[:, 0], cosine.argmax(1))
    assert bool((weight == 1).all())
    assert router.weight.norm(dim=1).tolist() == pytest.approx([1.0] * 4, rel=1e-5)


def test_a_saved_folder_is_a_base_like_any_other(dense: tuple[Any, Any], sparse: Any, tmp_path: Path) -> None:
    model, tokenizer = dense
    out = tmp_path / "sparse"
    save(sparse, tokenizer, out)
    classifier = load_classifier(out, ("neg", "pos"), seed=0)
    assert (classifier.prefix, classifier.head) == ("bert.", ("classifier.weight", "classifier.bias"))
    again, _ = load_encoder(out)
    batch = encode(tokenizer, TEXTS[:9], 20).batch(np.arange(9))
    encoder: Any = classifier.model.get_submodule("bert")
    with torch.no_grad():
        want = model(**batch).last_hidden_state
        assert torch.equal(again(**batch).last_hidden_state, want)
        assert torch.equal(encoder(**batch).last_hidden_state, want)
    with pytest.raises(ReleaseError, match="exists already"):
        save(sparse, tokenizer, out)


def test_the_upcycled_model_passes_the_self_check(
    dense: tuple[Any, Any], sparse: Any, tmp_path: Path
) -> None:
    save(sparse, dense[1], tmp_path / "sparse")
    classifier = load_classifier(tmp_path / "sparse", ("neg", "pos"), seed=0)
    model: Any = classifier.model
    harden(model, max_length=20)
    layer = sparse_layers(model)[1]
    attach(layer, Lora(2, 4.0))
    found = self_check(
        model,
        lambda batch: model(**batch).logits,
        layer,
        vocabulary=model.config.vocab_size,
        pad=classifier.tokenizer.pad_token_id,
    )
    assert found.gradient < 1e-4


def test_directions_find_well_separated_clusters() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.linalg.qr(torch.randn(6, 6, generator=generator)).Q[:4]
    lengths = 1 + 9 * torch.rand(400, 1, generator=generator)
    kind = torch.arange(400) % 4
    tokens = lengths * (truth[kind] + 0.05 * torch.randn(400, 6, generator=generator))
    found = directions(tokens, 4, seed=1)
    closeness, order = (found @ truth.T).max(1)
    assert sorted(order.tolist()) == [0, 1, 2, 3]
    assert float(closeness.min()) > 0.99
    assert torch.equal(found, directions(tokens, 4, seed=1))


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ModelError, match="2 distinct tokens can't be told apart into 3 experts"):
        directions(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]), 3, seed=0)


def test_refusals(dense: tuple[Any, Any], sparse: Any, make_base: MakeBase) -> None:
    model, _ = dense
    nothing: list[dict[str, Tensor]] = []
    with pytest.raises(ModelError, match="not of a 'moe_bert' model"):
        upcycle(sparse, nothing, blocks=[0], experts=4)
    with pytest.raises(ModelError, match="blocks 0 to 2; there is no block 3"):
        upcycle(model, nothing, blocks=[1, 3], experts=4)
    with pytest.raises(ModelError, match="no block was named"):
        upcycle(model, nothing, blocks=[], experts=4)
    with pytest.raises(ModelError, match="at least 2"):
        upcycle(model, nothing, blocks=[1], experts=1)
    with pytest.raises(ModelError, match="0 distinct tokens"):
        upcycle(model, nothing, blocks=[1], experts=4)


@pytest.mark.slow
def test_minilm_itself() -> None:
    model, tokenizer = load_encoder(minilm_folder())
    encoded = encode(tokenizer, TEXTS * 2, 64)
    sparse = upcycle(model, (batch for _, batch in batches(encoded)), blocks=[1, 3, 5], experts=8)
    assert sum(parameter.numel() for parameter in sparse.parameters()) == 47_535_360
    with torch.no_grad():
        for size in (1, 2, 7, 30):
            batch = encoded.batch(np.arange(size))
            assert torch.equal(sparse(**batch).last_hidden_state, model(**batch).last_hidden_state)
