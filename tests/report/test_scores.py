"""Score tables from made-up rows, against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from confide.errors import ConfigError
from confide.report.scores import Spread, score_table
from confide.report.study import Row
from confide.report.tables import score_text


def row(method: str, operator: str, a: float, b: float, seed: int = 0, epsilon: float | None = 4.0) -> Row:
    delta = None if epsilon is None else 1e-6
    return Row(method, operator, seed, {"a": a, "b": b}, (a + b) / 2, epsilon, delta)


ROWS = [
    row("dp-adamw", "ties", 0.70, 0.60),
    row("dp-merging", "ties", 0.72, 0.59),
    row("non-private", "individual", 0.9, 0.8, epsilon=None),
    row("dp-adamw", "individual", 0.75, 0.65),
    row("dp-merging", "individual", 0.74, 0.61),
    row("non-private", "ties", 0.82, 0.73, epsilon=None),
    row("dp-adamw", "average", 0.7, 0.5),
    row("pretrained", "individual", 0.6, 0.7),
]
GOLDEN = """\
method operator a b average gain
pretrained individual 60.0 70.0 65.0 –
non-private individual 90.0 80.0 85.0 –
DP-AdamW individual 75.0 65.0 70.0 –
DP-Merging individual 74.0 61.0 67.5 −2.5
non-private ties 82.0 73.0 77.5 –
DP-AdamW ties 70.0 60.0 65.0 –
DP-Merging ties 72.0 59.0 65.5 +0.5
DP-AdamW average 70.0 50.0 60.0 –"""


def test_the_table_reads_as_in_the_papers() -> None:
    rows = [ROWS[7], ROWS[2], ROWS[3], ROWS[4], ROWS[5], ROWS[0], ROWS[1], ROWS[6]]
    table = score_text(score_table(rows))
    assert "\n".join(" ".join(cells) for cells in (table.header, *table.rows)) == GOLDEN


def test_pretrained_leads_then_models_before_merging_then_merges_in_any_order_of_rows() -> None:
    order = [(line.method, line.operator) for line in score_table(ROWS)]
    assert order[0] == ("pretrained", "individual")
    assert all(operator == "individual" for _, operator in order[:4])
    assert [operator for _, operator in order[4:]] == ["ties"] * 3 + ["average"]


def test_spread_over_seeds_and_a_gain_within_each_seed() -> None:
    # Both methods vary by 4 points from seed to seed, their difference by none.
    rows = [
        row(method, "ties", 0.70 + shift + bonus, 0.60 + shift + bonus, seed)
        for seed, shift in enumerate((0.0, 0.04, -0.04))
        for method, bonus in (("dp-adamw", 0.0), ("dp-merging", 0.01))
    ]
    adamw, merging = score_table(rows)
    assert adamw.average.mean == pytest.approx(0.65)
    assert adamw.average.deviation == pytest.approx(0.04)  # sqrt((0² + .04² + .04²) / 2)
    assert adamw.scores["a"].percent() == "70.0 ± 4.0"
    assert merging.gain is not None
    assert merging.gain.percent(signed=True) == "+1.0 ± 0.0"


def test_gain_needs_the_same_seeds() -> None:
    rows = [row("dp-adamw", "ties", 0.7, 0.6, 0), row("dp-merging", "ties", 0.7, 0.6, 1)]
    with pytest.raises(ConfigError, match="same seeds"):
        score_table(rows)


def test_a_line_claims_only_what_every_seed_claims() -> None:
    line = score_table([row("dp-adamw", "ties", 0.5, 0.5, s, e) for s, e in ((0, 3.9), (1, 4.0))])[0]
    assert line.epsilon == 4.0
    line = score_table([row("dp-adamw", "ties", 0.5, 0.5, s, e) for s, e in ((0, 3.9), (1, None))])[0]
    assert line.epsilon is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no rows"),
        ([ROWS[0], ROWS[0]], "dp-adamw with ties, seed 0, is there twice"),
        ([ROWS[0], Row("dp-merging", "ties", 0, {"a": 0.5}, 0.5, 4, 1e-6)], "scores"),
        ([replace(ROWS[0], scores={})], "scores"),
        ([row("dp-adamw", "ties", math.nan, 0.5)], "score nan for 'a'"),
        ([row("dp-adamw", "ties", 0.5, 72.9)], "score 72.9 for 'b'"),
        ([replace(ROWS[0], average=0.7)], "isn't the mean"),
        ([replace(ROWS[0], average=math.nan)], "isn't the mean"),
        ([replace(ROWS[0], epsilon=math.inf)], "claims nothing"),
        ([replace(ROWS[0], epsilon=math.nan)], "claims nothing"),
    ],
)
def test_refuses(rows: list[Row], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        score_table(rows)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0042, "+0.4"), (-0.0042, "−0.4"), (-0.0001, "0.0"), (0.0001, "0.0"), (0.0, "0.0")],
)
def test_signs(value: float, text: str) -> None:
    assert Spread(value, None).percent(signed=True) == text
