from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from confide.errors import MergeError
from confide.merging.assign import groups_of
from confide.merging.merge import merge, write
from confide.merging.plan import plan_recipe
from confide.merging.recipe import Condition, Model, Recipe, constant, is_recipe, read

NAMES = (
    "embeddings.word_embeddings.weight",
    "encoder.layer.0.attention.weight",
    "encoder.layer.0.output.weight",
    "encoder.layer.1.attention.weight",
    "encoder.layer.2.output.weight",
    "pooler.weight",
)

TEXT = """\
merge_method: ties
base_model: some/base
models:
  - model: one
    parameters:
      weight: 1
      density: 1e-1
  - model: two
    task: north
    parameters:
      weight:
        - filter: attention
          value: [0, 1]
        - value: 0.5
parameters:
  normalize: true
  lambda: 2
out_dtype: bfloat16
dtype: float32
tokenizer_source: base
disjoint: true
heads: score
"""


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_recipe_is_read(tmp_path: Path) -> None:
    recipe = read(file(tmp_path, TEXT))
    assert (recipe.operator, recipe.base, recipe.dtype) == ("ties", "some/base", "BF16")
    assert (recipe.compat, recipe.disjoint, recipe.heads, recipe.statistics) == (None, True, ("score",), None)
    one, two = recipe.models
    assert (one.path, one.task, two.task) == (Path("one"), None, "north")
    assert one.parameters == {"weight": constant(1.0), "density": constant(0.1)}
    assert two.parameters["weight"] == (Condition("attention", (0.0, 1.0)), Condition(None, (0.5,)))
    assert recipe.parameters == {"normalize": constant(True), "lambda": constant(2.0)}
    assert is_recipe([Path("a.yaml")])
    assert not is_recipe([Path("a"), Path("b.yaml")])
    short = read(file(tmp_path, "merge_method: task_arithmetic\nmodels: [a, b]\nstatistics: data-free\n"))
    assert (short.operator, [m.path.name for m in short.models]) == ("task-arithmetic", ["a", "b"])
    files = read(file(tmp_path, f"{TEXT}statistics: {{public: [x.safetensors, y.safetensors]}}\n"))
    assert files.statistics == (Path("x.safetensors"), Path("y.safetensors"))
    assert files.text is None
    text = read(file(tmp_path, f"{TEXT}statistics: {{public: corpus.txt}}\n"))
    assert text.text == Path("corpus.txt")
    assert read(file(tmp_path, f"{TEXT}statistics: released\n")).text is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("merge_method", "merge_metod", r":1: merge_metod: unknown key; did you mean 'merge_method'\?"),
        ("merge_method: ties\n", "", r":1: the recipe has no merge_method"),
        ("  - model: two", "  - modle: two", r":8: models\[1\]\.modle: unknown key; did you mean 'model'\?"),
        ("    task: north", "    task: 3", r":9: models\[1\]\.task: needs text, not 3"),
        (
            "filter: attention",
            "fliter: attention",
            r":12: models\[1\]\.parameters\.weight\[0\]\.fliter: unknown",
        ),
        ("value: [0, 1]", "vaule: 1", r":13: models\[1\]\.parameters\.weight\[0\]\.vaule: unknown key; did"),
        ("value: [0, 1]", "value: []", r":12: .*weight\[0\]: needs a value, not an empty list"),
        ("value: [0, 1]", "value: [a, b]", r":12: .*: only numbers can be spread over the layers"),
        ("value: [0, 1]", "value: .nan", r":12: .*: must be a finite number, not nan"),
        ("value: [0, 1]", "value: null", r":12: .*: needs a number, a word, or a list"),
        ("out_dtype: bfloat16", "out_dtype: int8", r":18: out_dtype: must be float64 or .*, not 'int8'"),
        ("tokenizer_source: base", "tokenizer_source: union", r":20: tokenizer_source: only 'base'"),
        ("disjoint: true", "disjoint: yes please", r":21: disjoint: needs true or false"),
        ("heads: score", "compat: peft", r":22: compat: must be mergekit, not 'peft'"),
        ("heads: score", "slices: []", r":22: slices: not supported; models are merged whole"),
        ("heads: score", "statistics: secret", r":22: statistics: must be data-free, released"),
        ("heads: score", "statistics: {private: x}", r":22: statistics\.private: unknown key"),
        ("heads: score", "statistics: {public: [x, y]}", r":22: statistics\.public: x is no file of stat"),
        ("heads: score", "statistics: {public: []}", r":22: statistics\.public: needs files"),
        ("heads: score", "heads: 3", r":22: heads: needs a list of patterns"),
        ("heads: score", "disjoint: true", r":22: disjoint is there twice"),
        ("heads: score", "heads: [", r":2[23]: not YAML"),
        (
            "- model: one",
            "- model: base+adapter",
            r":4: models\[0\]\.model: 'base\+adapter': name the adapter",
        ),
        ("lambda: 2", "lambda", r":1[5-9]: not YAML"),
    ],
)
def test_errors_name_file_line_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TEXT
    path = file(tmp_path, TEXT.replace(old, new, 1))
    with pytest.raises(MergeError, match=r"recipe\.yaml" + message):
        read(path)


