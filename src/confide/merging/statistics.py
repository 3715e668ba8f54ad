"""Statistics of each model's data that some operators weigh by, and where they may come from.

A file `statistics.safetensors` holds, under the canonical names of the encoder's tensors, either

- `grams`: for each Linear weight (out, in) the mean of x xᵀ over the tokens of its input, (in, in) float64;
- `fisher`: for each tensor the diagonal of the Fisher information, in its shape.

Its metadata say which, on which model (`encoder_hash`), and its origin. `public`: computed from text that
anybody may have. `released`: asked of private records as a charged query, so that a statement lists the hash
of the file. Whatever came from records in another way is refused: no claim would be true of the merge.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from confide import choices
from confide.errors import MergeError, PrivacyError
from confide.merging.vectors import CHUNK, Arrays, TaskVectors, Weights
from confide.release.hashes import file_hash
from confide.release.shards import write_tensors
from confide.release.tensors import Checkpoint

Array = npt.NDArray[Any]
Kind = choices.Statistics
Origin = Literal["public", "released"]

SUFFIX = ".safetensors"
"""What ends the name of a file of statistics; other files are text."""

_FORMAT = "confide.statistics/1"
_KINDS: tuple[str, ...] = get_args(Kind)
_ORIGINS: tuple[str, ...] = get_args(Origin)


class Statistics(Weights, Protocol):
    """Statistics of one model, by the names of the tensors that they are about.

    Attributes:
        kind: what they are.
    """

    @property
    def kind(self) -> str: ...


class ArrayStatistics(Arrays):
    """Statistics that are in memory; whoever makes them answers for their origin."""

    def __init__(self, label: str, kind: Kind, arrays: Mapping[str, Array]) -> None:
        super().__init__(label, arrays)
        self.kind = kind


class StatisticsFile:
    """Statistics in a file.

    Attributes:
        model: hash of the encoder that they were computed on.
        origin: `public` or `released`.
        source: the public text, in words, or the name of the data set.

    Args:
        path: the file.
        released: hashes of all files that the statements of the models to merge cover.

    Raises:
        MergeError: not such a file.
        PrivacyError: an origin that no claim covers.
    """

    def __init__(self, path: Path, released: Collection[str] = ()) -> None:
        checkpoint = Checkpoint.open(path)
        metadata = checkpoint.metadata[0] or {}
        if metadata.get("format") != _FORMAT or metadata.get("kind") not in _KINDS:
            raise MergeError(f"{path} holds no statistics in the format {_FORMAT}")
        self.label = str(path)
        self.kind, self.model = str(metadata["kind"]), str(metadata.get("model"))
        self.origin, self.source = str(metadata.get("origin")), str(metadata.get("source"))
        if self.origin not in _ORIGINS:
            raise PrivacyError(
                f"{path} has origin {self.origin!r}; statistics are computed from public text, or released "
                "as a charged query: otherwise no claim about the merge would hold"
            )
        if self.origin == "released" and file_hash(path) not in released:
            raise PrivacyError(
                f"{path} says that it was released, but no statement of the models to merge covers this file"
            )
        self._checkpoint = checkpoint
        self.names: Collection[str] = checkpoint.names

    def dtype(self, name: str) -> str:
        return self._checkpoint.dtype(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def read(self, name: str, start: int, stop: int) -> Array:
        return self._checkpoint.read(name, start, stop)


def split(given: Sequence[Path]) -> tuple[tuple[Path, ...], Path | None]:
    """What somebody names for a merge: files of statistics, or one public text to compute them on.

    Raises:
        MergeError: a text beside other files.
    """
    texts = [path for path in given if path.suffix != SUFFIX]
    if not texts:
        return tuple(given), None
    if len(given) > 1:
        raise MergeError(
            f"{texts[0]} is no file of statistics ({SUFFIX}); a public text stands alone, for all models"
        )
    return (), texts[0]


class Whole(Sequence[Array]):
    """The statistics of one tensor, of each model: float64, in their shape, read when asked for."""

    def __init__(self, statistics: Sequence[Statistics], name: str) -> None:
        self._statistics, self._name = statistics, name

    def __len__(self) -> int:
        return len(self._statistics)

    def __getitem__(self, index: Any) -> Any:
        return whole(self._statistics[range(len(self))[index]], self._name)


def whole(statistics: Statistics, name: str) -> npt.NDArray[np.float64]:
    """The statistics of one tensor, in their shape, float64."""
    shape = statistics.shape(name)
    return statistics.read(name, 0, math.prod(shape)).astype(np.float64, copy=False).reshape(shape)


def pieces(statistics: Statistics, name: str) -> Iterator[npt.NDArray[np.float64]]:
    """The statistics of one tensor, flattened and cut, float64."""
    size = math.prod(statistics.shape(name))
    for start in range(0, size, CHUNK):
        yield statistics.read(name, start, min(start + CHUNK, size)).astype(np.float64)


def write_statistics(
    path: Path, kind: Kind, origin: Origin, model: str, arrays: Mapping[str, Array], source: str
) -> None:
    """Write statistics of one model to a file.

    Args:
        path: the file; replaced if it exists.
        kind: what they are.
        origin: where they come from.
        model: `encoder_hash` of the model that they were computed on.
        arrays: by canonical name of the encoder's tensor.
        source: the public text, in words, or the name of the data set.

    Raises:
        MergeError: the file can't be written.
    """
    side = path.with_name(f".{path.name}.partial")
    about = {"format": _FORMAT, "kind": kind, "origin": origin, "model": model, "source": source}
    try:
        write_tensors(side, dict(arrays), about)
        side.replace(path)
    except OSError as error:
        raise MergeError(f"can't write {path}: {error.strerror or error}") from error
    finally:
        side.unlink(missing_ok=True)


def match_statistics(statistics: Sequence[StatisticsFile], models: Mapping[str, str]) -> list[StatisticsFile]:
    """The statistics of each model, whatever the order in which they were given.

    Args:
        statistics: files.
        models: hash of each model's encoder → what messages call it.

    Raises:
        MergeError: none for some model, two for one, or some that were computed on none of them.
    """
    by_model: dict[str, StatisticsFile] = {}
    for each in statistics:
        if each.model not in models:
            raise MergeError(f"{each.label} was computed on none of the models to merge ({each.model})")
        if each.model in by_model:
            raise MergeError(f"{by_model[each.model].label} and {each.label} are of one model")
        by_model[each.model] = each
    for model, label in models.items():
        if by_model and model not in by_model:
            raise MergeError(f"no statistics were given for {label}, though there are some for another model")
    return [by_model[model] for model in models] if by_model else []


def check_statistics(
    operator: str, needs: Kind | None, statistics: Sequence[Statistics], vectors: TaskVectors
) -> None:
    """Make sure that statistics are what an operator needs, for every model, in its shapes, and finite.

    Raises:
        MergeError: they aren't; names the tensor.
    """
    if needs is None:
        if statistics:
            raise MergeError(f"operator {operator} needs no statistics; leave them out")
        return
    if len(statistics) != vectors.count:
        raise MergeError(
            f"operator {operator} needs the {needs} of each of the {vectors.count} models, from public text "
            f"or released as a charged query; {len(statistics)} were given"
        )
    names = set(statistics[0].names)
    for each in statistics:
        if each.kind != needs:
            raise MergeError(f"operator {operator} needs {needs}, but {each.label} holds {each.kind}")
        for name in sorted(names ^ set(each.names)):
            raise MergeError(f"tensor {name} is in only one of {statistics[0].label} and {each.label}")
        for name in sorted(names):
            _check(each, name, vectors)


def _check(statistics: Statistics, name: str, vectors: TaskVectors) -> None:
    what = f"{statistics.label}: {statistics.kind} of tensor {name}"
    if name not in vectors.base.names:
        raise MergeError(f"{what} were given, a tensor that the models don't have")
    shape, ours = vectors.base.shape(name), statistics.shape(name)
    square = statistics.kind == "grams"
    wanted = (shape[-1], shape[-1]) if square else shape
    if ours != wanted or (square and len(shape) != 2):
        raise MergeError(f"{what} have shape {list(ours)}, but the tensor {list(shape)}")
    for piece in pieces(statistics, name):
        if not np.isfinite(piece).all():
            raise MergeError(f"{what} hold values that aren't finite (NaN or ∞)")
        if not square and (piece < 0).any():
            raise MergeError(f"{what} are negative where a mean of squares stands")
    if square:
        gram = whole(statistics, name)
        if (gram.diagonal() < 0).any():
            raise MergeError(f"{what} are negative where a mean of squares stands")
        if not np.allclose(gram, gram.T, rtol=1e-6, atol=1e-9 * float(np.abs(gram).max(initial=0))):
            raise MergeError(f"{what} aren't symmetric")
