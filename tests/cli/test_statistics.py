"""`confide statistics` on public text, statistics that training releases, and merges by both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from confide.privacy.composition import check
from confide.privacy.statement import read as read_statement
from confide.release.tensors import Checkpoint

from .conftest import Answer

Confide = Callable[..., Answer]


def test_public_and_released(
    confide: Confide, train: Confide, reviews: Path, tiny_base: Path, tmp_path: Path
) -> None:
    corpus = tmp_path / "public.txt"
    corpus.write_text("the film was fine\na dull play\n\nthe film was fine\n")
    asked = ("--release-statistics", "grams", "--statistics-noise", 3, "--labels", "neg,pos")
    files = []
    for name in ("one", "two"):
        answer = train(reviews, "--task", name, *asked, out=name)
        assert answer.code == 0, answer.err
        release = tmp_path / name / "release"
        statement = read_statement(release)
        check(statement)
        assert statement.claim is not None
        assert statement.claim.epsilon <= 4
        assert "statistics.safetensors" in statement.weights
        files.append(tmp_path / f"{name}.safetensors")
        found = confide(
            "statistics", release, "--corpus", corpus, "--base", tiny_base, "--out", files[-1], "--json"
        )
        assert found.json()["texts"] == 2
        # Only what training changed.
        assert set(Checkpoint.open(files[-1]).names) == set(
            Checkpoint.open(release / "statistics.safetensors").names
        )
    assert (
        "exists already"
        in confide("statistics", tmp_path / "one/release", "--corpus", corpus, "--out", files[0]).message()
    )
    models = [tmp_path / name / "release" for name in ("one", "two")]
    given = ("--base", tiny_base, "--operator", "regmean", "--disjoint")
    public = [part for file in files for part in ("--statistics", file)]
    assert confide("merge", *models, *given, *public, "--out", tmp_path / "public").code == 0
    merged = (tmp_path / "public/model.safetensors").read_bytes()
    recipe = tmp_path / "recipe.yaml"
    lines = "".join(f"  - model: {model}\n" for model in models)

    # The text itself instead of files that were computed on it: the same merge.
    answer = confide("merge", *models, *given, "--statistics", corpus, "--out", tmp_path / "text")
    assert answer.code == 0, answer.err
    assert (tmp_path / "text/model.safetensors").read_bytes() == merged
    recipe.write_text(
        f"merge_method: regmean\nbase_model: {tiny_base}\nstatistics: {{public: {corpus}}}\nmodels:\n{lines}"
    )
    assert confide("merge", recipe, "--dry-run").code == 0
    answer = confide("merge", recipe, "--out", tmp_path / "by-recipe")
    assert answer.code == 0, answer.err
    assert (tmp_path / "by-recipe/model.safetensors").read_bytes() == merged
    report = json.loads((tmp_path / "by-recipe/merge-report.json").read_text())
    said = {"kind": "grams", "origin": "public", "source": "2 texts, public.txt"}
    assert report["statistics"] == [said, said]
    card = (tmp_path / "by-recipe/README.md").read_text()
    assert "weighs the models by public grams, of: 2 texts, public.txt." in card
    stated = read_statement(tmp_path / "by-recipe")
    check(stated)
    assert "statistics of 2 texts, public.txt, which is public" in stated.assumptions[-1]
    inputs = [part for model in models for part in ("--input", model)]
    again = ("verify", tmp_path / "by-recipe", "--base", tiny_base, *inputs, "--statistics", corpus)
    assert confide(*again, "--sample", 1000, "--json").json()["checks"][-1]["result"] == "ok"

    missing = ("--statistics", tmp_path / "none.txt", "--out", tmp_path / "x")
    assert "can't read the corpus" in confide("merge", *models, *given, *missing).message()
    mixed = ("--statistics", corpus, *public, "--out", tmp_path / "x")
    assert "a public text stands alone" in confide("merge", *models, *given, *mixed).message()
    needless = ("--base", tiny_base, "--statistics", corpus, "--out", tmp_path / "x")
    assert "needs no statistics" in confide("merge", *models, *needless).message()
    assert not (tmp_path / "x").exists()
    recipe.write_text(
        f"merge_method: regmean\nbase_model: {tiny_base}\nstatistics: released\nmodels:\n{lines}"
    )
    released = confide("merge", recipe, "--out", tmp_path / "released", "--json")
    assert released.json()["claim"]["epsilon"] > 0
    again = ("verify", tmp_path / "released", "--base", tiny_base, *inputs, "--sample", 1000, "--json")
    assert confide(*again).json()["checks"][-1]["result"] == "ok"
