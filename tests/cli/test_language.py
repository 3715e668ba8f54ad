"""Language models from a file to a release that plain transformers reads, and to a merge."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.conftest import BAD, GOOD, OTHER
from tests.language import save_base
from transformers import AutoTokenizer

import confide as library
from confide.privacy.statement import read as read_statement
from confide.release.write import verify

from .conftest import Answer

Confide = Callable[..., Answer]
Base = Callable[[str], Path]

LENGTH = 44


def rows(count: int, seed: int) -> list[tuple[str, str, str]]:
    """(prompt, answer, label) of uneven length, all different."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        words = [*random.choice(OTHER, size=random.integers(1, 9)), str(1000 * seed + number)]
        answer = random.choice(GOOD + BAD, size=random.integers(1, 4))
        found.append((" ".join(words), " ".join(answer), ("pos", "neg")[number % 2]))
    return found


@pytest.fixture(scope="session")
def language_base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """kind → a tiny base of it, made once."""
    made: dict[str, Path] = {}
    texts = [part for row in rows(60, 1) for part in row]

    def base(kind: str) -> Path:
        if kind not in made:
            made[kind] = save_base(kind, texts, tmp_path_factory.mktemp("language") / kind)
        return made[kind]

    return base


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    path = tmp_path / "answers.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("prompt", "answer", "label"), *rows(60, 1)])
    return path


@pytest.fixture
def learn(confide: Confide, language_base: Base, answers: Path, tmp_path: Path) -> Callable[..., Answer]:
    """`confide train` on prompts with answers; arguments given come later, so they win."""

    def run(kind: str, *arguments: object, out: str = "run") -> Answer:
        given = ("--base", language_base(kind), "--data", answers, "--dataset", out, "--out", tmp_path / out)
        quick = ("--steps", 2, "--expected-batch", 16, "--max-length", LENGTH, "--text", "prompt")
        return confide("train", *given, *quick, *arguments)

    return run


ANSWERS = ("--target", "answer")
TEXTS = ("--language-model",)


def plain(release: Path, loader: str) -> tuple[Any, Any]:
    """The release as transformers alone reads it."""
    model = getattr(transformers, loader).from_pretrained(release).eval()
    return model, AutoTokenizer.from_pretrained(release)


def same_logits(release: Path, loader: str, task: str | None = None, alone: Path | None = None) -> None:
    model, tokenizer = plain(alone or release, loader)
    ours = library.load(release, task=task).classifier.model
    inputs = tokenizer("a very dull plot", return_tensors="pt")
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor([[1, 5, 6]])
    with torch.inference_mode():
        torch.testing.assert_close(ours(**inputs).logits, model(**inputs).logits, rtol=1e-5, atol=1e-5)


def by_hand(release: Path, loader: str) -> tuple[float, float]:
    """Perplexity and token accuracy of all answers, one record at a time, written a second time."""
    model, tokenizer = plain(release, loader)
    loss, right, count = 0.0, 0, 0
    for prompt, answer, _ in rows(60, 1):
        if model.config.is_encoder_decoder:
            asked, said = tokenizer(prompt)["input_ids"], tokenizer(text_target=answer)["input_ids"]
            start = [model.config.decoder_start_token_id, *said[:-1]]
            given = {"input_ids": torch.tensor([asked]), "decoder_input_ids": torch.tensor([start])}
        else:
            asked = tokenizer(prompt + "\n")["input_ids"]
            said = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            given = {"input_ids": torch.tensor([asked + said])}
            assert len(asked + said) <= LENGTH
        with torch.inference_mode():
            odds = model(**given).logits[0].log_softmax(-1)
        odds = odds if model.config.is_encoder_decoder else odds[len(asked) - 1 : -1]
        loss -= float(odds[torch.arange(len(said)), torch.tensor(said)].sum())
        right += int((odds.argmax(-1) == torch.tensor(said)).sum())
        count += len(said)
    return math.exp(loss / count), right / count


