"""Findings for every way a study can come out."""

from __future__ import annotations

from itertools import product

import pytest

from confide.report.findings import findings
from confide.report.study import Row


def row(method: str, operator: str, *scores: float, seed: int = 0, epsilon: float | None = 4.0) -> Row:
    if method == "non-private":
        epsilon = None
    by_task = dict(zip(("films", "codes"), scores, strict=True))
    delta = None if epsilon is None else 1e-6
    return Row(method, operator, seed, by_task, sum(scores) / 2, epsilon, delta)


def say(*rows: Row) -> str:
    return "\n".join(findings(rows))


def test_a_private_head_does_as_well() -> None:
    said = say(row("pretrained", "individual", 0.7, 0.7), row("dp-adamw", "individual", 0.7, 0.71))
    assert "A private head on the public encoder does as well here: 70.0 % on average" in said
    assert "70.5 % of DP-AdamW" in said
    assert "(+0.5 points)" in said
    assert "pays on codes (+1.0 points), but not on films (0.0 points)" in said


def test_a_private_head_does_better() -> None:
    said = say(row("pretrained", "individual", 0.7, 0.7), row("dp-merging", "individual", 0.6, 0.7))
    assert "does as well here, and better: 70.0 %" in said
    assert "DP-Merging pays on none by more than half a point: films (−10.0 points) and codes" in said


def test_private_fine_tuning_pays() -> None:
    said = say(
        row("pretrained", "individual", 0.7, 0.7),
        row("dp-adamw", "individual", 0.71, 0.8),
        row("dp-merging", "individual", 0.72, 0.85),
    )
    assert "Private fine-tuning pays here" in said
    assert "as well" not in said
    assert "78.5 % of DP-Merging, the best private fine-tuning before merging (+8.5 points)" in said
    assert "pays on every one: films (+2.0 points) and codes (+15.0 points)" in said


def test_non_private_models_never_count_as_private() -> None:
    said = say(
        row("pretrained", "individual", 0.7, 0.7),
        row("non-private", "individual", 0.9, 0.9),
        row("non-private", "ties", 0.8, 0.8),
        row("dp-adamw", "individual", 0.7, 0.7),
    )
    assert "does as well here" in said
    assert "best private merge" not in said


GAINS = {"better": 0.02, "worse": -0.02, "level": 0.0}


@pytest.mark.parametrize(("models", "ties"), list(product(GAINS, GAINS)))
def test_dp_merging_against_dp_adamw(models: str, ties: str) -> None:
    said = say(
        row("dp-adamw", "individual", 0.7, 0.7),
        row("dp-merging", "individual", 0.7 + GAINS[models], 0.7 + GAINS[models]),
        row("dp-adamw", "ties", 0.6, 0.6),
        row("dp-merging", "ties", 0.6 + GAINS[ties], 0.6 + GAINS[ties]),
    )
    sentence = next(line for line in said.splitlines() if line.startswith("DP-Merging "))
    outcomes = {models, ties}
    if outcomes == {"better"}:
        assert "does better than DP-AdamW in every row" in sentence
    elif "better" not in outcomes:
        assert "doesn't beat DP-AdamW in any row" in sentence
    else:
        assert sentence.startswith("DP-Merging does better than DP-AdamW")
        other = (outcomes - {"better"}).pop()
        assert {"worse": "; worse ", "level": "; no clear difference "}[other] in sentence
    written = {"better": "+2.0", "worse": "−2.0", "level": "0.0"}
    assert (
        f"before merging ({written[models]} points: {70 + GAINS[models] * 100:.1f} % against 70.0 %)"
        in sentence
    )
    assert f"with ties ({written[ties]} points: {60 + GAINS[ties] * 100:.1f} % against 60.0 %)" in sentence


def test_a_gain_within_the_spread_of_seeds_is_no_clear_one() -> None:
    rows = []
    for seed, gain in enumerate((0.03, -0.02, 0.01)):  # mean .0067, deviation .025
        rows += [
            row("dp-adamw", "ties", 0.6, 0.6, seed=seed),
            row("dp-merging", "ties", 0.6 + gain, 0.6 + gain, seed=seed),
        ]
    said = say(*rows)
    assert "doesn't beat DP-AdamW in any row: with ties (+0.7 ± 2.5 points" in said
    assert "standard deviation over 3 seeds" in said
    assert "one seed:" not in said


def test_the_best_private_merge_and_where_it_stands() -> None:
    said = say(
        row("pretrained", "individual", 0.7, 0.7),
        row("dp-adamw", "individual", 0.74, 0.74),
        row("dp-adamw", "ties", 0.71, 0.71),
        row("dp-adamw", "average", 0.69, 0.69),
        row("dp-merging", "average", 0.70, 0.70),
    )
    assert (
        "The best private merge is DP-AdamW with ties, with 71.0 % on average: 3.0 points below its models "
        "before merging and 1.0 points above a private head on the public encoder." in said
    )


def test_the_cost_of_privacy() -> None:
    said = say(
        row("non-private", "individual", 0.8, 0.8),
        row("non-private", "ties", 0.65, 0.65),
        row("dp-adamw", "individual", 0.75, 0.75),
        row("dp-adamw", "average", 0.65, 0.66),
    )
    assert (
        "Privacy costs 5.0 points before merging (80.0 % without it, 75.0 % for DP-AdamW) and nothing" in said
    )
    assert "nothing after merging (65.0 % without it with ties, 65.5 % for DP-AdamW with average)" in said


def test_rows_without_a_claim_are_named_and_compared_as_private_with_nobody() -> None:
    said = say(
        row("pretrained", "individual", 0.7, 0.7),
        row("dp-adamw", "individual", 0.9, 0.9, epsilon=None),
        row("dp-merging", "individual", 0.71, 0.71),
    )
    assert "No privacy is claimed for DP-AdamW before merging." in said
    assert "71.0 % of DP-Merging" in said


def test_one_seed_says_so() -> None:
    said = findings([row("pretrained", "individual", 0.7, 0.7)])
    assert said == (
        "All numbers come from one seed, and another one, with its own noise, can move them by points: run "
        "several seeds before ranking what is close.",
    )
