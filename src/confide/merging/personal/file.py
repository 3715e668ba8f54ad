"""The personal file: a safetensors file that a merge turns back into one task's model.

It holds `about` (compressed JSON: format, task and head, hashes of base and merge, shapes, ranks, statement),
`codes` (2 bits an entry), `scales` and `values` (float32), `bitmap` (which rows are coded) and the head's
tensors as `head.NAME`. What belongs to which tensor follows from the ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from confide import files
from confide.errors import MergeError
from confide.merging.personal.residual import Coded, Lengths, Part
from confide.privacy.composition import check
from confide.privacy.statement import Statement
from confide.release.format import Head
from confide.release.shards import METADATA, Values, write_tensors
from confide.release.tensors import FLOATS, STORAGE, Checkpoint

FORMAT = "confide.personal/1"
WEIGHTS = "personal"
"""What the statement calls the content of the file, which has no weight files of its own."""

Heads = Mapping[str, tuple[str, tuple[int, ...], npt.NDArray[Any]]]
"""A head's tensors: dtype code, shape, values in storage form."""

_ABOUT = "about"
_HEAD = "head."
_LONGEST_ABOUT = 1 << 26  # bytes of JSON; a forged file may claim to be larger
_SLACK = 96  # bytes by which another hash may change how well the description is compressed
_PAYLOADS = {"bitmap": "U8", "codes": "U8", "scales": "F32", "values": "F32"}
_ENTRY = 112  # bytes that a tensor of at most 12 dimension digits and 12-digit offsets adds to the header


class About(BaseModel):
    """Everything about a personal file but its numbers.

    Attributes:
        format: and its version.
        encoder_prefix: what the whole classifier puts before the encoder's names.
        head: the task, its labels, and which tensors are its head.
        description: what the task is about, in public words; compares it with unseen tasks.
        merge: hash of the merged encoder that the residual is relative to.
        absent: tensors of that encoder that the task's classifier doesn't have.
        parts: every tensor that is coded, sorted by name; one that is there again adds a layer.
        statement: of the merge and the task's model together; its base is theirs.
    """

    format: Literal["confide.personal/1"] = "confide.personal/1"
    encoder_prefix: str
    head: Head
    description: str = ""
    merge: str
    absent: tuple[str, ...] = ()
    parts: tuple[Part, ...]
    statement: Statement

    model_config = ConfigDict(frozen=True, extra="forbid")

    def packed(self) -> bytes:
        """As in the file: the statements of all inputs repeat each other, so they are compressed."""
        return zlib.compress(self.text(), 9)

    def text(self) -> bytes:
        """As JSON, in the file's own spelling."""
        values = self.model_dump(mode="json", by_alias=True)
        return json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


@dataclass(frozen=True)
class PersonalFile:
    """A personal file that was read and checked.

    Attributes:
        path: where it is.
        about: its description.
        layers: coded residuals by tensor name; what a tensor gains is their sum.
        heads: the head's tensors.
    """

    path: Path
    about: About
    layers: Mapping[str, tuple[Coded, ...]]
    heads: Heads


def size(about: About, heads: Heads) -> int:
    """Bytes that the file will have at most; it has at most some hundred fewer.

    Args:
        about: with the parts as they will be; the hash in the statement may be any of its length.
        heads: the head's tensors.
    """
    payload = sum(part.lengths.bytes for part in about.parts)
    head = sum(math.prod(shape) * STORAGE[dtype].itemsize for dtype, shape, _ in heads.values())
    names = [_ABOUT, *_PAYLOADS, *(_HEAD + name for name in heads)]
    header = 64 + sum(len(json.dumps(name, ensure_ascii=False).encode()) + _ENTRY for name in names)
    return header + len(about.packed()) + _SLACK + payload + head


def write(path: Path, about: About, coded: Sequence[Coded], heads: Heads) -> About:
    """Write a personal file, atomically.

    Args:
        path: must not exist.
        about: the statement's `weights` are filled in here.
        coded: one for each of its parts, in their order.
        heads: the tensors that its head names.

    Returns:
        `about` as written.

    Raises:
        ReleaseError: the file exists or can't be written.
    """
    tensors: dict[str, Values] = {
        name: np.concatenate([np.empty(0, STORAGE[dtype]), *(getattr(item, name) for item in coded)])
        for name, dtype in _PAYLOADS.items()
    }
    for name, (dtype, shape, stored) in heads.items():
        tensors[_HEAD + name] = (dtype, shape, [stored])
    raw = {name: _bytes(values) for name, values in tensors.items()}
    about = _with_hash(about, _content(about, raw))
    tensors[_ABOUT] = np.frombuffer(about.packed(), np.uint8)
    with files.new_file(path) as side:
        write_tensors(side, tensors)
    return about


