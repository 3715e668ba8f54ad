"""An unfinished run on disk: what is stored goes on bitwise, and what doesn't fit is refused by name."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import confide
from confide.errors import PrivacyError, ReleaseError, ResumeError
from confide.finetune import fingerprint, loop, run
from confide.finetune.base import PublicBase
from confide.finetune.checkpoint import Begun, Unfinished
from confide.finetune.history import History, State, StepRecord
from confide.finetune.loop import train
from confide.finetune.run import finetune, prepare
from confide.finetune.settings import Settings
from confide.finetune.tuned import FineTuned
from confide.gradients.keys import Keys
from confide.models.adapters import Trainable
from confide.privacy.ledger import Ledger
from confide.privacy.streams import ParameterGroup, Schedule
from confide.tasks.records import Records, TaskData

from .conftest import Bound, stream_for

MakeTask = Callable[..., TaskData]
KEYS = Keys.fixed(3)
NOISE = {"noise_multiplier": 0.7}
PAIRED = {"ascent": "paired", "ascent_radius": 0.3, "ascent_noise": 0.9}
CASES: dict[str, dict[str, Any]] = {
    "adamw": {"decay": "linear"},
    "sgd": {"optimizer": "sgd"},
    "dp-merging": {**PAIRED, "anchor": 0.5},
    "fresh": {**PAIRED, "ascent": "fresh"},
    "lagged": {"ascent": "lagged", "ascent_radius": 0.3},
    "decoupled anchor": {"anchor": 2.0, "anchor_form": "decoupled"},
}


class StoppedError(Exception):
    """Stands for a kill."""


def begin(folder: Path, every: float = 0) -> Unfinished:
    unfinished = Unfinished.open(folder, every=every)
    if unfinished.read() is None:
        unfinished.begin(Begun("r", KEYS, {"records": "x"}))
    return unfinished


@pytest.mark.parametrize("stop", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_goes_on_bitwise(
    bert: Callable[..., Bound], tmp_path: Path, case: str, stop: int
) -> None:
    def go(unfinished: Unfinished | None, last: int) -> tuple[dict[str, torch.Tensor], History | None]:
        bound = bert(Trainable(kind="blocks", blocks=1), dtype=torch.float32)
        schedule = Schedule((stream_for(bound, **NOISE, **CASES[case]),))

        def after(state: Callable[[], State]) -> None:
            if unfinished:
                unfinished.after_step("r", state)
            if state().step == last:
                raise StoppedError

        start = unfinished.latest("r") if unfinished else None
        try:
            return bound.values(), train(bound.binding, schedule, KEYS, start=start, after_step=after)
        except StoppedError:
            return bound.values(), None
        finally:
            result.update(bound.values())

    result: dict[str, torch.Tensor] = {}
    _, history = go(None, -1)
    whole = dict(result)
    with closing(begin(tmp_path)) as unfinished:
        assert go(unfinished, stop)[1] is None
    assert any(not torch.equal(result[name], whole[name]) for name in whole)
    with closing(begin(tmp_path)) as unfinished:
        _, again = go(unfinished, -1)
    assert again == history
    for name, value in whole.items():
        assert torch.equal(result[name], value), name


def test_streams_of_different_lengths_go_on(bert: Callable[..., Bound], tmp_path: Path) -> None:
    def schedule_for(bound: Bound) -> Schedule:
        encoder = ParameterGroup("encoder", bound.adapted.encoder, 0.1, anchored=True)
        head = ParameterGroup("head", bound.adapted.head, 0.1, anchored=False)
        first = stream_for(bound, name="a", groups=(encoder,), **NOISE)
        return Schedule((first, stream_for(bound, name="b", draw="b", steps=2, groups=(head,), **NOISE)))

    def go(folder: Path | None, last: int) -> dict[str, torch.Tensor]:
        bound = bert(Trainable(kind="blocks", blocks=1))
        with closing(begin(folder or tmp_path / "unused")) as unfinished:

            def after(state: Callable[[], State]) -> None:
                unfinished.after_step("r", state)
                if state().step == last:
                    raise StoppedError

            start = unfinished.latest("r") if folder else None
            try:
                train(bound.binding, schedule_for(bound), KEYS, start=start, after_step=after)
            except StoppedError:
                assert unfinished.steps_run() == {"a": last, "b": min(last, 2)}
        return bound.values()

    whole = go(None, -1)
    go(tmp_path / "run", 3)
    again = go(tmp_path / "run", -1)
    assert all(torch.equal(again[name], value) for name, value in whole.items())


# The folder.


def state(step: int = 4, loss: float = math.nan) -> State:
    history = History(
        {"all": step}, [StepRecord("all", 0, 3, loss, 0.5, 1.0), StepRecord("all", 1, 2, 0.1, 0.0, 1.0)]
    )
    tensors = {"weights/w": torch.arange(3.0), "optimizer/step/w": torch.tensor(4.0)}
    tensors["gradient/w"] = torch.tensor([1.5], dtype=torch.bfloat16)
    return State(step, tensors, history)


def save(folder: Path, *steps: int) -> None:
    with closing(begin(folder)) as unfinished:
        for step in steps:
            unfinished.after_step("r", lambda step=step: state(step))  # type: ignore[misc]


def test_only_the_last_whole_checkpoint_stays(tmp_path: Path) -> None:
    save(tmp_path, 4, 5)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["checkpoint-00000005", "lock", "run.json"]
    with closing(begin(tmp_path)) as unfinished:
        found = unfinished.latest("r")
    assert found is not None
    assert found.step == 5
    assert found.tensors.keys() == state().tensors.keys()
    assert all(torch.equal(found.tensors[name], value) for name, value in state().tensors.items())
    assert found.tensors["gradient/w"].dtype == torch.bfloat16
    assert found.history.steps_run == {"all": 5}
    assert math.isnan(found.history.steps[0].loss)
    assert found.history.steps[1] == StepRecord("all", 1, 2, 0.1, 0.0, 1.0)


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    save(tmp_path / "run", 4)
    paths = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert all(path.stat().st_mode & 0o077 == 0 for path in paths if path.is_file() or path == paths[0])
    assert "secret" not in repr(begin(tmp_path / "run").read())


def test_a_checkpoint_is_due_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("confide.finetune.checkpoint.time.monotonic", lambda: now[0])
    with closing(begin(tmp_path, every=10)) as unfinished:
        for second in range(1, 31):
            now[0] = second
            unfinished.after_step("r", lambda: state(second))  # noqa: B023
            steps = [int(path.name[-8:]) for path in tmp_path.glob("checkpoint-*")]
            assert steps == ([] if second < 10 else [second // 10 * 10])


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 4)

    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("confide.finetune.checkpoint.save_file", full)
    with pytest.raises(ReleaseError, match="No space left on device"):
        save(tmp_path, 5)
    with closing(begin(tmp_path)) as unfinished:
        found = unfinished.latest("r")
    assert found is not None
    assert found.step == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-00000004", "lock", "run.json"]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def newer(file: Path) -> None:
    file.write_text(file.read_text().replace("confide.checkpoint/1", "confide.checkpoint/2"))


def other(file: Path) -> None:
    file.write_text(file.read_text().replace('"run": "r"', '"run": "s"'))


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "tensors cut": (
        "state.safetensors",
        truncate,
        "is truncated or was changed; remove .*checkpoint-00000004",
    ),
    "tensors gone": ("state.safetensors", Path.unlink, "is damaged; remove .*checkpoint-00000004"),
    "state cut": ("state.json", truncate, "is truncated or was changed"),
    "state gone": ("state.json", Path.unlink, "is truncated or was changed"),
    "newer": ("state.json", newer, "is of schema confide.checkpoint/2, and this confide reads"),
    "another run's": ("state.json", other, "belongs to another run"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint(tmp_path: Path, case: str) -> None:
    save(tmp_path, 4)
    name, damage, message = DAMAGE[case]
    damage(tmp_path / "checkpoint-00000004" / name)
    with closing(begin(tmp_path)) as unfinished, pytest.raises(ResumeError, match=message):
        unfinished.latest("r")


@pytest.mark.parametrize(
    ("damage", "message"),
    [(truncate, "is truncated or was changed"), (newer, "is of schema confide.checkpoint/2")],
)
def test_damaged_keys(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    save(tmp_path)
    damage(tmp_path / "run.json")
    with closing(Unfinished.open(tmp_path)) as unfinished, pytest.raises(ResumeError, match=message):
        unfinished.read()


def test_checkpoints_without_keys_are_nobodys(tmp_path: Path) -> None:
    save(tmp_path, 4)
    (tmp_path / "charge.json").write_text("{}")
    (tmp_path / "run.json").unlink()
    with closing(Unfinished.open(tmp_path)) as unfinished:
        assert unfinished.read() is None
        assert not unfinished.asked
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


HOLD = """
import fcntl, sys
held = open(sys.argv[1], "r+")
fcntl.flock(held, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_one_process_at_a_time(tmp_path: Path) -> None:
    save(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ResumeError, match="another process is at work on the run"):
        Unfinished.open(tmp_path)
    holder.kill()
    holder.communicate()
    Unfinished.open(tmp_path).close()


def test_destroyed_keys_are_overwritten(tmp_path: Path) -> None:
    save(tmp_path / "run", 4)
    os.link(tmp_path / "run" / "run.json", tmp_path / "same-bytes")
    text = (tmp_path / "same-bytes").read_bytes()
    Unfinished.open(tmp_path / "run").destroy()
    assert not (tmp_path / "run").exists()
    left = (tmp_path / "same-bytes").read_bytes()
    assert len(left) == len(text)
    assert KEYS.noise.secret.hex().encode() in text
    assert KEYS.noise.secret.hex().encode() not in left


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ReleaseError, match="can't write"):
        Unfinished.open(tmp_path / "file" / "run")


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    mode = tmp_path.stat().st_mode
    with pytest.raises(ResumeError, match=r"holds thesis\.tex, which is no part of a run"):
        Unfinished.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert tmp_path.stat().st_mode == mode


