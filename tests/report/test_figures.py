"""Figures: well-formed, labelled, and to scale."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from confide.report import figures
from confide.report.scores import score_table
from confide.report.tables import method_table

from .conftest import TASKS, made_up_study

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return ["".join(text.itertext()) for text in ET.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
def test_every_bar_has_its_name_and_number(seeds: tuple[int, ...]) -> None:
    study = made_up_study(seeds)
    lines = score_table(study.rows)
    written = texts(figures.task_scores(lines).svg)
    for task in TASKS:
        assert task in written
    for line in lines:
        if line.operator == "individual":
            assert all(score.percent() in written for score in line.scores.values())
    assert written.count("DP-Merging") == len(TASKS)
    assert "score in percent (the axis starts at 50)" in written
    merged = figures.merged_scores(lines)
    assert merged is not None
    assert {"average", "task-arithmetic", "ties"} <= set(texts(merged.svg))
    methods = method_table(study.methods, study.rows)
    gaps, drifts = figures.merge_gaps(methods), figures.drifts(methods)
    assert gaps is not None
    assert drifts is not None
    for line in methods:
        assert all(gap.percent(signed=True) in texts(gaps.svg) for gap in line.merge_gap.values())
        assert (line.drift.plain() in texts(drifts.svg)) == (line.method != "pretrained")


def test_bars_are_as_long_as_their_values() -> None:
    study = made_up_study()
    chart = figures.drifts(method_table(study.methods, study.rows))
    assert chart is not None
    lengths = {}
    for colour in ("#009e73", "#56b4e9", "#d55e00"):
        path = re.search(rf'<path d="([^"]*)"[^>]*fill: {colour}', chart.svg)
        assert path
        across = [float(x) for x in re.findall(r"[ML] ([\d.]+) ", path[1])]
        lengths[colour] = max(across) - min(across)
    assert lengths["#56b4e9"] / lengths["#009e73"] == pytest.approx(0.0462 / 0.0731, rel=1e-3)
    assert lengths["#d55e00"] / lengths["#009e73"] == pytest.approx(0.0311 / 0.0731, rel=1e-3)


def test_names_are_neither_markup_nor_mathematics_and_ids_are_the_figures_own() -> None:
    study = made_up_study(tasks=("<b>", "$x$", "a & b", "d"))
    svg = figures.task_scores(score_table(study.rows)).svg
    assert {"<b>", "$x$", "a & b"} <= set(texts(svg))
    identifiers = re.findall(r'\bid="([^"]*)"', svg)
    assert len(identifiers) == len(set(identifiers))
    assert all(name.startswith("task-scores-") for name in identifiers)
    referred = re.findall(r'(?:href="|url\()#([^")]*)', svg)
    assert referred
    assert set(referred) <= set(identifiers)


def test_figures_are_the_same_each_time() -> None:
    lines = score_table(made_up_study().rows)
    assert figures.merged_scores(lines) == figures.merged_scores(lines)


def test_nothing_merged_nothing_drawn() -> None:
    study = made_up_study()
    rows = [row for row in study.rows if row.operator == "individual"]
    assert figures.merged_scores(score_table(rows)) is None
    assert figures.merge_gaps(method_table(study.methods, rows)) is None
    heads = [fact for fact in study.methods if fact.method == "pretrained"]
    assert figures.drifts(method_table(heads, rows)) is None
