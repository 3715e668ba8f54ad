"""Is the experts' stream more than noise? Ways of clipping it, beside baselines, on one public task.

python benchmarks/expert_clipping.py --base minilm-moe --layer 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from confide.finetune.run import PublicBase, finetune, prepare
from confide.finetune.settings import Settings
from confide.tasks import registry

WAYS: dict[str, dict[str, Any]] = {
    "shared alone (B)": {"variant": "shared-only"},
    "raptor, flat, C = 1": {"clipping_bound": 1.0},
    "raptor, flat, C = 0.1": {"clipping_bound": 0.1},
    "raptor, normalised": {"clipping": "normalised"},
    "raptor, normalised, no residual": {"clipping": "normalised", "record_weight": "none"},
    "one stream (A)": {"variant": "one-stream"},
    "raptor, non-private": {"variant": "non-private"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True, help="mixture of experts")
    parser.add_argument("--task", default="icd-chapter")
    parser.add_argument("--layer", default="5")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--expected-batch", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--ways", default=",".join(str(number) for number in range(len(WAYS))))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    base, task = PublicBase.of(chosen.base), registry.load(chosen.task)
    prepared = prepare(task, base, 24)
    print(f"{chosen.task}: {len(task.train)} records, ε = {chosen.epsilon:g}, {chosen.steps} steps")
    print("| way | score | σ shared, experts | clipped, first and last step | CPU s |")
    print("|---|---|---|---|---|")
    for name in [list(WAYS)[int(number)] for number in chosen.ways.split(",")]:
        scores, clipped, sigmas, spent = [], "", "", 0.0
        for seed in range(chosen.seeds):
            settings = Settings.of(
                {
                    "method": "raptor",
                    "epsilon": chosen.epsilon,
                    "expected_batch": chosen.expected_batch,
                    "steps": chosen.steps,
                    "learning_rate": 0.01,
                    "max_length": 24,
                    "seed": seed,
                    "experts": {"layer": chosen.layer, **WAYS[name]},
                }
            )
            started = time.process_time()
            tuned = finetune(prepared, base, settings, simulate=seed)
            spent += time.process_time() - started
            scores.append(100 * tuned.score())
            last = [step for step in tuned.history.steps if step.stream == tuned.schedule.streams[-1].name]
            clipped = f"{last[0].clipped:.2f}, {last[-1].clipped:.2f}"
            sigmas = ", ".join(f"{stream.noise_multiplier:.2f}" for stream in tuned.schedule.streams)
        spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
        print(
            f"| {name} | {statistics.mean(scores):.1f}{spread} | {sigmas} | {clipped} | "
            f"{spent / chosen.seeds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
