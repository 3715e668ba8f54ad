from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from confide.errors import ConfideError, MergeError, ReleaseError
from confide.merging.merge import merge
from confide.merging.personal import file
from confide.merging.personal.pack import CLOSE, pack
from confide.merging.personal.residual import array
from confide.privacy import statement as statements
from confide.release.tensors import Checkpoint

from .conftest import TOUCHED, Arrays, arrays, as_dtype, build

Releases = tuple[Path, Path]


def residuals(merged: Path, model: Path) -> Arrays:
    """What the model has beyond the merge, where that isn't zero."""
    theirs, ours = arrays(model), arrays(merged)
    found = {name: theirs["bert." + name] - values for name, values in ours.items()}
    return {name: values for name, values in found.items() if values.any()}


@pytest.mark.parametrize("budget", [0.06, 0.08, 0.1, 0.15, 0.3, 1.0])
def test_the_file_on_disk_keeps_the_budget(
    merged: Path, releases: Releases, tmp_path: Path, budget: float
) -> None:
    packed = pack(merged, releases[0], out=tmp_path / "p", budget=budget)
    weights = Checkpoint.open(merged)
    base_size = sum(weights.stored(name).nbytes for name in weights.names)
    assert packed.base_size == base_size
    assert packed.size == (tmp_path / "p").stat().st_size <= budget * base_size
    read = file.read(tmp_path / "p")
    assert read.about == packed.about
    # The estimate that the ranks were chosen by is close, and what was left over buys no other rank.
    assert 0 <= file.size(read.about, read.heads) - packed.size < 600
    wanted = residuals(merged, releases[0])
    assert packed.changed == tuple(wanted)
    assert packed.size > budget * base_size - 1500 or packed.error < CLOSE
    lost = sum(
        np.sum((values - (array(read.layers[name]) if name in read.layers else 0)) ** 2)
        for name, values in wanted.items()
    )
    whole = sum(np.sum(values**2) for values in wanted.values())
    assert packed.error == pytest.approx(math.sqrt(lost / whole), rel=1e-5)


def test_a_larger_budget_loses_less(merged: Path, releases: Releases, tmp_path: Path) -> None:
    lost = [
        pack(merged, releases[0], out=tmp_path / f"{b}", budget=b).error for b in (0.06, 0.08, 0.1, 0.15, 0.3)
    ]
    assert lost == sorted(lost, reverse=True)
    assert lost[0] > 0.7
    assert lost[-1] < 0.3


def test_layers_come_as_near_as_the_budget_allows(merged: Path, releases: Releases, tmp_path: Path) -> None:
    once = pack(merged, releases[0], out=tmp_path / "once", budget=0.08)
    assert len({part.name for part in once.about.parts}) == len(once.about.parts)
    often = pack(merged, releases[0], out=tmp_path / "often", budget=1.0)
    assert often.error < CLOSE
    layers = file.read(tmp_path / "often").layers
    assert set(layers) == set(residuals(merged, releases[0]))
    wanted = residuals(merged, releases[0])
    for name, coded in layers.items():
        if wanted[name].ndim > 1:
            assert len(coded) > 3
        left = [np.linalg.norm(wanted[name] - array(coded[:n])) for n in range(1, len(coded) + 1)]
        assert left == sorted(left, reverse=True)


def test_a_layer_that_leads_away_is_left_out(base: Path, tmp_path: Path) -> None:
    name = "bert.encoder.layer.0.output.dense.bias"

    def change(tensors: Arrays) -> None:
        for stored in tensors:
            if stored.startswith("bert."):
                tensors[stored] = arrays(base)[stored.removeprefix("bert.")]
        tensors[name] = tensors[name] + np.concatenate([[100.0], np.linspace(0.01, 0.02, 47)])

    merge([build(tmp_path / "plain", base, "plain")], base=base, operator="average", out=tmp_path / "merged")
    model = build(tmp_path / "odd", base, "odd", change=change)
    plain = pack(tmp_path / "merged", model, out=tmp_path / "p", budget=0.5)
    # The RMS of its upper half is 20, for 23 entries of which one is 100 and the others 0.02.
    assert name.removeprefix("bert.") not in {part.name for part in plain.about.parts}
    assert plain.error <= 1


def test_what_is_in_the_file(merged: Path, releases: Releases, tmp_path: Path) -> None:
    packed = pack(merged, releases[1], out=tmp_path / "p", budget=0.1, description="Moods of tweets.")
    about = packed.about
    assert (about.head.task, about.head.labels) == ("tweets", ("bad", "even", "good"))
    assert about.description == "Moods of tweets."
    words = next(part for part in about.parts if part.name == "embeddings.word_embeddings.weight")
    assert words.rows == len(TOUCHED)
    model = Checkpoint.open(releases[1])
    read = file.read(tmp_path / "p")
    assert set(read.heads) == {"classifier.bias", "classifier.weight"}
    for name, (dtype, shape, stored) in read.heads.items():
        assert (dtype, shape) == (model.dtype(name), model.shape(name))
        assert stored.tobytes() == model.stored(name).tobytes()
    # The claim: both runs, one of which the merge already counts; what the merge declares of them stays.
    assert [s.dataset for s in about.statement.spendings] == ["films-2026", "tweets-2026"]
    assert about.statement.claim is not None
    assert about.statement.claim == statements.read(merged).claim