@pytest.mark.parametrize("text", ["", "- a\n", "just text", "merge_method: ties\nmodels: []\n", "\tx"])
def test_no_recipe(tmp_path: Path, text: str) -> None:
    with pytest.raises(MergeError, match=r"recipe\.yaml"):
        read(file(tmp_path, text))
    with pytest.raises(MergeError, match=r"can't read the recipe .*nowhere"):
        read(tmp_path / "nowhere.yaml")


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6), st.floats(0, 1))
def test_values_are_spread_over_the_layers(values: list[float], depth: float) -> None:
    found = Condition(None, tuple(values)).at(depth)
    expected = np.interp(depth, np.linspace(0, 1, len(values)), values) if len(values) > 1 else values[0]
    assert found == pytest.approx(expected, abs=1e-9)


def recipe(operator: str, *models: dict[str, Any], **options: Any) -> Recipe:
    parameters = {key: constant(value) for key, value in options.pop("parameters", {}).items()}
    made = tuple(
        Model(Path(f"m{number}"), parameters={key: constant(value) for key, value in own.items()})
        for number, own in enumerate(models)
    )
    return Recipe(operator, options.pop("base", "base"), made, parameters, **options)


def settings(made: Recipe) -> dict[str, Any]:
    _, groups = groups_of(made, NAMES, "bert.")
    assert len(groups) == 1
    assert groups[0].names == NAMES
    return dict(groups[0].settings)


def test_mergekits_words_become_ours() -> None:
    found = settings(recipe("ties", {"weight": 1, "density": 0.1}, {"weight": 2, "density": 0.3}))
    assert (found["weights"], found["density"], found["trim"]) == ((1.0, 2.0), (0.1, 0.3), "global")
    found = settings(
        recipe("ties", {}, {}, parameters={"lambda": 0.4, "normalize": False, "int8_mask": True})
    )
    assert (found["scale"], found["merge"], found["density"]) == (0.4, "sum", 0.2)
    assert settings(recipe("linear", {"weight": 1}, {"weight": 3}))["weights"] == (1.0, 3.0)
    assert settings(recipe("task-arithmetic", {}, {}))["scale"] == 0.3
    # A weight is a scale, so λ is 1 beside it and not our default.
    assert settings(recipe("task-arithmetic", {"weight": 0.5}, {"weight": 2}))["scale"] == (0.5, 2.0)
    weighted = recipe("task-arithmetic", {"weight": 0.5}, {"weight": 2}, parameters={"lambda": 0.1})
    assert settings(weighted)["scale"] == pytest.approx((0.05, 0.2))
    own = recipe("pcb", {}, parameters={"density": 0.05})
    assert settings(own)["density"] == 0.05


