"""Statistics on public text, against definitions that know nothing of batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from confide.errors import DataError
from confide.finetune.base import PublicBase
from confide.finetune.run import finetune, prepare
from confide.finetune.settings import Settings
from confide.finetune.statistics import fisher, grams, write_public_statistics
from confide.merging.merge import merge
from confide.models.releases import load_release
from confide.tasks.records import TaskData
from confide.tasks.text import encode

TEXTS = ["a fine film", "dull", "the play was very grim here today", "lovely book", "a cold plot"]


@pytest.fixture(scope="module")
def releases(
    tiny_base: Path, make_task: Callable[..., TaskData], tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    base = PublicBase.of(str(tiny_base))
    settings = Settings(
        method="dp-adamw",
        steps=2,
        expected_batch=10,
        max_length=20,
        learning_rate=0.05,
        trainable={"kind": "lora", "blocks": 1, "rank": 2},
    )
    folders = []
    for seed, name in enumerate(("films", "plays"), start=1):
        trained = finetune(prepare(make_task(name, seed=seed), base, 20), base, settings, simulate=seed)
        folders.append(tmp_path_factory.mktemp("statistics") / name)
        trained.release(folders[-1])
    return folders


def test_grams_are_means_over_tokens(releases: list[Path]) -> None:
    """One padded batch; the mask says what counts."""
    classifier, head = load_release(releases[0])
    encoded = encode(classifier.tokenizer, TEXTS, head.max_length)
    found = grams(classifier, encoded)
    batch = encoded.batch(np.arange(len(TEXTS)))
    assert not batch["attention_mask"].all()
    with torch.no_grad():
        hidden = classifier.model(**batch, output_hidden_states=True).hidden_states
    real = batch["attention_mask"].bool()
    for block in range(3):
        tokens = hidden[block][real].double().numpy()
        expected = tokens.T @ tokens / len(tokens)
        for part in ("query", "key", "value"):
            name = f"encoder.layer.{block}.attention.self.{part}.weight"
            np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-5)
    first = hidden[3][:, 0].double().numpy()
    np.testing.assert_allclose(
        found["pooler.dense.weight"], first.T @ first / len(first), rtol=1e-4, atol=1e-5
    )
    assert all(name.endswith(".weight") and values.dtype == np.float64 for name, values in found.items())
    assert not any("classifier" in name for name in found)


def test_fisher_is_per_text_and_class(releases: list[Path]) -> None:
    """By finite differences of log p, two coordinates at a time."""
    classifier, head = load_release(releases[0])
    encoded = encode(classifier.tokenizer, TEXTS, head.max_length)
    found = fisher(classifier, encoded)
    model = classifier.model.double()

    def logs() -> np.ndarray:
        with torch.no_grad():
            rows = [model(**encoded.batch(np.array([row]))).logits[0] for row in range(len(TEXTS))]
        return torch.stack(rows).log_softmax(1).numpy()

    odds = np.exp(logs())
    for name, place in (
        ("encoder.layer.2.output.dense.weight", (3, 5)),
        ("encoder.layer.0.attention.self.value.bias", (7,)),
        ("embeddings.word_embeddings.weight", (2, 0)),
    ):
        entry = model.get_parameter(f"bert.{name}").data
        value, step = float(entry[place]), 1e-5
        entry[place] = value + step
        above = logs()
        entry[place] = value - step
        below = logs()
        entry[place] = value
        slope = (above - below) / (2 * step)
        assert found[name][place] == pytest.approx((odds * slope**2).sum(1).mean(), rel=1e-3)


def test_a_merge_from_public_text(releases: list[Path], tiny_base: Path, tmp_path: Path) -> None:
    for kind, operator in (("grams", "regmean"), ("fisher", "fisher")):
        files = []
        for number, folder in enumerate(releases):
            files.append(tmp_path / f"{kind}-{number}.safetensors")
            write_public_statistics(folder, TEXTS, files[-1], kind, source="five sentences")  # type: ignore[arg-type]
        report = merge(releases, base=tiny_base, operator=operator, statistics=files, out=tmp_path / operator)
        assert operator in {line.rule for line in report.tensors}
        load_release(tmp_path / operator, "films")
    with pytest.raises(DataError, match="at least one public text"):
        write_public_statistics(releases[0], [], tmp_path / "no", "grams", source="")
