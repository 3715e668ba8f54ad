"""The same recipe by mergekit itself and by confide, on small Llamas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from confide.merging.merge import write
from confide.merging.plan import plan_recipe
from confide.merging.recipe import read

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("mergekit") is None, reason="mergekit isn't installed"),
]

RECIPES = {
    "ties": """
merge_method: ties
base_model: {base}
models:
  - model: {base}
  - model: {one}
    parameters: {{weight: 1.0, density: 0.3}}
  - model: {two}
    parameters: {{weight: 0.5, density: 0.6}}
  - model: {three}
    parameters: {{weight: 1.5, density: 0.2}}
parameters: {{normalize: true, int8_mask: true, lambda: 0.9}}
dtype: float32
""",
    "ties-unnormalised": """
merge_method: ties
base_model: {base}
models:
  - model: {one}
  - model: {two}
  - model: {three}
parameters: {{weight: 0.3, density: 0.5, normalize: false}}
dtype: float32
""",
    "ties-filters": """
merge_method: ties
base_model: {base}
models:
  - model: {one}
    parameters:
      weight:
        - filter: mlp
          value: [0, 0.5, 1]
        - value: 1
      density: [1, 0.4, 0.1, 1e-1]
  - model: {two}
    parameters: {{weight: 1, density: 1}}
dtype: float32
""",
    "ties-default-density": """
merge_method: ties
base_model: {base}
models:
  - model: {one}
    parameters: {{weight: 1}}
  - model: {two}
    parameters: {{weight: -1}}
dtype: float32
""",
    "ties-one-entry": """
merge_method: ties
base_model: {base}
models:
  - model: {three}
    parameters: {{weight: 1, density: 0.001}}
dtype: float32
""",
    "linear": """
merge_method: linear
models:
  - model: {one}
    parameters: {{weight: 0.1}}
  - model: {two}
    parameters: {{weight: 1.0}}
dtype: float32
""",
    "linear-base": """
merge_method: linear
base_model: {base}
models:
  - model: {base}
    parameters: {{weight: 2}}
  - model: {one}
    parameters: {{weight: [1, 0.25]}}
  - model: {two}
    parameters: {{weight: 1.0}}
dtype: float32
""",
    "linear-shared": """
merge_method: linear
base_model: {base}
models:
  - model: {one}
  - model: {two}
parameters: {{weight: 1}}
dtype: float32
""",
    "task_arithmetic": """
merge_method: task_arithmetic
base_model: {base}
models:
  - model: {one}
    parameters: {{weight: 0.4}}
  - model: {two}
    parameters: {{weight: 0.2}}
parameters: {{lambda: 0.7}}
dtype: float32
out_dtype: bfloat16
""",
}

EQUAL = """
merge_method: ties
base_model: {base}
models:
  - model: {equal}
    parameters: {{weight: 1, density: 0.3}}
dtype: float32
"""

RUN = """
import json, sys
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
import torch, yaml
torch.set_num_threads(1)
for text, out in json.load(sys.stdin):
    run_merge(MergeConfiguration.model_validate(yaml.safe_load(text)), out, MergeOptions(quiet=True))
"""


def changed(base: dict[str, np.ndarray], seed: int, equal: bool = False) -> dict[str, np.ndarray]:
    """A fine-tuned model: its largest changes cancel another one's exactly, or many are equal."""
    rng = np.random.default_rng(seed)
    shared = np.random.default_rng(99)
    tensors = {}
    for name, values in base.items():
        move = rng.normal(size=values.shape) / 64
        if equal:
            move = np.round(move * 256) / 256
        elif seed < 3:
            move = np.where(shared.random(values.shape) < 0.05, 0.25 * (-1) ** seed, move)
        tensors[name] = (values + move.astype(np.float32)).astype(np.float32)
    return tensors


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("llamas")
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    LlamaForCausalLM(config).save_pretrained(root / "base")
    base = load_file(root / "base" / "model.safetensors")
    # Values on a grid, so that differences are exact and many are equal.
    base = {name: (np.round(values * 4096) / 4096).astype(np.float32) for name, values in base.items()}
    for seed, name in enumerate(("base", "one", "two", "three", "equal")):
        (root / name).mkdir(exist_ok=True)
        (root / name / "config.json").write_bytes((root / "base" / "config.json").read_bytes())
        tensors = changed(base, seed, name == "equal") if seed else base
        save_file(tensors, root / name / "model.safetensors", metadata={"format": "pt"})
    return {name: root / name for name in ("base", "one", "two", "three", "equal")}


@pytest.fixture(scope="module")
def theirs(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mergekit")
    jobs = [(text.format(**folders), str(root / name)) for name, text in {**RECIPES, "equal": EQUAL}.items()]
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(jobs, default=str),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return root


def merged(text: str, folders: dict[str, Path], out: Path) -> dict[str, np.ndarray]:
    file = out.with_suffix(".yaml")
    file.write_text(text.format(**folders))
    write(plan_recipe(read(file), folders["base"]), out)
    return tensors_of(out)


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.torch import load_file as load

    found = {}
    for file in folder.glob("*.safetensors"):
        found |= {name: tensor.float().numpy() for name, tensor in load(file).items()}
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_compat_does_what_mergekit_does(
    folders: dict[str, Path], theirs: Path, tmp_path: Path, name: str
) -> None:
    ours = merged(RECIPES[name] + "compat: mergekit\n", folders, tmp_path / "ours")
    expected = tensors_of(theirs / name)
    assert set(ours) == set(expected)
    base = load_file(folders["base"] / "model.safetensors")
    tolerance = {"rtol": 2**-7, "atol": 1e-9} if "bfloat16" in RECIPES[name] else {"rtol": 2e-6, "atol": 1e-8}
    moved = 0
    assert ours
    for tensor, values in expected.items():
        np.testing.assert_allclose(ours[tensor], values, **tolerance, err_msg=tensor)
        moved += int((values != base[tensor]).sum())
    assert moved > (20 if name == "ties-one-entry" else 1000)


def test_among_equal_magnitudes_only_the_number_is_mergekits(
    folders: dict[str, Path], theirs: Path, tmp_path: Path
) -> None:
    """mergekit sorts without keeping the order of equal entries, so which of them it keeps is an accident."""
    ours = merged(EQUAL + "compat: mergekit\n", folders, tmp_path / "ours")
    expected = tensors_of(theirs / "equal")
    base = load_file(folders["base"] / "model.safetensors")
    model = load_file(folders["equal"] / "model.safetensors")
    accidents = 0
    for name, zero in base.items():
        magnitude = np.abs(model[name] - zero)
        wanted = max(1, int(0.3 * zero.size))
        threshold = np.sort(magnitude, axis=None)[-wanted]
        for merge in (ours, expected):
            np.testing.assert_allclose(merge[name][magnitude < threshold], zero[magnitude < threshold])
            np.testing.assert_allclose(
                merge[name][magnitude > threshold], model[name][magnitude > threshold], rtol=2e-6, atol=1e-8
            )
            assert np.sum(merge[name] != zero) == wanted
        accidents += int(np.sum(ours[name] != expected[name]))
    assert accidents > 0
