"""What a finished run says: its claim, its score, where its release is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confide.choices import Metric
from confide.cli.keys import signed
from confide.cli.output import print_json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from confide.finetune.tuned import FineTuned
    from confide.models.adapters import Adapted
    from confide.privacy.statement import Statement

NOTE = "The score comes from test records without noise: it is for you, and no part of the release."


def summary_of(
    result: FineTuned, out: Path, scores: Mapping[Metric, float], signs: Ed25519PrivateKey | None
) -> dict[str, Any]:
    """The content of results.json: scores among it aren't noised."""
    from confide.privacy.signature import public_text

    statement = result.statement
    return {
        "release": str(out / "release"),
        "dataset": statement.spendings[0].dataset,
        "method": result.settings.method,
        **({"expert_blocks": blocks} if (blocks := _expert_blocks(result.adapted)) else {}),
        "epsilon": statement.claim.epsilon if statement.claim else None,
        "delta": statement.claim.delta if statement.claim else None,
        "no_claim": statement.no_claim,
        "signed_by": public_text(signs) if signs else None,
        "metric": result.prepared.task.metric,
        "score": scores[result.prepared.task.metric],
        **({"scores": scores} if len(scores) > 1 else {}),
        "score_is_private": False,
        "published": [number.model_dump() for number in statement.published],
    }


def _expert_blocks(adapted: Adapted) -> list[int]:
    return [layer.number for layer in adapted.experts]


def show(
    result: FineTuned, statement: Statement, summary: dict[str, Any], scores: Mapping[Metric, float]
) -> None:
    """Print the claim, the score and where the release is."""
    from confide.privacy.calibration import delta_warning
    from confide.privacy.words import describe
    from confide.release.names import CLASSES, model_type
    from confide.tasks.metrics import in_words

    for line in describe(result.statement):
        print(line)
    claim = result.statement.claim
    if claim and (warning := delta_warning(claim.delta, result.statement.spendings[0].units)):
        print(f"Warning: {warning}.")
    print(signed(statement))
    if blocks := _expert_blocks(result.adapted):
        print(f"Experts of block{'s' if len(blocks) > 1 else ''} {', '.join(map(str, blocks))} were trained.")
    task = result.prepared.task
    said = ", ".join(in_words(metric, score) for metric, score in scores.items())
    print(
        f"On {len(task.test)} test records: {said}. "
        f"{'This number is' if len(scores) == 1 else 'These numbers are'} not noised: "
        f"{'it is' if len(scores) == 1 else 'they are'} for you, and no part of the release."
    )
    objective = result.adapted.classifier.problem.objective
    does = {None: " labels new rows", "masked": None}.get(objective, " goes on from new texts")
    module = CLASSES.get(model_type(Path(summary["release"])))
    print(
        f"Release in {summary['release']}; it loads with transformers"
        f"{f', after `import {module}`' if module else ''}"
        f"{f', and `confide predict`{does}' if does else ''}."
    )


def show_finished(out: Path, *, json: bool) -> None:
    """Say again what a run that is finished already had found."""
    import json as parser

    if json:
        summary = parser.loads((out / "report" / "results.json").read_text(encoding="utf-8"))
        print_json({name: value for name, value in summary.items() if name != "note"})
    else:
        print(f"{out} is finished. Release in {out / 'release'}")