def test_compat_sets_what_mergekit_does_unasked() -> None:
    found = settings(recipe("ties", {"weight": 1}, compat="mergekit"))
    assert (found["density"], found["trim"], found["zero_sum"], found["equal"]) == (
        1.0,
        "per-tensor",
        "plus",
        "first",
    )
    base = Recipe(
        "linear",
        "m0",
        (
            Model(Path("m0"), parameters={"weight": constant(2.0)}),
            Model(Path("m1"), parameters={"weight": constant(1.0)}),
            Model(Path("m2"), parameters={"weight": constant(1.0)}),
        ),
    )
    assert settings(base) | {"weights": 0} == {"weights": 0, "normalise": False}
    assert settings(base)["weights"] == (0.25, 0.25)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (recipe("tis", {}), "merge_method: unknown operator 'tis'; did you mean 'ties'"),
        (recipe("pcb", {}, compat="mergekit"), "compat: only linear, task-arithmetic, ties can do"),
        (recipe("ties", {}, parameters={"densty": 1}), r"parameters\.densty: .* did you mean 'density'"),
        (recipe("ties", {"wieght": 1}), r"models\[0\]\.parameters\.wieght: .* did you mean 'weight'"),
        (recipe("ties", {"lambda": 1}), r"models\[0\]\.parameters\.lambda: .* one lambda for all models"),
        (recipe("ties", {}, {"weight": 1}), r"models\[0\]: has no weight for tensor bert\."),
        (
            recipe("ties", {"density": 2}),
            r"models\[0\]\.parameters\.density: density of operator ties must be between 0 and 1",
        ),
        (recipe("ties", {"density": "much"}), r"parameters\.density: needs a number, not 'much'"),
        (recipe("ties", {}, parameters={"rescale": True}), r"parameters\.rescale: .* takes no parameter"),
        (recipe("ties", {}, parameters={"normalize": 3.0}), r"parameters\.normalize: needs true or false"),
        (recipe("task-arithmetic", {}, parameters={"normalize": True}), "normalize: true isn't supported"),
        (recipe("ties", {}, compat="mergekit"), "mergekit needs a `weight` for every model"),
        (
            recipe("linear", {"weight": 2.0}, parameters={"normalize": False}, compat="mergekit"),
            "the weights sum to 2: mergekit would scale the whole model",
        ),
        (
            Recipe("ties", "b", (Model(Path("m")),), {"density": (Condition("mlp", (0.5,)),)}),
            r"parameters\.density: filter 'mlp' matches no tensor; a name here is bert\.pooler",
        ),
    ],
)
def test_settings_that_cant_be(made: Recipe, message: str) -> None:
    with pytest.raises(MergeError, match=message):
        groups_of(made, NAMES, "bert.")


def test_filters_and_depths_make_groups() -> None:
    density = (Condition("bert.encoder.layer.0", (0.9,)), Condition("attention", (0.1, 0.5)), *constant(0.3))
    made = Recipe("ties", "b", (Model(Path("m")),), {"density": density})
    operator, groups = groups_of(made, NAMES, "bert.")
    assert operator.name == "ties"
    found = {name: group.settings["density"] for group in groups for name in group.names}
    assert found == pytest.approx(dict(zip(NAMES, (0.3, 0.9, 0.9, 0.3, 0.3, 0.3), strict=True)))


def test_each_group_is_prepared_by_itself(base: Path, releases: tuple[Path, Path], tmp_path: Path) -> None:
    text = f"""
merge_method: ties
base_model: {base}
models: [{releases[0]}, {releases[1]}]
parameters:
  density:
    - {{filter: attention, value: 0.5}}
    - {{value: 0.1}}
"""
    report = write(plan_recipe(read(file(tmp_path, text)), base), tmp_path / "merged")
    half, tenth = report.facts["groups"]
    assert report.parameters["density"] == [0.5, 0.1] or report.parameters["density"] == [0.1, 0.5]
    kept = {round(facts["effective_density"][0], 2) for facts in (half, tenth)}
    assert kept == {0.5, 0.1}
    assert half["trained"] + tenth["trained"] == sum(
        t.size for n, t in load_file(base / "model.safetensors").items() if not n.startswith("embeddings.")
    )


