"""What a page and a terminal say about a mixture of experts, from facts by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from confide.models.moe.selection import LayerRouting, Selection
from confide.report import figures
from confide.report.html import report_html, write_private, write_report
from confide.report.mixtures import (
    clipped_text,
    diagnostics_text,
    mixture_findings,
    routing_text,
    routing_words,
    streams_text,
)
from confide.report.scores import score_table
from confide.report.study import MixtureFacts, MixtureRun, PrivateRun, RecordFacts, Row, StreamFacts, Study
from confide.report.tables import score_text
from confide.report.terminal import print_study

ROUTING = Selection(
    layers=(LayerRouting(1, "a", (10, 0)), LayerRouting(3, "b", (5, 5))),
    chosen=3,
    margin=0.69,
    stability=((10, 1.0),),
    stable_from=10,
)
FOUND = RecordFacts(
    records=48,
    mismatch=5.66,
    signals={"shared": (0.041, 0.0), "experts": (0.0072, 1.25)},
    experts_share=(0.01, 0.05),
    scales=(0.0, 6.61),
    scale_gap=1.4,
    bias=1.36,
    bias_bound=1.71,
    changed=0.02,
    kept=0.796,
    stale=0.06,
    stale_bound=1.1,
    public_evenness=1.0,
    private_evenness=0.5,
    public_choice=3,
    private_choice=5,
)


def stream(name: str, sigma: float, share: float | None) -> StreamFacts:
    rule = "flat" if sigma else "none"
    return StreamFacts(name, 1200, 20, 128.0, sigma, rule, 1.0, 16.0, share)


def runs() -> tuple[MixtureRun, ...]:
    two = (stream("shared", 1.234, 0.9), stream("experts", 4.321, 0.1))
    free = (stream("shared", 0, None), stream("experts", 0, None))
    return (
        MixtureRun("non-private", 0, "icd", "non-private", None, (3,), free),
        MixtureRun("raptor-eps1", 0, "icd", "raptor", 1.0, (3,), two),
        MixtureRun("raptor-eps8", 0, "icd", "raptor", 8.0, (3,), two),
        MixtureRun("mono-eps1", 0, "icd", "monolithic", 1.0, (1, 3), (stream("all", 1.2, 1.0),)),
        MixtureRun("shared-eps8", 0, "icd", "shared-only", 8.0, (), (stream("shared", 1.2, 1.0),)),
    )


PRIVATE = (
    PrivateRun("raptor-eps1", 0, "icd", {"shared": 0.5, "experts": 0.125}, FOUND),
    PrivateRun("raptor-eps8", 0, "icd", {"shared": 0.25}),
    PrivateRun("raptor-eps8", 1, "icd", {"shared": 0.75}),
)
SCORES = {"non-private": 0.7, "raptor-eps1": 0.5, "raptor-eps8": 0.6, "mono-eps1": 0.42, "shared-eps8": 0.6}


def rows() -> tuple[Row, ...]:
    claims = {run.method: run.epsilon for run in runs()}
    return tuple(
        Row(method, "individual", 0, {"icd": score}, score, claims[method], 1e-6 if claims[method] else None)
        for method, score in SCORES.items()
    )


@pytest.fixture
def mixed(study: Study) -> Study:
    facts = [replace(study.methods[0], method=run.method) for run in runs()]
    own = [
        replace(fact, **{key: {"icd": 1} for key in ("drift", "noise_multiplier", "trained", "seconds")})  # type: ignore[arg-type]
        for fact in facts
    ]
    return replace(
        study,
        tasks=(replace(study.tasks[0], name="icd"),),
        rows=rows(),
        findings=(),
        claims=(),
        methods=tuple(replace(fact, memory={"icd": 2_500_000}) for fact in own),
        mixture=MixtureFacts(("Made & <checked>",), 4321, ROUTING, "brown", runs()),
        private=PRIVATE,
    )


def test_the_score_table_has_only_columns_that_say_something() -> None:
    table = score_text(score_table(rows()))
    assert table.header == ("method", "ε", "icd")
    assert table.words == 1
    assert table.rows[:2] == (("non-private", "–", "70.0"), ("raptor-eps1", "1.00", "50.0"))


def test_the_routing_table_marks_what_is_trained() -> None:
    table = routing_text(ROUTING, 3)
    assert [row[0] for row in table.rows] == ["1", "3 *"]
    assert [row[2] for row in table.rows] == ["0.000", "1.000"]
    assert [row[-1] for row in table.rows] == ["100 %", "50 %"]
    assert routing_words(ROUTING)[0].endswith("from 10 texts.")
    assert "not certain" in routing_words(replace(ROUTING, stable_from=None))[0]


def test_streams_with_their_noise_and_share() -> None:
    table = streams_text(runs())
    found = {(row[0], row[1]): row[2:] for row in table.rows}
    assert found["raptor-eps1", "experts (block 3)"] == (
        *("1,200", "20", "128", "4.32", "1 flat"),
        *("16", "0.100"),
    )
    assert found["non-private", "shared"][3:] == ("–", "–", "16", "–")
    assert ("mono-eps1", "all (blocks 1, 3)") in found
    assert ("shared-eps8", "shared") in found
    again = (*runs(), *(replace(run, seed=1) for run in runs()))
    assert streams_text(again) == table


def test_findings_compare_at_equal_budgets_only() -> None:
    mixture = MixtureFacts((), 1, None, None, runs())
    assert mixture_findings(rows(), mixture) == (
        "At ε = 1 raptor-eps1 has 50.0 %: 8.0 points above mono-eps1 (42.0 %).",
        "At ε = 8 raptor-eps8 has 60.0 %: level with shared-eps8 (60.0 %).",
    )


def test_diagnostics_have_a_column_for_each_run_that_has_them() -> None:
    table = diagnostics_text(PRIVATE)
    assert table is not None
    assert table.header == ("", "raptor-eps1")
    found = dict(table.rows)  # type: ignore[arg-type]
    assert found["M_role, ratio of the two"] == "5.7"
    assert found["owners changed by training (theorem 3)"] == "2.0 %"
    assert found["mean relative bias ≤ by entropy (theorem 2)"] == "1.4 ≤ 1.7"
    assert found["most even block, public text → records"] == "3 → 5"
    bare = replace(PRIVATE[0], diagnostics=RecordFacts(1, None, {}))
    assert {row[1] for row in diagnostics_text((bare,)).rows} == {"–"}  # type: ignore[union-attr]
    assert diagnostics_text(PRIVATE[1:]) is None


def test_what_was_clipped_by_stream() -> None:
    table = clipped_text(PRIVATE)
    assert table is not None
    assert [row[-2:] for row in table.rows] == [("shared", "50 %"), ("experts", "12 %"), ("shared", "25 %")]
    assert clipped_text((replace(PRIVATE[0], clipped={}),)) is None


def test_what_is_private_stays_out_of_the_report(mixed: Study, tmp_path: Path) -> None:
    """Two studies that differ in it alone have one report, byte for byte."""
    write_report(mixed, tmp_path / "a")
    write_report(replace(mixed, private=()), tmp_path / "b")
    for name in ("study.json", "results.json", "report.html"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    write_private(mixed, tmp_path / "private")
    page = (tmp_path / "private" / "roles.html").read_text()
    for text in ("<strong>Private.</strong>", "M_role", "records clipped in a step", "12 %"):
        assert text in page
    assert json.loads((tmp_path / "private" / "roles.json").read_text())[0]["diagnostics"]["records"] == 48
    assert (tmp_path / "private" / "roles.json").stat().st_mode & 0o077 == 0
    write_private(replace(mixed, private=()), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_bars_are_grouped_by_budget() -> None:
    lines = score_table(rows())
    chart = figures.variants(lines, runs())
    assert chart is not None
    for text in ("ε = 1", "ε = 8", "without privacy", "RAPTOR", "monolithic", "70.0"):
        assert text in chart.svg
    twin = [replace(run, variant="raptor") for run in runs()]
    assert "mono-eps1" in figures.variants(lines, twin).svg  # type: ignore[union-attr]
    assert figures.variants(lines, runs()[:1]) is None


def test_a_layers_experts_fill_its_bar() -> None:
    chart = figures.owner_shares(ROUTING, [3])
    for text in ("block 1", "block 3", "H 0.00", "H 1.00"):
        assert text in chart.svg
    assert "data:image" not in chart.svg  # the page's policy loads none


def test_the_page_and_the_terminal_have_every_part(mixed: Study, capsys: pytest.CaptureFixture[str]) -> None:
    page = report_html(mixed)
    assert "Made &amp; &lt;checked&gt;" in page
    for text in ("share of μ²", "Owners of 10 public texts", "3 *"):
        assert text in page
    assert "merging" not in page.split("<main>", 1)[1].split("Tasks and where", 1)[0]
    print_study(mixed)
    printed = capsys.readouterr().out
    for text in (
        "Made & <checked>.",
        "3 *",
        "Private diagnostics",
        "M_role",
        "peak memory, MB",
        "experts (block 3)",
    ):
        assert text in printed


def test_a_study_without_a_mixture_says_nothing_of_one(study: Study) -> None:
    assert "Streams" not in report_html(study)
