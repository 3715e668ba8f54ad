"""A whole study of a tiny BERT on files of made-up reviews, and its results by another way."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import confide
from confide.errors import ConfigError, DataError
from confide.experiment import run as module
from confide.experiment.plan import Plan
from confide.experiment.run import run
from confide.geometry.drift import folder_drift
from confide.privacy.accountant import epsilon
from confide.privacy.composition import check
from confide.privacy.events import Composed
from confide.privacy.statement import read as read_statement
from confide.release.write import verify
from confide.report.scores import score_table
from confide.report.study import Study

Sentences = Callable[[int, int], list[tuple[str, str]]]
KEYS = {"method", "operator", "seed", "scores", "average", "epsilon", "delta"}
SEEDS = (0, 5)
METHODS = ("non-private", "dp-adamw", "dp-merging")
OPERATORS = ("average", "ties")


def silent(*_: Any) -> None:
    pass


def write(path: Path, rows: list[tuple[str, str]]) -> Path:
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    return path


def make_plan(base: Path, folder: Path, rows: dict[str, list[tuple[str, str]]], **changes: Any) -> Plan:
    files = {name: write(folder / f"{name}.csv", own) for name, own in rows.items()}
    values: dict[str, Any] = {
        "title": "Tiny",
        "base": str(base),
        "disjoint": "declared",
        "tasks": [
            {"name": name, "data": str(path), "text": "text", "label": "label", "labels": ["neg", "pos"]}
            for name, path in files.items()
        ],
        "settings": {
            "steps": 2,
            "expected_batch": 12,
            "max_length": 20,
            "trainable": {"kind": "lora", "blocks": 1, "rank": 2, "train_a": False},
            "learning_rate": 0.05,
        },
        "pretrained": {},
        "methods": {method: {} for method in METHODS},
        "merges": [{"operator": operator} for operator in OPERATORS],
        "seeds": list(SEEDS),
    }
    return Plan.model_validate(values | changes)


@pytest.fixture(scope="module")
def plan(tiny_base: Path, sentences: Sentences, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("data")
    return make_plan(tiny_base, folder, {"films": sentences(60, 1), "plays": sentences(80, 2)})


@pytest.fixture(scope="module")
def done(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path]:
    out = tmp_path_factory.mktemp("study") / "out"
    return run(plan, out, silent), out


def folder_of(out: Path, row: dict[str, Any], task: str) -> Path:
    if row["operator"] == "individual":
        return out / "models" / row["method"] / f"seed-{row['seed']}" / task
    return out / "merged" / f"{row['method']}-{row['operator']}-seed-{row['seed']}"


def test_a_row_for_everything(done: tuple[Study, Path]) -> None:
    rows = done[0].results()
    assert all(set(row) == KEYS for row in rows)
    found = [(row["method"], row["operator"], row["seed"]) for row in rows]
    wanted = {("pretrained", "individual", seed) for seed in SEEDS}
    wanted |= {(m, o, seed) for m in METHODS for o in ("individual", *OPERATORS) for seed in SEEDS}
    assert len(found) == len(wanted)
    assert set(found) == wanted
    for row in rows:
        assert set(row["scores"]) == {"films", "plays"}
        assert row["average"] == pytest.approx(np.mean(list(row["scores"].values())))


def test_scores_are_those_of_the_releases(done: tuple[Study, Path], plan: Plan) -> None:
    """Every release is opened again and scored on the test records, read anew."""
    study, out = done
    for row in study.results():
        for task in plan.tasks:
            assert task.data is not None
            test = confide.read_task(task.data, text="text", label="label", labels=["neg", "pos"]).test
            model = confide.load(folder_of(out, row, task.name), task=task.name)
            predicted = [one["label"] for one in model.predict(test.texts)]
            right = [("neg", "pos")[label] for label in test.labels]
            share = np.mean([a == b for a, b in zip(predicted, right, strict=True)])
            assert row["scores"][task.name] == pytest.approx(share)


def test_claims(done: tuple[Study, Path]) -> None:
    study, out = done
    for row in study.results():
        statements = [read_statement(folder_of(out, row, task)) for task in row["scores"]]
        for statement in statements:
            check(statement)
        if row["method"] == "non-private":
            assert row["epsilon"] is row["delta"] is None
            assert all(statement.claim is None for statement in statements)
        else:
            claims = [statement.claim for statement in statements if statement.claim]
            assert len(claims) == 2
            assert row["epsilon"] == max(claim.epsilon for claim in claims)
            assert 3.9 < row["epsilon"] <= 4
            assert row["delta"] == 1e-6
    runs = {
        read_statement(folder).spendings[0].run
        for folder in (out / "models").glob("*/*/*")
        if folder.is_dir()
    }
    assert len(runs) == 2 * 2 * 4
    assert any("adding or removing any one unit" in sentence for sentence in study.claims)


def test_every_release_is_whole(done: tuple[Study, Path]) -> None:
    _, out = done
    folders = [path.parent for path in out.rglob("confide.json")]
    assert len(folders) == 16 + 12
    for folder in folders:
        verify(folder)
    assert not list(out.rglob(".*"))


def test_facts(done: tuple[Study, Path], tiny_base: Path) -> None:
    study, out = done
    assert [(task.name, task.train, task.test, task.classes) for task in study.tasks] == [
        ("films", 48, 12, 2),
        ("plays", 64, 16, 2),
    ]
    for facts in study.methods:
        for task in ("films", "plays"):
            folder = out / "models" / facts.method / f"seed-{facts.seed}" / task
            assert facts.drift[task] == pytest.approx(folder_drift(tiny_base, folder), rel=1e-9)
            assert (facts.drift[task] == 0) == (facts.method == "pretrained")
            schedule = read_statement(folder).spendings[0].schedule
            assert schedule is not None
            assert facts.noise_multiplier[task] == schedule.streams[0].noise_multiplier
            assert (facts.noise_multiplier[task] == 0) == (facts.method == "non-private")
            assert facts.trained[task] == (66 if facts.method == "pretrained" else 66 + 2 * 2 * 32)


def test_a_study_is_not_overwritten(done: tuple[Study, Path], plan: Plan) -> None:
    with pytest.raises(ConfigError, match="holds a study already"):
        run(plan, done[1], silent)


def test_tasks_that_share_a_record(
    tiny_base: Path, sentences: Sentences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Declared disjoint and not: refused before anything is trained. Not declared: the claims add up."""
    films = sentences(60, 1)
    rows = {"films": films, "plays": [*sentences(60, 2), (films[3][0].upper() + "!", films[3][1])]}
    monkeypatch.setattr(module, "finetune", lambda *_, **__: pytest.fail("trained all the same"))
    with pytest.raises(DataError, match=r"'films' and 'plays' share 1 record"):
        run(make_plan(tiny_base, tmp_path, rows), tmp_path / "out", silent)
    assert not (tmp_path / "out").exists()