def test_a_recipe_without_filters_is_the_command(
    base: Path, releases: tuple[Path, Path], tmp_path: Path
) -> None:
    text = f"merge_method: ties\nbase_model: {base}\nmodels: [{base}, {releases[0]}, {releases[1]}]\n"
    ours = write(plan_recipe(read(file(tmp_path, text)), base), tmp_path / "ours")
    theirs = merge(releases, base=base, operator="ties", out=tmp_path / "theirs")
    name = "model.safetensors"
    assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    assert ours.parameters == theirs.parameters
    assert ours.statement == theirs.statement


def test_a_recipe_may_name_tasks_and_a_dtype(base: Path, releases: tuple[Path, Path], tmp_path: Path) -> None:
    from transformers import AutoModel

    text = (
        f"merge_method: linear\nbase_model: {base}\nout_dtype: float16\n"
        f"models:\n  - model: {releases[0]}\n    task: reviews\n  - model: {releases[1]}\n"
    )
    report = write(plan_recipe(read(file(tmp_path, text)), base), tmp_path / "merged")
    assert [head.task for head in report.info.heads] == ["reviews", "tweets"]
    assert {line.dtype for line in report.tensors} == {"F16"}
    model = AutoModel.from_pretrained(tmp_path / "merged")
    assert {str(p.dtype) for p in model.parameters()} == {"torch.float16"}
    exact = merge(releases, base=base, operator="average", out=tmp_path / "exact")
    assert exact.tensors[0].dtype == "F32"
    for name, values in load_file(tmp_path / "merged" / "model.safetensors").items():
        full = load_file(tmp_path / "exact" / "model.safetensors")[name]
        np.testing.assert_array_equal(values, full.astype(np.float16))


def test_models_that_a_recipe_cant_find(base: Path, tmp_path: Path) -> None:
    text = f"merge_method: ties\nbase_model: {base}\nmodels:\n  - model: {base}\n  - model: nowhere\n"
    with pytest.raises(MergeError, match=r"recipe\.yaml:5: models\[1\]\.model: nowhere doesn't exist"):
        plan_recipe(read(file(tmp_path, text)), base)
    with pytest.raises(MergeError, match=r"recipe\.yaml:3: models: holds nothing but the base"):
        plan_recipe(read(file(tmp_path, text.replace("  - model: nowhere\n", ""))), base)


def test_the_base_is_told_however_it_is_spelled(
    base: Path, releases: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base.parent)
    spelled = f"./{base.name}/"
    text = (
        f"merge_method: average\nbase_model: {spelled}\nmodels: [{spelled}, {releases[0]}, {releases[1]}]\n"
    )
    report = write(plan_recipe(read(file(tmp_path, text)), base), tmp_path / "merged")
    assert report.models == ("films", "tweets")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("density: 2", r":7: models\[2\]\.parameters\.density: density of operator ties must be between"),
        ("weight: much", r":7: models\[2\]\.parameters\.weight: needs a number, not 'much'"),
        ("density: 0.5", r":4: models\[1\]: has no density for tensor bert\."),
    ],
)
def test_a_models_wrong_setting_is_named_where_it_stands(
    base: Path, releases: tuple[Path, Path], tmp_path: Path, parameters: str, message: str
) -> None:
    other = "" if parameters.startswith("density: 0") else "parameters: {density: 0.1, weight: 1}\n"
    models = "".join(f"  - model: {model}\n" for model in (base, *releases))
    text = (
        f"merge_method: ties\nmodels:\n{models}"
        f"    parameters:\n      {parameters}\nbase_model: {base}\n{other}"
    )
    with pytest.raises(MergeError, match=r"recipe\.yaml" + message):
        plan_recipe(read(file(tmp_path, text)), base)


def test_statistics_must_fit_the_operator(base: Path, releases: tuple[Path, Path], tmp_path: Path) -> None:
    def attempt(operator: str, value: str, message: str) -> None:
        text = f"merge_method: {operator}\nbase_model: {base}\nmodels: [{releases[0]}]\nstatistics: {value}\n"
        with pytest.raises(MergeError, match=message):
            plan_recipe(read(file(tmp_path, text)), base)

    attempt("regmean", "data-free", r":4: statistics: regmean needs grams of each model's data")
    attempt("ties", "released", r":4: statistics: ties needs none")
