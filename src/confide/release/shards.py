"""Writing safetensors without torch: streamed, hashed on the way, and divided into shards."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from confide.errors import ModelError
from confide.release.tensors import INDEX, STORAGE, WEIGHTS, Array, byte_length, dtype_of
from confide.threads import in_order

Values = Array | tuple[str, tuple[int, ...], Iterable[Array]]
"""A tensor to write: an array, or (dtype code, shape, arrays in storage form that follow one another)."""

METADATA = {"format": "pt"}
"""The only metadata that a release carries: what transformers asks for, and nothing that depends on data."""

SHARD_SIZE = 5_000_000_000
"""Largest file of weights in bytes, unless one tensor is larger: what transformers writes too."""

_FILLED = 1 << 19
_SENT = 8 << 20


def write_tensors(path: Path, tensors: Mapping[str, Values], metadata: Mapping[str, str] = METADATA) -> str:
    """Write a safetensors file, header first, one tensor at a time.

    Every tensor's place is known from its dtype and shape, so its values may be an iterator that computes
    them while the file is written: a thread hashes and writes what came before. Not atomic: write into a side
    folder (`files.new_folder`).

    Args:
        path: the file; replaced if it exists.
        tensors: by name. Arrays of an iterator are in storage form (`encode`), of any shape; together they
            have exactly the tensor's size.
        metadata: a release carries the default one only.

    Returns:
        Hash of the file, as `hashes.file_hash` would find it.

    Raises:
        ModelError: a dtype that safetensors can't hold, or an iterator with too few or too many values.
    """
    order = sorted(tensors)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in order:
        dtype, shape = _declared(name, tensors[name])
        length = byte_length(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + length]}
        offset += length
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    content = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        unsent = 0

        def put(filled: memoryview) -> memoryview:
            nonlocal unsent
            content.update(filled)
            done = 0
            while done < len(filled):
                done += file.write(filled[done:])
            unsent += done
            if unsent >= _SENT:
                _send(file.fileno(), unsent)
                unsent = 0
            return filled

        put(memoryview(struct.pack("<Q", len(text)) + text))
        free: list[memoryview] = []
        for emptied in in_order(put, _filled(_bytes(order, tensors), free), threads=1):
            if len(emptied) == _FILLED:
                free.append(emptied)
    return "sha256:" + content.hexdigest()


def _filled(parts: Iterable[memoryview], free: list[memoryview]) -> Iterator[memoryview]:
    """The same bytes in buffers that are full, but for the last; those in `free` are used again."""
    buffer, used = memoryview(b""), 0
    for part in parts:
        while part:
            if used == len(buffer):
                buffer, used = free.pop() if free else memoryview(bytearray(_FILLED)), 0
            taken = part[: len(buffer) - used]
            buffer[used : used + len(taken)] = taken
            used, part = used + len(taken), part[len(taken) :]
            if used == len(buffer):
                yield buffer
    if used < len(buffer):
        yield buffer[:used]


def _bytes(order: Sequence[str], tensors: Mapping[str, Values]) -> Iterator[memoryview]:
    for name in order:
        dtype, shape = _declared(name, tensors[name])
        written = 0
        for part in _parts(tensors[name]):
            if part.dtype != STORAGE[dtype]:
                raise ModelError(f"tensor {name}: values of {part.dtype} given for dtype {dtype}")
            written += part.nbytes
            yield np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
        if written != byte_length(dtype, shape):
            raise ModelError(f"tensor {name}: {written} bytes given for shape {list(shape)} of {dtype}")


def _send(descriptor: int, count: int) -> None:
    """Let the system begin to move the last bytes to the disk: a sync at the end would wait for all of them.

    POSIX has no call for it. On Linux this advice does it, and drops no page that is not on the disk yet.
    """
    if hasattr(os, "posix_fadvise"):
        end = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.posix_fadvise(descriptor, end - count, count, os.POSIX_FADV_DONTNEED)


def write_shards(folder: Path, tensors: Mapping[str, Values], limit: int = SHARD_SIZE) -> dict[str, str]:
    """Write a model's weights as transformers reads them: one file, or shards and their index.

    Args:
        folder: gets `model.safetensors`, or `model-00001-of-0000N.safetensors`, … and the index.
        tensors: as in `write_tensors`; computed in the order of their names.
        limit: largest file in bytes; a tensor that is larger has a shard of its own.

    Returns:
        Hash of each file of weights, by its name.
    """
    shards = plan_shards({name: _declared(name, values) for name, values in tensors.items()}, limit)
    hashes = {
        file: write_tensors(folder / file, {name: tensors[name] for name in names})
        for file, names in shards.items()
    }
    if len(shards) > 1:
        total = sum(byte_length(*_declared(name, values)) for name, values in tensors.items())
        placed = {name: file for file, names in shards.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return hashes


def plan_shards(about: Mapping[str, tuple[str, tuple[int, ...]]], limit: int) -> dict[str, tuple[str, ...]]:
    """Which tensors go into which file: in the order of their names, a new shard where one is full.

    Args:
        about: dtype and shape by name.
        limit: largest file in bytes.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name in sorted(about):
        length = byte_length(*about[name])
        if shards[-1] and filled + length > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += length
    if len(shards) == 1:
        return {WEIGHTS: tuple(shards[0])}
    count = len(shards)
    return {f"model-{i:05}-of-{count:05}.safetensors": tuple(names) for i, names in enumerate(shards, 1)}


def _declared(name: str, values: Values) -> tuple[str, tuple[int, ...]]:
    if isinstance(values, tuple):
        dtype, shape, _ = values
        if dtype not in STORAGE:
            raise ModelError(f"tensor {name}: unknown dtype {dtype!r}")
        return dtype, tuple(shape)
    return dtype_of(values), values.shape


def _parts(values: Values) -> Iterator[Array]:
    if isinstance(values, tuple):
        yield from values[2]
    else:
        yield values
