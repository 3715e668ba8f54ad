"""Agreements: made from settings, kept to in training, carried by releases, compared by merges."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from confide.errors import ConfigError, ReleaseError
from confide.finetune.agreement import agreed, agreement, tokenizer_hash
from confide.finetune.base import PublicBase
from confide.finetune.run import finetune, prepare
from confide.finetune.settings import Settings
from confide.finetune.tuned import FineTuned
from confide.merging.merge import merge
from confide.merging.plan import plan_models
from confide.privacy.composition import check
from confide.release.agreement import differences, read
from confide.release.write import verify
from confide.tasks.records import TaskData

MakeTask = Callable[..., TaskData]
SMALL: dict[str, Any] = {
    "expected_batch": 15,
    "steps": 2,
    "max_length": 20,
    "trainable": {"kind": "lora", "blocks": 1, "rank": 2},
}
TASKS = {"films": ("neg", "pos"), "plays": ("neg", "pos")}


@pytest.fixture(scope="module")
def base(tiny_base: Path) -> PublicBase:
    return PublicBase.of(str(tiny_base))


def made(base: PublicBase, folder: Path, tasks: Any = TASKS, **chosen: Any) -> Path:
    path = folder / f"agreement-{len(list(folder.iterdir()))}.json"
    value = agreement(Settings.of(SMALL | chosen), base.identity, base.folder, tasks)
    path.write_text(json.dumps(value.to_json()))
    return path


def tune(base: PublicBase, task: TaskData, **chosen: Any) -> FineTuned:
    settings = Settings.of(SMALL | {"method": "dp-merging"} | chosen)
    return finetune(prepare(task, base, settings.max_length), base, settings, simulate=1)


def test_the_hash_is_of_the_content(base: PublicBase, tmp_path: Path) -> None:
    path = made(base, tmp_path)
    value = json.loads(path.read_text())
    other = tmp_path / "reordered.json"
    other.write_text(json.dumps(dict(reversed(value.items())), indent=7))
    assert read(path).hash == read(other).hash
    changed = read(path).model_copy(update={"clipping_bound": 2.0})
    assert changed.hash != read(path).hash


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"clipping_bound": 2.0}, "clipping_bound is agreed to be 1.0, and this run has 2.0"),
        ({"trainable": {"kind": "lora", "rank": 4}}, "trainable.rank is agreed to be 2, and this run has 4"),
        ({"method": "dp-adamw"}, "anchor is agreed to be 0.001, and this run has 0.0"),
        ({"max_length": 19}, "max_length is agreed to be 20"),
    ],
)
def test_what_contradicts_it_is_refused(
    base: PublicBase, make_task: MakeTask, tmp_path: Path, chosen: dict[str, Any], message: str
) -> None:
    path = made(base, tmp_path)
    with pytest.raises(ConfigError, match=message):
        tune(base, make_task("films"), agreement=path, **chosen)


def test_other_tasks_labels_bases_and_tokenizers_are_refused(
    base: PublicBase, make_task: MakeTask, make_base: Callable[..., Path], tmp_path: Path
) -> None:
    path = made(base, tmp_path)
    with pytest.raises(ConfigError, match="tasks are agreed to be films, plays, and this is books"):
        tune(base, make_task("books"), agreement=path)
    turned = made(base, tmp_path, {"films": ("pos", "neg")})
    with pytest.raises(ConfigError, match=r"tasks\.films .* pos, neg, in this order"):
        tune(base, make_task("films"), agreement=turned)
    other = PublicBase.of(str(make_base(seed=5)))
    with pytest.raises(ConfigError, match="base_hash is agreed to be"):
        tune(other, make_task("films"), agreement=path)
    folder = tmp_path / "words"
    shutil.copytree(base.folder, folder)
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")
    assert tokenizer_hash(folder) != tokenizer_hash(base.folder)
    with pytest.raises(ConfigError, match="tokenizer is agreed to be"):
        tune(PublicBase.of(str(folder)), make_task("films"), agreement=path)


def test_without_tasks_they_are_open(base: PublicBase, make_task: MakeTask, tmp_path: Path) -> None:
    path = made(base, tmp_path, {})
    # The method's own anchor, given as a number, is the same.
    tuned = tune(base, make_task("anything"), agreement=path, anchor=0.001)
    assert tuned.statement.agreement == read(path).hash


def test_releases_carry_it_and_merges_compare_it(
    base: PublicBase, make_task: MakeTask, tiny_base: Path, tmp_path: Path
) -> None:
    first, second = made(base, tmp_path), made(base, tmp_path, clipping_bound=3.0)
    folders: dict[str, Path] = {}
    for label, name, path, bound in (
        ("films", "films", first, 1.0),
        ("plays", "plays", first, 1.0),
        ("other", "plays", second, 3.0),
        ("none", "plays", None, 1.0),
    ):
        tuned = tune(base, make_task(name), agreement=path, clipping_bound=bound)
        folders[label] = tmp_path / label
        statement = tuned.release(folders[label])
        check(statement)
        assert verify(folders[label]).agreement == (read(path).hash if path else None)

    bare = shutil.copytree(folders["films"], tmp_path / "bare")
    (bare / "agreement.json").unlink()
    said = json.loads((bare / "statement.json").read_text())
    del said["files"]["agreement.json"]
    (bare / "statement.json").write_text(json.dumps(said))
    with pytest.raises(ReleaseError, match=r"about an agreement, but agreement\.json is missing"):
        verify(bare)

    def planned(*labels: str) -> Any:
        return plan_models([folders[label] for label in labels], base=tiny_base, operator="average")

    assert planned("films", "plays").disagreements() == ()
    assert planned("films", "other").disagreements() == ("clipping_bound: 1.0 (films), 3.0 (plays)",)
    assert planned("films", "none").disagreements() == ("plays was trained under no agreement",)

    both = [folders["films"], folders["plays"]]
    report = merge(both, base=tiny_base, operator="average", out=tmp_path / "merged")
    assert report.statement.agreement == read(first).hash
    assert read(tmp_path / "merged" / "agreement.json") == read(first)
    verify(tmp_path / "merged")
    apart = merge([both[0], folders["other"]], base=tiny_base, operator="average", out=tmp_path / "apart")
    assert apart.statement.agreement is None
    written = json.loads((tmp_path / "apart" / "merge-report.json").read_text())["agreement"]
    assert written == {"hash": None, "differences": ["clipping_bound: 1.0 (films), 3.0 (plays)"]}

    shutil.copy(folders["other"] / "agreement.json", folders["films"] / "agreement.json")
    with pytest.raises(ReleaseError, match="agreement"):
        verify(folders["films"])


def test_differences_name_labels(base: PublicBase, tmp_path: Path) -> None:
    one = read(made(base, tmp_path))
    other = one.model_copy(update={"tasks": {"films": ("neg", "pos", "mixed")}})
    assert differences({"a": one, "b": other}) == (
        "tasks.films: ['neg', 'pos'] (a), ['neg', 'pos', 'mixed'] (b)",
        "tasks.plays: ['neg', 'pos'] (a), None (b)",
    )
    assert differences({"a": one, "b": one}) == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "isn't JSON"), ("[]", "is no agreement"), ("{}", "base"), (None, "can't read the agreement")],
)
def test_files_that_are_none(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read(path)


def test_an_unknown_key_is_refused(base: PublicBase, tmp_path: Path) -> None:
    path = made(base, tmp_path)
    value = json.loads(path.read_text()) | {"rank": 3}
    path.write_text(json.dumps(value))
    with pytest.raises(ConfigError, match="rank"):
        read(path)


EXPERTS: dict[str, Any] = {"layer": "last", "rank": 2}
SPARSE: dict[str, Any] = {"method": "raptor", "trainable": {"rank": 2}, "experts": EXPERTS}


def test_experts_are_agreed_on(sparse_base: Path, make_task: MakeTask, tmp_path: Path) -> None:
    base = PublicBase.of(str(sparse_base))
    path = made(base, tmp_path, {}, **SPARSE)
    assert read(path).experts is not None
    for changed, message in (
        ({"layer": "first"}, r"experts\.layer is agreed to be last, and this run has first"),
        ({"variant": "one-draw"}, r"experts\.variant is agreed to be raptor"),
        ({"vote": "majority"}, r"experts\.vote is agreed to be plurality"),
        ({"train": "weights"}, r"experts\.train is agreed to be lora"),
        ({"rank": 4}, r"experts\.rank is agreed to be 2, and this run has 4"),
        ({"clipping": "flat"}, r"experts\.clipping is agreed to be normalised"),
        ({"clipping_bound": 2.0}, r"experts\.clipping_bound is agreed to be 1\.0, and this run has 2\.0"),
        ({"denominator": "batch"}, r"experts\.denominator is agreed to be even"),
        ({"record_weight": "none"}, r"experts\.record_weight is agreed to be residual"),
        ({"record_memory": 0.5}, r"experts\.record_memory is agreed to be 0\.0"),
        ({"shared_share": 0.5}, r"experts\.shared_share is agreed to be 0\.9"),
        ({"split": "paper-ratio"}, r"experts\.split is agreed to be shared_share"),
    ):
        other = Settings.of(SMALL | SPARSE | {"experts": EXPERTS | changed, "agreement": path})
        with pytest.raises(ConfigError, match=message):
            agreed(other, make_task("films"), base.identity, base.folder)
    own = EXPERTS | {"steps": 7, "learning_rate": 0.3, "diagnostics": True}
    kept = Settings.of(SMALL | SPARSE | {"experts": own, "agreement": path})
    assert agreed(kept, make_task("films"), base.identity, base.folder) == read(path)


def test_a_key_of_experts_that_is_missing_is_refused(
    sparse_base: Path, make_task: MakeTask, tmp_path: Path
) -> None:
    base = PublicBase.of(str(sparse_base))
    path = made(base, tmp_path, {}, **SPARSE)
    value = json.loads(path.read_text())
    del value["experts"]["layer"]
    path.write_text(json.dumps(value))
    kept = Settings.of(SMALL | SPARSE | {"agreement": path})
    with pytest.raises(ConfigError, match=r"experts\.layer is agreed to be None"):
        agreed(kept, make_task("films"), base.identity, base.folder)


def test_mixtures_and_dense_models_agree_apart(
    sparse_base: Path, make_task: MakeTask, tmp_path: Path
) -> None:
    base = PublicBase.of(str(sparse_base))
    about_dense, about_sparse = made(base, tmp_path, {}), made(base, tmp_path, {}, **SPARSE)
    assert "experts" not in json.loads(about_dense.read_text())  # its hash is what it was before experts
    for path, chosen, message in (
        (about_dense, SPARSE, "is about a dense model, and this run trains a mixture of experts"),
        (about_sparse, {}, "is about a mixture of experts, and this run trains a dense model"),
    ):
        with pytest.raises(ConfigError, match=message):
            agreed(
                Settings.of(SMALL | chosen | {"agreement": path}),
                make_task("films"),
                base.identity,
                base.folder,
            )
    assert "experts.layer: None (a), last (b)" in differences(
        {"a": read(about_dense), "b": read(about_sparse)}
    )
    with pytest.raises(ConfigError, match="an agreement names the layer"):
        made(base, tmp_path, {}, method="raptor")


def test_a_release_of_a_mixture_carries_it(sparse_base: Path, make_task: MakeTask, tmp_path: Path) -> None:
    base = PublicBase.of(str(sparse_base))
    path = made(base, tmp_path, {}, **SPARSE)
    settings = Settings.of(SMALL | SPARSE | {"agreement": path})
    tuned = finetune(prepare(make_task("films"), base, settings.max_length), base, settings, simulate=1)
    assert tuned.release(tmp_path / "release").agreement == read(path).hash
    assert verify(tmp_path / "release").agreement == read(tmp_path / "release" / "agreement.json").hash
