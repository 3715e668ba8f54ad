"""Scores of every merge operator on the models of a study that has run.

    confide run examples/quickstart.yaml --out runs/quickstart
    python benchmarks/operators.py runs/quickstart

Models are those of RUN; settings, operators and public text those of the study file. Rows: each method's
models alone, every merge, and the TIES merge with personal files of at most 1 % of the base. With `--noised`
RegMean by noised Grams of the training records too, σ = 5: a simulation, as these models asked no such query.
Scores are on the study's test records, not noised. One seed: differences of a point or two mean nothing.
`--json` prints the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import numpy as np

Scores = dict[str, float]
BUDGET = 0.01
SIGMA = 5.0


def rows(
    run: Path, study: Path, methods: list[str], only: list[str] | None, folder: Path, *, simulate: bool
) -> list[dict[str, Any]]:
    """One row for each method and operator: scores by task in [0, 1], their mean, ε, seconds to merge."""
    from confide.experiment.merges import merge_models, merged_folder, model_folder, public_texts, score_merge
    from confide.experiment.plan import read
    from confide.experiment.run import load_task
    from confide.finetune.base import PublicBase
    from confide.finetune.prepare import score_test
    from confide.finetune.run import prepare
    from confide.merging.merge import merge as merge_files
    from confide.merging.personal.apply import apply
    from confide.merging.personal.pack import pack
    from confide.models.adapters import adapt
    from confide.models.backbones import load_classifier
    from confide.models.releases import load_release

    plan = read(study)
    base, seed = PublicBase.of(plan.base), plan.seeds[0]
    tasks = [load_task(task) for task in plan.tasks]
    settings = plan.settings_of(methods[0], seed)
    prepared = {task.name: prepare(task, base, settings.max_length) for task in tasks}
    texts = public_texts(plan.statistics, tasks) if plan.statistics else ()
    first_block = adapt(load_classifier(base.folder, tasks[0].labels, 0), settings.trainable, 0).first_block

    def scored(release: Path, task: str) -> float:
        return score_test(prepared[task], load_release(release, task)[0], first_block)

    found: list[dict[str, Any]] = []

    def note(method: str, operator: str, scores: Scores, epsilon: float | None, seconds: float) -> None:
        mean = float(np.mean(list(scores.values())))
        row = {"method": method, "operator": operator, **scores, "average": mean}
        found.append(row | {"epsilon": epsilon, "seconds": seconds})
        print(json.dumps(found[-1], ensure_ascii=False), flush=True, file=sys.stderr)

    for method in methods:
        models = {name: model_folder(run, method, seed, name) for name in prepared}
        note(method, "individual", {name: scored(path, name) for name, path in models.items()}, None, 0.0)
        for merge in plan.merges:
            if only is not None and merge.label not in only:
                continue
            out = merged_folder(folder, method, seed, merge)
            start = time.perf_counter()
            report = merge_models(
                models,
                merge,
                out,
                base=base,
                disjoint=plan.disjoint is not None,
                texts=texts,
                statistics=folder / "statistics" / method,
            )
            taken = time.perf_counter() - start
            claim = report.statement.claim
            scores = score_merge(out, prepared, first_block)
            note(method, merge.label, scores, claim.epsilon if claim else None, taken)
            if simulate and merge.label == "regmean":
                out = folder / f"{method}-noised"
                files = noised(models, prepared, plan.settings_of(method, seed), base, folder)
                start = time.perf_counter()
                merge_files(
                    list(models.values()), base=base.folder, operator="regmean", statistics=files, out=out
                )
                taken = time.perf_counter() - start
                note(method, "regmean, noised", score_merge(out, prepared, first_block), None, taken)
            if merge.label == "ties":
                start = time.perf_counter()
                personal = {}
                for name, path in models.items():
                    file = folder / f"{method}-{name}.personal"
                    pack(out, path, out=file, budget=BUDGET)
                    apply(out, file, out=folder / "personal" / method / name)
                    personal[name] = scored(folder / "personal" / method / name, name)
                taken = time.perf_counter() - start
                note(method, "ties and dts, 1 %", personal, None, taken)
    return found


def noised(
    models: dict[str, Path], prepared: dict[str, Any], settings: Any, base: Any, folder: Path
) -> list[Path]:
    """Grams of the training records, noised as a release has them, but by a fixed key and charged to nobody.

    The records of these tasks are public, and so is what is written.
    """
    from confide.finetune import released
    from confide.gradients.keys import Keys
    from confide.merging.statistics import write_statistics
    from confide.models.adapters import adapt
    from confide.models.backbones import load_classifier
    from confide.models.releases import load_release
    from confide.release import format
    from confide.release.hashes import encoder_hash
    from confide.release.tensors import Checkpoint

    wanted = settings.model_copy(
        update={"method": "dp-adamw", "release_statistics": "grams", "statistics_noise": SIGMA}
    )
    files = []
    for number, (name, path) in enumerate(models.items()):
        task, tokens = prepared[name].task, prepared[name].encoded("train")
        adapted = adapt(load_classifier(base.folder, task.labels, 0), settings.trainable, 0)
        (query,) = released.queries(wanted, adapted)
        plain, head = load_release(path)
        found = released.ask(
            query,
            adapted,
            plain,
            tokens,
            tokens,
            lambda batch, model=plain.model: model(**batch).logits,
            task.train.units,
            denominator=task.train.units.count,
            bound=None,
            noise=Keys.fixed(number).noise.generator(query.name, 0, query.purpose),
        )
        info = format.read(path)
        model = encoder_hash(Checkpoint.open(path), info.weights_prefix, head.tensors)
        files.append(folder / f"noised-{number}.safetensors")
        write_statistics(files[-1], "grams", "public", model, found.arrays, f"training records of {name}")
    return files


def main() -> None:
    """Merge, score, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of `confide run`, with models/")
    parser.add_argument(
        "--study", type=Path, default=Path(__file__).parents[1] / "examples/every-operator.yaml"
    )
    parser.add_argument("--methods", nargs="+", default=["non-private", "dp-adamw", "dp-merging"])
    parser.add_argument("--only", nargs="+", help="merges by name; all of the study if left out")
    parser.add_argument("--noised", action="store_true", help="RegMean by noised Grams of the records too")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    versions = {"python": platform.python_version()}
    versions |= {name: version(name) for name in ("confide", "torch", "transformers", "numpy", "scipy")}
    with tempfile.TemporaryDirectory() as folder:
        found = rows(
            chosen.run, chosen.study, chosen.methods, chosen.only, Path(folder), simulate=chosen.noised
        )
    if chosen.json:
        print(json.dumps({"rows": found, "versions": versions}))
        return
    keys = [key for key in found[0] if key not in ("method", "operator", "epsilon", "seconds")]
    print("| method | operator | " + " | ".join(keys) + " | ε | s |\n|" + "---|" * (len(keys) + 4))
    for row in found:
        cells = [f"{100 * row[key]:.1f}" for key in keys]
        epsilon = "–" if row["epsilon"] is None else f"{row['epsilon']:.4f}"
        print(
            f"| {row['method']} | {row['operator']} | "
            + " | ".join(cells)
            + f" | {epsilon} | {row['seconds']:.1f} |"
        )
    print(", ".join(f"{name} {number}" for name, number in versions.items()))


if __name__ == "__main__":
    main()
