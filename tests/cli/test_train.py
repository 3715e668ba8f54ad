"""`confide train`: a release that plain transformers reads, and refusals that leave nothing behind."""

from __future__ import annotations

import csv
import errno
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import confide as library
from confide.errors import ConfigError
from confide.finetune import folder as folders
from confide.finetune import run as finetune_run
from confide.finetune.checkpoint import Unfinished
from confide.models.adapters import Trainable
from confide.privacy.composition import check
from confide.privacy.ledger import Ledger
from confide.privacy.statement import read as read_statement
from confide.release.write import provenance, verify

from .conftest import QUICK, Answer, WriteCsv, listing

Confide = Callable[..., Answer]
Train = Callable[..., Answer]
Sentences = Callable[[int, int], list[tuple[str, str]]]


def test_a_release(train: Train, reviews: Path, tmp_path: Path) -> None:
    answer = train(reviews, "--labels", "neg,pos", "--epsilon", 3)
    assert answer.code == 0, answer.err
    assert {path.name for path in tmp_path.iterdir()} == {"reviews.csv", "run"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"release", "private", "report"}
    release = tmp_path / "run" / "release"
    statement = verify(release)
    check(statement)
    assert statement.claim is not None
    assert 2.9 < statement.claim.epsilon <= 3
    (spending,) = statement.spendings
    assert (spending.dataset, spending.units) == ("reviews-2026", 64)
    assert "not noised" in answer.out
    results = json.loads((tmp_path / "run" / "report" / "results.json").read_text())
    assert results["epsilon"] == statement.claim.epsilon
    assert results["release"] == str(release)

    texts = ["the film was fine", "a very dull plot here"]
    plain = AutoModelForSequenceClassification.from_pretrained(release)
    tokens = AutoTokenizer.from_pretrained(release)(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        theirs = plain(**tokens).logits.numpy()
    np.testing.assert_allclose(library.load(release).logits(texts), theirs, rtol=1e-5, atol=1e-5)
    assert plain.config.id2label == {0: "neg", 1: "pos"}


def test_json(train: Train, reviews: Path, tmp_path: Path) -> None:
    answer = train(reviews, "--json", "--method", "dp-adamw", "--task", "stars", "--metric", "macro-f1")
    found = answer.json()
    assert found["release"] == str(tmp_path / "run" / "release")
    assert (found["method"], found["metric"], found["dataset"]) == ("dp-adamw", "macro-f1", "reviews-2026")
    assert 0 <= found["score"] <= 1
    assert found["score_is_private"] is False
    assert found["epsilon"] <= 4
    head = json.loads((tmp_path / "run" / "release" / "confide.json").read_text())["heads"][0]
    assert (head["task"], head["labels_from"], head["metric"]) == ("stars", "file", "macro-f1")


@pytest.mark.parametrize(
    ("option", "reason"), [(("--method", "non-private"), "no noise"), (("--simulate", 3), "simulation")]
)
def test_no_claim(train: Train, reviews: Path, option: tuple[object, ...], reason: str) -> None:
    found = train(reviews, "--json", *option).json()
    assert found["epsilon"] is None
    assert reason in found["no_claim"]


def test_simulations_repeat(train: Train, reviews: Path, tmp_path: Path) -> None:
    for out in ("one", "two"):
        assert train(reviews, "--simulate", 3, out=out).code == 0
    one, two = ((tmp_path / out / "release" / "model.safetensors").read_bytes() for out in ("one", "two"))
    assert one == two


def test_a_dry_run_spends_nothing(train: Train, reviews: Path, tmp_path: Path) -> None:
    plan = train(reviews, "--dry-run", "--json").json()
    (stream,) = plan["streams"]
    assert (plan["units"], stream["steps"], stream["expected_batch"]) == (64, 2, 16.0)
    assert (stream["sampling_rate"], stream["queries_per_step"], plan["queries"]) == (0.25, 2, 4)
    assert 3.9 < plan["claim"]["epsilon"] <= 4
    assert plan["cost"]["seconds"] >= 2 * plan["cost"]["seconds_per_step"] > 0
    assert plan["cost"]["memory_bytes"] > 2**20
    assert any("2 steps are few" in sentence for sentence in plan["advice"])
    factors = 2 if Trainable().train_a else 1  # of query and value, 2 × 32 each; and the head
    assert stream["trained_parameters"] == factors * 2 * 2 * 32 + 2 * 32 + 2
    assert "nothing has been" in " ".join(train(reviews, "--dry-run").out.split())
    assert not (tmp_path / "run").exists()
    assert train(reviews, "--dry-run", "--json", "--method", "non-private").json()["claim"] is None


def test_a_declared_n_does_not_move_with_one_record(
    train: Train, write_csv: WriteCsv, sentences: Sentences
) -> None:
    """Counted, the default batch, q and δ follow the file; declared, one record more changes nothing."""
    plans = {}
    for rows in (80, 85):
        data = write_csv(f"{rows}.csv", sentences(rows, 1))
        for declared in ((), ("--declared-units", 64)):
            arguments = ("--dry-run", "--json", "--delta", "n^-1.1", *declared)
            plans[rows, bool(declared)] = train(data, *arguments).json()
    assert plans[80, False]["claim"]["delta"] != plans[85, False]["claim"]["delta"]
    for key in ("units", "claim", "streams"):
        assert plans[80, True][key] == plans[85, True][key] == plans[80, False][key]


def test_a_declared_n_is_what_the_statement_says(train: Train, reviews: Path, tmp_path: Path) -> None:
    answer = train(reviews, "--declared-units", 100, "--expected-batch", 10)
    assert answer.code == 0, answer.err
    (spending,) = read_statement(tmp_path / "run" / "release").spendings
    assert spending.units == 100
    assert spending.schedule is not None
    assert spending.schedule.streams[0].sampling_rate == 0.1
    verify(tmp_path / "run" / "release")


def test_units(train: Train, write_csv: WriteCsv, sentences: Sentences, tmp_path: Path) -> None:
    rows = [(text, label, f"user{number // 4}") for number, (text, label) in enumerate(sentences(160, 1))]
    data = write_csv("users.csv", rows, ("text", "label", "user"))
    answer = train(data, "--unit", "user", "--expected-batch", 8, "--rows-per-unit", 3)
    assert answer.code == 0, answer.err
    (spending,) = read_statement(tmp_path / "run" / "release").spendings
    assert spending.schedule is not None
    (stream,) = spending.schedule.streams
    # 40 users, 8 of them for the test.
    assert (spending.unit, spending.units) == ("user", 32)
    assert (stream.sampling_rate, stream.denominator) == (0.25, 8.0)
    task = library.read_task(data, text="text", label="label", unit="user")
    owner = {text: user for text, _, user in rows}
    sides = [{owner[text] for text in part.texts} for part in (task.train, task.test)]
    assert not sides[0] & sides[1]
    assert [len(side) for side in sides] == [32, 8]


# Bad input: one message, exit code 2, and nothing half-written.


def broken(rows: list[tuple[str, str]], place: int, text: str | None = None, label: str | None = None) -> Any:
    changed = list(rows)
    old = changed[place]
    changed[place] = (old[0] if text is None else text, old[1] if label is None else label)
    return changed


BAD_FILES: dict[str, tuple[Callable[[Any], Any], tuple[object, ...], str]] = {
    "missing column": (lambda rows: rows, ("--text", "review"), "review"),
    "empty file": (lambda rows: [], (), "no record|empty"),
    "one class": (lambda rows: [(text, "pos") for text, _ in rows], (), "'pos'.*at least 2 classes"),
    "undeclared label": (
        lambda rows: broken(rows, 5, label="so-so"),
        ("--labels", "neg,pos"),
        "row 6: label 'so-so'",
    ),
    "NaN label": (lambda rows: broken(rows, 5, label="nan"), (), "row 6"),
    "no label": (lambda rows: broken(rows, 5, label=""), (), "row 6"),
    "empty text": (lambda rows: broken(rows, 7, text="  "), (), "row 8: an empty text"),
    "one declared label": (lambda rows: rows, ("--labels", "pos"), "at least 2"),
    "two few records": (lambda rows: rows[:2], (), "too few|at least 2|training"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file(train: Train, write_csv: WriteCsv, sentences: Sentences, tmp_path: Path, case: str) -> None:
    change, options, expected = BAD_FILES[case]
    data = write_csv("bad.csv", change(sentences(80, 1)))
    message = train(data, *options).message()
    assert re.search(expected, message), message
    assert listing(tmp_path) == {"bad.csv"}


BAD_OPTIONS: dict[str, tuple[tuple[object, ...], str]] = {
    "epsilon 0": (("--epsilon", 0), "--epsilon: .*greater than 0"),
    "epsilon -1": (("--epsilon", -1), "--epsilon: .*greater than 0"),
    "epsilon nan": (("--epsilon", "nan"), "--epsilon"),
    "delta 1": (("--delta", 1), "--delta: .*between 0 and 1"),
    "delta 0": (("--delta", 0), "--delta: .*between 0 and 1"),
    "delta word": (("--delta", "tiny"), "--delta: .*not tiny"),
    "batch beyond the records": (("--expected-batch", 65), "expected_batch is 65, but there are only 64"),
    "batch 0": (("--expected-batch", 0), "--expected-batch"),
    "steps 0": (("--steps", 0), "--steps"),
    "rank 0": (("--rank", 0), "--rank: "),
    "blocks": (("--blocks", 4), "blocks is 4, but the base has 3"),
    "rate": (("--learning-rate", "inf"), "--learning-rate: .*finite"),
    "clipping": (("--clipping-bound", 0), "--clipping-bound"),
    "test size": (("--test-size", 1), "test size"),
    "unit column": (("--unit", "user"), "user"),
    "task name": (("--task", "my task"), "'my task' can't name a folder"),
    "longer than the positions": (("--max-length", 33), "max_length is 33, but the base reads at most 32"),
    "no such base": (("--base", "/no/such/base"), "no such folder"),
    "hub base offline": (("--base", "someone/no-such-model"), "Hugging Face hub"),
    "no such file": (("--data", "missing.csv"), "missing.csv"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_option(train: Train, reviews: Path, tmp_path: Path, case: str) -> None:
    options, expected = BAD_OPTIONS[case]
    message = train(reviews, *options).message()
    assert re.search(expected, message), message
    assert listing(tmp_path) == {"reviews.csv"}


def test_an_existing_folder_is_left_alone(train: Train, reviews: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    assert "exists already" in train(reviews).message()
    assert listing(tmp_path) == {"reviews.csv", "run", "run/mine.txt"}


def test_debug_shows_where(confide: Callable[..., Answer], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--epsilon"):
        confide(
            "--debug", "train", "--base", "x", "--data", "x", "--dataset", "x",
            "--out", tmp_path / "run", "--epsilon", 0,
        )  # fmt: skip


# Ctrl-C and full disks: no release appears. What asked nothing leaves nothing; the rest can go on.


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_before_anything_was_asked(
    train: Train, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune_run, "train", interrupted)
    answer = train(reviews)
    assert answer.code == 130
    assert "Traceback" not in answer.err
    assert "--resume" not in answer.err
    assert (
        answer.err.strip().splitlines()[-1]
        == "confide: interrupted; no half-written release was left, and noisy steps stay charged"
    )
    assert listing(tmp_path) == {"reviews.csv"}


def goes_on(confide: Confide, out: Path) -> None:
    answer = confide("train", "--resume", out)
    assert answer.code == 0, answer.err
    assert {path.name for path in out.parent.iterdir()} == {"reviews.csv", "run"}
    check(verify(out / "release"))
    assert listing(out / "private") == {"steps.jsonl"}
    ((_, state),) = [(c.entry, c.state) for c in Ledger.open().account("reviews-2026").charges]
    assert state == "settled"


@pytest.mark.parametrize(
    "place",
    ["run.training_statement", "tuned.write_release", "tuned.FineTuned.keep_private", "tuned.FineTuned.info"],
)
def test_ctrl_c_later(
    confide: Confide,
    train: Train,
    reviews: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(f"confide.finetune.{place}", interrupted)
        answer = train(reviews)
    assert answer.code == 130
    assert f"The run can go on where it stopped: confide train --resume {tmp_path / 'run'}" in answer.err
    assert {path.name for path in tmp_path.iterdir()} == {"reviews.csv", "run.unfinished"}
    assert not (tmp_path / "run.unfinished" / "release").exists()
    goes_on(confide, tmp_path / "run")


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_at_the_end(
    confide: Confide, train: Train, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("confide.finetune.tuned.write_tensors", full)
        assert "No space left on device" in train(reviews).message()
    goes_on(confide, tmp_path / "run")


@pytest.mark.parametrize("place", ["os.fsync", "pathlib.Path.mkdir"])
def test_full_or_read_only_disk_at_the_beginning(
    train: Train, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    Ledger.open()

    def fails(*arguments: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(folders, "Unfinished", Failing(place, fails, patch))
        assert "Read-only file system" in train(reviews).message()
    assert listing(tmp_path) <= {"reviews.csv"}
    assert Ledger.open().entries() == ()


class Failing:
    """`Unfinished`, on a disk that fails from then on."""

    def __init__(self, place: str, fails: Any, patch: pytest.MonkeyPatch) -> None:
        self.place, self.fails, self.patch = place, fails, patch

    def open(self, *arguments: Any, **keywords: Any) -> Any:
        self.patch.setattr(self.place, self.fails)
        return Unfinished.open(*arguments, **keywords)


def command(base: Path, data: Path, out: Path, *arguments: object) -> list[str]:
    given = ("train", "--base", base, "--data", data, "--out", out, "--dataset", "d", *QUICK, *arguments)
    return [sys.executable, "-m", "confide.cli.main", *map(str, given)]


def test_a_disk_that_really_fills_up(reviews: Path, tiny_base: Path, tmp_path: Path) -> None:
    """No file may grow beyond a limit that the weights don't fit."""
    import resource

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60 * 1024, 60 * 1024))

    found = subprocess.run(
        command(tiny_base, reviews, tmp_path / "run", "--method", "non-private"),
        capture_output=True, text=True, check=False, preexec_fn=limit,
    )  # fmt: skip
    assert found.returncode == 2, found.stderr
    assert "Traceback" not in found.stderr
    assert f"confide: can't write {tmp_path}" in found.stderr
    assert "File too large" in found.stderr
    assert listing(tmp_path) == {"reviews.csv"}


def test_sigint(reviews: Path, tiny_base: Path, tmp_path: Path) -> None:
    """A run of very many steps is stopped at a random moment while it trains."""
    endless = ("--method", "non-private", "--steps", 10**6)
    process = subprocess.Popen(
        command(tiny_base, reviews, tmp_path / "run", *endless),
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "FORCE_COLOR": "1", "COLUMNS": "200"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells may ignore it
    )  # fmt: skip
    try:
        assert process.stderr is not None
        seen = ""
        while "non-private" not in seen:  # the progress bar says that training began
            letter = process.stderr.read(1)
            assert letter, f"it ended before it was interrupted: {seen}"
            seen += letter
        time.sleep(random.uniform(0, 0.5))
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in rest
    assert "interrupted; no half-written release was left, and noisy steps stay charged" in rest
    assert listing(tmp_path) == {"reviews.csv"}


# Where everything in a real release comes from.


def differences(one: Any, two: Any, path: str = "") -> set[str]:
    if isinstance(one, dict) and isinstance(two, dict) and set(one) == set(two):
        return {found for key in one for found in differences(one[key], two[key], f"{path}/{key}")}
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        return {
            found
            for n, pair in enumerate(zip(one, two, strict=True))
            for found in differences(*pair, f"{path}/{n}")
        }
    return set() if one == two else {path}


def test_two_runs_on_different_records_differ_in_nothing_but_the_weights(
    train: Train, write_csv: WriteCsv, sentences: Sentences, tmp_path: Path
) -> None:
    """Same n, labels and settings; other texts, other balance of the labels, other files."""
    first = sentences(80, 1)
    second = [(text + " and very quite here", label) for text, label in sentences(110, 7) if label == "pos"][
        :52
    ]
    second += [(text, label) for text, label in sentences(110, 8) if label == "neg"][:28]
    for name, rows in (("one", first), ("two", second)):
        folder = tmp_path / f"owner-{name}"
        folder.mkdir()
        data = write_csv(f"owner-{name}/{name}.csv", rows)
        answer = train(data, "--labels", "neg,pos", out=f"owner-{name}/run")
        assert answer.code == 0, answer.err
    one, two = (tmp_path / f"owner-{name}" / "run" / "release" for name in ("one", "two"))
    assert listing(one) == listing(two)
    for name in sorted(listing(one)):
        assert provenance(name), name
        ours, theirs = (one / name).read_bytes(), (two / name).read_bytes()
        if name == "model.safetensors":
            headers = []
            for content in (ours, theirs):
                (length,) = struct.unpack("<Q", content[:8])
                headers.append(content[: 8 + length])
            assert headers[0] == headers[1]
            assert len(ours) == len(theirs)
        elif name == "statement.json":
            changed = differences(json.loads(ours), json.loads(theirs))
            ledger = {"/ledger/entry", "/ledger/head"}
            assert changed == {"/weights/model.safetensors", "/spendings/0/run", *ledger}
            assert set(json.loads(ours)["files"]) == listing(one) - {"model.safetensors", name}
        elif name == "README.md":
            run_one, run_two = (read_statement(folder).spendings[0].run for folder in (one, two))
            assert ours.decode().replace(run_one, run_two) == theirs.decode()
        else:
            assert ours == theirs, f"{name} depends on the records"


def test_only_trained_weights_depend_on_the_records(
    train: Train, reviews: Path, tiny_base: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    assert train(reviews).code == 0
    released = load_file(tmp_path / "run" / "release" / "model.safetensors")
    base = load_file(tiny_base / "model.safetensors")
    changed = {name for name, value in base.items() if not torch.equal(released[f"bert.{name}"], value)}
    assert changed == {f"encoder.layer.2.attention.self.{name}.weight" for name in ("query", "value")}
    with open(reviews, encoding="utf-8") as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    for path in (tmp_path / "run" / "release").rglob("*"):
        content = path.read_bytes()
        assert not any(text.encode() in content for text in texts)
        assert str(tmp_path).encode() not in content


def test_options_that_would_do_nothing(train: Train, reviews: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("--trainable", "head"), "--rank has no effect here: it needs trainable `lora`"),
        (("--rows-per-unit", 3), "--rows-per-unit has no effect here: it needs --unit"),
        (("--test-size", 0.3, "--test-data", reviews), "--test-size has no effect here: it needs no --test"),
        (("--ascent", "none", "--ascent-radius", 0.2), "--ascent-radius has no effect here: it needs an asc"),
        (
            ("--clipping-quantile", 0.3),
            "--clipping-quantile has no effect here: it needs clipping `adapt",
        ),
        (("--optimizer", "sgd", "--bias-correction", 1e-8), "bias_correction is for adamw"),
        (("--metric", "macro-f1", "--publish-accuracy", 2), "the metric is macro-f1"),
        (("--memory", "8 gigs"), "--memory"),
        (("--memory", "10MiB"), "allow at least"),
    ):
        answer = train(reviews, *arguments)
        assert (answer.code, message in answer.err) == (2, True), answer.err
        assert {path.name for path in tmp_path.iterdir()} == {"reviews.csv"}


def test_every_rule_from_the_command_line(train: Train, reviews: Path, tmp_path: Path) -> None:
    """Adaptive clipping, bias correction, a warmup, bfloat16 and a published accuracy, in one claim."""
    answer = train(
        reviews,
        *("--clipping", "adaptive", "--count-noise", 20, "--bias-correction", 1e-4, "--decay", "cosine"),
        *("--steps", 3, "--warmup", 1, "--publish-accuracy", 4, "--memory", "64GiB", "--json"),
        *("--precision", "bfloat16"),
    )
    found = answer.json()
    statement = verify(tmp_path / "run" / "release")
    check(statement)
    assert [number.model_dump() for number in statement.published] == found["published"]
    assert statement.claim is not None
    assert statement.claim.epsilon <= 4
    schedule = statement.spendings[0].schedule
    assert schedule is not None
    (stream,) = schedule.streams
    assert (stream.clipping.rule, stream.clipping.count_noise, stream.warmup) == ("adaptive", 20.0, 1)
    assert [query.noise_multipliers for query in schedule.queries] == [(4.0,)]
    lines = (tmp_path / "run" / "private" / "steps.jsonl").read_text().splitlines()
    assert len({json.loads(line)["bound"] for line in lines}) == 3


def test_raptor(
    confide: Confide, train: Train, sparse_base: Path, reviews: Path, sentences: Any, tmp_path: Path
) -> None:
    corpus = tmp_path / "public.txt"
    corpus.write_text("\n".join(text for text, _ in sentences(40, 9)), encoding="utf-8")
    options = ("--method", "raptor", "--base", sparse_base, "--public", corpus, "--expert-steps", 3)
    plan = train(reviews, *options, "--dry-run", "--json").json()
    assert [(stream["name"], stream["steps"]) for stream in plan["streams"]] == [
        ("shared", 2),
        ("experts", 3),
    ]
    found = train(reviews, *options, "--json").json()
    assert found["method"] == "raptor"
    assert 3.99 < found["epsilon"] <= 4
    assert listing(tmp_path / "run" / "private") >= {"owners.json", "steps.jsonl"}
    assert confide("verify", tmp_path / "run" / "release").code == 0
    statement = (tmp_path / "run" / "release" / "statement.json").read_text()
    assert "is public, as whoever named it declares" in statement
    bare = ("--method", "raptor", "--base", sparse_base)
    assert "--public" in train(reviews, *bare, out="other").message()
    bad = train(reviews, *bare, "--expert-clipping-bound", -1, out="other").message()
    assert "--expert-clipping-bound: " in bad
    idle = train(reviews, *bare, "--variant", "one-stream", "--expert-steps", 3, out="other").message()
    assert "--expert-steps has no effect here: it needs a variant with a stream of experts" in idle
    assert (
        "--layer has no effect here: it needs --method raptor"
        in train(reviews, "--layer", "last", out="other").message()
    )
