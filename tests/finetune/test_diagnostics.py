"""Diagnostics of a real run: exact numbers, the same release either way, and nothing outside private/."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from confide.errors import ConfigError, DataError
from confide.finetune import diagnostics, run
from confide.finetune.base import PublicBase
from confide.finetune.checkpoint import Unfinished
from confide.finetune.diagnostics import NOTE, document
from confide.finetune.history import State
from confide.finetune.run import finetune, prepare
from confide.finetune.settings import Settings
from confide.finetune.tuned import FineTuned
from confide.gradients import expert_engine
from confide.models.moe.owners import owner_maps
from confide.privacy.units import UnitMap
from confide.tasks.records import TaskData


@pytest.fixture(scope="module")
def base(sparse_base: Path) -> PublicBase:
    return PublicBase.of(str(sparse_base))


def settings_of(corpus: Path, **experts: Any) -> Settings:
    own = {"public": str(corpus), "rank": 2, "layer": "last", "clipping_bound": 0.05, **experts}
    return Settings.of(
        {
            "method": "raptor",
            "epsilon": 3.0,
            "expected_batch": 15,
            "steps": 3,
            "max_length": 20,
            "trainable": {"rank": 2},
            "experts": {"learning_rate": 0.05, "diagnostics": True, **own},
        }
    )


def tune(base: PublicBase, task: TaskData, settings: Settings, **options: Any) -> FineTuned:
    return finetune(prepare(task, base, settings.max_length), base, settings, simulate=4, **options)


def test_the_release_is_the_same_bits(
    base: PublicBase,
    make_task: Callable[..., TaskData],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        run, "new_run", lambda: "0123456789abcdef"
    )  # the name of a run is drawn anew each time
    tuned = {
        asked: tune(base, make_task(), settings_of(corpus, diagnostics=asked)) for asked in (True, False)
    }
    contents = {}
    for asked, one in tuned.items():
        folder, private = tmp_path / f"release-{asked}", tmp_path / f"private-{asked}"
        one.release(folder)
        one.keep_private(private)
        files = [path for path in folder.rglob("*") if path.is_file()]
        contents[asked] = {path.relative_to(folder): path.read_bytes() for path in files}
        assert folder / "adapter" / "adapter_model.safetensors" in files
        assert (private / "diagnostics.json").exists() == asked
        assert [step.loss for step in one.history.steps] == [step.loss for step in tuned[True].history.steps]
    assert contents[True] == contents[False]
    file = tmp_path / "private-True" / "diagnostics.json"
    assert file.stat().st_mode & 0o077 == 0
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["note"] == NOTE
    assert "never share" in NOTE
    assert all(b"iagnostics" not in content for content in contents[True].values())
    bare = (tmp_path / "private-False" / "steps.jsonl").read_text(encoding="utf-8")
    assert '"norms": {}' in bare


def test_what_is_paid_for_is_released_without_diagnostics_too(
    base: PublicBase, make_task: Callable[..., TaskData], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise DataError("public.txt can't be read")

    monkeypatch.setattr(run, "diagnose", fails)
    with pytest.warns(UserWarning, match=r"no diagnostics: public.txt can't be read"):
        tuned = tune(base, make_task(), settings_of(corpus))
    assert tuned.diagnostics is None
    assert tuned.history.steps_run == {"shared": 3, "experts": 3}


@pytest.mark.parametrize("train", ["lora", "weights"])
def test_moments_are_those_of_single_records(
    base: PublicBase, make_task: Callable[..., TaskData], corpus: Path, train: str
) -> None:
    """Each record's gradient by autograd, alone; then its owner's part, clipped."""
    tuned = tune(base, make_task(train=24), settings_of(corpus, train=train, clipping="flat"))
    found = tuned.diagnostics
    assert found is not None
    assert found.estimator is not None
    assert found.simulated is not None
    assert found.imbalance is not None
    assert tuned.owner is not None
    model: Any = tuned.adapted.classifier.model
    named = dict(model.named_parameters())
    trained = [named[name].requires_grad_() for name in tuned.adapted.expert_parameters]
    encoded, labels = tuned.prepared.encoded("train"), torch.from_numpy(tuned.prepared.labels("train"))
    own = torch.zeros(24, sum(value[0].numel() for value in trained), dtype=torch.float64)
    for row in range(24):
        logits = model(**encoded.batch(np.array([row]))).logits[0].double()
        weight = 1 - logits.softmax(0)[labels[row]].detach()
        loss = functional.cross_entropy(logits, labels[row]) * weight
        parts = torch.autograd.grad(loss, trained)
        own[row] = torch.cat([part[tuned.owner[row]].flatten().double() for part in parts])
    own *= (0.05 / own.norm(dim=1, keepdim=True)).clamp(max=1)
    assert 0.1 < (own.norm(dim=1) > 0.0499).double().mean() < 1  # some are clipped, some are not
    assert found.silent == float((own.norm(dim=1) == 0).double().mean())
    counts = np.bincount(tuned.owner, minlength=4)
    assert found.imbalance.counts == tuple(counts)
    rate, denominator = 15 / 24, 15 / 4
    for expert in range(4):
        mine = own[tuned.owner == expert]
        mean = mine.mean(0) if len(mine) else torch.zeros(own.shape[1])
        scale = 4 * counts[expert] / 24
        assert found.estimator.scale[expert] == pytest.approx(scale)
        assert found.estimator.bias[expert] == pytest.approx(abs(scale - 1) * float(mean.norm()), rel=1e-4)
        spread = rate * (1 - rate) * float(mine.square().sum()) / denominator**2
        assert found.estimator.sampling[expert] == pytest.approx(spread, rel=1e-4)
        sigma = tuned.schedule.streams[1].noise_multiplier
        noise = own.shape[1] * (sigma * 0.05 / denominator) ** 2
        assert found.estimator.noise[expert] == pytest.approx(noise)
    closed = found.estimator.error - found.estimator.noise
    drawn = found.simulated
    assert (np.abs(drawn.error - closed) <= 4.5 * drawn.error_error).all()
    told = np.isfinite(drawn.scale)  # all but experts without a gradient
    assert told.any()
    assert (np.abs(drawn.scale - found.estimator.scale)[told] <= 4.5 * drawn.scale_error[told]).all()


def test_owners_drift_and_roles_of_a_run(
    base: PublicBase, make_task: Callable[..., TaskData], corpus: Path
) -> None:
    tuned = tune(base, make_task(), settings_of(corpus))
    found = tuned.diagnostics
    assert found is not None
    assert found.stability is not None
    assert found.drift is not None
    assert found.transfer is not None
    assert tuned.owner is not None
    model: Any = tuned.adapted.classifier.model
    encoded = tuned.prepared.encoded("train")
    rows = np.arange(len(encoded))
    (layer,) = tuned.adapted.experts
    now = owner_maps([layer], lambda batch: model(**batch), [(rows, encoded.batch(rows))], len(rows))[
        layer.name
    ]
    assert found.stability.changed == pytest.approx((now != tuned.owner).mean())
    assert found.drift.changed == (now != tuned.owner).sum()
    assert found.stability.changed + found.stability.kept_for_sure <= 1
    assert found.drift.stale_bound is not None
    assert found.drift.stale <= found.drift.stale_bound
    assert found.drift.total <= found.drift.stale + found.drift.moved + 1e-12
    assert 0 < found.stability.drift < found.drift.drift
    assert [x.block for x in found.transfer.private] == [x.block for x in found.transfer.public] == [0, 2]
    assert found.transfer.private[1].counts == tuple(np.bincount(tuned.owner, minlength=4))
    roles = {role.role: role for role in found.roles}
    assert found.mismatch == roles["shared"].mean_snr / roles["experts"].mean_snr
    assert all(a + b == pytest.approx(1) for a, b in zip(*(r.share for r in found.roles), strict=True))
    clipped = [step.clipped for step in tuned.history.steps if step.stream == "experts"]
    assert roles["experts"].clipped == pytest.approx(np.mean(clipped))
    assert found.parameters["shared"] + found.parameters["head"] == roles["shared"].parameters
    assert found.parameters["experts"] == 4 * found.parameters["each expert"] == roles["experts"].parameters
    assert all(seconds > 0 for seconds in found.seconds.values())
    assert found.peak_bytes > 50 * 2**20
    json.dumps(document(found), allow_nan=False)


class StoppedError(Exception):
    """Stands for a kill."""


def test_norms_outlive_a_stop(
    base: PublicBase,
    make_task: Callable[..., TaskData],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, settings = make_task(), settings_of(corpus)
    whole = tune(base, task, settings)
    keep = Unfinished.after_step

    def stop(self: Unfinished, run: str, state: Callable[[], State]) -> None:
        keep(self, run, state)
        raise StoppedError

    with (
        closing(Unfinished.open(tmp_path / "resume", every=0)) as unfinished,
        monkeypatch.context() as patched,
    ):
        patched.setattr(Unfinished, "after_step", stop)
        with pytest.raises(StoppedError):
            tune(base, task, settings, unfinished=unfinished)
    with closing(Unfinished.open(tmp_path / "resume")) as unfinished:
        again = tune(base, task, settings, unfinished=unfinished)
    assert [step.norms for step in again.history.steps] == [step.norms for step in whole.history.steps]
    assert again.diagnostics is not None
    assert whole.diagnostics is not None
    one, two = (document(made.diagnostics) for made in (whole, again))
    for found in (one, two):
        for name in ("seconds", "peak_bytes"):
            found.pop(name)
        for role in found["roles"]:
            role.pop("seconds")
    assert one == two


@pytest.mark.parametrize(
    ("variant", "roles", "layer", "estimated"),
    [
        ("one-stream", {"shared", "experts"}, True, False),
        ("one-clip", {"shared", "experts"}, True, False),
        ("shared-only", {"shared"}, False, False),
        ("experts-only", {"experts"}, True, True),
        ("monolithic", {"shared", "experts"}, False, False),
        ("non-private", {"shared", "experts"}, True, True),
    ],
)
def test_variants_have_what_they_have(
    base: PublicBase,
    make_task: Callable[..., TaskData],
    corpus: Path,
    variant: str,
    roles: set[str],
    layer: bool,
    estimated: bool,
) -> None:
    tuned = tune(base, make_task(train=30), settings_of(corpus, variant=variant))
    found = tuned.diagnostics
    assert found is not None
    assert {role.role for role in found.roles} == roles
    assert (found.layer is not None, found.estimator is not None) == (layer, estimated)
    assert (found.stability is not None) == (tuned.owner is not None)
    trained = sum(found.parameters.get(name, 0) for name in ("shared", "head", "experts"))
    assert trained == sum(role.parameters for role in found.roles)
    if variant == "monolithic":
        experts = next(role for role in found.roles if role.role == "experts")
        assert experts.snr is not None
        assert len(experts.snr) == 8
    if variant == "non-private":
        assert found.mismatch is None
        assert found.drift is not None
        assert found.drift.stale_bound is None
    json.dumps(document(found), allow_nan=False)


def test_a_sample_stands_for_many(
    base: PublicBase, make_task: Callable[..., TaskData], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnostics, "RECORDS", 20)
    asked, check = [], expert_engine.check_independence
    monkeypatch.setattr(expert_engine, "check_independence", lambda *a: asked.append(check(*a)))
    tuned = tune(base, make_task(), settings_of(corpus))
    assert len(asked) == 3  # before training, at its first step, and once in all of the diagnostics
    found = tuned.diagnostics
    assert found is not None
    assert found.estimator is not None
    assert found.imbalance is not None
    assert found.records == 20
    assert sum(found.imbalance.counts) == 60
    assert found.estimator.scale.sum() == pytest.approx(4)  # as if the sample were all


def test_units_of_several_rows_are_refused(
    base: PublicBase, make_task: Callable[..., TaskData], corpus: Path
) -> None:
    task = make_task()
    units = UnitMap.column("person", [str(row // 2) for row in range(len(task.train))], 2)
    several = dataclasses.replace(task, train=dataclasses.replace(task.train, units=units))
    with pytest.raises(ConfigError, match="up to 2 rows of a person"):
        tune(base, several, settings_of(corpus))
