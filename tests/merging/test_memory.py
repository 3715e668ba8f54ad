"""A limit on private memory is kept by the system, and what a plan says it needs is enough."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from confide.errors import MergeError
from confide.merging import memory
from confide.merging.memory import CHUNKS, limited, streaming
from confide.merging.plan import Plan, plan_models
from confide.merging.vectors import CHUNK

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux counts private memory")

# Every case is a process of its own, which begins with the libraries and the plan in memory and nothing else.
SCRIPT = """
import json, os, sys
from dataclasses import replace
from pathlib import Path
from confide.merging import memory
from confide.merging.merge import _write
from confide.merging.plan import plan_models

root = Path(sys.argv[1])
memory._load_libraries()
found = {}
for operator, settings, part in json.loads(sys.argv[2]):
    models = sorted(root.glob("model-*"))
    files = sorted(root.glob("*.safetensors")) if operator == "regmean" else []
    plan = plan_models(models, base=root / "base", operator=operator, parameters=settings, statistics=files)
    for chunk in memory.CHUNKS[::2]:
        fitting = replace(plan, vectors=plan.vectors.in_chunks(chunk))
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                with memory.limited(int(part * fitting.memory()[0])):
                    _write(fitting, root / "out" / "merged", None, True, 10**9, None)
                said = "ok"
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(write, said.encode())
            os._exit(0)
        os.close(write)
        found[f"{operator} {chunk} {part}"] = os.read(read, 1000).decode()
        os.wait()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models whose largest matrix is most of what a merge by matrices needs."""
    from confide.merging.statistics import write_statistics
    from confide.release.hashes import tensors_hash
    from confide.release.tensors import Checkpoint

    root = tmp_path_factory.mktemp("memory")
    shapes = {"attention.weight": (640, 640), "mlp.weight": (1280, 640), "norm.weight": (640,)}
    for number in range(4):
        rng = np.random.default_rng(number)
        folder = root / (f"model-{number}" if number else "base")
        folder.mkdir()
        tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text('{"model_type": "toy"}')
        if number:
            checkpoint = Checkpoint.open(folder)
            model = tensors_hash(checkpoint, {name: name for name in checkpoint.names})
            some = rng.normal(size=(700, 640))
            grams = {name: some.T @ some for name in shapes if name != "norm.weight"}
            write_statistics(root / f"{number}.safetensors", "grams", "public", model, grams, "none")
    (root / "out").mkdir()
    return root


def attempt(root: Path, *cases: tuple[str, dict[str, float], float]) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(root), json.dumps(cases)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@linux
def test_what_the_plan_needs_is_enough(models: Path) -> None:
    found = attempt(
        models,
        ("average", {}, 1.0),
        ("ties", {}, 1.0),
        ("pcb", {}, 1.0),
        ("actmat", {}, 1.0),
        ("actmat", {"rcond": 0.9}, 1.0),  # by eigenvalues
        ("wudi", {"iterations": 2}, 1.0),
        ("regmean", {}, 1.0),
    )
    assert set(found.values()) == {"ok"}, found


@linux
def test_less_is_refused_by_the_system(models: Path) -> None:
    found = attempt(models, ("actmat", {}, 0.2), ("regmean", {}, 0.2))
    assert len(found) == 4
    for said in found.values():
        assert said.startswith("MergeError: the merge needs more private memory than the "), found
        assert "nothing was written" in said
    assert not [path for path in (models / "out").iterdir() if path.name.startswith(".")]


@linux
@pytest.mark.parametrize(
    "lack", [MemoryError(), OSError(12, "Cannot allocate memory"), RuntimeError("can't start new thread")]
)
def test_every_way_of_saying_it_is_one_message(lack: Exception) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)

    def fail() -> None:
        assert resource.getrlimit(resource.RLIMIT_DATA) != before
        try:
            raise lack
        except Exception as error:
            raise ValueError("wrapped") from error

    with pytest.raises(MergeError, match="private memory than the 500 MB that are"), limited(500_000_000):
        fail()
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@linux
def test_other_errors_and_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(ValueError, match="else"), limited(500_000_000):
        raise ValueError("something else")
    with pytest.raises(MemoryError), limited(None):
        raise MemoryError
    with limited(1 << 30), limited(1 << 40):  # the narrower one stays
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] < 1 << 40
    monkeypatch.setattr(memory, "_private", lambda: None)
    with limited(1):
        assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.parametrize("ranks", [False, True])
def test_smaller_chunks_need_less(ranks: bool) -> None:
    needed = [streaming(8, chunk, ranks=ranks) for chunk in CHUNKS]
    assert needed == sorted(needed, reverse=True)
    assert CHUNKS[0] == CHUNK


def test_a_plan_takes_the_largest_chunks_that_fit(base: Path, releases: tuple[Path, Path]) -> None:
    plan = plan_models(releases, base=base, operator="ties")

    def needs(size: int) -> int:
        return streaming(plan.vectors.count, size, ranks=True)

    def chunk(fitting: Plan) -> int:
        return fitting.vectors.chunk

    for larger, smaller in pairwise(CHUNKS):
        assert chunk(plan.within(needs(larger))) == larger
        assert chunk(plan.within(needs(larger) - 1)) == smaller
    with pytest.raises(MergeError, match=r"ties needs \d+ MB of private memory for chunks of every model"):
        plan.within(needs(CHUNKS[-1]) - 1)
