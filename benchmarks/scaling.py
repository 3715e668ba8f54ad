"""How a private step grows with length, batch and depth, on MiniLM, against plain AdamW.

    python benchmarks/scaling.py docs/scaling.png     a table, and the figure
    python benchmarks/scaling.py figure.png --json    the same as JSON

Full fine-tuning, one thread. At each point plain AdamW, confide's DP-AdamW and Opacus's ghost clipping take
turns step by step (`step_time.py`). Memory is the peak of a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import warnings
from pathlib import Path
from typing import Any

import step_time
import torch

import models
from models import Case

MODES = {
    "adamw": "AdamW, not private",
    "dp-adamw": "confide DP-AdamW",
    "opacus-ghost": "Opacus ghost clipping",
}
SWEEPS: dict[str, tuple[str, tuple[int, ...], dict[str, int]]] = {
    "length": ("tokens per record (8 records)", (32, 64, 128, 256, 512), {"size": 8}),
    "size": ("records (64 tokens)", (4, 8, 16, 32, 64), {"length": 64}),
    "layers": ("layers (8 records of 64 tokens)", (1, 3, 6, 12), {"size": 8, "length": 64}),
}


def point(settings: dict[str, int], repeats: int) -> list[dict[str, Any]]:
    """Seconds, ratio and peak memory of each mode."""

    def build() -> Case:
        return models.case("minilm", "full", **settings)

    taken = step_time.apart(lambda: step_time.seconds(build, list(MODES), repeats))
    rows = []
    for mode in MODES:
        times = taken[mode]
        if isinstance(times, str):
            raise SystemExit(f"{mode}: {times}")
        ratio = statistics.median(a / b for a, b in zip(times, taken["adamw"], strict=True))
        peak = step_time.apart(lambda mode=mode: step_time.peak_mb(build, mode))
        rows.append(
            {
                **settings,
                "mode": mode,
                "seconds": round(statistics.median(times), 4),
                "ratio": round(ratio, 3),
                "peak_mb": round(peak),
            }
        )
    return rows


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Three sweeps side by side: seconds per step above, peak memory below, ratios at the points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(SWEEPS), figsize=(11, 6), sharex="col", layout="constrained")
    for column, (key, (label, values, _)) in enumerate(SWEEPS.items()):
        for row, (field, unit) in enumerate(
            (("seconds", "seconds per step"), ("peak_mb", "peak memory, MB"))
        ):
            ax = axes[row][column]
            for mode, name in MODES.items():
                own = [line for line in found[key] if line["mode"] == mode]
                at = [line[key] for line in own]
                ax.plot(at, [line[field] for line in own], marker="o", markersize=4, label=name)
                if field == "seconds" and mode == "dp-adamw":
                    for value, line in zip(at, own, strict=True):
                        place = {"xytext": (4, -12), "textcoords": "offset points", "fontsize": 8}
                        ax.annotate(f"{line['ratio']:.2f}", (value, line[field]), **place)
            ax.set_xscale("log", base=2)
            ax.set_xticks(values, [str(value) for value in values])
            ax.minorticks_off()
            if field == "seconds":
                ax.set_yscale("log")
            else:
                ax.set_ylim(bottom=0)
                ax.set_xlabel(label)
            if not column:
                ax.set_ylabel(unit)
            ax.grid(alpha=0.3)
    axes[0][0].legend(frameon=False)
    figure.suptitle(
        "Full fine-tuning of MiniLM on one thread; numbers are confide's ratio to AdamW", fontsize=11
    )
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figure", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    import opacus  # noqa: F401  (libraries before the children are forked, models after)

    import confide.finetune.loop  # noqa: F401

    found: dict[str, list[dict[str, Any]]] = {}
    for key, (label, values, fixed) in SWEEPS.items():
        found[key] = []
        for value in values:
            rows = point({**fixed, key: value}, chosen.repeats)
            found[key] += rows
            if not chosen.json:
                for row in rows:
                    print(
                        f"{label:34}{value:>5}  {row['mode']:14}{row['seconds']:>9.3f}{row['ratio']:>7.2f}"
                        f"{row['peak_mb']:>7}",
                        flush=True,
                    )
    draw(found, chosen.figure)
    load = round(os.getloadavg()[1], 1)
    if chosen.json:
        print(json.dumps({"sweeps": found, "load": load}))
    else:
        print(f"one thread; load {load} on {os.cpu_count()} processors")


if __name__ == "__main__":
    main()
