"""`confide merge` with a recipe, `--dry-run`, limits; `confide export`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from confide.cli.main import main
from confide.merging.merge import merge

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["confide", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    return run


@pytest.fixture
def recipe(base: Path, releases: tuple[Path, Path], tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"merge_method: ties\nbase_model: {base}\nmodels: [{releases[0]}, {releases[1]}]\n"
        "parameters: {density: 0.3}\ndisjoint: true\n"
    )
    return file


def test_a_dry_run_tells_what_the_run_does(run: Run, recipe: Path, tmp_path: Path) -> None:
    code, out, err = run("merge", recipe, "--dry-run", "--json", "--shard-size", "3KB")
    assert (code, err) == (0, "")
    planned = json.loads(out)
    assert list(tmp_path.iterdir()) == [recipe]
    code, out, err = run("merge", recipe, "--out", tmp_path / "merged", "--json", "--shard-size", "3KB")
    assert code == 0, err
    done = json.loads(out)
    report = json.loads((tmp_path / "merged" / "merge-report.json").read_text())
    assert [line["rule"] for line in planned["tensors"]] == [
        line["rule"] for line in sorted(report["tensors"], key=lambda line: line["name"])
    ]
    files = sorted(path.name for path in (tmp_path / "merged").glob("model-*.safetensors"))
    assert list(planned["files"]) == files
    assert len(files) > 1
    assert (planned["operator"], planned["parameters"]) == (done["operator"], done["parameters"])
    assert (planned["claim"], planned["heads"]) == (done["claim"], done["heads"])
    assert planned["claim"] is not None
    assert done["merged"] == sum(line["rule"] == "ties" for line in planned["tensors"])
    assert planned["bytes"] == sum(line["bytes"] for line in planned["tensors"])


def test_a_dry_run_tells_what_an_operator_of_matrices_leaves_alone(
    run: Run, base: Path, releases: tuple[Path, Path], tmp_path: Path
) -> None:
    code, out, _ = run("merge", *releases, "--base", base, "--operator", "wudi", "--dry-run", "--json")
    assert code == 0
    report = merge(releases, base=base, operator="wudi", out=tmp_path / "merged")
    rules = {line.name: line.rule for line in report.tensors}
    assert {line["name"]: line["rule"] for line in json.loads(out)["tensors"]} == rules
    assert {rule.split(":")[0] for rule in rules.values()} == {"wudi", "base"}


def test_the_plan_for_people(run: Run, recipe: Path) -> None:
    code, out, _ = run("merge", recipe, "--dry-run")
    assert code == 0
    assert "ties, density 0.3" in out
    assert "Model: films (release" in out
    assert "Would claim: (" in out
    assert "declared to share no unit" in " ".join(out.split())


def test_export_after_merge(run: Run, recipe: Path, tmp_path: Path) -> None:
    assert run("merge", recipe, "--out", tmp_path / "merged")[0] == 0
    code, out, _ = run("export", tmp_path / "merged", "--task", "films", "--out", tmp_path / "films")
    assert code == 0
    assert "confide predict" in out
    assert (tmp_path / "films" / "model.safetensors").exists()
    code, out, _ = run("export", tmp_path / "merged", "--task", "films", "--out", tmp_path / "two", "--json")
    assert json.loads(out)["claim"]["delta"] == 1e-6


def test_verify_merges_some_tensors_again(
    run: Run, recipe: Path, base: Path, releases: tuple[Path, Path], tmp_path: Path
) -> None:
    assert run("merge", recipe, "--out", tmp_path / "merged")[0] == 0
    given = ["--base", base, "--input", releases[0], "--input", releases[1], "--sample", 1000, "--json"]
    code, out, _ = run("verify", tmp_path / "merged", *given)
    assert code == 0
    assert json.loads(out)["checks"][-1]["result"] == "ok"
    report = tmp_path / "merged" / "merge-report.json"
    report.write_text(report.read_text().replace('"density": 0.3', '"density": 0.9'))
    code, out, _ = run("verify", tmp_path / "merged", *given)
    assert code == 2
    assert "came out different" in json.loads(out)["checks"][-1]["detail"]
    assert run("verify", tmp_path / "merged", "--base", base)[0] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{recipe}"], "name the folder to write with --out"),
        (["{recipe}", "--out", "x", "--density", "0.1"], "is a recipe: write the operator, parameters and"),
        (["{recipe}", "--out", "x", "--operator", "average"], "is a recipe: write the operator, param"),
        (
            ["{recipe}", "--out", "x", "--memory", "lots"],
            "--memory is a size such as 5GB or 500MiB, not 'lots'",
        ),
        (
            ["{recipe}", "--out", "x", "--memory", "1KB"],
            "ties needs .* MB of private memory for chunks of every model",
        ),
        (["{recipe}", "--out", "x", "--shard-size", "0GB"], "--shard-size is a size"),
        (["{folder}", "--out", "x"], "name the public base of the models with --base"),
        (["{folder}/missing.yaml", "--out", "x"], "can't read the recipe .*missing.yaml: No such file"),
    ],
)
def test_refusals(run: Run, recipe: Path, arguments: list[str], message: str) -> None:
    filled = [text.format(recipe=recipe, folder=recipe.parent) for text in arguments]
    code, out, err = run("merge", *filled)
    assert (code, out) == (2, "")
    assert err.count("confide: ") == 1
    assert re.search(message, " ".join(err.split())), err


def test_a_recipe_without_a_base_takes_the_options(
    run: Run, base: Path, recipe: Path, tmp_path: Path
) -> None:
    recipe.write_text("\n".join(line for line in recipe.read_text().splitlines() if "base_model" not in line))
    code, _, err = run("merge", recipe, "--out", tmp_path / "merged")
    assert code == 2
    assert "names no base_model; add it, or give --base" in err
    assert run("merge", recipe, "--base", base, "--out", tmp_path / "merged")[0] == 0
