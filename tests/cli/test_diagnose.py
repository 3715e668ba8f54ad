"""`confide moe diagnose` on what `confide train --diagnostics` wrote."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path

from confide.cli.diagnose import diagnose, remarks, tables

from .conftest import Answer

Confide = Callable[..., Answer]


def test_tables_and_a_document(
    confide: Confide, sparse_base: Path, reviews: Path, corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    answer = confide(
        *("train", "--method", "raptor", "--base", sparse_base, "--data", reviews, "--out", out),
        *("--dataset", "reviews", "--steps", 2, "--expected-batch", 16, "--max-length", 20, "--rank", 2),
        *("--layer", "last", "--public", corpus, "--ledger", "none", "--diagnostics"),
    )
    assert answer.code == 0
    assert not any("diagnostics" in path.name for path in (out / "release").iterdir())
    shown = confide("moe", "diagnose", out).out
    assert shown.startswith("Private: never share.")
    for word in ("Roles over training", "Each expert's gradient", "H/log E", "M_role", "Parameters: model"):
        assert word in shown
    found = confide("moe", "diagnose", out, "--json").json()
    assert found == json.loads((out / "private" / "diagnostics.json").read_text(encoding="utf-8"))
    assert confide("moe", "diagnose", out / "private").out == shown
    assert f"{found['mismatch']:.2f} times" in shown
    assert f"κ {found['stability']['kappa']:.4f}" in shown
    for part in (
        "estimator",
        "simulated",
        "silent",
        "imbalance",
        "stability",
        "drift",
        "transfer",
        "mismatch",
    ):
        found[part] = None
    assert len(tables(found)) == 2
    assert len(remarks(found)) == 2


def test_bad_files(confide: Confide, tmp_path: Path) -> None:
    assert "there are no diagnostics in" in confide("moe", "diagnose", tmp_path).message()
    file = tmp_path / "diagnostics.json"
    file.write_text("{", encoding="utf-8")
    assert "is damaged" in confide("moe", "diagnose", tmp_path).message()
    file.write_text('{"schema": "confide.diagnostics/9"}', encoding="utf-8")
    assert (
        "holds no diagnostics of schema confide.diagnostics/1" in confide("moe", "diagnose", file).message()
    )


def test_diagnostics_are_of_experts(confide: Confide, tiny_base: Path, reviews: Path, tmp_path: Path) -> None:
    answer = confide(
        *("train", "--base", tiny_base, "--data", reviews, "--out", tmp_path / "run", "--dataset", "reviews"),
        "--diagnostics",
    )
    assert "--diagnostics has no effect here: it needs --method raptor" in answer.message()


def test_the_guide_lists_every_option() -> None:
    page = (Path(__file__).parents[2] / "docs" / "moe-diagnostics.md").read_text(encoding="utf-8")
    table = page.split("| argument of `diagnose` |", 1)[1].split("\n\n", 1)[0]
    listed = [re.findall(r"`([^`]+)`", line)[0] for line in table.splitlines()[2:]]
    assert listed == ["RUN", "--json"]
    assert list(inspect.signature(diagnose).parameters) == ["run", "json"]