# A run that goes on.

SMALL = {
    "expected_batch": 15,
    "steps": 5,
    "max_length": 20,
    "trainable": {"kind": "lora", "blocks": 1, "rank": 2},
}


@pytest.fixture(scope="module")
def base(tiny_base: Path) -> PublicBase:
    return PublicBase.of(str(tiny_base))


@pytest.fixture
def tune(base: PublicBase, tmp_path: Path) -> Callable[..., FineTuned]:
    def tune(task: TaskData, on: PublicBase = base, name: str = "clinic", **settings: Any) -> FineTuned:
        chosen = Settings.of(SMALL | settings)
        with closing(Unfinished.open(tmp_path / "run", every=0)) as unfinished:
            return finetune(
                prepare(task, on, chosen.max_length),
                on,
                chosen,
                dataset=name,
                ledger=Ledger.open(),
                unfinished=unfinished,
            )

    return tune


@pytest.fixture
def stopped(tune: Callable[..., FineTuned], make_task: MakeTask, monkeypatch: pytest.MonkeyPatch) -> TaskData:
    """The task of a run that was stopped after its third query."""
    plain, calls = loop.add_noise, []

    def noise(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 7:
            raise StoppedError
        return plain(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "add_noise", noise)
        with pytest.raises(StoppedError):
            tune(make_task())
    return make_task()


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("noise was drawn")


def changed(task: TaskData, **fields: Any) -> TaskData:
    return TaskData(**{name: fields.get(name, getattr(task, name)) for name in TaskData.__dataclass_fields__})


def one_letter(task: TaskData) -> TaskData:
    texts = list(task.train.texts)
    texts[7] = texts[7][:-1] + "é"
    return changed(task, train=Records.of(texts, task.train.labels))


def one_label(task: TaskData) -> TaskData:
    labels = task.train.labels.copy()
    labels[3] = 1 - labels[3]
    return changed(task, train=Records.of(task.train.texts, labels))


def order(task: TaskData) -> TaskData:
    return changed(task, train=Records.of(task.train.texts[::-1], task.train.labels[::-1]))


@pytest.mark.parametrize("change", [one_letter, one_label, order])
def test_noise_never_meets_other_records(
    tune: Callable[..., FineTuned],
    stopped: TaskData,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[TaskData], TaskData],
) -> None:
    monkeypatch.setattr(loop, "add_noise", never)
    monkeypatch.setattr(run, "plan", never)  # it is the first thing that is looked at
    with pytest.raises(ResumeError, match=r"the records are not those it began with\. Noise that was drawn"):
        tune(change(stopped))