@pytest.mark.parametrize(
    ("kind", "trainable", "more"),
    [
        ("gpt2", "lora", ()),
        pytest.param("llama", "all", ("--method", "dp-adamw"), marks=pytest.mark.slow),
        pytest.param("gpt2", "all", (), marks=pytest.mark.slow),
        pytest.param("gpt2", "blocks", (), marks=pytest.mark.slow),
        pytest.param("llama", "lora", (), marks=pytest.mark.slow),
        pytest.param("qwen2", "all", (), marks=pytest.mark.slow),
    ],
)
def test_answers_of_a_decoder(
    confide: Confide,
    learn: Callable[..., Answer],
    answers: Path,
    tmp_path: Path,
    kind: str,
    trainable: str,
    more: tuple[object, ...],
) -> None:
    answer = learn(kind, *ANSWERS, "--trainable", trainable, *more)
    assert answer.code == 0, answer.err
    assert "perplexity" in answer.out
    assert "accuracy" in answer.out
    release = tmp_path / "run" / "release"
    (spending,) = verify(release).spendings
    assert spending.units == 48
    same_logits(release, "AutoModelForCausalLM")
    found = confide("evaluate", release, "--data", answers, "--text", "prompt", *ANSWERS, "--json").json()
    perplexity, accuracy = by_hand(release, "AutoModelForCausalLM")
    assert found["scores"]["perplexity"] == pytest.approx(perplexity, rel=1e-4)
    assert found["scores"]["accuracy"] == pytest.approx(accuracy, abs=1e-9)
    assert (found["metric"], found["records"]) == ("perplexity", 60)

    written = confide("predict", release, "--data", answers, "--text", "prompt", "--json").json()
    model, tokenizer = plain(release, "AutoModelForCausalLM")
    ids = tokenizer(rows(60, 1)[3][0] + "\n", return_tensors="pt")
    theirs = model.generate(**ids, do_sample=False, max_length=LENGTH, pad_token_id=tokenizer.pad_token_id)[
        0, ids["input_ids"].shape[1] :
    ]
    assert written[3]["text"] == tokenizer.decode(theirs, skip_special_tokens=True).strip()
    assert len(written) == 60


@pytest.mark.parametrize(
    ("kind", "trainable"),
    [
        ("t5", "lora"),
        pytest.param("bart", "lora", marks=pytest.mark.slow),
        pytest.param("t5", "all", marks=pytest.mark.slow),
        pytest.param("bart", "blocks", marks=pytest.mark.slow),
        pytest.param("bart", "all", marks=pytest.mark.slow),
    ],
)
def test_answers_of_an_encoder_and_decoder(
    confide: Confide, learn: Callable[..., Answer], answers: Path, tmp_path: Path, kind: str, trainable: str
) -> None:
    answer = learn(kind, *ANSWERS, "--trainable", trainable)
    assert answer.code == 0, answer.err
    release = tmp_path / "run" / "release"
    verify(release)
    same_logits(release, "AutoModelForSeq2SeqLM")
    found = confide("evaluate", release, "--data", answers, "--text", "prompt", *ANSWERS, "--json").json()
    perplexity, accuracy = by_hand(release, "AutoModelForSeq2SeqLM")
    assert found["scores"]["perplexity"] == pytest.approx(perplexity, rel=1e-4)
    assert found["scores"]["accuracy"] == pytest.approx(accuracy, abs=1e-9)
    written = confide("predict", release, "--data", answers, "--text", "prompt", "--json").json()
    model, tokenizer = plain(release, "AutoModelForSeq2SeqLM")
    ids = tokenizer(rows(60, 1)[3][0], return_tensors="pt")
    theirs = model.generate(**ids, do_sample=False, num_beams=1, max_new_tokens=LENGTH)[0]
    assert written[3]["text"] == tokenizer.decode(theirs, skip_special_tokens=True).strip()


@pytest.mark.parametrize(
    ("trainable", "masked"),
    [
        ("all", True),
        pytest.param("lora", True, marks=pytest.mark.slow),
        pytest.param("blocks", False, marks=pytest.mark.slow),
    ],
)
def test_texts_themselves(
    confide: Confide,
    learn: Callable[..., Answer],
    answers: Path,
    tmp_path: Path,
    trainable: str,
    masked: bool,
) -> None:
    answer = learn("bert" if masked else "gpt2", *TEXTS, "--trainable", trainable)
    assert answer.code == 0, answer.err
    release = tmp_path / "run" / "release"
    same_logits(release, "AutoModelForMaskedLM" if masked else "AutoModelForCausalLM")
    given = (release, "--data", answers, "--text", "prompt")
    assert confide("evaluate", *given, "--json").json()["score"] > 1
    card = (release / "README.md").read_text()
    assert f"pipeline_tag: {'fill-mask' if masked else 'text-generation'}" in card
    if masked:
        assert "fills masks" in confide("predict", *given).message()
    else:
        assert len(confide("predict", *given, "--json").json()) == 60


