"""The page as a browser would read it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from confide.errors import ConfigError, ReleaseError
from confide.report.html import report_html, write_report
from confide.report.scores import score_table
from confide.report.study import Study
from confide.report.tables import method_table, method_text, score_text

from .conftest import made_up_study

LOADS = {"src", "href", "xlink:href", "data", "srcset", "poster", "action"}
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Tags, text outside of styles, attributes; fails on tags that don't match."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data.strip())


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
def test_every_number_and_sentence_is_on_the_page(seeds: tuple[int, ...]) -> None:
    study = made_up_study(seeds)
    page = Page(report_html(study))
    for table in (score_text(score_table(study.rows)), method_text(method_table(study.methods, study.rows))):
        for cells in (table.header, *table.rows):
            assert set(cells) - {""} <= set(page.texts)
    assert set(study.findings) | set(study.claims) <= set(page.texts)
    assert {f"{task.train:,}" for task in study.tasks} <= set(page.texts)
    assert {task.source for task in study.tasks} <= set(page.texts)
    assert set(study.versions.values()) <= set(page.texts)
    assert any("expected_batch: 512" in text for text in page.texts)
    assert any("not noised" in text for text in page.texts)
    assert page.texts.index(study.findings[0]) < page.texts.index("Scores")


def test_nothing_is_loaded_from_anywhere(study: Study) -> None:
    source = report_html(study)
    page = Page(source)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert all(value.startswith("#") for name, value in page.attributes if name in LOADS)
    assert "@import" not in source
    assert "url(" not in source.replace("url(#", "")


def test_everything_is_escaped() -> None:
    bad = '<b>bold</b>"&{{ 7 * 7 }}'
    study = made_up_study(tasks=(bad, "t", "u", "v"))
    study = replace(
        study,
        title=bad,
        base=bad,
        claims=(bad,),
        findings=(bad,),
        tasks=(replace(study.tasks[0], metric=bad, source=bad),),
        settings={bad: {bad: bad}},
        versions={bad: bad},
    )
    page = Page(report_html(study))
    assert "b" not in page.tags
    assert page.texts.count(bad) >= 8
    assert "49" not in "".join(page.texts).split("bold")[1]


def test_the_folder_holds_rows_facts_and_page(study: Study, tmp_path: Path) -> None:
    write_report(study, tmp_path / "report")
    folder = tmp_path / "report"
    assert sorted(file.name for file in folder.iterdir()) == ["report.html", "results.json", "study.json"]
    results = json.loads((folder / "results.json").read_text())
    assert isinstance(results, list)
    assert results == study.results()
    assert set(results[0]) == {"method", "operator", "seed", "scores", "average", "epsilon", "delta"}
    facts = json.loads((folder / "study.json").read_text())
    assert facts["methods"][0]["drift"] == study.methods[0].drift
    assert facts["findings"] == list(study.findings)


def nan_score(study: Study) -> Study:
    row = study.rows[0]
    return replace(study, rows=(replace(row, scores={**row.scores, "tweets": math.nan}), *study.rows[1:]))


@pytest.mark.parametrize(
    "spoil",
    [
        nan_score,
        lambda study: replace(study, methods=(replace(study.methods[0], drift={"tweets": math.nan}),)),
        lambda study: replace(study, minutes=math.inf),
        lambda study: replace(study, settings={"dp-adamw": {"epsilon": math.nan}}),
        lambda study: replace(study, settings={"dp-adamw": {"epsilon": {1, 2}}}),
    ],
)
def test_what_json_cannot_hold_is_refused_and_nothing_is_written(spoil, study: Study, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError):
        write_report(spoil(study), tmp_path / "report")
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_is_there_stays_unless_told(study: Study, tmp_path: Path) -> None:
    write_report(study, tmp_path / "report")
    with pytest.raises(ReleaseError, match="exists already"):
        write_report(study, tmp_path / "report")
    write_report(replace(study, title="Again"), tmp_path / "report", overwrite=True)
    assert "<title>Again</title>" in (tmp_path / "report" / "report.html").read_text()