def read(path: Path) -> PersonalFile:
    """Read a personal file and check it: whole, unaltered, of this format, with a statement that holds.

    Raises:
        MergeError: not a personal file, of another version, or altered.
        ModelError: not a safetensors file, or a truncated one.
        PrivacyError: its statement claims less than its events cost.
    """
    path = Path(path)
    if path.is_dir():
        raise MergeError(f"{path} is a folder; a personal file is what `confide personal pack` writes")
    checkpoint = Checkpoint.open(path)
    about = _read_about(path, checkpoint)
    heads = {name: _HEAD + name for name in about.head.tensors}
    odd = set(checkpoint.names) ^ {_ABOUT, *_PAYLOADS, *heads.values()}
    if odd or checkpoint.metadata != (METADATA,):
        raise MergeError(
            f"{path} is no valid personal file: {min(odd, default='metadata')} is odd or missing"
        )
    raw = {name: checkpoint.stored(name).tobytes() for name in checkpoint.names if name != _ABOUT}
    if about.statement.weights != {WEIGHTS: _content(about, raw)}:
        raise MergeError(f"{path} was changed after its statement was written")
    check(about.statement)
    layers: dict[str, tuple[Coded, ...]] = {}
    for item in _split(path, about, checkpoint):
        layers[item.part.name] = (*layers.get(item.part.name, ()), item)
    for name in (*heads.values(), "scales", "values"):
        if checkpoint.dtype(name) in FLOATS and not np.isfinite(checkpoint.numpy(name)).all():
            raise MergeError(f"tensor {name} of {path} holds values that aren't finite (NaN or ∞)")
    return PersonalFile(
        path,
        about,
        layers,
        {
            name: (checkpoint.dtype(stored), checkpoint.shape(stored), checkpoint.stored(stored))
            for name, stored in heads.items()
        },
    )


def _read_about(path: Path, checkpoint: Checkpoint) -> About:
    if _ABOUT not in checkpoint or checkpoint.dtype(_ABOUT) != "U8":
        raise MergeError(f"{path} is not a personal file: it has no tensor {_ABOUT}")
    packed = checkpoint.stored(_ABOUT).tobytes()
    try:
        unpacker = zlib.decompressobj()
        given = json.loads(unpacker.decompress(packed, _LONGEST_ABOUT))
        if isinstance(given, dict) and given.get("format", FORMAT) != FORMAT:
            raise MergeError(
                f"{path} has format {given['format']!r}, and this version of confide reads {FORMAT!r}"
            )
        about = About.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"]) or _ABOUT
        raise MergeError(f"{path} is no valid personal file: {where}: {first['msg']}") from None
    except (ValueError, zlib.error):
        raise MergeError(f"{path} is no valid personal file: {_ABOUT} isn't compressed JSON") from None
    names = [part.name for part in about.parts]
    if names != sorted(names):
        raise MergeError(f"{path} is no valid personal file: its tensors aren't sorted by name")
    if len({(part.name, part.shape) for part in about.parts}) != len(set(names)):
        raise MergeError(f"{path} is no valid personal file: two layers of a tensor have different shapes")
    return about


def _split(path: Path, about: About, checkpoint: Checkpoint) -> Iterator[Coded]:
    """The payloads, cut into tensors."""
    stored = {}
    for field in fields(Lengths):
        wanted = sum(getattr(part.lengths, field.name) for part in about.parts)
        if (checkpoint.dtype(field.name), checkpoint.shape(field.name)) != (_PAYLOADS[field.name], (wanted,)):
            raise MergeError(f"{path} is no valid personal file: {field.name} doesn't fit the ranks in it")
        stored[field.name] = checkpoint.stored(field.name)
    place = dict.fromkeys(stored, 0)
    for part in about.parts:
        pieces = {}
        for name, values in stored.items():
            stop = place[name] + getattr(part.lengths, name)
            pieces[name] = values[place[name] : stop]
            place[name] = stop
        bitmap = pieces["bitmap"]
        if bitmap.size and int(np.unpackbits(bitmap, count=part.height).sum()) != part.rows:
            raise MergeError(f"{path} is no valid personal file: the bitmap of {part.name} has other rows")
        yield Coded(part=part, **pieces)


def _bytes(values: Values) -> memoryview:
    array = values[2][0] if isinstance(values, tuple) else values  # type: ignore[index]
    return np.ascontiguousarray(array).data.cast("B")


def _content(about: About, raw: Mapping[str, memoryview | bytes]) -> str:
    """Hash of everything in the file but the hash itself."""
    total = hashlib.sha256(_with_hash(about, None).text() + b"\n")
    for name in sorted(raw):
        total.update(f"{name} {hashlib.sha256(raw[name]).hexdigest()}\n".encode())
    return "sha256:" + total.hexdigest()


def _with_hash(about: About, value: str | None) -> About:
    weights = {} if value is None else {WEIGHTS: value}
    return about.model_copy(update={"statement": about.statement.model_copy(update={"weights": weights})})


def with_room_for_hash(about: About) -> About:
    """With a hash of the right length, so that its size is that of the file."""
    return _with_hash(about, "sha256:" + 64 * "0")
