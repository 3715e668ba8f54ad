"""What a recipe's parameters mean for each tensor: settings of our operator, whoever's words they are in.

mergekit's `weight`, `lambda` and `normalize` are translated; `compat: mergekit` adds what it does otherwise
without being asked. Tensors with the same settings form a group, which the operator prepares by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from confide.errors import MergeError
from confide.merging.operators import find
from confide.merging.operators.parameters import PerModel, Setting
from confide.merging.operators.specification import Kernel, Operator, Rule, suggest
from confide.merging.recipe import Model, Recipe, Value
from confide.merging.recipe import Setting as Written
from confide.merging.statistics import Statistics
from confide.merging.vectors import TaskVectors

MERGEKIT = {"weight": "weights", "lambda": "scale", "density": "density"}
"""mergekit's word → ours."""

COMPATIBLE = ("linear", "task-arithmetic", "ties")
"""Operators that can do exactly what mergekit's of that name does."""

_WITHOUT_EFFECT = ("int8_mask",)
_LAYER = re.compile(r"(.*?)\.(\d+)\.")
_SMALLEST = 1e-8


@dataclass(frozen=True)
class Group:
    """Tensors that are merged with the same settings.

    Attributes:
        settings: every parameter of the operator.
        names: of the tensors.
    """

    settings: Mapping[str, Setting]
    names: tuple[str, ...]


def groups_of(recipe: Recipe, names: Sequence[str], prefix: str) -> tuple[Operator, tuple[Group, ...]]:
    """The operator of a recipe, and the settings of every tensor.

    Args:
        recipe: base entries included; its models in the order of the task vectors.
        names: canonical names of the tensors.
        prefix: what a whole model puts before them; filters see it too.

    Raises:
        MergeError: an unknown operator or parameter, a value out of range, a filter that matches no tensor,
            or something that mergekit does and this operator can't. The message names file, line and key.
    """
    try:
        operator = find(recipe.operator)
    except MergeError as error:
        raise recipe.wrong("merge_method", str(error)) from None
    if recipe.compat and operator.name not in COMPATIBLE:
        raise recipe.wrong("compat", f"only {', '.join(COMPATIBLE)} can do what mergekit does")
    _check_known(recipe, operator)
    _check_filters(recipe, names, prefix)
    depths = _depths(names)
    found: dict[tuple[tuple[str, Setting], ...], list[str]] = {}
    for name in names:
        settings = _settings(recipe, operator, prefix + name, depths[name])
        found.setdefault(tuple(settings.items()), []).append(name)
    return operator, tuple(Group(dict(key), tuple(own)) for key, own in found.items())


def prepare(
    vectors: TaskVectors, operator: Operator, groups: Sequence[Group], statistics: Sequence[Statistics]
) -> Rule:
    """One rule for all groups; what was looked up is told for each, if there are several."""
    if len(groups) == 1:
        return operator.prepare(vectors, groups[0].settings, statistics)
    rules = [operator.prepare(vectors.only(group.names), group.settings, statistics) for group in groups]
    of = {name: rule for group, rule in zip(groups, rules, strict=True) for name in group.names}

    def kernel(name: str) -> Kernel:
        return of[name].kernel(name)

    return Rule(kernel, {"groups": [rule.facts for rule in rules]}, lambda name: of[name].label(name))


def without_base(recipe: Recipe) -> Recipe:
    """The recipe without the base among its models, where mergekit's list it: it has no task vector."""
    return replace(recipe, models=tuple(model for model in recipe.models if not is_base(recipe, model)))


def is_base(recipe: Recipe, model: Model) -> bool:
    """Whether a model of the recipe is its base: the same path, however it is spelled."""
    return recipe.base is not None and model.path == Path(recipe.base).expanduser()


