"""Merge recipes: mergekit's YAML for what it covers, and confide's own keys beside it.

Only reading happens here; what the settings mean for an operator is `merging.assign`. Every error names the
file, the line and the key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml

from confide.errors import MergeError
from confide.merging.statistics import split

Value = float | bool | str

_TOP = {
    "merge_method": "the operator",
    "base_model": "the public base",
    "models": "what is merged",
    "parameters": "the operator's, for all models",
    "dtype": "of the output",
    "out_dtype": "of the output, before dtype",
    "tokenizer_source": "base",
    "compat": "mergekit",
    "disjoint": "whether no unit is in two of the data sets",
    "heads": "patterns of tensors that stay per task",
    "statistics": "where statistics of the data come from",
}
_MODEL = {"model": "its folder", "parameters": "the operator's, for this model", "task": "name of its head"}
_CONDITION = {"filter": "part of a tensor's name", "value": "a value, or one per stretch of layers"}
_STATISTICS = {"public": "files of statistics of public text, or one public text"}
_NOT_OURS = {
    "slices": "models are merged whole: write them under `models`",
    "modules": "models are merged whole: write them under `models`",
    "tokenizer": "the base's tokenizer is kept; write `tokenizer_source: base` or nothing",
    "chat_template": "the base's is kept",
}
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""What a recipe calls a dtype → what safetensors does."""

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Condition:
    """A value for the tensors whose name contains `filter`; None matches all.

    Several numbers are spread over the layers: the first one holds at the first layer and the last one at
    the last, and in between they are interpolated. Tensors outside the layers take the first.
    """

    filter: str | None
    values: tuple[Value, ...]

    def at(self, depth: float) -> Value:
        """The value at a depth in [0, 1]."""
        if len(self.values) == 1:
            return self.values[0]
        numbers = [float(value) for value in self.values]
        place = depth * (len(numbers) - 1)
        low = min(int(place), len(numbers) - 2)
        return numbers[low] + (place - low) * (numbers[low + 1] - numbers[low])


Setting = tuple[Condition, ...]
"""The first condition that matches a tensor counts."""


