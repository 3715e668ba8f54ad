"""`confide moe` from a dense base to a chosen layer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from confide.cli import moe

from .conftest import Answer, WriteCsv

Confide = Callable[..., Answer]
Sentences = Callable[[int, int], list[tuple[str, str]]]


@pytest.fixture
def corpus(sentences: Sentences, tmp_path: Path) -> Path:
    path = tmp_path / "public.txt"
    path.write_text("\n".join(text for text, _ in sentences(120, 9)), encoding="utf-8")
    return path


@pytest.fixture
def sparse(confide: Confide, corpus: Path, tiny_base: Path, tmp_path: Path) -> Path:
    out = tmp_path / "sparse"
    found = confide(
        *("moe", "upcycle", "--base", tiny_base, "--corpus", corpus, "--out", out),
        *("--experts", 4, "--blocks", "0,2", "--max-length", 20, "--json"),
    ).json()
    assert (found["experts"], found["blocks"], found["texts"]) == (4, [0, 2], 120)
    return out


def test_a_table_a_document_and_a_figure(
    confide: Confide, sparse: Path, corpus: Path, tmp_path: Path
) -> None:
    common = ("moe", "routing", "--model", sparse, "--corpus", corpus, "--max-length", 20)
    figure = tmp_path / "routing.png"
    found: dict[str, Any] = confide(*common, "--figure", figure, "--json").json()
    assert figure.read_bytes()[:4] == b"\x89PNG"
    assert [layer["block"] for layer in found["layers"]] == [0, 2]
    best = max(found["layers"], key=lambda layer: layer["entropy"])
    assert found["layer"] == found["by_entropy"] == best["block"]
    assert all(sum(layer["owners"]) == found["texts"] == 120 for layer in found["layers"])
    assert "120 public texts are few" in found["warnings"][0]
    answer = confide(*common, "--layer", "last", "--vote", "majority", "--texts", 50)
    assert answer.code == 0
    assert "2 *" in answer.out
    assert "Warning: 50 public texts are few" in answer.out
    assert confide(*common, "--figure", tmp_path / "routing.svg", "--json").code == 0
    assert "<svg" in (tmp_path / "routing.svg").read_text(encoding="utf-8")


def test_refusals(
    confide: Confide, sparse: Path, corpus: Path, tiny_base: Path, tmp_path: Path, write_csv: WriteCsv
) -> None:
    routing = ("moe", "routing", "--corpus", corpus, "--model")
    assert "it is a dense model" in confide(*routing, tiny_base).message()
    assert "sparse layers are 0, 2" in confide(*routing, sparse, "--layer", 1).message()
    assert "none of: entropy" in confide(*routing, sparse, "--layer", "best").message()
    assert "neither plurality" in confide(*routing, sparse, "--vote", "all").message()
    assert "ends with one of png" in confide(*routing, sparse, "--figure", tmp_path / "x.doc").message()
    shared = corpus.read_text(encoding="utf-8").splitlines()[7]
    data = write_csv("records.csv", [(shared.upper() + "!", "pos"), ("something else", "neg")])
    message = confide(*routing, sparse, "--data", data).message()
    assert "1 text(s) of the public corpus are also records of" in message
    assert "the first at text 8" in message
    own = write_csv("own.csv", [("something else", "neg")])
    assert confide(*routing, sparse, "--data", own, "--json").code == 0

    upcycle = ("moe", "upcycle", "--corpus", corpus, "--base")
    out = ("--out", tmp_path / "new")
    assert "exists already" in confide(*upcycle, tiny_base, "--out", sparse).message()
    assert "there is no block 3" in confide(*upcycle, tiny_base, *out).message()
    assert "no list of block numbers" in confide(*upcycle, tiny_base, *out, "--blocks", "a").message()
    assert "not of a 'moe_bert' model" in confide(*upcycle, sparse, *out, "--blocks", "0").message()
    assert "also records of" in confide(*upcycle, tiny_base, *out, "--data", data).message()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["upcycle", "routing", "budget"])
def test_the_guide_lists_every_option_and_default(command: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "moe.md").read_text(encoding="utf-8")
    table = page.split(f"| option of `{command}` |", 1)[1].split("\n\n", 1)[0]
    rows = {}
    for line in table.splitlines()[2:]:
        names, values = (cell.strip() for cell in line.strip("|").split("|")[:2])
        options = re.findall(r"`([^`]+)`", names)
        parts = values.split(", ") if len(options) > 1 else [values]
        rows |= dict(zip(options, parts, strict=True))
    shown = {}
    for name, parameter in inspect.signature(getattr(moe, command)).parameters.items():
        default = parameter.default
        words = {"<class 'inspect._empty'>": "required", "None": "none", "False": "off"}
        value = words.get(str(default), str(default))
        shown[f"--{name.replace('_', '-')}"] = value
    assert rows == shown


def test_a_budget_is_divided_by_what_noise_does(confide: Confide, sparse_base: Path, reviews: Path) -> None:
    common = ("moe", "budget", "--model", sparse_base, "--data", reviews, "--max-length", 20)
    quick = ("--draws", 3, "--texts", 20, "--rank", 2, "--noise", 0.3)
    found = confide(*common, *quick, "--json").json()
    assert (found["layer"], found["experts"]) == (2, 4)
    assert found["own"]["harm"] == pytest.approx(16 * found["own"]["sensitivity"])
    assert 0 < found["shared_share"] < 1
    other = confide(*common, *quick, "--expert-clipping-bound", 0.1, "--json").json()
    assert other["own"]["harm"] == pytest.approx(0.01 * found["own"]["harm"])
    assert other["shared_share"] > found["shared_share"]
    assert "RAPTOR's own rule" in confide(*common, *quick).out
    assert "needs a corpus" in confide(*common, "--layer", "entropy").message()


QUICK = ("--draws", 2, "--texts", 20, "--rank", 2, "--noise", 0.3, "--max-length", 20)


def test_a_budget_by_private_records_is_charged(
    confide: Confide, sparse_base: Path, reviews: Path, tmp_path: Path
) -> None:
    book = tmp_path / "ledger.sqlite"
    private = ("--dataset", "clinic", "--epsilon", 1, "--delta", 1e-5, "--ledger", book)
    common = ("moe", "budget", "--model", sparse_base, "--data", reviews, *QUICK)
    found = confide(*common, *private, "--bound", 50, "--expert-bound", 5, "--json").json()
    spent = found["spent"]
    assert 0.999 < spent["claim"]["epsilon"] <= 1
    assert (spent["units"], spent["sampling_rate"], spent["dataset"]) == (64, 20 / 64, "clinic")
    assert len(set(spent["noise_multipliers"])) == 1
    assert found["shared"]["noise"] == pytest.approx(spent["noise_multipliers"][0] * 50 / 20)
    assert found["own"]["harm"] == pytest.approx(16 * found["own"]["sensitivity"])
    assert "error" not in found["shared"]  # its spread over the draws is one of the records
    divides = found["shared"]["sensitivity"] > 0 and found["own"]["sensitivity"] > 0
    assert (found["shared_share"] is not None) == divides
    assert any("nothing but noise" in sentence for sentence in found["warnings"])  # 20 records

    answer = confide(*common, *private, "--declared-units", 70, "--labels", "neg,pos")
    assert answer.code == 0, answer.err
    assert re.search(r"Spent on clinic: ε = (1|0\.999\d+), δ = ", answer.out)
    assert "n = 70 counts as public" in answer.out
    assert "confide ledger show clinic" in answer.out
    assert "Warning: λ of" in answer.out

    (shown,) = confide("ledger", "show", "clinic", "--ledger", book, "--json").json()["datasets"]
    assert [charge["state"] for charge in shown["charges"]] == ["settled", "settled"]
    assert shown["charges"][0]["run"] == spent["run"]
    assert shown["epsilon_filter"] > shown["epsilon_pld"] > 1.2

    assert confide("ledger", "cap", "clinic", "--epsilon", 2, "--delta", 1e-5, "--ledger", book).code == 0
    assert "the cap on clinic is epsilon = 2" in confide(*common, *private).message()
    unmarked = confide(*common, *private[:6], "--ledger", "none", "--bound", 50, "--expert-bound", 5)
    assert "no ledger is charged" in unmarked.err
    assert "No ledger was charged" in unmarked.out


def test_a_charged_budget_and_training_add_up(
    confide: Confide, train: Confide, sparse_base: Path, reviews: Path, tmp_path: Path
) -> None:
    book = ("--ledger", tmp_path / "ledger.sqlite")
    asked = ("--bound", 50, "--expert-bound", 5, "--dataset", "reviews-2026", "--epsilon", 1)
    common = ("moe", "budget", "--model", sparse_base, "--data", reviews, *QUICK)
    assert confide(*common, *asked, *book, "--json").code == 0
    own = ("--base", sparse_base, "--method", "raptor", "--layer", "last", "--epsilon", 2)
    assert train(reviews, *own, *book).code == 0
    (shown,) = confide("ledger", "show", "reviews-2026", *book, "--json").json()["datasets"]
    assert len(shown["charges"]) == 2
    assert 2 < shown["epsilon_pld"] < 3
    assert shown["epsilon_pld"] < shown["epsilon_filter"]


def test_what_a_budget_refuses(
    confide: Confide, sparse_base: Path, tiny_base: Path, reviews: Path, tmp_path: Path
) -> None:
    common = ("moe", "budget", "--data", reviews, *QUICK, "--model")
    book = ("--ledger", tmp_path / "ledger.sqlite")
    private = ("--dataset", "clinic", *book)
    for option in ("--bound", "--epsilon", "--declared-units"):
        assert (
            f"{option} has no effect here: it needs --dataset"
            in confide(*common, sparse_base, option, 3).message()
        )
    assert "needs --unit" in confide(*common, sparse_base, *private, "--rows-per-unit", 3).message()
    for wrong in (("--bound", 0), ("--expert-bound", -1)):
        assert "must be positive" in confide(*common, sparse_base, *private, *wrong).message()
    assert "dense model" in confide(*common, tiny_base, *private).message()
    assert (
        "--epsilon: Input should be greater"
        in confide(*common, sparse_base, *private, "--epsilon", 0).message()
    )
    assert "--delta: a number" in confide(*common, sparse_base, *private, "--delta", 2).message()
    assert "at most 32 tokens" in confide(*common, sparse_base, *private, "--max-length", 90).message()
    assert confide("ledger", "show", *book, "--json").json()["datasets"] == []