def _settings(recipe: Recipe, operator: Operator, name: str, depth: float) -> dict[str, Setting]:
    """All settings of one tensor."""
    own = {n: model for n, model in enumerate(recipe.models) if not is_base(recipe, model)}
    shared = {key: _at(setting, name, depth) for key, setting in recipe.parameters.items()}
    words = {parameter.name: parameter for parameter in operator.parameters}
    given: dict[str, Any] = {}
    for word, meaning in [*MERGEKIT.items(), *((key, key) for key in words if key not in MERGEKIT)]:
        if isinstance(words.get(meaning), PerModel):
            value = _each(recipe, word, name, depth, own, shared)
        else:
            value = shared.get(word) if meaning in words else None
        if value is not None:
            given[meaning] = value
    if (normalize := shared.get("normalize")) is not None:
        given |= _normalised(recipe, operator, normalize)
    if operator.name == "task-arithmetic":
        weights = _each(recipe, "weight", name, depth, own, shared)
        if weights is not None:  # a scale already, which λ multiplies
            factors = _listed(given.get("scale", 1.0), len(own))
            given["scale"] = tuple(w * f for w, f in zip(_listed(weights, len(own)), factors, strict=True))
    if operator.name == "linear":
        of_base = [
            _own(model, "weight", name, depth, shared) for model in recipe.models if is_base(recipe, model)
        ]
        if recipe.compat and recipe.base and not of_base:
            of_base = [shared.get("weight")]  # mergekit adds a base that isn't listed
        given |= _with_base(recipe, given, _listed(given.get("weights", 1.0), len(own)), of_base)
    if recipe.compat:
        _as_mergekit(recipe, operator, given)
    for meaning, value in given.items():
        try:
            operator.settings({meaning: value})
        except MergeError as error:
            raise recipe.wrong(_place(recipe, operator, meaning, name, depth), str(error)) from None
    return operator.settings(given)


def _place(recipe: Recipe, operator: Operator, meaning: str, name: str, depth: float) -> str:
    """The key at which a setting that can't be is written."""
    words = [word for word in {**MERGEKIT, meaning: meaning} if MERGEKIT.get(word, word) == meaning]
    written = [
        (f"models[{number}].parameters.{word}", model.parameters[word])
        for number, model in enumerate(recipe.models)
        for word in words
        if word in model.parameters
    ]
    written += [
        (f"parameters.{word}", recipe.parameters[word]) for word in words if word in recipe.parameters
    ]
    for key, setting in written:
        try:
            if (value := _at(setting, name, depth)) is not None:
                operator.settings({meaning: value})
        except MergeError:
            return key
    return "parameters"


def _with_base(
    recipe: Recipe, given: Mapping[str, Any], weights: tuple[float, ...], of_base: Sequence[Value | None]
) -> dict[str, Any]:
    """`linear` where the base is one of the models: no task vector, but its weight counts in the sum."""
    total = sum(weights) + sum(float(value) for value in of_base if value is not None)
    if given.get("normalise", True):
        if not any(of_base):
            return {}
        if abs(total) < _SMALLEST:
            raise recipe.wrong("parameters", f"the weights sum to {total:g}")
        return {"weights": tuple(weight / total for weight in weights), "normalise": False}
    if recipe.compat and abs(total - 1) > _SMALLEST:
        raise recipe.wrong(
            "parameters.normalize",
            f"false, and the weights sum to {total:g}: mergekit would scale the whole model; leave compat "
            "out for θ₀ + Σ w (θ − θ₀), or let the weights sum to 1",
        )
    return {}


def _as_mergekit(recipe: Recipe, operator: Operator, given: dict[str, Any]) -> None:
    """Set what mergekit does where nothing is written, and what it does otherwise whatever is written."""
    weighted = "scale" if operator.name == "task-arithmetic" else "weights"
    if weighted not in given:
        raise recipe.wrong("models[0]", "mergekit needs a `weight` for every model")
    if operator.name == "ties":
        given.setdefault("density", 1.0)
        given |= {"trim": "per-tensor", "zero_sum": "plus", "equal": "first"}


def _listed(value: Setting, count: int) -> tuple[float, ...]:
    if isinstance(value, tuple):
        return value
    return (float(value),) * count


def _normalised(recipe: Recipe, operator: Operator, value: Value) -> dict[str, Any]:
    if not isinstance(value, bool):
        raise recipe.wrong("parameters.normalize", f"needs true or false, not {value!r}")
    if operator.name == "linear":
        return {"normalise": value}
    if operator.name == "ties":
        return {"merge": "mean" if value else "sum"}
    if value:
        raise recipe.wrong(
            "parameters.normalize", f"true isn't supported by {operator.name}; scale the weights"
        )
    return {}


