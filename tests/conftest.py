"""A tiny real BERT with a real WordPiece tokenizer, and small files of labelled texts."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from confide.tasks.records import Records, TaskData

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

GOOD = ["fine", "lovely", "splendid", "warm", "bright"]
BAD = ["dull", "awful", "grim", "cold", "weak"]
OTHER = ["the", "a", "film", "play", "book", "was", "is", "very", "quite", "and", "here", "today", "plot"]
PIECES = ["##s", "##ly", "##er", "##ing"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *GOOD, *BAD, *OTHER, *PIECES, *"0123456789"]
VOCABULARY += [f"##{digit}" for digit in range(10)]

MakeBase = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _ledger_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["CONFIDE_LEDGER"] = str(tmp_path_factory.mktemp("ledger") / "ledger.sqlite")


@pytest.fixture(autouse=True)
def _own_ledger(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test writes into its user's ledger, and none sees what another one spent."""
    monkeypatch.setenv("CONFIDE_LEDGER", str(tmp_path_factory.mktemp("ledger") / "ledger.sqlite"))


@pytest.fixture(autouse=True)
def _no_key(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test signs with its user's key."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    monkeypatch.delenv("CONFIDE_KEY", raising=False)
    monkeypatch.delenv("CONFIDE_PASSPHRASE", raising=False)


@pytest.fixture(scope="session")
def make_base(tmp_path_factory: pytest.TempPathFactory) -> MakeBase:
    """Saves a BERT of a few thousand parameters; keywords go to its configuration."""

    def make(seed: int = 0, **changes: object) -> Path:
        import torch
        from transformers import BertConfig, BertModel, BertTokenizerFast

        values: dict[str, object] = {
            "vocab_size": len(VOCABULARY),
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "max_position_embeddings": 32,
            "initializer_range": 0.3,
        }
        folder = tmp_path_factory.mktemp("tiny-base")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = BertModel(BertConfig(**(values | changes)))
            with torch.no_grad():  # a pretrained model's biases and norms aren't at their initial values
                for name, parameter in model.named_parameters():
                    if name.endswith("bias") or "LayerNorm" in name:
                        parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder)
        tokenizer = BertTokenizerFast(vocab={word: number for number, word in enumerate(VOCABULARY)})
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_base(make_base: MakeBase) -> Path:
    """The tiny BERT that most tests fine-tune: 3 blocks, hidden size 32. Read only."""
    return make_base()


@pytest.fixture(scope="session")
def sparse_base(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    """The tiny BERT's like with four experts in blocks 0 and 2, all different. Read only."""
    import torch
    from transformers import AutoTokenizer

    from confide.models.moe.bert import MoeBertConfig, MoeBertModel
    from confide.models.moe.upcycle import save

    config = MoeBertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
        initializer_range=0.3,
        num_experts=4,
        sparse_blocks=(0, 2),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MoeBertModel(config).eval()
    folder = tmp_path_factory.mktemp("sparse") / "base"
    save(model, AutoTokenizer.from_pretrained(tiny_base), folder)
    return folder


@pytest.fixture
def corpus(sentences: Callable[[int, int], list[tuple[str, str]]], tmp_path: Path) -> Path:
    """A file of 60 public texts, one a line."""
    path = tmp_path / "public.txt"
    path.write_text("\n".join(text for text, _ in sentences(60, 9)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def sentences() -> Callable[[int, int], list[tuple[str, str]]]:
    """(count, seed) → distinct texts of uneven length with the label `pos` or `neg`, in equal numbers."""

    def make(count: int, seed: int) -> list[tuple[str, str]]:
        random = np.random.default_rng(seed)
        rows = []
        for number in range(count):
            words = list(random.choice(OTHER, size=random.integers(1, 12)))
            words.insert(int(random.integers(len(words) + 1)), str(random.choice((GOOD, BAD)[number % 2])))
            rows.append((" ".join([*words, str(1000 * seed + number)]), ("pos", "neg")[number % 2]))
        return rows

    return make


@pytest.fixture
def write_csv(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows with a header into a file of the test's own folder."""

    def write(
        name: str, rows: list[tuple[object, ...]], columns: tuple[str, ...] = ("text", "label")
    ) -> Path:
        path = tmp_path / name
        with open(path, "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([columns, *rows])
        return path

    return write


@pytest.fixture(scope="session")
def make_task(sentences: Callable[[int, int], list[tuple[str, str]]]) -> Callable[..., TaskData]:
    """A task of made-up reviews whose label follows from one word; each seed has its own records."""

    def make(name: str = "reviews", train: int = 60, test: int = 20, seed: int = 1) -> TaskData:
        rows = sentences(train + test, seed)
        labels = [("neg", "pos").index(label) for _, label in rows]
        texts = [text for text, _ in rows]
        parts = (Records.of(texts[:train], labels[:train]), Records.of(texts[train:], labels[train:]))
        return TaskData(name, ("neg", "pos"), "declared", "accuracy", *parts, "made up for tests")

    return make
