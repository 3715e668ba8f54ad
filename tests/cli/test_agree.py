"""`confide agree`, and training that keeps to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from confide.privacy.statement import read as read_statement

from .conftest import Answer

Confide = Callable[..., Answer]
SHAPE = ("--max-length", 20, "--blocks", 1, "--rank", 2)


def test_agree_train_and_refuse(
    confide: Confide, train: Confide, reviews: Path, tiny_base: Path, tmp_path: Path
) -> None:
    file = tmp_path / "agreement.json"
    given = ("--base", tiny_base, "--out", file, "--task", "reviews-2026=neg,pos", *SHAPE)
    answer = confide("agree", *given, "--json")
    hash = answer.json()["hash"]
    assert json.loads(file.read_text())["tasks"] == {"reviews-2026": ["neg", "pos"]}
    assert "never changed" in confide("agree", *given).message()

    kept = train(reviews, "--labels", "neg,pos", "--agreement", file, "--ledger", "none")
    assert kept.code == 0, kept.err
    assert read_statement(tmp_path / "run" / "release").agreement == hash

    for arguments, message in (
        (("--rank", 4), "trainable.rank is agreed to be 2, and this run has 4"),
        (("--dry-run", "--labels", "pos,neg"), "is agreed to have the labels neg, pos"),
    ):
        refused = train(reviews, "--labels", "neg,pos", "--agreement", file, *arguments, out="other")
        assert message in refused.message()
        assert not (tmp_path / "other").exists()
        assert not (tmp_path / "other.unfinished").exists()


def test_tasks_that_cant_be_read(confide: Confide, tiny_base: Path, tmp_path: Path) -> None:
    for text in ("films", "films=neg", "=neg,pos"):
        answer = confide("agree", "--base", tiny_base, "--out", tmp_path / "a.json", "--task", text)
        assert "NAME=label,label" in answer.message()
    assert not (tmp_path / "a.json").exists()


def test_an_agreement_about_experts(
    confide: Confide, train: Confide, reviews: Path, sparse_base: Path, tmp_path: Path
) -> None:
    file = tmp_path / "agreement.json"
    given = ("agree", "--base", sparse_base, "--out", file, "--max-length", 20, "--rank", 2)
    assert "needs --method raptor" in confide(*given, "--layer", "last").message()
    assert "an agreement names the layer" in confide(*given, "--method", "raptor").message()
    sparse = (*given, "--method", "raptor", "--layer", "last")
    idle = confide(*sparse, "--variant", "shared-only").message()
    assert "--layer has no effect here" in idle
    assert "is not one of 'residual', 'none'" in confide(*sparse, "--record-weight", "much").err
    made = confide(*sparse, "--shared-share", 0.8, "--expert-clipping", "flat", "--json").json()
    assert made["trainable"]["blocks"] == 0
    experts = made["experts"]
    assert (experts["layer"], experts["rank"]) == ("last", 2)
    assert (experts["shared_share"], experts["clipping"]) == (0.8, "flat")
    assert not {"public", "steps", "learning_rate", "diagnostics"} & experts.keys()

    own = ("--base", sparse_base, "--method", "raptor", "--agreement", file, "--dry-run", "--layer", "last")
    refused = train(reviews, *own, "--expert-clipping", "flat").message()
    assert "experts.shared_share is agreed to be 0.8, and this run has 0.9" in refused
    kept = train(reviews, *own, "--expert-clipping", "flat", "--shared-share", 0.8)
    assert kept.code == 0, kept.err
