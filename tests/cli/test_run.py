"""`confide run`: a study from a YAML file to its report."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from confide.privacy.ledger import Ledger

from .conftest import Answer, Interrupted, WriteCsv, listing

Confide = Callable[..., Answer]


@pytest.fixture
def study(
    tiny_base: Path,
    write_csv: WriteCsv,
    sentences: Callable[[int, int], list[tuple[str, str]]],
    tmp_path: Path,
) -> Callable[..., Path]:
    def make(**changes: Any) -> Path:
        files = {
            name: write_csv(f"{name}.csv", sentences(60, n)) for n, name in enumerate(("films", "plays"), 1)
        }
        content: dict[str, Any] = {
            "title": "Tiny study",
            "base": str(tiny_base),
            "disjoint": "declared",
            "tasks": [
                {"name": name, "data": str(path), "text": "text", "label": "label"}
                for name, path in files.items()
            ],
            "settings": {"steps": 2, "expected_batch": 12, "max_length": 20, "trainable": {"blocks": 1}},
            "methods": {"non-private": {}, "dp-adamw": {}},
            "merges": [{"operator": "ties"}],
            "fast": {"title": "Tiny and fast", "methods": {}},
        }
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(content | changes))
        return path

    return make


def test_results_and_report(confide: Confide, study: Callable[..., Path], tmp_path: Path) -> None:
    answer = confide("run", study(), "--fast", "--out", tmp_path / "out", "--json")
    rows = answer.json()
    assert len(rows) == 4
    report = tmp_path / "out" / "report"
    assert json.loads((report / "results.json").read_text()) == rows
    page = (report / "report.html").read_text()
    assert "Tiny and fast" in page
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page)  # nothing is fetched


def test_the_table(confide: Confide, study: Callable[..., Path], tmp_path: Path) -> None:
    answer = confide("run", study(methods={"dp-adamw": {}}), "--out", tmp_path / "out")
    assert answer.code == 0, answer.err
    assert all(word in answer.out for word in ("films", "plays", "ties", "report.html"))


def test_refusals_leave_nothing(confide: Confide, study: Callable[..., Path], tmp_path: Path) -> None:
    path = study(methds={})
    before = listing(tmp_path)
    out = ("--out", tmp_path / "out")
    assert "did you mean 'methods'" in confide("run", path, *out).message()
    assert "missing.yaml" in confide("run", tmp_path / "missing.yaml", *out).message()
    study(merges=[{"operator": "tiez"}])
    assert "did you mean 'ties'" in confide("run", path, *out).message()
    study(settings={"expected_batch": 1000})
    assert "only 48 records" in confide("run", path, *out).message()
    study(base="package:no-such-package")
    assert "not installed" in confide("run", path, *out).message()
    assert listing(tmp_path) == before


def test_ctrl_c_keeps_whole_releases_only(
    confide: Confide, study: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from confide.finetune import tuned
    from confide.release.write import verify

    plain = tuned.write_tensors
    calls = 0

    def third_time_interrupted(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        plain(*arguments)

    monkeypatch.setattr(tuned, "write_tensors", third_time_interrupted)
    assert confide("run", study(), "--out", tmp_path / "out").code == 130
    found = [path.parent for path in (tmp_path / "out").rglob("model.safetensors")]
    assert len(found) == 2
    for folder in found:
        verify(folder)
    assert not list((tmp_path / "out").rglob("*.partial"))


def test_studies_on_own_files_are_charged(
    confide: Confide, study: Callable[..., Path], tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger.sqlite"
    plan = study(methods={"non-private": {}, "dp-adamw": {}}, merges=[])
    assert confide("run", plan, "--out", tmp_path / "out", "--ledger", ledger).code == 0
    found = confide("ledger", "show", "--ledger", ledger, "--json").json()["datasets"]
    assert [(row["dataset"], len(row["charges"])) for row in found] == [("films", 1), ("plays", 1)]
    (charge,) = found[0]["charges"]
    assert charge["state"] == "settled"
    answer = confide("ledger", "cap", "plays", "--epsilon", 4, "--delta", 1e-6, "--ledger", ledger)
    assert answer.code == 0
    message = confide("run", plan, "--out", tmp_path / "again", "--ledger", ledger).message()
    assert "the cap on plays" in message


@pytest.mark.slow
def test_a_study_of_raptor_and_what_it_is_compared_with(
    confide: Confide, study: Callable[..., Path], sparse_base: Path, tmp_path: Path
) -> None:
    experts = {"layer": "last", "rank": 2}
    raptor: dict[str, Any] = {"method": "raptor", "epsilon": 8.0, "experts": experts}
    path = study(
        base=str(sparse_base),
        methods={"raptor": raptor, "one-stream": {**raptor, "experts": {**experts, "variant": "one-stream"}}},
        settings={"steps": 2, "expected_batch": 12, "max_length": 20},
    )
    rows = confide("run", path, "--out", tmp_path / "out", "--json").json()
    assert {(row["method"], row["operator"]) for row in rows} == {
        (method, operator) for method in ("raptor", "one-stream") for operator in ("individual", "ties")
    }
    assert all(7.9 < row["epsilon"] <= 8 for row in rows)


def test_a_corpus_that_shares_a_text_stops_a_study_before_it_begins(
    confide: Confide, study: Callable[..., Path], sparse_base: Path, tmp_path: Path
) -> None:
    shared = (tmp_path / "plays.csv").read_text(encoding="utf-8") if study() else ""
    corpus = tmp_path / "public.txt"
    corpus.write_text("\n".join(line.rsplit(",", 1)[0] for line in shared.splitlines()), encoding="utf-8")
    path = study(
        base=str(sparse_base),
        methods={"raptor": {"epsilon": 8.0, "experts": {"public": str(corpus)}}},
        settings={"steps": 2, "expected_batch": 12, "max_length": 20},
    )
    assert "must be public" in confide("run", path, "--out", tmp_path / "out").message()
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_study_makes_its_mixture_and_says_what_it_did(
    confide: Confide,
    study: Callable[..., Path],
    tiny_base: Path,
    sentences: Callable[[int, int], list[tuple[str, str]]],
    tmp_path: Path,
) -> None:
    """A tiny version of examples/moe.yaml: every release is whole, and the page has every part."""
    corpus = tmp_path / "public.txt"
    corpus.write_text("\n".join(text for text, _ in sentences(120, 9)), encoding="utf-8")
    experts = {"layer": "entropy", "public": str(corpus), "rank": 2}

    def method(epsilon: float, variant: str) -> dict[str, Any]:
        return {"method": "raptor", "epsilon": epsilon, "experts": {**experts, "variant": variant}}

    raptor = method(1, "raptor")
    path = study(
        upcycle={"corpus": str(corpus), "experts": 4, "blocks": [0, 2]},
        methods={
            "non-private": method(1, "non-private"),
            "raptor-eps1": {**raptor, "experts": {**raptor["experts"], "diagnostics": True}},
            "raptor-eps8": method(8, "raptor"),
            "monolithic-eps1": method(1, "monolithic"),
        },
        settings={"steps": 2, "expected_batch": 12, "max_length": 20},
        merges=[],
    )
    out = tmp_path / "out"
    answer = confide("run", path, "--out", out)
    assert answer.code == 0, answer.err
    for text in (
        "4 experts in blocks 0, 2",
        "are the dense model's, bit for bit",
        "Owners of 120 public texts",
    ):
        assert text in answer.out
    assert "At ε = 1 raptor-eps1 has" in answer.out
    facts = json.loads((out / "report" / "study.json").read_text())
    (chosen,) = {
        layer for run in facts["mixture"]["runs"] for layer in run["layers"] if run["variant"] == "raptor"
    }
    assert chosen == facts["mixture"]["routing"]["chosen"]
    streams = {run["method"]: run["streams"] for run in facts["mixture"]["runs"]}
    assert [stream["name"] for stream in streams["raptor-eps1"]] == ["shared", "experts"]
    assert streams["raptor-eps1"][0]["share"] == pytest.approx(0.9, abs=1e-6)
    assert streams["raptor-eps1"][1]["denominator"] == 12 / 4
    assert streams["raptor-eps1"][0]["noise_multiplier"] > streams["raptor-eps8"][0]["noise_multiplier"] > 0
    assert streams["non-private"][0]["share"] is None
    releases = sorted(path.parent for path in (out / "models").rglob("model.safetensors"))
    assert len(releases) == 8
    for folder in releases:
        assert confide("verify", folder).code == 0
        statement = json.loads((folder / "statement.json").read_text())
        assert statement["base"]["name"] == f"{tiny_base.name}-moe"
    assert not [name for name in listing(out / "models") if "diagnostics" in name or "owners" in name]
    private = out / "private" / "raptor-eps1" / "seed-0" / "films"
    assert json.loads((private / "diagnostics.json").read_text())["records"] == 48
    for text in ("M_role", "Private diagnostics: of the records"):
        assert text in answer.out
    page = (out / "report" / "report.html").read_text()
    for text in ("share of μ²", "Routing on public text"):
        assert text in page
    assert "M_role" in (out / "private" / "roles.html").read_text()
    for report in (out / "report").iterdir():
        assert "M_role" not in report.read_text()
        assert "clipped" not in report.read_text()


def test_a_study_is_given_up(
    confide: Confide, study: Callable[..., Path], tmp_path: Path, interrupted: Interrupted
) -> None:
    """Its broken-off run is settled and loses its keys; what is finished stays, the rest can begin anew."""
    file, out = study(methods={"dp-adamw": {}}), tmp_path / "out"
    with interrupted(4):  # the second of two steps on the second task
        assert confide("run", file, "--out", out).code == 130
    assert list((out / "private").rglob("run.json"))
    assert "--yes gives it up" in confide("purge", out, "--json").message()
    found = confide("purge", out, "--yes", "--json").json()
    assert found["destroyed"] == ["keys and checkpoints"]
    assert found["settled"]
    assert found["remains"] == ["models", "private"]
    assert not list((out / "private").rglob("run.json"))
    assert "nothing; a finished run" in confide("purge", out, "--yes").out
    assert confide("run", file, "--out", out, "--resume").code == 0
    accounts = Ledger.open().accounts()
    assert {name: [c.state for c in one.charges] for name, one in accounts.items()} == {
        "films": ["settled"],
        "plays": ["settled", "settled"],
    }


def test_all_of_a_study_is_given_up(
    confide: Confide,
    study: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    interrupted: Interrupted,
) -> None:
    """A run that can't be opened doesn't keep the keys of another, nor does a ledger that is away."""
    out = tmp_path / "out"
    with interrupted(2):
        assert confide("run", study(methods={"dp-adamw": {}}), "--out", out).code == 130
    strange = out / "private" / "unfinished" / "a-method" / "seed-0" / "films"
    strange.mkdir(parents=True)
    (strange / "mine.txt").touch()
    Path(os.environ["CONFIDE_LEDGER"]).rename(tmp_path / "moved.sqlite")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "taken"))
    (tmp_path / "taken").touch()  # no note can be written there
    assert "holds mine.txt" in confide("purge", out, "--yes").message()
    assert not list((out / "private").rglob("run.json"))
    shutil.rmtree(strange)
    found = confide("purge", out, "--all", "--json").json()
    assert found["destroyed"] == ["private/"]
    assert not (out / "private").exists()
