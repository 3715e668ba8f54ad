"""One tensor's residual θ_t − θ_merged, coded: decomposed, thresholded and scaled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from confide.merging.personal.codes import GROUPS, Bytes, Floats, packed_size, quantise, restore
from confide.merging.personal.factors import factors
from confide.merging.stacks import is_stack


class Part(BaseModel):
    """What a personal file holds of one tensor.

    A tensor of two or more dimensions is a matrix of shape[0] rows; a stack of experts' matrices is one that
    has all their rows, since they read one kind of input. Rows in which the residual is zero
    (tokens that no record had) are left out, and a bitmap says which; otherwise codes, which can't be 0,
    would put noise there.

    Attributes:
        name: canonical.
        shape: of the tensor.
        rows: how many rows (entries of a vector) are coded.
        rank: of the coded matrix; None for a tensor whose entries are coded as they are.
    """

    name: str
    shape: tuple[int, ...]
    rows: int = Field(gt=0)
    rank: int | None = Field(default=None, gt=0)

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="after")
    def _is_possible(self) -> Part:
        if min(self.shape, default=1) < 1 or self.rows > self.height:
            raise ValueError(f"tensor {self.name} of shape {list(self.shape)} can't have {self.rows} rows")
        if self.rank is not None and self.rank > min(self.rows, self.width):
            raise ValueError(
                f"tensor {self.name} of {self.rows} rows and {self.width} columns can't have rank {self.rank}"
            )
        return self

    @property
    def height(self) -> int:
        """Rows of the tensor as a matrix."""
        return height(self.name, self.shape)

    @property
    def width(self) -> int:
        """Columns of the tensor as a matrix."""
        return math.prod(self.shape) // self.height

    @property
    def coded(self) -> tuple[int, ...]:
        """Numbers of entries that are coded together: left and right factor, or the tensor itself."""
        if self.rank is None:
            return (self.rows * self.width,)
        return (self.rows * self.rank, self.width * self.rank)

    @property
    def lengths(self) -> Lengths:
        """How much of each kind of payload belongs to this tensor."""
        return Lengths(
            bitmap=packed_bits(self.height) if self.rows < self.height else 0,
            codes=sum(packed_size(entries) for entries in self.coded),
            scales=GROUPS * len(self.coded),
            values=self.rank or 0,
        )


@dataclass(frozen=True)
class Lengths:
    """Bytes of bitmap and codes, numbers of scales and singular values (float32)."""

    bitmap: int
    codes: int
    scales: int
    values: int

    @property
    def bytes(self) -> int:
        """All together."""
        return self.bitmap + self.codes + 4 * (self.scales + self.values)


@dataclass(frozen=True, eq=False)
class Coded:
    """A coded residual.

    Attributes:
        part: which tensor, and how it is coded.
        bitmap: rows that are coded; empty if all are.
        codes: 2 bits an entry; left factor, then right.
        scales: (4,) for a tensor coded as it is, (8,) for two factors.
        values: (rank,) singular values.
    """

    part: Part
    bitmap: Bytes
    codes: Bytes
    scales: Floats
    values: Floats


def packed_bits(count: int) -> int:
    """Bytes of a bitmap of `count` bits."""
    return -(-count // 8)


def height(name: str, shape: tuple[int, ...]) -> int:
    """Rows of a tensor as a matrix."""
    if is_stack(name, shape):
        return shape[0] * shape[1]
    return shape[0] if shape else 1


def touched(name: str, residual: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """(height,) which rows of a residual hold anything but zeros."""
    rows = residual.reshape(height(name, residual.shape), -1)
    return np.asarray((rows != 0).any(axis=1))


def matrix(name: str, residual: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(rows, width) the rows of a residual that aren't all zero."""
    rows = touched(name, residual)
    flat = residual.reshape(len(rows), -1)
    return flat if rows.all() else flat[rows]


def encode(name: str, residual: npt.NDArray[Any], rank: int | None) -> Coded:
    """Code a residual that isn't zero.

    A matrix is cut to its largest `rank` singular values, and each of its two factors, as one flat list, is
    quantised to 2 bits an entry; singular values stay float32. Without a rank the entries are quantised
    as they are; the paper does that with vectors. Paper: DTS (arXiv 2512.01461).

    Args:
        name: of the tensor.
        residual: finite floats of the tensor's shape.
        rank: of the factors, at most len(spectrum); None for none.
    """
    rows = touched(name, residual)
    part = Part(name=name, shape=residual.shape, rows=int(rows.sum()), rank=rank)
    bitmap = np.empty(0, np.uint8) if rows.all() else np.packbits(rows)
    if rank is None:
        codes, scales = quantise(matrix(name, residual))
        return Coded(part, bitmap, codes, scales, np.empty(0, np.float32))
    left, values, right = factors(matrix(name, residual), rank)
    pairs = [quantise(left), quantise(right)]
    codes, scales = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return Coded(part, bitmap, codes, scales, values.astype(np.float32))


def decode(coded: Coded) -> Decoded:
    """The factors that the codes stand for."""
    part = coded.part
    rows = np.ones(part.height, bool)
    if coded.bitmap.size:
        rows = np.unpackbits(coded.bitmap, count=part.height).astype(bool)
    start, factors = 0, []
    for number, entries in enumerate(part.coded):
        stop = start + packed_size(entries)
        scales = coded.scales[GROUPS * number : GROUPS * (number + 1)]
        factors.append(restore(coded.codes[start:stop], scales, entries))
        start = stop
    if part.rank is None:
        return Decoded(part, rows, factors[0].reshape(part.rows, part.width), None)
    left = factors[0].reshape(part.rows, part.rank) * coded.values
    return Decoded(part, rows, left, factors[1].reshape(part.width, part.rank))


@dataclass(frozen=True, eq=False)
class Decoded:
    """A residual as left · rightᵀ on some rows, and 0 on the others.

    Attributes:
        part: which tensor.
        rows: (height,) which rows.
        left: (rows, rank) with the singular values in it; (rows, width) without factors.
        right: (width, rank); None without factors.
    """

    part: Part
    rows: npt.NDArray[np.bool_]
    left: Floats
    right: Floats | None

    def blocks(self, rows: int) -> Iterator[Floats]:
        """The flattened residual, so many rows at a time, in order."""
        begun = 0
        for start in range(0, self.part.height, rows):
            chosen = self.rows[start : start + rows]
            block = np.zeros((len(chosen), self.part.width), np.float32)
            end = begun + int(chosen.sum())
            left = self.left[begun:end]
            block[chosen] = left if self.right is None else left @ self.right.T
            begun = end
            yield block.reshape(-1)


def blocks(layers: Sequence[tuple[float, Coded]], rows: int) -> Iterator[npt.NDArray[np.float64]]:
    """The weighted sum of one tensor's coded residuals, flattened, so many rows at a time, in order.

    Args:
        layers: at least one (weight, coded), all of one tensor.
        rows: of the tensor as a matrix.
    """
    decoded = [(weight, decode(coded).blocks(rows)) for weight, coded in layers]
    for first in decoded[0][1]:
        total = decoded[0][0] * first.astype(np.float64)
        for weight, others in decoded[1:]:
            total += weight * next(others)
        yield total


def array(layers: Sequence[Coded]) -> npt.NDArray[np.float64]:
    """The whole sum of one tensor's layers, in its shape."""
    part = layers[0].part
    flat = np.concatenate(list(blocks([(1.0, coded) for coded in layers], part.height)))
    return flat.reshape(part.shape)
