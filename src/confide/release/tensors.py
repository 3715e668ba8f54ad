"""Reading safetensors without torch: mapped, and never a pickle."""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from confide.errors import ModelError

Array = npt.NDArray[Any]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

STORAGE: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
"""numpy dtype that holds each safetensors dtype; bfloat16, which numpy lacks, is held as its 16 bits."""

FLOATS = ("F64", "F32", "F16", "BF16")

_LONGEST_HEADER = 100 << 20
_PIECE = 1 << 20
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    file: int


class Checkpoint:
    """The tensors of one safetensors file, or of a folder that holds one or its shards.

    Nothing is loaded until it is asked for. Whole tensors are read-only views of the mapped file, whose
    pages count as this process's memory for as long as the checkpoint lives; pieces (`read`, `pieces`) are
    copied out of the file and leave nothing behind.

    Attributes:
        path: what was opened; messages name it.
        files: the safetensors files, in order.
    """

    def __init__(self, path: Path, files: tuple[Path, ...]) -> None:
        self.path = path
        self.files = files
        self._maps: list[mmap.mmap] = []
        self._descriptors: list[int] = []
        self._entries: dict[str, _Entry] = {}
        self._metadata: list[Any] = []
        for number, file in enumerate(files):
            buffer, descriptor = _map(file)
            weakref.finalize(self, os.close, descriptor)
            self._maps.append(buffer)
            self._descriptors.append(descriptor)
            header, data = _header(file, buffer)
            self._metadata.append(header.pop("__metadata__", None))
            for name, entry in _entries(file, header, data, len(buffer), number).items():
                if name in self._entries:
                    other = files[self._entries[name].file].name
                    raise ModelError(f"{path}: tensor {name} is in two shards, {other} and {file.name}")
                self._entries[name] = entry

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Open a safetensors file, or the folder of a model.

        Raises:
            ModelError: no weights there, a pickle checkpoint, a truncated or malformed file, or an index
                that doesn't match its shards.
        """
        path = Path(path)
        if path.is_dir():
            return _open_folder(cls, path)
        if not path.exists():
            raise ModelError(f"{path} doesn't exist")
        if path.suffix in _PICKLES:
            raise ModelError(_refuse_pickle(path))
        return cls(path, (path,))

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor's name, sorted."""
        return tuple(sorted(self._entries))

    @property
    def metadata(self) -> tuple[Any, ...]:
        """The free text that each file carries beside its tensors."""
        return tuple(self._metadata)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def dtype(self, name: str) -> str:
        """The safetensors code of a tensor's dtype, such as `F32` or `BF16`."""
        return self._entry(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._entry(name).shape

    def size(self, name: str) -> int:
        """How many elements a tensor has."""
        return math.prod(self._entry(name).shape)

    def stored(self, name: str) -> Array:
        """(size,) view of a tensor in storage form; bfloat16 as uint16."""
        entry = self._entry(name)
        count = math.prod(entry.shape)
        return np.frombuffer(self._maps[entry.file], STORAGE[entry.dtype], count, entry.start)

    def numpy(self, name: str) -> Array:
        """A tensor in its shape: a read-only view, except bfloat16, which becomes float32 (exact)."""
        entry = self._entry(name)
        return decode(self.stored(name), entry.dtype).reshape(entry.shape)

    def read(self, name: str, start: int, stop: int) -> Array:
        """A copy of elements [start, stop) of a flattened tensor; bfloat16 as float32.

        Raises:
            ModelError: the file can't be read, or has become shorter.
        """
        entry = self._entry(name)
        stored = np.empty(max(0, min(stop, math.prod(entry.shape)) - start), STORAGE[entry.dtype])
        self._copy(entry, start * stored.itemsize, stored.view(np.uint8).data)
        return decode(stored, entry.dtype)

    def pieces(self, name: str) -> Iterator[memoryview]:
        """A tensor's bytes as they are in the file: little-endian, row-major.

        Each piece is overwritten by the next.
        """
        entry = self._entry(name)
        buffer = memoryview(bytearray(min(_PIECE, entry.stop - entry.start)))
        for offset in range(0, entry.stop - entry.start, _PIECE):
            piece = buffer[: entry.stop - entry.start - offset]
            self._copy(entry, offset, piece)
            yield piece

    def _copy(self, entry: _Entry, offset: int, out: memoryview) -> None:
        file = self.files[entry.file]
        done = 0
        while done < len(out):
            try:
                count = os.preadv(self._descriptors[entry.file], [out[done:]], entry.start + offset + done)
            except OSError as error:
                raise ModelError(f"can't read {file}: {error.strerror or error}") from error
            if count == 0:
                raise ModelError(f"{file} has become shorter while it was read")
            done += count

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise ModelError(f"{self.path} has no tensor {name}") from None


def decode(stored: Array, dtype: str) -> Array:
    """Values of an array in storage form: bfloat16's 16 bits become float32, the rest is as it is."""
    if dtype == "BF16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored


def encode(values: Array, dtype: str) -> Array:
    """Floating-point values rounded to nearest, ties to even, in the storage form of `dtype`.

    float64 goes to bfloat16 by way of float32; values past the largest one become infinite, without a
    warning: the caller looks for them.
    """
    if dtype != "BF16":
        with np.errstate(over="ignore"):
            return values.astype(STORAGE[dtype])
    with np.errstate(over="ignore"):
        single = np.ascontiguousarray(values, dtype=np.float32)
    bits = single.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
        np.uint16
    )
    quiet = np.uint16(0x7FC0)
    return np.where(np.isnan(single), quiet, rounded).astype(np.uint16)


