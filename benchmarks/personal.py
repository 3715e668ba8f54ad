"""Accuracy of personal files against their size, on the models and the TIES merge of a study.

    confide run examples/quickstart.yaml --out runs/quickstart
    python benchmarks/personal.py runs/quickstart --method dp-merging
    python benchmarks/personal.py runs/quickstart --unseen     each task left out once
    python benchmarks/personal.py --speed      seconds for 110 million parameters, and the error of the codes

Rows: the merge, a personal file at each budget, each task's own model. Files that come out the same under
different budgets (of a model that differs from the merge in few tensors) are scored once. Scores are on the
study's test records, not noised. `--json` prints the same as JSON.

`--unseen`: the other tasks' models are merged, and their personal files (at the first budget) are fused by
how similar their descriptions are to the left-out task's. That task is scored under its own model's head,
and under the head that the study trained on the untouched base, as `confide train --trainable head` does.
`mean`: the same with equal weights.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import numpy as np

DESCRIPTIONS = {
    "rotten-tomatoes": "Whether a sentence of a film review is positive or negative",
    "tweets": "Whether a tweet is positive or negative",
    "brown-genre": "The genre of a passage of American prose: news, fiction, religion, science and so on",
    "icd-chapter": "The chapter of the international classification of diseases that a diagnosis belongs to",
}


def score(release: Path, task: str, records: int) -> float:
    """The task's metric in percent."""
    import confide

    model = confide.load(release, task=task)
    return 100 * model.score(confide.test_records(model.head).limit(records, 0))


def table(run: Path, method: str, budgets: list[float], records: int, folder: Path) -> list[dict[str, Any]]:
    """One row a variant: what it is, bytes of its files as a part of the base, residual lost, scores."""
    from confide.merging.personal.apply import apply
    from confide.merging.personal.pack import pack

    merged = run / f"merged/{method}-ties-seed-0"
    models = {path.name: path for path in sorted((run / f"models/{method}/seed-0").iterdir())}
    rows: list[dict[str, Any]] = [
        {"what": "merge (TIES)", "percent": 0.0, "lost": 1.0}
        | {task: score(merged, task, records) for task in models}
    ]
    known: dict[str, float] = {}
    for budget in budgets:
        row: dict[str, Any] = {"what": f"personal, budget {100 * budget:g} %", "percent": 0.0, "lost": 0.0}
        sizes, lost = [], []
        for task, model in models.items():
            file = folder / f"{task}-{budget}.personal"
            packed = pack(merged, model, out=file, budget=budget)
            key = packed.about.statement.weights["personal"]
            if key not in known:
                apply(merged, file, out=folder / f"{task}-{budget}")
                known[key] = score(folder / f"{task}-{budget}", task, records)
            row[task] = known[key]
            sizes.append(100 * packed.size / packed.base_size)
            lost.append(packed.error)
        rows.append(row | {"percent": max(sizes), "lost": float(np.mean(lost))})
    own = {task: score(model, task, records) for task, model in models.items()}
    rows.append({"what": "own model", "percent": 100.0, "lost": 0.0} | own)
    return rows


def unseen(run: Path, method: str, budget: float, records: int, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each left-out task and each head: weights of the other tasks' files, and scores."""
    from confide.merging.merge import merge
    from confide.merging.personal.apply import fuse
    from confide.merging.personal.pack import pack
    from confide.merging.personal.similarity import cosines
    from confide.models.embeddings import embed
    from confide.models.resolve import resolve
    from confide.privacy.statement import load, parse

    models = {path.name: path for path in sorted((run / f"models/{method}/seed-0").iterdir())}
    first = next(iter(models.values()))
    base = resolve(parse(load(first), str(first)).base.name)
    vectors = dict(zip(models, embed(base, [DESCRIPTIONS[task] for task in models]), strict=True))
    for left in models:
        others = {task: model for task, model in models.items() if task != left}
        merged = folder / f"without-{left}"
        merge(list(others.values()), base=base, operator="ties", out=merged, disjoint=True)
        files = [folder / f"{left}-{task}.personal" for task in others]
        for file, model in zip(files, others.values(), strict=True):
            pack(merged, model, out=file, budget=budget)
        similar = cosines(vectors[left], [vectors[task] for task in others])
        for trained in (method, "pretrained"):
            head = run / f"models/{trained}/seed-0/{left}"
            row: dict[str, Any] = {"task": left, "head": trained, "its own model": score(head, left, records)}
            weights = {"merge": (0.0,) * len(files), "mean": (1.0,) * len(files), "fused": similar}
            for what, similarities in weights.items():
                out = folder / f"{left}-{trained}-{what}"
                applied = fuse(merged, files, head=head, similarities=similarities, out=out, disjoint=True)
                row[what] = score(out, left, records)
            yield row | {"weights": dict(zip(others, np.round(applied.weights, 3).tolist(), strict=True))}


def speed() -> list[dict[str, Any]]:
    """Seconds on this thread to choose and code tensors of BERT base's shapes, and what the codes lose."""
    from confide.merging.personal.factors import factors, spectrum
    from confide.merging.personal.residual import array, encode

    random = np.random.default_rng(0)
    shapes = {(30522, 768): 1, (512, 768): 1, (768, 768): 48, (3072, 768): 12, (768, 3072): 12}
    rows = []
    for shape, count in shapes.items():
        residual = random.normal(size=shape).astype(np.float32) * 1e-3
        start = time.process_time()
        spectrum(residual)
        coded = encode("tensor", residual, rank=min(shape) // 10)
        taken = time.process_time() - start
        left, values, right = factors(residual, min(shape) // 10)
        exact = (left * values) @ right.T
        near = array([coded])
        rows.append(
            {
                "shape": list(shape),
                "count": count,
                "seconds": round(taken, 3),
                "norm_ratio": round(float(np.linalg.norm(near) / np.linalg.norm(exact)), 4),
                "error_of_codes": round(float(np.linalg.norm(near - exact) / np.linalg.norm(exact)), 4),
            }
        )
    rows.append({"total_seconds": round(sum(row["count"] * row["seconds"] for row in rows), 1)})
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?", help="folder of `confide run`")
    parser.add_argument("--method", default="dp-merging")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.0025, 0.005, 0.01, 0.02])
    parser.add_argument("--records", type=int, default=1000, help="test records a task, at most")
    parser.add_argument("--unseen", action="store_true", help="leave each task out once")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    if chosen.speed == (chosen.run is not None):
        parser.error("give the folder of a study, or --speed")
    versions = {"python": platform.python_version()}
    versions |= {name: version(name) for name in ("confide", "torch", "transformers", "numpy", "scipy")}
    if chosen.speed:
        rows = speed()
    else:
        with tempfile.TemporaryDirectory() as folder:
            about = (chosen.run, chosen.method)
            if chosen.unseen:
                rows = list(unseen(*about, chosen.budgets[0], chosen.records, Path(folder)))
            else:
                rows = table(*about, chosen.budgets, chosen.records, Path(folder))
    if chosen.json:
        print(json.dumps({"rows": rows, "versions": versions}))
        return
    for row in rows:
        print(
            " | ".join(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values())
        )
    print(", ".join(f"{name} {number}" for name, number in versions.items()))


if __name__ == "__main__":
    main()