def test_undeclared_tasks_compose(tiny_base: Path, sentences: Sentences, tmp_path: Path) -> None:
    rows = {"films": sentences(60, 1), "plays": sentences(61, 1)}
    one = {"disjoint": None, "methods": {"dp-adamw": {}}, "pretrained": None, "seeds": [0]}
    study = run(
        make_plan(tiny_base, tmp_path, rows, **one, merges=[{"operator": "average"}]),
        tmp_path / "out",
        silent,
    )
    individual, merged = study.rows
    assert individual.epsilon is not None
    assert merged.epsilon is not None
    events = [
        read_statement(tmp_path / "out/models/dp-adamw/seed-0" / name).spendings[0].event for name in rows
    ]
    composed = Composed(tuple(event for event in events if event is not None))
    assert merged.epsilon == epsilon(composed, 1e-6).epsilon
    assert individual.epsilon < merged.epsilon < 2 * individual.epsilon


def test_limits(tiny_base: Path, sentences: Sentences, tmp_path: Path) -> None:
    plan = make_plan(tiny_base, tmp_path, {"films": sentences(60, 1)})
    cut = plan.tasks[0].model_copy(update={"records": 20, "test_records": 5})
    task = module.load_task(cut)
    assert (task.train.units.count, len(task.train), len(task.test)) == (20, 20, 5)
    whole = module.load_task(plan.tasks[0])
    assert set(task.train.texts) < set(whole.train.texts)
    assert set(task.test.texts) < set(whole.test.texts)


