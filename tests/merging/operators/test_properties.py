"""Which invariants each operator has: measured here, and the table in docs/operators.md is what was measured.

`python -m tests.merging.operators.test_properties` writes the table into the page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from confide.errors import MergeError
from confide.merging.operators import OPERATORS
from confide.merging.operators.parameters import Choice, PerModel, Switch
from confide.merging.stream import merge_arrays
from confide.merging.vectors import Encoder, TaskVectors
from confide.release.shards import write_tensors
from confide.release.tensors import Checkpoint, decode, encode

from .helpers import BIAS, WEIGHT, statistics_for

Model = dict[str, np.ndarray]
Row = tuple[str, dict[str, Any]]

PAGE = Path(__file__).parents[3] / "docs" / "operators.md"
START, END = "<!-- properties: measured by the tests -->", "<!-- end -->"
PARAMETERS, PARAMETERS_END = "<!-- parameters: from the specifications -->", "<!-- end parameters -->"

ROWS: dict[str, Row] = {
    "`average`": ("average", {}),
    "`linear`": ("linear", {}),
    "`task-arithmetic`": ("task-arithmetic", {}),
    "`ties`": ("ties", {}),
    "`ties`, density 1": ("ties", {"density": 1}),
    "`pcb`": ("pcb", {}),
    "`wudi`": ("wudi", {}),
    "`wudi`, solver closed": ("wudi", {"solver": "closed"}),
    "`actmat`": ("actmat", {}),
    "`regmean`": ("regmean", {}),
    "`fisher`": ("fisher", {}),
}


def models_of(seed: int, count: int, shape: tuple[int, int], rank: int | None = None) -> list[Model]:
    """Random task vectors of a layer, of full rank or less, that a base of zeros is left with."""
    rng = np.random.default_rng(seed)

    def weight() -> np.ndarray:
        if rank is None:
            return rng.normal(size=shape)
        return rng.normal(size=(shape[0], rank)) @ rng.normal(size=(rank, shape[1]))

    return [{WEIGHT: weight(), BIAS: rng.normal(size=shape[0])} for _ in range(count)]


def run(
    row: Row, models: Sequence[Model], base: Mapping[str, np.ndarray] | None = None, seed: int = 0
) -> Model:
    name, parameters = row
    base = base or {key: np.zeros_like(values) for key, values in models[0].items()}
    statistics = statistics_for(name, models, seed)
    return merge_arrays(base, models, name, parameters, statistics)


def same(first: Model, second: Model) -> bool:
    scale = max(float(np.abs(values).max()) for values in first.values())
    return all(np.allclose(first[name], second[name], rtol=1e-6, atol=1e-7 * scale) for name in first)


def plus(model: Model, other: Mapping[str, np.ndarray], factor: float = 1.0) -> Model:
    return {name: values + factor * other[name] for name, values in model.items()}


def identity(row: Row, models: Sequence[Model]) -> bool:
    return same(run(row, [models[0]] * 3), models[0])


def order(row: Row, models: Sequence[Model]) -> bool:
    return same(run(row, models), run(row, list(models)[::-1]))


def one_model(row: Row, models: Sequence[Model]) -> bool:
    return same(run(row, models[:1]), models[0])


def unchanged(row: Row, models: Sequence[Model]) -> bool:
    zero = {name: np.zeros_like(values) for name, values in models[0].items()}
    base = models[0]
    merged = run(row, [plus(base, zero)] * 2, base)
    return all(np.array_equal(merged[name], base[name]) for name in base)


def zero_has_no_say(row: Row, models: Sequence[Model]) -> bool:
    zero = {name: np.zeros_like(values) for name, values in models[0].items()}
    return same(run(row, [*models, zero]), run(row, models))


def base_doesnt_matter(row: Row, models: Sequence[Model]) -> bool:
    other = {name: values[::-1] / 2 for name, values in models[-1].items()}
    return same(run(row, models), run(row, models, other))


def scales(row: Row, models: Sequence[Model]) -> bool:
    """c·D gives c·τ; statistics stay those of the unscaled models."""
    name, parameters = row
    statistics = statistics_for(name, models, 0)
    base = {key: np.zeros_like(values) for key, values in models[0].items()}
    larger = [plus(base, model, 8.0) for model in models]
    merged = merge_arrays(base, larger, name, parameters, statistics)
    return same(plus(base, merged, 1 / 8), run(row, models))


PROPERTIES: dict[str, Callable[[Row, Sequence[Model]], bool]] = {
    "equal models are kept": identity,
    "order doesn't matter": order,
    "one model is itself": one_model,
    "no change, no change": unchanged,
    "an unchanged model has no say": zero_has_no_say,
    "the base doesn't matter": base_doesnt_matter,
    "c·D gives c·τ": scales,
}

ALWAYS = {"order doesn't matter", "no change, no change"}
_MEAN = {"equal models are kept", "one model is itself", "the base doesn't matter", "c·D gives c·τ"}
DECLARED: dict[str, set[str]] = {
    "`average`": ALWAYS | _MEAN,
    "`linear`": ALWAYS | _MEAN,
    "`task-arithmetic`": ALWAYS | {"an unchanged model has no say", "c·D gives c·τ"},
    "`ties`": ALWAYS | {"an unchanged model has no say", "c·D gives c·τ"},
    "`ties`, density 1": ALWAYS
    | {
        "equal models are kept",
        "one model is itself",
        "an unchanged model has no say",
        "c·D gives c·τ",
    },
    "`pcb`": ALWAYS,
    "`wudi`": ALWAYS | {"an unchanged model has no say"},
    "`wudi`, solver closed": ALWAYS | {"an unchanged model has no say", "c·D gives c·τ"},
    "`actmat`": ALWAYS | {"equal models are kept", "one model is itself", "c·D gives c·τ"},
    "`regmean`": ALWAYS | _MEAN,
    "`fisher`": ALWAYS | _MEAN,
}


def measured(label: str) -> set[str]:
    """Properties that no drawn case contradicts."""
    cases = [models_of(seed, 3, shape) for seed, shape in enumerate([(6, 5), (5, 8), (7, 7)])]
    return {
        title for title, holds in PROPERTIES.items() if all(holds(ROWS[label], models) for models in cases)
    }


def table() -> str:
    lines = [
        "| operator, defaults else | " + " | ".join(PROPERTIES) + " |",
        "|---" * (len(PROPERTIES) + 1) + "|",
    ]
    for label in ROWS:
        found = measured(label)
        lines.append(f"| {label} | " + " | ".join("yes" if p in found else "no" for p in PROPERTIES) + " |")
    return "\n".join(lines)


def parameter_table() -> str:
    lines = ["| operator | parameter | default | values | |", "|---|---|---|---|---|"]
    for operator in OPERATORS.values():
        for each in operator.parameters:
            if isinstance(each, Choice):
                values = ", ".join(f"`{choice}`" for choice in each.choices)
            elif isinstance(each, Switch):
                values = "`true`, `false`"
            else:
                values = f"{each.minimum:g} to {each.maximum:g}".replace("inf", "∞").replace("-", "−")
                values += ", whole" * each.whole + ", per model" * isinstance(each, PerModel)
            default = (
                str(each.default).lower() if isinstance(each.default, bool | str) else f"{each.default:g}"
            )
            lines.append(f"| `{operator.name}` | `{each.name}` | {default} | {values} | {each.about} |")
    return "\n".join(lines)


def test_the_page_lists_every_parameter() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.split(PARAMETERS)[1].split(PARAMETERS_END)[0].strip() == parameter_table()
    for operator in OPERATORS.values():
        assert f"**`{operator.name}`**" in page


def test_every_operator_is_in_the_table() -> None:
    assert {name for name, _ in ROWS.values()} == set(OPERATORS)


@pytest.mark.parametrize("label", ROWS)
def test_what_holds_is_what_is_declared(label: str) -> None:
    assert measured(label) == DECLARED[label]


def test_the_page_shows_what_was_measured() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.split(START)[1].split(END)[0].strip() == table()


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(sorted((label, title) for label, titles in DECLARED.items() for title in titles)),
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.none() | st.integers(1, 3),
)
def test_declared_properties_hold(
    declared: tuple[str, str], seed: int, count: int, shape: tuple[int, int], rank: int | None
) -> None:
    label, title = declared
    models = models_of(seed, count, shape, rank)
    assert PROPERTIES[title](ROWS[label], models)


@pytest.mark.parametrize("label", ROWS)
def test_equal_and_opposite_task_vectors(label: str) -> None:
    """Everything cancels exactly: finite, and the base where the operator sees nothing else."""
    (model,) = models_of(0, 1, (5, 4))
    opposite = {name: -values for name, values in model.items()}
    merged = run(ROWS[label], [model, opposite])
    for values in merged.values():
        assert np.isfinite(values).all()
    if ROWS[label][0] not in ("regmean", "fisher"):
        np.testing.assert_allclose(merged[WEIGHT], 0, atol=1e-12)


@pytest.mark.parametrize("label", ROWS)
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_computed_wide_and_written_as_the_base(label: str, dtype: str, tmp_path: Path) -> None:
    """Half precision is only how tensors are stored: the answer is that of the same values in float64."""
    models = [plus(m, m, -0.9) for m in models_of(3, 4, (6, 5))]
    rounded = []
    for number, model in enumerate(models):
        stored = {name: encode(values, dtype) for name, values in model.items()}
        tensors: Any = {name: (dtype, model[name].shape, [values]) for name, values in stored.items()}
        write_tensors(tmp_path / f"{number}.safetensors", tensors)
        rounded.append({n: decode(v, dtype).astype(float).reshape(model[n].shape) for n, v in stored.items()})
    base, *others = rounded
    expected = run(ROWS[label], others, base)
    names = {name: name for name in base}
    opened = [
        Encoder(str(n), Checkpoint.open(tmp_path / f"{n}.safetensors"), names) for n in range(len(models))
    ]
    from confide.merging.stream import merge_tensor

    name, parameters = ROWS[label]
    vectors = TaskVectors(opened[0], opened[1:])
    rule = OPERATORS[name].prepare(vectors, parameters, statistics_for(name, others, 0))
    for tensor, values in expected.items():
        written = np.concatenate(list(merge_tensor(vectors, tensor, rule, name, lambda line: None)))
        np.testing.assert_array_equal(written, encode(values.ravel(), dtype))


@pytest.mark.parametrize("label", ROWS)
@pytest.mark.parametrize("tensor", [WEIGHT, BIAS])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_isnt_finite_is_an_error(label: str, tensor: str, bad: float) -> None:
    models = models_of(0, 2, (5, 4))
    statistics = statistics_for(ROWS[label][0], models, 0)
    models[1][tensor].flat[3] = bad
    base = {name: np.zeros_like(values) for name, values in models[0].items()}
    with pytest.raises(MergeError, match=rf"{tensor} of model 2 holds values that aren't finite"):
        merge_arrays(base, models, ROWS[label][0], ROWS[label][1], statistics)


@pytest.mark.parametrize("label", ROWS)
def test_inputs_are_left_alone(label: str) -> None:
    models = models_of(0, 3, (5, 4))
    copies = [plus(model, model, 0.0) for model in models]
    merged = run(ROWS[label], models)
    for model, copy in zip(models, copies, strict=True):
        for name, values in model.items():
            np.testing.assert_array_equal(values, copy[name])
            assert not np.shares_memory(merged[name], values)


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    for start, end, made in ((START, END, table()), (PARAMETERS, PARAMETERS_END, parameter_table())):
        before, rest = text.split(start)
        text = f"{before}{start}\n{made}\n{end}{rest.split(end)[1]}"
    PAGE.write_text(text, encoding="utf-8")
