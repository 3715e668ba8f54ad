"""Seconds and memory of a merge by confide, mergekit and fusion_bench, against reading and writing the bytes.

    python benchmarks/merge.py                             4 models of 105M float32 and their base
    python benchmarks/merge.py --size 1b --tool confide    4 of 1B bfloat16 in shards, TIES within 6 GiB
    python benchmarks/merge.py --json                      {"rows": [...]}

Every run is a process of its own, from start to a finished folder; peak_mb is its largest resident set.
--mergekit and --fusion-bench name a Python that has the peer. The models are synthetic Llamas, which mergekit
0.1.5 can merge (it can't merge BERT). `raw` reads the five models and writes one, as a measure of the disk.
Inputs are read once before, so all tools find them in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from confide.release.shards import Values, write_shards
from confide.release.tensors import encode

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden": 64, "inner": 160, "layers": 2, "vocabulary": 256, "dtype": "F32", "shard": 10**6},
    "105m": {
        "hidden": 768,
        "inner": 2560,
        "layers": 12,
        "vocabulary": 8000,
        "dtype": "F32",
        "shard": 5 * 10**9,
    },
    "1b": {"hidden": 2048, "inner": 5632, "layers": 18, "vocabulary": 32000, "dtype": "BF16", "shard": 10**9},
}
OPERATORS = ("average", "linear", "task-arithmetic", "ties")
MODELS = 4
_CHUNK = 1 << 20

RAW = """
import os, sys
out, *paths = sys.argv[1:]
buffer = bytearray(1 << 20)
for path in paths:
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
size = int(os.environ["BYTES"])
with open(out, "wb", buffering=0) as file:
    while size > 0:
        size -= file.write(memoryview(buffer)[:min(size, len(buffer))])
    os.fsync(file.fileno())
"""

FUSION = """
import sys
from fusion_bench import BaseModelPool
from fusion_bench.method import SimpleAverageAlgorithm, TaskArithmeticAlgorithm, TiesMergingAlgorithm
from transformers import AutoModelForCausalLM
operator, out, base, *models = sys.argv[1:]
load = lambda path: AutoModelForCausalLM.from_pretrained(path, dtype="auto")
pool = BaseModelPool({"_pretrained_": load(base), **{str(n): load(m) for n, m in enumerate(models)}})
algorithm = {
    "average": lambda: SimpleAverageAlgorithm(),
    "task-arithmetic": lambda: TaskArithmeticAlgorithm(scaling_factor=0.3),
    "ties": lambda: TiesMergingAlgorithm(scaling_factor=1.0, threshold=20, remove_keys=[], merge_func="mean"),
}[operator]()
algorithm.run(pool).save_pretrained(out)
"""


def shapes(hidden: int, inner: int, layers: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """A Llama's tensors, output layer tied to the embeddings."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        found |= {f"{at}self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        found |= {f"{at}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        found |= {f"{at}mlp.down_proj.weight": (hidden, inner)}
        found |= {f"{at}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return found


def make(root: Path, size: str) -> tuple[Path, list[Path]]:
    """The base and the models, each its own small change of the base."""
    about = dict(SIZES[size])
    dtype, shard = about.pop("dtype"), about.pop("shard")
    tensors = shapes(**about)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": about["hidden"],
        "intermediate_size": about["inner"],
        "num_hidden_layers": about["layers"],
        "num_attention_heads": about["hidden"] // 64,
        "num_key_value_heads": about["hidden"] // 64,
        "vocab_size": about["vocabulary"],
        "tie_word_embeddings": True,
        "dtype": {"F32": "float32", "BF16": "bfloat16"}[dtype],
    }

    def values(shape: tuple[int, ...], key: int, model: int) -> Iterator[np.ndarray]:
        count = int(np.prod(shape))
        for start in range(0, count, _CHUNK):
            length = min(_CHUNK, count - start)
            base = np.random.default_rng([0, key, start]).standard_normal(length, np.float32) * np.float32(
                0.02
            )
            if model:
                change = np.random.default_rng([model, key, start]).standard_normal(length, np.float32)
                base += change * np.float32(0.001)
            yield encode(base, dtype)

    folders = [root / name for name in ("base", *(f"model-{n}" for n in range(1, MODELS + 1)))]
    for number, folder in enumerate(folders):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        given: dict[str, Values] = {
            name: (dtype, shape, values(shape, key, number))
            for key, (name, shape) in enumerate(tensors.items())
        }
        write_shards(folder, given, shard)
    return folders[0], folders[1:]