@dataclass(frozen=True)
class Model:
    """A model of a recipe.

    Attributes:
        path: its folder.
        task: what its head is called; None takes its release's, or the folder's name.
        parameters: the operator's, for this model.
    """

    path: Path
    task: str | None = None
    parameters: Mapping[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """What to merge and how.

    Attributes:
        operator: its name, with `-` where mergekit writes `_`.
        base: folder, `package:NAME` or Hugging Face id of the public base; None where the recipe says none.
        models: in the order of the report's cosines.
        parameters: the operator's, for all models.
        dtype: safetensors code of the output's floating-point tensors; None keeps the base's.
        compat: whether the operator does what mergekit does, also where that isn't its paper.
        disjoint: the owners declare that no unit is in two of the data sets.
        heads: patterns of tensors that stay per task; None: whatever the family calls its head.
        statistics: `data-free`, `released` with each model, or files: of statistics, or one public text; None
            if nothing is said.
        where: line of each key, for messages about settings.
    """

    operator: str
    base: str | None
    models: tuple[Model, ...]
    parameters: Mapping[str, Setting] = field(default_factory=dict)
    dtype: str | None = None
    compat: Literal["mergekit"] | None = None
    disjoint: bool = False
    heads: tuple[str, ...] | None = None
    statistics: Literal["data-free", "released"] | tuple[Path, ...] | None = None
    where: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def text(self) -> Path | None:
        """The public text on which statistics are to be computed; None where there is none."""
        return split(self.statistics)[1] if isinstance(self.statistics, tuple) else None

    def wrong(self, key: str, message: str) -> MergeError:
        """The error about a key; it points at the line, where the recipe came from a file."""
        return MergeError(f"{self.where.get(_nearest(key, self.where), '')}{key}: {message}")


def _nearest(key: str, known: Collection[str]) -> str:
    """The key itself, or what it lies in."""
    while key and key not in known:
        key = re.sub(r"(\.[^.\[\]]*|\[\d+\]|^[^.\[\]]*)$", "", key)
    return key


def constant(value: Value) -> Setting:
    """The setting that holds for every tensor."""
    return (Condition(None, (value,)),)


def is_recipe(paths: Sequence[Path]) -> bool:
    """Whether what is to be merged is one recipe; otherwise it is models."""
    return len(paths) == 1 and paths[0].suffix in (".yaml", ".yml")


def read(file: Path) -> Recipe:
    """A recipe from its file.

    Raises:
        MergeError: no such file, no YAML, an unknown key (the message names the near one), a key that is
            missing, or a value that it can't have. The message begins with file and line.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MergeError(f"can't read the recipe {file}: {getattr(error, 'strerror', error)}") from error
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        content = loader.construct_document(node) if node else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise MergeError(f"{file}{line}: not YAML: {getattr(error, 'problem', error)}") from None
    finally:
        loader.dispose()
    page = _Page(Path(file))
    if node is None or not isinstance(content, dict):
        raise MergeError(f"{file} is no recipe: it holds no keys")
    page.note(node, "")
    return page.recipe(content)


class _Page:
    """A recipe's file while it is read: where each key stands."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.lines: dict[str, int] = {"": 1}

    def note(self, node: Any, key: str) -> None:
        """Remember the line of every key; a key that is there twice is an error."""
        if isinstance(node, yaml.MappingNode):
            for name, value in node.value:
                inner = f"{key}.{name.value}" if key else str(name.value)
                if inner in self.lines:
                    raise MergeError(f"{self.file}:{name.start_mark.line + 1}: {inner} is there twice")
                self.lines[inner] = name.start_mark.line + 1
                self.note(value, inner)
        elif isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                inner = f"{key}[{number}]"
                self.lines[inner] = value.start_mark.line + 1
                self.note(value, inner)

    def where(self, key: str) -> str:
        return f"{self.file}:{self.lines[_nearest(key, self.lines)]}: "

    def wrong(self, key: str, message: str) -> MergeError:
        return MergeError(f"{self.where(key)}{key + ': ' if key else ''}{message}")

    def mapping(self, value: Any, key: str, known: Mapping[str, str]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(key, f"needs keys ({', '.join(known)}), not {value!r}")
        for name in value:
            inner = f"{key}.{name}" if key else str(name)
            if name in known:
                continue
            if not key and name in _NOT_OURS:
                raise self.wrong(inner, f"not supported; {_NOT_OURS[name]}")
            near = get_close_matches(str(name), known, n=1)
            raise self.wrong(
                inner,
                f"unknown key; did you mean {near[0]!r}?"
                if near
                else f"unknown key; known: {', '.join(known)}",
            )
        return value

    def recipe(self, content: dict[str, Any]) -> Recipe:
        self.mapping(content, "", _TOP)
        for name in ("merge_method", "models"):
            if content.get(name) is None:
                raise self.wrong("", f"the recipe has no {name}")
        models = content["models"]
        if not isinstance(models, list) or not models:
            raise self.wrong("models", "needs a list of models, each `- model: FOLDER`")
        if content.get("tokenizer_source", "base") not in ("base", None):
            raise self.wrong(
                "tokenizer_source",
                f"only 'base' is supported, not {content['tokenizer_source']!r}: the models share the base's "
                "vocabulary, or they can't be merged",
            )
        return Recipe(
            operator=self.text(content["merge_method"], "merge_method").replace("_", "-"),
            base=self.text(content["base_model"], "base_model") if content.get("base_model") else None,
            models=tuple(self.model(model, f"models[{i}]") for i, model in enumerate(models)),
            parameters=self.parameters(content.get("parameters"), "parameters"),
            dtype=self.dtype(content, "out_dtype") or self.dtype(content, "dtype"),
            compat=self.choice(content, "compat", ("mergekit",)),
            disjoint=self.flag(content, "disjoint"),
            heads=self.heads(content),
            statistics=self.statistics(content),
            where={key: self.where(key) for key in self.lines},
        )

    def model(self, value: Any, key: str) -> Model:
        if isinstance(value, str):
            value = {"model": value}
        value = self.mapping(value, key, _MODEL)
        if value.get("model") is None:
            raise self.wrong(key, "has no `model: FOLDER`")
        path = self.text(value["model"], f"{key}.model")
        if "+" in path and not Path(path).exists():
            raise self.wrong(
                f"{key}.model", f"{path!r}: name the adapter's folder alone; it is applied to base_model"
            )
        task = value.get("task")
        return Model(
            Path(path).expanduser(),
            task=self.text(task, f"{key}.task") if task is not None else None,
            parameters=self.parameters(value.get("parameters"), f"{key}.parameters"),
        )

    def parameters(self, value: Any, key: str) -> dict[str, Setting]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(key, f"needs `name: value` pairs, not {value!r}")
        return {str(name): self.setting(inner, f"{key}.{name}") for name, inner in value.items()}

    def setting(self, value: Any, key: str) -> Setting:
        if isinstance(value, dict):
            value = [value]
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            conditions = []
            for number, item in enumerate(value):
                inner = f"{key}[{number}]" if f"{key}[{number}]" in self.lines else key
                item = self.mapping(item, inner, _CONDITION)
                if "value" not in item:
                    raise self.wrong(inner, "has no `value`")
                part = None if item.get("filter") in (None, "*") else self.text(item["filter"], inner)
                conditions.append(Condition(part, self.values(item["value"], inner)))
            return tuple(conditions)
        return (Condition(None, self.values(value, key)),)

    def values(self, value: Any, key: str) -> tuple[Value, ...]:
        items = value if isinstance(value, list) else [value]
        found = tuple(self.value(item, key) for item in items)
        if not found:
            raise self.wrong(key, "needs a value, not an empty list")
        if len(found) > 1 and any(not isinstance(item, float) for item in found):
            raise self.wrong(key, "only numbers can be spread over the layers")
        return found

    def value(self, value: Any, key: str) -> Value:
        if isinstance(value, str) and _NUMBER.fullmatch(value):
            value = float(value)  # YAML 1.1 takes 1e-3 for text
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = float(value)
            if not math.isfinite(value):
                raise self.wrong(key, f"must be a finite number, not {value}")
        if not isinstance(value, float | bool | str):
            raise self.wrong(key, f"needs a number, a word, or a list of {{filter, value}}, not {value!r}")
        return value

    def text(self, value: Any, key: str) -> str:
        if not isinstance(value, str) or not value:
            raise self.wrong(key, f"needs text, not {value!r}")
        return value

    def flag(self, content: dict[str, Any], key: str) -> bool:
        value = content.get(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, f"needs true or false, not {value!r}")
        return value

    def choice(self, content: dict[str, Any], key: str, known: tuple[str, ...]) -> Any:
        value = content.get(key)
        if value is not None and value not in known:
            raise self.wrong(key, f"must be {' or '.join(known)}, not {value!r}")
        return value

    def dtype(self, content: dict[str, Any], key: str) -> str | None:
        value = self.choice(content, key, tuple(DTYPES))
        return DTYPES[value] if value else None

    def heads(self, content: dict[str, Any]) -> tuple[str, ...] | None:
        value = content.get("heads")
        if value is None:
            return None
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list):
            raise self.wrong("heads", f"needs a list of patterns, such as [score, lm_head], not {value!r}")
        return tuple(self.text(item, "heads") for item in items)

    def statistics(self, content: dict[str, Any]) -> Any:
        value = content.get("statistics")
        if value is None or value in ("data-free", "released"):
            return value
        if not isinstance(value, dict):
            raise self.wrong(
                "statistics",
                f"must be data-free, released, or {{public: FILES}}, not {value!r}: statistics of private "
                "records are charged queries",
            )
        value = self.mapping(value, "statistics", _STATISTICS)
        files = value.get("public")
        paths = tuple(
            Path(self.text(file, "statistics.public")).expanduser()
            for file in (files if isinstance(files, list) else [files])
        )
        if not paths:
            raise self.wrong("statistics.public", "needs files of statistics, or one public text")
        try:
            split(paths)
        except MergeError as error:
            raise self.wrong("statistics.public", str(error)) from None
        return paths