def dtype_of(array: Array) -> str:
    """The safetensors code of a numpy array.

    Raises:
        ModelError: numpy holds something that safetensors can't.
    """
    for code, dtype in STORAGE.items():
        if code != "BF16" and array.dtype == dtype:
            return code
    raise ModelError(f"an array of {array.dtype} can't be written to safetensors")


def byte_length(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * STORAGE[dtype].itemsize


def _open_folder(cls: type[Checkpoint], folder: Path) -> Checkpoint:
    index = folder / INDEX
    if (folder / WEIGHTS).exists():
        return cls(folder, (folder / WEIGHTS,))
    if index.exists():
        placed = _read_index(index)
        files = tuple(folder / name for name in sorted(set(placed.values())))
        for file in files:
            if not file.exists():
                raise ModelError(f"{index} names the shard {file.name}, which is missing")
        checkpoint = cls(folder, files)
        if set(placed) != set(checkpoint.names):
            odd = sorted(set(placed) ^ set(checkpoint.names))[0]
            raise ModelError(f"{index} doesn't match its shards: tensor {odd} is only in one of them")
        return checkpoint
    pickles = sorted(file for file in folder.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise ModelError(_refuse_pickle(pickles[0]))
    raise ModelError(f"{folder} holds no weights: neither {WEIGHTS} nor {INDEX} is there")


def _read_index(index: Path) -> dict[str, str]:
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = [Path(name) for name in placed.values()]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{index} is not a safetensors index: it has no readable weight_map") from None
    for name in names:
        if name.name != str(name) or name.suffix != ".safetensors":
            raise ModelError(f"{index} names a shard {str(name)!r}, which isn't a safetensors file beside it")
    return dict(placed)


def _refuse_pickle(file: Path) -> str:
    target = file.with_name(WEIGHTS)
    return (
        f"{file} is a pickle checkpoint, which can run code when loaded; confide reads safetensors only. "
        'To convert one that you trust: python -c "import torch; from safetensors.torch import save_file; '
        f"save_file({{n: t.clone().contiguous() for n, t in torch.load('{file}', map_location='cpu', "
        f"weights_only=True).items()}}, '{target}', metadata={{'format': 'pt'}})\""
    )


def _map(file: Path) -> tuple[mmap.mmap, int]:
    """The mapped file, and a descriptor of it that the caller closes."""
    try:
        with open(file, "rb") as handle:
            if handle.seek(0, 2) < 8:
                raise ModelError(f"{file} is not a safetensors file, or is truncated: it has no header")
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ), os.dup(handle.fileno())
    except OSError as error:
        raise ModelError(f"can't read {file}: {error.strerror or error}") from error


def _header(file: Path, buffer: mmap.mmap) -> tuple[dict[str, Any], int]:
    (length,) = struct.unpack("<Q", buffer[:8])
    if length > _LONGEST_HEADER or 8 + length > len(buffer):
        raise ModelError(f"{file} is not a safetensors file, or is truncated within its header")
    try:
        header = json.loads(buffer[8 : 8 + length].decode())
    except ValueError:
        raise ModelError(f"{file} is not a safetensors file: its header isn't JSON") from None
    if not isinstance(header, dict):
        raise ModelError(f"{file} is not a safetensors file: its header isn't a table of tensors")
    return header, 8 + length


def _entries(file: Path, header: dict[str, Any], data: int, end: int, number: int) -> dict[str, _Entry]:
    """Where each tensor lies; every byte after the header belongs to exactly one of them."""
    found: dict[str, _Entry] = {}
    for name, fields in header.items():
        try:
            dtype, shape = str(fields["dtype"]), tuple(int(side) for side in fields["shape"])
            start, stop = (int(offset) for offset in fields["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise ModelError(f"{file}: the header's entry for tensor {name} can't be read") from None
        if dtype not in STORAGE:
            raise ModelError(f"{file}: tensor {name} has dtype {dtype}, which confide doesn't read")
        if min(shape, default=0) < 0 or stop - start != byte_length(dtype, shape):
            raise ModelError(
                f"{file}: tensor {name} of shape {list(shape)} doesn't fit its place in the file"
            )
        found[name] = _Entry(dtype, shape, data + start, data + stop, number)
    reached = data
    for name, entry in sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != reached:
            raise ModelError(f"{file}: bytes before tensor {name} belong to no tensor, or to two")
        reached = entry.stop
    if reached > end:
        raise ModelError(f"{file} is truncated: its tensors need {reached} bytes, the file has {end}")
    if reached < end:
        raise ModelError(f"{file} has {end - reached} bytes that belong to no tensor")
    return found
