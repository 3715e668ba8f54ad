"""A study as a YAML file: one base, some tasks, methods to compare, operators to merge with."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from confide.errors import ConfigError
from confide.finetune.settings import Settings
from confide.merging.operators import find
from confide.release.write import check_task_name


class TaskPlan(BaseModel):
    """One task: a registered one by `name`, or a file of one's own with `data`, `text` and `label`.

    Attributes:
        name: registered task, or what to call the file's.
        records: keep at most this many training units, picked at random with seed 0.
        test_records: score on at most this many test units.
        data, text, label, labels, unit, test_size: as in `confide train`.
    """

    name: str
    records: int | None = Field(default=None, gt=0)
    test_records: int | None = Field(default=None, gt=0)
    data: Path | None = None
    text: str | None = None
    label: str | None = None
    labels: tuple[str, ...] | None = None
    unit: str | None = None
    test_size: float = Field(default=0.2, gt=0, lt=1)

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="after")
    def _file_is_complete(self) -> TaskPlan:
        if self.data is not None and (self.text is None or self.label is None):
            raise ValueError("a task with data needs text and label: the names of its columns")
        idle = self.model_fields_set & {"text", "label", "labels", "unit", "test_size"}
        if self.data is None and idle:
            raise ValueError(f"{', '.join(sorted(idle))} belong to a task with data, a file of one's own")
        return self


class MergePlan(BaseModel):
    """A merge operator and its parameters; `name` tells two merges by one operator apart.

    Attributes:
        statistics: of an operator that needs them: of the study's public text, or `released` with the models
            as a charged query. Then only models of methods whose `release_statistics` is what the operator
            needs are merged by it.
    """

    operator: str
    parameters: dict[str, Any] = {}
    name: str | None = None
    statistics: Literal["public", "released"] = "public"

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def label(self) -> str:
        """What rows and folders call it."""
        return self.name or self.operator


class PublicText(BaseModel):
    """Text that anybody may have, for operators that need statistics.

    Attributes:
        corpus: a file with one text a line, or `brown`: sentences of the Brown corpus in genres that the task
            `brown-genre` doesn't use.
        texts: at most this many, picked at random with seed 0.
    """

    corpus: str
    texts: int = Field(default=1000, gt=0)

    model_config = ConfigDict(frozen=True, extra="forbid")


class Upcycling(BaseModel):
    """Experts for a dense base: a mixture that computes what the base does until it is trained.

    Attributes:
        corpus: public text for the routers: a file with one text a line, or `brown`, as in `PublicText`.
        texts: at most this many, picked at random with seed 0.
        experts: of each layer.
        blocks: that get experts, from 0.
    """

    corpus: str
    texts: int = Field(default=2000, gt=0)
    experts: int = Field(default=8, ge=2)
    blocks: tuple[int, ...] = Field(default=(1, 3, 5), min_length=1)

    model_config = ConfigDict(frozen=True, extra="forbid")


class Plan(BaseModel):
    """A whole study.

    Attributes:
        base: folder, `package:NAME` or hub id of the public model.
        upcycle: makes the base into a mixture of experts first; None leaves it as it is.
        disjoint: the owner declares that no unit is in two tasks; the run checks that no text is.
        settings: shared by all methods; every key of `Settings` but `method` and `seed`. `experts` concerns
            those whose method is `raptor`.
        pretrained: settings of the floor: the untouched encoder with a private head. None leaves it out.
        methods: by name, each with what differs from `settings`. `method` may be given where the name
            isn't one, so that ablations can be listed.
        merges: operators to merge each method's models with.
        statistics: public text for operators that need statistics.
        seeds: of initial weights; noise and sampling are fresh in every run.
    """

    title: str
    base: str
    upcycle: Upcycling | None = None
    disjoint: Literal["declared"] | None = None
    tasks: tuple[TaskPlan, ...] = Field(min_length=1)
    settings: dict[str, Any] = {}
    pretrained: dict[str, Any] | None = None
    methods: dict[str, dict[str, Any]] = {}
    merges: tuple[MergePlan, ...] = ()
    statistics: PublicText | None = None
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="after")
    def _names_are_unique(self) -> Plan:
        _refuse_twins("tasks have the name", [task.name for task in self.tasks])
        _refuse_twins("merges have the name", [merge.label for merge in self.merges])
        _refuse_twins("seeds are", [str(seed) for seed in self.seeds])
        if "pretrained" in self.methods:
            raise ValueError("`pretrained` is a key of its own, beside `methods`")
        if not self.methods and self.pretrained is None:
            raise ValueError("a study needs a method to train with: methods, or pretrained")
        for key in ("seed", "method"):
            if key in self.settings:
                raise ValueError(f"settings are shared by all methods, so {key} has no place there")
        return self

    def merges_of(self, method: str) -> tuple[MergePlan, ...]:
        """The merges that a method's models can be merged by: all but those by what it doesn't release."""
        released = self.settings_of(method, self.seeds[0]).release_statistics
        return tuple(
            merge
            for merge in self.merges
            if merge.statistics == "public" or find(merge.operator).needs == released
        )

    def settings_of(self, method: str, seed: int) -> Settings:
        """The settings of one method (or `pretrained`) under one seed.

        Raises:
            ConfigError: an unknown key or a value out of range; names the method and the key.
        """
        if method == "pretrained":
            own: dict[str, Any] = {"method": "dp-adamw", **(self.pretrained or {})}
            if "trainable" in own:
                raise ConfigError("pretrained trains the head alone, so it takes no `trainable`")
            own["trainable"] = {"kind": "head"}
            own.setdefault("release_statistics", None)  # a head alone has nothing to merge
        else:
            own = {"method": method, **self.methods[method]}
        mixture = own["method"] == "raptor"
        shared = {key: value for key, value in self.settings.items() if mixture or key != "experts"}
        try:
            return Settings.of({**_over(shared, own), "seed": seed})
        except ConfigError as error:
            raise ConfigError(f"method {method!r}: {error}") from None


_NESTED: dict[int | str, type[BaseModel]] = {
    "tasks": TaskPlan,
    "merges": MergePlan,
    "statistics": PublicText,
    "upcycle": Upcycling,
}


def read(path: Path, *, fast: bool = False) -> Plan:
    """Read a study.

    Args:
        fast: lay the file's `fast:` section over it: a shorter run of the same shape.

    Raises:
        ConfigError: the file is missing, isn't YAML, or holds an unknown key or a bad value.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold keys such as base, tasks and methods")
    shorter = content.pop("fast", None)
    if fast and shorter is None:
        raise ConfigError(f"{path} has no `fast:` section, so --fast doesn't know what to shorten")
    try:
        plan = Plan.model_validate(_over(content, shorter) if fast else content)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first(error, Plan)}") from None
    names = [*plan.methods, *(["pretrained"] if plan.pretrained is not None else [])]
    lengths = {plan.settings_of(method, plan.seeds[0]).max_length for method in names}
    if len(lengths) > 1:
        raise ConfigError(
            f"{path}: methods have max_length {sorted(lengths)}; texts are encoded once for all of them, so "
            "put one max_length into settings"
        )
    for name in [*(task.name for task in plan.tasks), *plan.methods, *(m.label for m in plan.merges)]:
        check_task_name(name)  # each becomes a folder
    for merge in plan.merges:
        operator = find(merge.operator)
        operator.settings(merge.parameters)
        if merge.statistics == "released":
            _check_released(path, plan, merge)
        elif operator.needs and plan.statistics is None:
            raise ConfigError(
                f"{path}: operator {operator.name} needs {operator.needs} of each model: name public text "
                "under statistics, such as {corpus: public.txt}, or merge by those that were `released`"
            )
    return plan


def _check_released(path: Path, plan: Plan, merge: MergePlan) -> None:
    needs = find(merge.operator).needs
    if needs is None:
        raise ConfigError(f"{path}: operator {merge.operator} needs no statistics; leave them out")
    if not any(merge in plan.merges_of(method) for method in plan.methods):
        raise ConfigError(
            f"{path}: merge {merge.label} takes released {needs}, but no method releases them: give one "
            f"`release_statistics: {needs}`"
        )


def _refuse_twins(what: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two {what} {name!r}; results would overwrite each other")


def _over(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return {
            key: _over(below.get(key), above[key]) if key in above else below[key]
            for key in {**below, **above}
        }
    return above


def _first(error: ValidationError, model: type[BaseModel]) -> str:
    """The first complaint: key, what is wrong, and the key that was perhaps meant."""
    first = error.errors()[0]
    model = _NESTED.get(first["loc"][0], model) if len(first["loc"]) > 1 else model
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        near = get_close_matches(str(first["loc"][-1]), list(model.model_fields), n=1)
        return f"unknown key {where}" + (f"; did you mean {near[0]!r}?" if near else "")
    return f"{where}: {first['msg']}" if where else str(first["msg"])
