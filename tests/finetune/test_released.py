"""Statistics of private records as a charged query: sensitivity by brute force, noise, claims, merges."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from confide.errors import ConfigError, PrivacyError, ReleaseError
from confide.finetune import released
from confide.finetune.base import PublicBase
from confide.finetune.checkpoint import Unfinished
from confide.finetune.run import finetune, prepare
from confide.finetune.settings import Settings
from confide.finetune.statistics import write_public_statistics
from confide.finetune.tuned import FineTuned
from confide.gradients.keys import Keys
from confide.merging.merge import merge
from confide.merging.statistics import StatisticsFile, whole
from confide.models.adapters import Adapted, Trainable, adapt, plain_state
from confide.models.backbones import Classifier, load_classifier
from confide.models.releases import load_release
from confide.privacy.accountant import epsilon
from confide.privacy.composition import check
from confide.privacy.events import leaves
from confide.privacy.ledger import Ledger
from confide.privacy.units import UnitMap
from confide.release.shards import write_tensors
from confide.release.tensors import Checkpoint
from confide.release.verify import examine
from confide.release.write import verify
from confide.tasks.records import TaskData
from confide.tasks.text import Encoded

MakeTask = Callable[..., TaskData]
SMALL = {
    "method": "dp-adamw",
    "expected_batch": 15,
    "steps": 2,
    "max_length": 20,
    "learning_rate": 0.05,
    "trainable": {"kind": "lora", "blocks": 1, "rank": 2},
}


@pytest.fixture(scope="module")
def base(tiny_base: Path) -> PublicBase:
    return PublicBase.of(str(tiny_base))


@pytest.fixture(scope="module")
def model(tiny_base: Path) -> tuple[Adapted, Classifier]:
    """An adapted classifier, and a plain one with the same weights, in float64."""
    adapted = adapt(
        load_classifier(tiny_base, ("neg", "pos"), seed=0), Trainable(blocks=1, targets=("query", "dense")), 0
    )
    plain = load_classifier(tiny_base, ("neg", "pos"), seed=0)
    plain.model.load_state_dict(plain_state(adapted))
    plain.model.double()
    return adapted, plain


def tune(base: PublicBase, task: TaskData, simulate: int | None = None, **chosen: Any) -> FineTuned:
    settings = Settings.of(SMALL | chosen)
    return finetune(prepare(task, base, settings.max_length), base, settings, simulate=simulate)


def texts_of(rows: list[list[int]]) -> Encoded:
    offsets = np.cumsum([0, *(len(row) for row in rows)]).astype(np.int64)
    return Encoded(np.array([token for row in rows for token in row], np.int32), offsets, 0)


def vector(matrices: dict[str, Any]) -> np.ndarray:
    """All of them as one, with the Frobenius norm of each."""
    return np.concatenate([np.asarray(matrix).ravel() for _, matrix in sorted(matrices.items())])


ROWS = st.lists(st.lists(st.integers(5, 40), min_size=1, max_size=7), min_size=2, max_size=6)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS, owners=st.data(), bound=st.floats(0.01, 300.0))
def test_one_unit_moves_a_gram_by_no_more_than_the_bound(
    model: tuple[Adapted, Classifier], rows: list[list[int]], owners: st.DataObject, bound: float
) -> None:
    """The last unit is removed, whoever the others are; the sums are in units of the bound."""
    adapted, plain = model
    groups = released.shared_inputs(adapted)
    owner = [owners.draw(st.integers(0, 2)) for _ in rows]
    gone = owner[-1]
    kept = [(row, who) for row, who in zip(rows, owner, strict=True) if who != gone]
    bounds = {group[0]: bound for group in groups}

    def sums(some: list[tuple[list[int], int]]) -> dict[str, Any]:
        units = UnitMap.column("user", [f"u{who}" for _, who in some], rows_per_unit=4)
        return released.gram_sums(plain, groups, texts_of([row for row, _ in some]), units, bounds)

    now = sums(list(zip(rows, owner, strict=True)))
    before = sums(kept) if kept else {name: 0 * value for name, value in now.items()}
    for name, value in now.items():
        change = value - before[name]
        assert float(torch.linalg.matrix_norm(change)) <= 1 + 1e-9
        assert float(torch.linalg.eigvalsh(change).min()) >= -1e-9


def test_the_bound_is_reached(model: tuple[Adapted, Classifier]) -> None:
    """A small bound clips everybody: each unit's contribution has that norm, and no less."""
    adapted, plain = model
    groups = released.shared_inputs(adapted)
    found = released.gram_sums(
        plain, groups, texts_of([[5, 9, 12]]), UnitMap.records(1), {group[0]: 1e-4 for group in groups}
    )
    for value in found.values():
        assert float(torch.linalg.matrix_norm(value)) == pytest.approx(1.0, rel=1e-6)