def test_another_setting_or_name(tune: Callable[..., FineTuned], stopped: TaskData) -> None:
    with pytest.raises(ResumeError, match=r"learning_rate was 0\.03 when it began and is 0\.04 now"):
        tune(stopped, learning_rate=0.04)
    with pytest.raises(ResumeError, match="dataset was clinic when it began and is other now"):
        tune(stopped, name="other")


def test_another_base(
    tune: Callable[..., FineTuned],
    stopped: TaskData,
    make_base: Callable[..., Path],
    tiny_base: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(ResumeError, match="base isn't what it was when it began"):
        tune(stopped, PublicBase.of(str(make_base(seed=5))))
    same = tmp_path / tiny_base.name  # the same weights, but another activation or tokenizer
    shutil.copytree(tiny_base, same)
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    with pytest.raises(ResumeError, match=r"base's config.json isn't what it was"):
        tune(stopped, PublicBase.of(str(same)))


def test_another_tokenizer(
    tune: Callable[..., FineTuned], stopped: TaskData, tiny_base: Path, tmp_path: Path
) -> None:
    same = tmp_path / tiny_base.name
    shutil.copytree(tiny_base, same)
    file = same / "tokenizer.json"
    value = json.loads(file.read_text())
    vocabulary = value["model"]["vocab"]
    vocabulary["fine"], vocabulary["dull"] = vocabulary["dull"], vocabulary["fine"]
    file.write_text(json.dumps(value))
    with pytest.raises(ResumeError, match="the tokens are not those it began with"):
        tune(stopped, PublicBase.of(str(same)))


def test_other_threads_and_versions(
    tune: Callable[..., FineTuned], stopped: TaskData, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 7)
        with pytest.raises(ResumeError, match=r"number of threads \(OMP_NUM_THREADS\) was 1 .* and is 7 now"):
            tune(stopped)
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "version", lambda name: "9.9")
        with pytest.raises(ResumeError, match=r"the version of confide was .* and is 9.9 now"):
            tune(stopped)