@pytest.mark.parametrize(
    "kind", ["gpt2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "t5", "bart"))]
)
def test_a_merge_of_two_language_models(
    confide: Confide,
    learn: Callable[..., Answer],
    language_base: Base,
    answers: Path,
    tmp_path: Path,
    kind: str,
) -> None:
    """GPT-2's output layer is its embedding, and merged as such; Llama's is its own, and stays per task."""
    loader = "AutoModelForCausalLM" if kind in ("gpt2", "llama") else "AutoModelForSeq2SeqLM"
    for name in ("one", "two"):
        assert learn(kind, *ANSWERS, "--trainable", "all", out=name).code == 0
    merged = tmp_path / "merged"
    releases = [tmp_path / name / "release" for name in ("one", "two")]
    given = ("--base", language_base(kind), "--operator", "average", "--disjoint", "--out", merged)
    answer = confide("merge", *releases, *given)
    assert answer.code == 0, answer.err
    assert confide("verify", merged).code == 0
    claim = read_statement(merged).claim
    assert claim is not None
    alone = tmp_path / "alone"
    assert confide("export", merged, "--task", "two", "--out", alone).code == 0
    same_logits(merged, loader, "two", alone)
    one, two, both = (plain(path, loader)[0].state_dict() for path in (*releases, alone))
    for name, value in both.items():
        kept = kind == "llama" and name == "lm_head.weight"
        expected = two[name] if kept else (one[name] + two[name]) / 2
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    scored = confide(
        "evaluate", merged, "--task", "two", "--data", answers, "--text", "prompt", *ANSWERS, "--json"
    ).json()
    assert scored["score"] == pytest.approx(by_hand(alone, loader)[0], rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "trainable"),
    [
        ("gpt2", "all"),
        pytest.param("llama", "lora", marks=pytest.mark.slow),
        pytest.param("llama", "all", marks=pytest.mark.slow),
    ],
)
def test_classes_with_a_decoder(
    confide: Confide, learn: Callable[..., Answer], answers: Path, tmp_path: Path, kind: str, trainable: str
) -> None:
    answer = learn(kind, "--trainable", trainable)
    assert answer.code == 0, answer.err
    release = tmp_path / "run" / "release"
    model, tokenizer = plain(release, "AutoModelForSequenceClassification")
    texts = ["a very dull plot here and there", "the film"]
    ours = library.load(release).logits(texts)
    for text, row in zip(texts, ours, strict=True):  # alone, without padding
        with torch.inference_mode():
            theirs = model(**tokenizer(text, return_tensors="pt")).logits[0]
        np.testing.assert_allclose(row, theirs.numpy(), rtol=1e-4, atol=1e-5)
    found = confide("evaluate", release, "--data", answers, "--text", "prompt", "--json").json()
    assert (found["metric"], found["records"]) == ("accuracy", 60)


@pytest.mark.slow
def test_a_language_model_and_a_classifier_in_one_merge(
    confide: Confide, learn: Callable[..., Answer], language_base: Base, answers: Path, tmp_path: Path
) -> None:
    assert learn("gpt2", *ANSWERS, out="writes").code == 0
    assert learn("gpt2", out="labels").code == 0
    merged, alone = tmp_path / "merged", tmp_path / "alone"
    releases = [tmp_path / name / "release" for name in ("writes", "labels")]
    given = ("--base", language_base("gpt2"), "--operator", "average", "--disjoint", "--out", merged)
    answer = confide("merge", *releases, *given)
    assert answer.code == 0, answer.err
    data = ("--data", answers, "--text", "prompt", "--json")
    assert len(confide("predict", merged, "--task", "writes", *data).json()) == 60
    assert len(confide("predict", merged, "--task", "labels", *data).json()) == 60
    assert confide("export", merged, "--task", "labels", "--out", alone).code == 0
    model, tokenizer = plain(alone, "AutoModelForSequenceClassification")
    tokenizer.pad_token = tokenizer.eos_token
    texts = ["a very dull plot here and there", "the film"]
    with torch.inference_mode():
        theirs = model(**tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")).logits
    ours = library.load(merged, task="labels").logits(texts)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=1e-5)


def test_what_is_refused(
    confide: Confide, learn: Callable[..., Answer], tiny_base: Path, answers: Path, tmp_path: Path
) -> None:
    assert "name the column of what it should write" in learn("t5", *TEXTS).message()
    assert "fills masks and writes no answers" in learn("bert", *ANSWERS).message()
    assert "choose one" in learn("gpt2", *ANSWERS, *TEXTS).message()
    assert "--labels has no effect" in learn("gpt2", *TEXTS, "--labels", "neg,pos").message()
    assert "no head of its own" in learn("gpt2", *TEXTS, "--trainable", "head").message()
    assert "nor tokens" in learn("gpt2", *TEXTS, "--metric", "accuracy", "--publish-accuracy", 5).message()
    assert "macro-f1 doesn't score" in learn("gpt2", *TEXTS, "--metric", "macro-f1").message()
    assert "at most 48 tokens" in learn("gpt2", *TEXTS, "--max-length", 49).message()
    assert "head_learning_rate has no effect" in learn("gpt2", *TEXTS, "--head-learning-rate", 1).message()
    assert "needs a head" in learn("gpt2", *TEXTS, "--clipping", "per-role").message()
    assert learn("t5", *ANSWERS, "--dry-run", "--json").json()["units"] == 48
    assert "lacks" in learn("bert", *TEXTS, "--base", tiny_base).message()  # no head for masks
    assert "text_pair and language_model" in learn("gpt2", *TEXTS, "--text-pair", "answer").message()
    assert not (tmp_path / "run").exists()