def test_grams_are_means_over_a_units_rows(model: tuple[Adapted, Classifier]) -> None:
    """Without clipping, against a loop over single rows without padding."""
    adapted, plain = model
    groups = released.shared_inputs(adapted)
    rows = [[5, 9, 12, 30], [7], [6, 6, 21], [8, 11]]
    units = UnitMap.column("user", ["a", "b", "a", "a"], rows_per_unit=2)
    found = released.gram_sums(plain, groups, texts_of(rows), units, {group[0]: 1e6 for group in groups})
    layer = plain.model.get_submodule(groups[0][0].removesuffix(".weight"))
    seen: list[np.ndarray] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].double().numpy()))
    with torch.no_grad():
        for row in rows:
            plain.model(input_ids=torch.tensor([row]))
    handle.remove()
    gram = [x.T @ x / len(x) for x in seen]
    expected = ((gram[0] + gram[2]) / 2 + gram[1]) / 1e6
    np.testing.assert_allclose(found[groups[0][0]].numpy(), expected, rtol=1e-4, atol=1e-10)


def test_layers_that_read_one_input_share_a_gram(tiny_base: Path) -> None:
    def groups(**trainable: Any) -> list[list[str]]:
        adapted = adapt(load_classifier(tiny_base, ("a", "b"), 0), Trainable(**trainable), 0)
        return [[name.rsplit(".", 3)[-2] for name in group] for group in released.shared_inputs(adapted)]

    assert groups(targets=("query", "value")) == [["query", "value"]]
    assert groups(kind="blocks", blocks=1) == [["query", "key", "value"], ["dense"], ["dense"], ["dense"]]
    assert groups(kind="head") == []


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS, bound=st.floats(1e-6, 10.0))
def test_one_unit_moves_a_fisher_by_no_more_than_the_bound(
    model: tuple[Adapted, Classifier], rows: list[list[int]], bound: float
) -> None:
    adapted, plain = model
    wanted = {name: plain.model.get_parameter(name) for name in released.trained(adapted)}

    def total(some: list[list[int]]) -> np.ndarray:
        return vector(
            released.fisher_sum(
                lambda batch: plain.model(**batch).logits,
                wanted,
                texts_of(some),
                UnitMap.records(len(some)),
                bound,
            )
        )

    change = total(rows) - total(rows[:-1])
    assert np.linalg.norm(change) <= 1 + 1e-9
    assert change.min() >= -1e-9


def test_noise_is_symmetric_and_has_its_variance() -> None:
    """On the diagonal σ², beside it σ²/2: isotropic on the vector that has the Frobenius norm."""
    drawn = [
        released.noisy_grams(
            {"w": torch.zeros(60, 60, dtype=torch.float64)},
            3.0,
            Keys.fixed(0).noise.generator("s", n, "gram"),
        )["w"]
        for n in range(6)
    ]
    assert all((matrix == matrix.T).all() for matrix in drawn)
    diagonal = np.concatenate([matrix.diagonal() for matrix in drawn])
    beside = np.concatenate([matrix[np.triu_indices(60, 1)] for matrix in drawn])
    assert diagonal.std() == pytest.approx(3.0, rel=5 / math.sqrt(2 * diagonal.size))
    assert beside.std() == pytest.approx(3.0 / math.sqrt(2), rel=5 / math.sqrt(2 * beside.size))
    assert abs(np.corrcoef(beside[1:], beside[:-1])[0, 1]) < 0.05
    value = torch.diag(torch.arange(60, dtype=torch.float64))
    exact = released.noisy_grams({"w": value}, 1e-29, Keys.fixed(0).noise.generator("s", 0, "gram"))["w"]
    np.testing.assert_allclose(exact, value.numpy(), atol=1e-20)


def test_the_nearest_semidefinite_matrix() -> None:
    random = np.random.default_rng(0)
    matrix = random.normal(size=(8, 8))
    matrix = matrix + matrix.T
    near = released.nearest(matrix)
    assert np.linalg.eigvalsh(near).min() >= -1e-12
    values = np.linalg.eigvalsh(matrix)
    assert np.linalg.norm(near - matrix) == pytest.approx(np.linalg.norm(values[values < 0]))
    np.testing.assert_allclose(released.nearest(near), near, atol=1e-12)