def test_merges_by_released_statistics(tiny_base: Path, sentences: Sentences, tmp_path: Path) -> None:
    """Each method's models are merged by what they released, and the query is in every claim."""
    rows = {"films": sentences(60, 1), "plays": sentences(60, 2)}
    asked = {"method": "dp-merging", "statistics_noise": 3.0}
    plan = make_plan(
        tiny_base,
        tmp_path,
        rows,
        pretrained=None,
        methods={
            "by-grams": asked | {"release_statistics": "grams"},
            "by-fisher": asked | {"release_statistics": "fisher"},
            "plain": {"method": "dp-merging"},
        },
        merges=[
            {"operator": "average"},
            {"operator": "regmean", "statistics": "released"},
            {"operator": "fisher", "statistics": "released"},
        ],
        seeds=[0],
    )
    study = run(plan, tmp_path / "out", silent)
    merged = [(row.method, row.operator) for row in study.rows if row.operator != "individual"]
    assert merged == [
        ("by-grams", "average"),
        ("by-grams", "regmean"),
        ("by-fisher", "average"),
        ("by-fisher", "fisher"),
        ("plain", "average"),
    ]
    for method, operator, purpose in (("by-grams", "regmean", "gram"), ("by-fisher", "fisher", "fisher")):
        folder = tmp_path / f"out/merged/{method}-{operator}-seed-0"
        report = json.loads((folder / "merge-report.json").read_text())
        assert [each["origin"] for each in report["statistics"]] == ["released", "released"]
        assert [each["source"] for each in report["statistics"]] == list(rows)
        statement = read_statement(folder)
        check(statement)
        assert statement.claim is not None
        for spending in statement.spendings:
            assert spending.schedule is not None
            assert [query.purpose for query in spending.schedule.queries] == [purpose]
    assert not (tmp_path / "out/statistics").exists()
    score_table(study.rows)


def test_merges_by_public_statistics(tiny_base: Path, sentences: Sentences, tmp_path: Path) -> None:
    corpus = tmp_path / "public.txt"
    corpus.write_text("a film nobody owns\nthe public play\n", encoding="utf-8")
    rows = {"films": sentences(60, 1), "plays": sentences(60, 2)}
    merges = [
        {"operator": "regmean"},
        {"operator": "regmean", "name": "by-diagonals", "parameters": {"alpha": 0}},
    ]
    changes = {"merges": [*merges, {"operator": "fisher"}], "methods": {"dp-adamw": {}}, "seeds": [0]}
    plan = make_plan(
        tiny_base, tmp_path, rows, pretrained=None, statistics={"corpus": str(corpus)}, **changes
    )
    study = run(plan, tmp_path / "out", silent)
    assert [row.operator for row in study.rows] == ["individual", "regmean", "by-diagonals", "fisher"]
    files = sorted(path.name for path in (tmp_path / "out/statistics/dp-adamw/seed-0").iterdir())
    assert files == [f"{kind}-{task}.safetensors" for kind in ("fisher", "grams") for task in rows]
    verify(tmp_path / "out/merged/dp-adamw-by-diagonals-seed-0")
    corpus.write_text(rows["plays"][3][0], encoding="utf-8")
    with pytest.raises(DataError, match="plays"):
        run(plan, tmp_path / "again", silent)
    assert not (tmp_path / "again").exists()