def test_the_charge_must_be_there(
    tune: Callable[..., FineTuned], stopped: TaskData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "add_noise", never)
    charged = os.environ["CONFIDE_LEDGER"]
    with monkeypatch.context() as patch:
        patch.setenv("CONFIDE_LEDGER", str(tmp_path / "swapped.sqlite"))
        with pytest.raises(PrivacyError, match=r"was charged to the ledger .*, but .* doesn't know it"):
            tune(stopped)
        assert Ledger.open().entries() == ()
    (entry,) = Ledger.open(charged).entries()
    Ledger.open().refund(entry)
    with pytest.raises(PrivacyError, match="was refunded, so it may ask nothing"):
        tune(stopped)


def test_copies_of_a_run_say_the_same(
    tune: Callable[..., FineTuned], stopped: TaskData, tmp_path: Path
) -> None:
    """A copy asks what the run asks, and gets the same answers: one charge is enough for both."""
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    one = tune(stopped).release(tmp_path / "one")
    assert (tmp_path / "run" / "run.json").exists() is False
    (tmp_path / "copy").rename(tmp_path / "run")
    two = tune(stopped).release(tmp_path / "two")
    assert one == two
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]
    assert [charge.state for charge in Ledger.open().account("clinic").charges] == ["settled"]


def test_in_python(
    make_task: MakeTask, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"base": str(tiny_base), "dataset": "clinic", "checkpoint": tmp_path / "kept", **SMALL}
    with monkeypatch.context() as patch:
        patch.setattr(run, "training_statement", never)
        with pytest.raises(AssertionError):
            confide.train(make_task(), **given)
    model = confide.train(make_task(), **given)
    assert (tmp_path / "kept" / "run.json").exists()
    model.release(tmp_path / "release")
    assert not (tmp_path / "kept").exists()
    assert [charge.state for charge in Ledger.open().account("clinic").charges] == ["settled"]
