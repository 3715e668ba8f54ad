"""WUDI's steps from Grams against the loop in the paper's form: seconds, and how far the two paths part.

Run: python benchmarks/wudi.py [--models 8] [--iterations 300] [--matrix attention] [--json]. One
layer of BERT-base: four projections, both matrices of the MLP. The loop is plain torch with autograd in
float32, as published.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from confide.merging.operators import find

SHAPES = {"attention": (768, 768), "up": (3072, 768), "down": (768, 3072)}
COUNTS = {"attention": 4, "up": 1, "down": 1}


def loop(matrices: Sequence[np.ndarray], rate: float, iterations: int, dtype: torch.dtype) -> np.ndarray:
    """The published form: Adam on Σ ‖(W − D_t) D_tᵀ‖² / ‖D_t‖², the task vectors gone over at each step."""
    vectors = torch.stack([torch.from_numpy(matrix) for matrix in matrices]).to(dtype)
    squares = vectors.square().sum((1, 2))
    merged = torch.nn.Parameter(vectors.sum(0))
    optimizer = torch.optim.Adam([merged], lr=rate)
    for _ in range(iterations):
        optimizer.zero_grad()
        products = (merged - vectors) @ vectors.mT
        (products.square() / squares[:, None, None]).sum().backward()
        optimizer.step()
    return merged.detach().double().numpy()


def compare(shape: tuple[int, int], models: int, iterations: int) -> dict[str, Any]:
    """Seconds of both for one matrix, and the distance of their answers relative to their length."""
    rng = np.random.default_rng(0)
    shared = rng.normal(size=shape)
    matrices = [
        np.float32(0.002 * rng.uniform(0.5, 2) * (shared + rng.normal(size=shape))).astype(np.float64)
        for _ in range(models)
    ]
    start = time.perf_counter()
    ours, _ = find("wudi").function(matrices, **find("wudi").settings({"iterations": iterations}))
    middle = time.perf_counter()
    theirs = loop(matrices, 1e-5, iterations, torch.float32)
    end = time.perf_counter()
    return {
        "gram_s": middle - start,
        "loop_s": end - middle,
        "speedup": (end - middle) / (middle - start),
        "relative_difference": float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--matrix", action="append", choices=SHAPES, help="leave out for the whole layer")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [
        {"matrix": name, "shape": list(shape), **compare(shape, options.models, options.iterations)}
        for name, shape in SHAPES.items()
        if not options.matrix or name in options.matrix
    ]
    if not options.matrix:
        layer = {key: sum(COUNTS[row["matrix"]] * row[key] for row in rows) for key in ("gram_s", "loop_s")}
        rows.append({"matrix": "layer", "shape": None, **layer, "speedup": layer["loop_s"] / layer["gram_s"]})
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    print(f"{'matrix':<10} {'grams s':>9} {'loop s':>9} {'speed-up':>9}  relative difference")
    for row in rows:
        numbers = (f"{row[key]:9.2f}" for key in ("gram_s", "loop_s", "speedup"))
        difference = f"{row['relative_difference']:.1e}" if "relative_difference" in row else ""
        print(f"{row['matrix']:<10}", *numbers, "", difference)


if __name__ == "__main__":
    main()