def test_nothing_beyond_the_merge(base: Path, releases: Releases, tmp_path: Path) -> None:
    merge(releases[:1], base=base, operator="average", out=tmp_path / "merged")
    packed = pack(tmp_path / "merged", releases[0], out=tmp_path / "p", budget=0.1)
    assert (packed.about.parts, packed.changed, packed.error) == ((), (), 0.0)
    assert file.read(tmp_path / "p").layers == {}


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision(base: Path, tmp_path: Path, dtype: str) -> None:
    half = as_dtype(base, tmp_path / "base", dtype)
    releases = [build(tmp_path / task, half, task, dtype=dtype) for task in ("films", "tweets")]
    merge(releases, base=half, operator="ties", out=tmp_path / "merged")
    packed = pack(tmp_path / "merged", releases[0], out=tmp_path / "p", budget=0.2)
    assert packed.base_size == 2 * sum(values.size for values in arrays(base).values())
    assert packed.size <= 0.2 * packed.base_size
    read = file.read(tmp_path / "p")
    wanted = residuals(tmp_path / "merged", releases[0])
    for name, (coded, *_) in read.layers.items():
        if coded.part.rank is None:
            norm = np.linalg.norm(wanted[name])
            assert np.linalg.norm(array([coded])) == pytest.approx(norm, rel=1e-5)


def test_a_model_outside_the_merge_adds_up(base: Path, merged: Path, tmp_path: Path) -> None:
    other = build(tmp_path / "songs", base, "songs")
    statement = pack(merged, other, out=tmp_path / "p", budget=0.1).about.statement
    assert statement.disjoint is None
    assert len(statement.spendings) == 3


def test_refusals(
    base: Path, merged: Path, releases: Releases, make_base: Callable[..., Path], tmp_path: Path
) -> None:
    def refused(
        kind: type[ConfideError], *patterns: str, out: Path = tmp_path / "p", **changes: object
    ) -> None:
        given = {"merged": merged, "model": releases[0], "budget": 0.1} | changes
        with pytest.raises(kind) as caught:
            pack(given.pop("merged"), given.pop("model"), out=out, **given)  # type: ignore[arg-type]
        assert all(pattern in str(caught.value) for pattern in patterns), str(caught.value)
        assert not (tmp_path / "p").exists()
        assert not list(tmp_path.glob(".*"))

    refused(MergeError, "between 0 and 100 %", budget=0)
    refused(MergeError, "between 0 and 100 %", budget=1.5)
    refused(MergeError, "budget of 0.1 %", "films", "allow more", budget=0.001)
    refused(MergeError, "kind 'model'", str(releases[1]), merged=releases[1])
    refused(MergeError, "kind 'merged'", str(merged), model=merged)
    refused(ReleaseError, "not a confide release", model=base)
    taken = tmp_path / "taken"
    taken.write_text("x")
    refused(ReleaseError, "exists already", out=taken)
    assert taken.read_text() == "x"

    strange = make_base(seed=1, hidden_size=48, num_hidden_layers=2, intermediate_size=80)
    alien = build(tmp_path / "alien", strange, "alien")
    refused(MergeError, "sha256:", str(alien), str(merged), model=alien)

    def poison(name: str, value: float) -> Callable[[Arrays], None]:
        def change(tensors: Arrays) -> None:
            tensors[name].reshape(-1)[-1] = value

        return change

    name = "bert.encoder.layer.1.output.dense.weight"
    nan = build(tmp_path / "nan", base, "nan", change=poison(name, math.nan))
    refused(MergeError, name.removeprefix("bert."), str(nan), "NaN", model=nan)
    head = build(tmp_path / "head", base, "head", change=poison("classifier.bias", math.inf))
    refused(MergeError, "classifier.bias", str(head), "finite", model=head)
    far = build(tmp_path / "far", base, "far", change=poison(name, 3.4e38))
    huge = tmp_path / "huge"
    opposite = build(tmp_path / "opposite", base, "opposite", change=poison(name, -3.4e38))
    merge([opposite], base=base, operator="average", out=huge)
    refused(MergeError, "too far apart", merged=huge, model=far)

    def cut(tensors: Arrays) -> None:
        del tensors[name]

    refused(MergeError, name.removeprefix("bert."), model=build(tmp_path / "cut", base, "cut", change=cut))