def test_a_record_that_is_not_finite_costs_itself(tiny_base: Path) -> None:
    """One token's embedding is infinite: its record contributes nothing, its neighbours all they have."""
    adapted = adapt(load_classifier(tiny_base, ("neg", "pos"), seed=0), Trainable(blocks=1), 0)
    plain = load_classifier(tiny_base, ("neg", "pos"), seed=0)
    embeddings: Any = plain.model.get_parameter("bert.embeddings.word_embeddings.weight")
    embeddings.data[33] = torch.inf
    groups = released.shared_inputs(adapted)
    bounds = {group[0]: 10.0 for group in groups}
    good, bad = [[5, 9, 12], [7, 8]], [[6, 33, 21]]

    def gram(rows: list[list[int]]) -> torch.Tensor:
        sums = released.gram_sums(plain, groups, texts_of(rows), UnitMap.records(len(rows)), bounds)
        return sums[groups[0][0]]

    torch.testing.assert_close(gram(good + bad), gram(good), rtol=1e-5, atol=1e-7)
    assert not gram(bad).any()
    wanted = {name: plain.model.get_parameter(name) for name in released.trained(adapted)}

    def fisher(rows: list[list[int]]) -> dict[str, torch.Tensor]:
        forward = lambda batch: plain.model(**batch).logits  # noqa: E731
        return released.fisher_sum(forward, wanted, texts_of(rows), UnitMap.records(len(rows)), 1.0)

    assert (vector(fisher(good + bad)) == vector(fisher(good))).all()
    assert not vector(fisher(bad)).any()


@pytest.mark.parametrize(("kind", "operator"), [("grams", "regmean"), ("fisher", "fisher")])
def test_charged_released_and_merged(
    base: PublicBase, make_task: MakeTask, tiny_base: Path, tmp_path: Path, kind: str, operator: str
) -> None:
    chosen = {"release_statistics": kind, "statistics_noise": 2.0, "epsilon": 3.0}
    folders = []
    for seed, name in enumerate(("films", "plays"), start=1):
        tuned = tune(base, make_task(name, seed=seed), **chosen)
        folders.append(tmp_path / name)
        statement = tuned.release(folders[-1])
        check(statement)
        assert verify(folders[-1]) == statement
        assert statement.claim is not None
        assert 2.99 < statement.claim.epsilon <= 3.0
        (query,) = tuned.schedule.queries
        assert [leaf.noise_multipliers for leaf in leaves(tuned.schedule.event())][-1] == (2.0,)
        without = dataclasses.replace(tuned.schedule, queries=())
        assert epsilon(without.event(), 1e-6).epsilon < statement.claim.epsilon - 0.01
        assert "statistics.safetensors" in statement.weights
        card = (folders[-1] / "README.md").read_text(encoding="utf-8")
        assert f"the {query.purpose} of all of them once" in card
        file = StatisticsFile(folders[-1] / "statistics.safetensors", statement.weights.values())
        assert set(file.names) == {
            f"encoder.layer.2.attention.self.{part}.weight" for part in ("query", "value")
        }
        for each in file.names:
            found = whole(file, each)
            assert np.isfinite(found).all()
            if kind == "grams":
                assert np.linalg.eigvalsh(found).min() >= -1e-9
            else:
                assert found.min() >= 0
                assert found.any()
        load_release(folders[-1])
    report = merge(
        folders,
        base=tiny_base,
        operator=operator,
        statistics=[folder / "statistics.safetensors" for folder in folders],
        out=tmp_path / "merged",
        disjoint=True,
    )
    assert operator in {line.rule for line in report.tensors}
    assert report.statement.claim is not None
    assert report.statement.claim.epsilon <= 3.0
    assert verify(tmp_path / "merged").claim == report.statement.claim