def _own(
    model: Model, word: str, name: str, depth: float, shared: Mapping[str, Value | None]
) -> Value | None:
    """A model's own value, or the one for all."""
    value = _at(model.parameters[word], name, depth) if word in model.parameters else None
    return shared.get(word) if value is None else value


def _each(
    recipe: Recipe,
    word: str,
    name: str,
    depth: float,
    models: Mapping[int, Model],
    shared: Mapping[str, Value | None],
) -> Setting | None:
    """One value for all models, or one for each; None where none has one.

    Args:
        models: by their place in the recipe.
    """
    values = {number: _own(model, word, name, depth, shared) for number, model in models.items()}
    missing = [number for number, value in values.items() if value is None]
    if len(missing) == len(values):
        return None
    if missing:
        raise recipe.wrong(
            f"models[{missing[0]}]", f"has no {word} for tensor {name}, though another model has one"
        )
    for number, value in values.items():
        if isinstance(value, bool | str):
            key = f"parameters.{word}"
            key = f"models[{number}].{key}" if word in models[number].parameters else key
            raise recipe.wrong(key, f"needs a number, not {value!r}")
    numbers = tuple(float(value) for value in values.values() if value is not None)
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _at(setting: Written, name: str, depth: float) -> Value | None:
    """The value for a tensor; None where no condition matches."""
    for condition in setting:
        if condition.filter is None or condition.filter in name:
            return condition.at(depth)
    return None


def _depths(names: Sequence[str]) -> dict[str, float]:
    """How deep in its stack of layers each tensor lies: 0 for the first layer, 1 for the last, 0 outside."""
    counts: dict[str, int] = {}
    places: dict[str, tuple[str, int]] = {}
    for name in names:
        if match := _LAYER.match(name):
            stack, layer = match[1], int(match[2])
            places[name] = (stack, layer)
            counts[stack] = max(counts.get(stack, 0), layer + 1)
    return {
        name: (places[name][1] / (counts[places[name][0]] - 1) if counts[places[name][0]] > 1 else 1.0)
        if name in places
        else 0.0
        for name in names
    }


def _check_known(recipe: Recipe, operator: Operator) -> None:
    own = {parameter.name: parameter for parameter in operator.parameters}
    words = {word for word, meaning in MERGEKIT.items() if meaning in own}
    words |= {"normalize", "weight"} if operator.name in COMPATIBLE else set()
    known = dict.fromkeys([*own, *sorted(words), *_WITHOUT_EFFECT])
    per_model = {key: None for key in known if isinstance(own.get(MERGEKIT.get(key, key)), PerModel)}
    per_model |= {"weight": None} if operator.name in COMPATIBLE else {}
    for key in recipe.parameters:
        if (
            key == "rescale"
            and recipe.parameters[key]
            and not any(value is True for c in recipe.parameters[key] for value in c.values)
        ):
            continue
        if key not in known:
            message = f"operator {operator.name} takes no parameter {key!r}{suggest(key, known)}"
            raise recipe.wrong(f"parameters.{key}", message)
    for number, model in enumerate(recipe.models):
        for key in model.parameters:
            if key not in per_model:
                message = (
                    f"operator {operator.name} has one {key} for all models; write it under `parameters`"
                    if key in known
                    else f"operator {operator.name} takes no parameter {key!r}{suggest(key, per_model)}"
                )
                raise recipe.wrong(f"models[{number}].parameters.{key}", message)


def _check_filters(recipe: Recipe, names: Sequence[str], prefix: str) -> None:
    written = [(f"parameters.{key}", setting) for key, setting in recipe.parameters.items()]
    for number, model in enumerate(recipe.models):
        written += [(f"models[{number}].parameters.{key}", s) for key, s in model.parameters.items()]
    for key, setting in written:
        for condition in setting:
            part = condition.filter
            if part is not None and not any(part in prefix + name for name in names):
                raise recipe.wrong(
                    key, f"filter {part!r} matches no tensor; a name here is {prefix}{names[-1]}"
                )