def recipe(operator: str, base: Path, models: list[Path], dtype: str) -> str:
    """The merge in mergekit's words, with the same settings as confide's defaults."""
    weight = {"average": 1.0, "linear": 0.25, "task-arithmetic": 0.3, "ties": 1.0}[operator]
    method = {"average": "linear", "task-arithmetic": "task_arithmetic"}.get(operator, operator)
    density = ", density: 0.2" if operator == "ties" else ""
    listed = "".join(f"  - model: {m}\n    parameters: {{weight: {weight}{density}}}\n" for m in models)
    start = f"base_model: {base}\n" if method != "linear" else ""
    return f"merge_method: {method}\n{start}models:\n{listed}dtype: {dtype}\n"


def measure(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Wall and processor seconds and the peak of resident memory of one process."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - start
        if process.returncode:
            said.seek(0)
            raise SystemExit(f"{' '.join(command[:4])} … failed:\n{said.read().decode()[-3000:]}")
    return {
        "wall_s": round(wall, 2),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_mb": round(usage.ru_maxrss / 1024),
    }


def command_of(
    tool: str, operator: str, base: Path, models: list[Path], out: Path, peers: str, dtype: str
) -> list[str] | None:
    """What runs a tool's merge; None where it has no such operator."""
    if tool == "confide":
        command = [sys.executable, "-m", "confide.cli.main", "merge", *map(str, models), "--base", str(base)]
        return [*command, "--operator", operator, "--out", str(out), "--json"]
    if tool == "mergekit":
        file = out.with_suffix(".yaml")
        file.write_text(recipe(operator, base, models, dtype))
        return [peers, "-m", "mergekit.scripts.run_yaml", str(file), str(out), "--quiet"]
    if operator == "linear":
        return None
    return [peers, "-c", FUSION, operator, str(out), str(base), *map(str, models)]


def has(python: str, module: str) -> bool:
    """Whether an interpreter has a module."""
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", look], check=False).returncode == 0


def run(options: argparse.Namespace, root: Path) -> list[dict[str, Any]]:
    """Every tool with every operator."""
    base, models = make(root, options.size)
    dtype = {"F32": "float32", "BF16": "bfloat16"}[SIZES[options.size]["dtype"]]
    weights = sorted(file for folder in (base, *models) for file in folder.glob("*.safetensors"))
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    environment["BYTES"] = str(sum(file.stat().st_size for file in base.glob("*.safetensors")))
    raw = [sys.executable, "-c", RAW, str(root / "raw"), *map(str, weights)]
    measure(raw, environment)
    tools = {"confide": sys.executable, "mergekit": options.mergekit, "fusion_bench": options.fusion_bench}
    rows = []
    for tool, python in tools.items():
        if (options.tool and tool not in options.tool) or not has(python, tool):
            continue
        for operator in options.operator or OPERATORS:
            out = root / f"{tool}-{operator}"
            command = command_of(tool, operator, base, models, out, python, dtype)
            if command is None:
                continue
            io = measure(raw, environment)  # beside each run, as other work on the machine comes and goes
            row = measure(command, environment)
            rows.append(
                {
                    "tool": tool,
                    "operator": operator,
                    **row,
                    "ratio_to_io": round(row["wall_s"] / io["wall_s"], 2),
                }
            )
            rows[-1]["io_s"] = io["wall_s"]
            shutil.rmtree(out)
            if not options.json:
                show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    """A line of the table."""
    numbers = f"{row['wall_s']:8.2f} {row['cpu_s']:8.2f} {row['peak_mb']:8} {row['ratio_to_io']:8.2f}"
    print(f"{row['tool']:<14}{row['operator']:<17}{numbers}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="105m")
    parser.add_argument("--tool", action="append", choices=("confide", "mergekit", "fusion_bench"))
    parser.add_argument("--operator", action="append", choices=OPERATORS)
    parser.add_argument("--mergekit", default=sys.executable, help="a Python that has mergekit")
    parser.add_argument("--fusion-bench", default=sys.executable, help="a Python that has fusion_bench")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the models are made; a temporary one if left out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.json:
        print(f"{'tool':<14}{'operator':<17}{'wall s':>8} {'CPU s':>8} {'peak MB':>8} {'× raw':>8}")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = run(options, Path(folder))
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