def test_released_grams_are_near_the_exact_ones(
    base: PublicBase, make_task: MakeTask, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With hardly any noise: RegMean merges as it does from the same texts without privacy."""
    monkeypatch.setattr("confide.finetune.methods.calibrate", lambda schedule, budget: schedule)
    folders, files = [], []
    for seed, name in enumerate(("films", "plays"), start=1):
        task = make_task(name, seed=seed)
        tuned = tune(
            base, task, simulate=seed, release_statistics="grams", statistics_noise=1e-9, statistics_bound=30
        )
        folders.append(tmp_path / name)
        tuned.release(folders[-1])
        texts = list(task.train.texts)
        files.append(tmp_path / f"{name}.safetensors")
        write_public_statistics(folders[-1], texts, files[-1], "grams", source="the records themselves")
        released_file = Checkpoint.open(folders[-1] / "statistics.safetensors")
        exact = Checkpoint.open(files[-1])
        for each in released_file.names:  # one weighs records alike, the other tokens
            found, wanted = released_file.numpy(each), exact.numpy(each)
            assert np.linalg.norm(found - wanted) < 0.25 * np.linalg.norm(wanted)
    merges = {}
    for label, statistics in (
        ("released", [folder / "statistics.safetensors" for folder in folders]),
        ("public", files),
    ):
        merge(folders, base=tiny_base, operator="regmean", statistics=statistics, out=tmp_path / label)
        merges[label] = Checkpoint.open(tmp_path / label).numpy("encoder.layer.2.attention.self.query.weight")
    start = Checkpoint.open(tiny_base).numpy("encoder.layer.2.attention.self.query.weight")
    step = np.linalg.norm(merges["public"] - start)
    assert np.linalg.norm(merges["released"] - merges["public"]) < 0.25 * step


def test_the_same_keys_give_the_same_answer(base: PublicBase, make_task: MakeTask) -> None:
    """A run that goes on asks at the same address again."""
    task = make_task()
    found = [tune(base, task, simulate=3, release_statistics="grams").statistics for _ in range(2)]
    other = tune(base, task, simulate=4, release_statistics="grams").statistics
    assert all(one is not None for one in (*found, other))
    arrays = [vector(dict(one.arrays)) for one in (*found, other) if one is not None]
    assert (arrays[0] == arrays[1]).all()
    assert (arrays[0] != arrays[2]).any()


def test_a_run_that_is_killed_at_the_query_goes_on_with_the_same_answer(
    base: PublicBase, make_task: MakeTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer was computed and lost; the charge stands, and the one that is released is the same."""
    settings = Settings.of(SMALL | {"release_statistics": "grams"})
    prepared = prepare(make_task(), base, settings.max_length)
    ledger = Ledger.open(str(tmp_path / "ledger.sqlite"))
    answers: list[np.ndarray] = []
    ask = released.ask

    def killed(*arguments: Any, **keywords: Any) -> Any:
        answers.append(vector(dict(ask(*arguments, **keywords).arrays)))
        raise KeyboardInterrupt

    def tuned() -> FineTuned:
        with closing(Unfinished.open(tmp_path / "unfinished", every=0)) as unfinished:
            return finetune(prepared, base, settings, ledger=ledger, unfinished=unfinished)

    monkeypatch.setattr(released, "ask", killed)
    with pytest.raises(KeyboardInterrupt):
        tuned()
    monkeypatch.setattr(released, "ask", ask)
    again = tuned()
    assert again.statistics is not None
    assert (vector(dict(again.statistics.arrays)) == answers[0]).all()
    assert [entry.value["kind"] for entry in ledger.entries() if "spending" in entry.value] == ["reserve"]
    (spending,) = again.statement.spendings
    assert spending.schedule is not None
    assert [query.purpose for query in spending.schedule.queries] == ["gram"]


def test_what_cant_be_released(base: PublicBase, make_task: MakeTask) -> None:
    with pytest.raises(ConfigError, match="adds no noise"):
        tune(base, make_task(), method="non-private", release_statistics="grams")
    with pytest.raises(ConfigError, match="with a head alone"):
        tune(base, make_task(), trainable={"kind": "head"}, release_statistics="grams")
    with pytest.raises(PrivacyError, match="statistics"):
        tune(base, make_task(), release_statistics="grams", statistics_noise=0.1, epsilon=1.0)


def test_a_file_that_no_query_covers_is_refused(
    base: PublicBase, make_task: MakeTask, tmp_path: Path
) -> None:
    plain = tune(base, make_task())
    plain.release(tmp_path / "plain")
    asked = tune(base, make_task(), release_statistics="grams")
    asked.release(tmp_path / "asked")
    stolen = tmp_path / "plain" / "statistics.safetensors"
    stolen.write_bytes((tmp_path / "asked" / "statistics.safetensors").read_bytes())
    with pytest.raises(ReleaseError, match="statistics"):
        verify(tmp_path / "plain")
    assert any(found.result == "failed" for found in examine(tmp_path / "plain")[1])
    (tmp_path / "asked" / "statistics.safetensors").unlink()
    with pytest.raises(ReleaseError, match="missing"):
        verify(tmp_path / "asked")


def test_free_text_doesnt_travel_with_statistics(
    base: PublicBase, make_task: MakeTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(path: Path, kind: str, origin: str, model: str, arrays: Any, source: str) -> None:
        about = {"format": "confide.statistics/1", "kind": kind, "origin": origin, "model": model}
        write_tensors(path, dict(arrays), about | {"source": source, "note": "patient 7 was odd"})

    monkeypatch.setattr("confide.finetune.tuned.write_statistics", careless)
    tuned = tune(base, make_task(), release_statistics="grams")
    with pytest.raises(ReleaseError, match="no place in a release"):
        tuned.release(tmp_path / "release")
    assert not (tmp_path / "release").exists()
