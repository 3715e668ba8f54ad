"""Writing that is all or nothing: build aside, then rename. And its opposite: making a file unreadable."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from confide.errors import ReleaseError

_SIDE = re.compile(r"\.(.+)\.[0-9a-f]{8}\.partial")


@contextlib.contextmanager
def new_folder(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside `path` that becomes `path` only if the block succeeds.

    On any exception, Ctrl-C included, the side folder is removed and `path` is untouched; what a killed
    process left is removed by the next one that writes there. With `overwrite`, an existing folder is
    swapped out at the end, never merged into.

    Raises:
        ReleaseError: `path` exists and `overwrite` is false, or it can't be written.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise ReleaseError(f"{path} exists already; choose another folder or remove it first")
    try:
        with aside(path) as side:
            new, old = side / "new", side / "old"
            new.mkdir()
            yield new
            _sync_tree(new)
            if path.exists():
                path.rename(old)
                try:
                    new.rename(path)
                except BaseException:
                    old.rename(path)
                    raise
            else:
                new.rename(path)
            sync(path.parent)
    except OSError as error:
        culprit = error.filename or path
        raise ReleaseError(f"can't write {path}: {error.strerror or error} ({culprit})") from error


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield the name of a side file that becomes `path` only if the block succeeds.

    Raises:
        ReleaseError: `path` exists, or it can't be written.
    """
    path = Path(path)
    if path.exists():
        raise ReleaseError(f"{path} exists already; choose another name or remove it first")
    try:
        with aside(path) as side:
            yield side / "new"
            sync(side / "new")
            (side / "new").replace(path)
            sync(path.parent)
    except OSError as error:
        raise ReleaseError(f"can't write {path}: {error.strerror or error}") from error


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write `text` to `path` atomically (a reader sees the old file or the new one, never a part).

    Args:
        private: nobody but the owner may read the file.
    """
    write_bytes(path, text.encode("utf-8"), private=private)


def write_bytes(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write `content` to `path` atomically; `private` as for `write_text`."""
    path = Path(path)
    try:
        with aside(path) as side:
            descriptor = os.open(side / "new", os.O_WRONLY | os.O_CREAT, 0o600 if private else 0o666)
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            (side / "new").replace(path)
            sync(path.parent)
    except OSError as error:
        raise ReleaseError(f"can't write {path}: {error.strerror or error}") from error


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    """Write `value` as indented JSON, atomically; NaN and infinity are refused (they are not JSON)."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", private=private)


@contextlib.contextmanager
def aside(path: Path) -> Iterator[Path]:
    """An empty folder beside `path` for the time of the block, to build in what will become `path`.

    It is locked as long as this process lives, so that the side folders of killed processes, which nobody
    locks, can be told apart: those beside `path` are removed first.
    """
    path = Path(path)
    if path.parent.is_dir():
        sweep(path.parent)
    while True:
        side = path.parent / f".{path.name}.{secrets.token_hex(4)}.partial"
        side.mkdir(parents=True)
        descriptor = lock(side)
        if descriptor is not None:
            break
    try:
        yield side
    finally:
        shutil.rmtree(side, ignore_errors=True)
        os.close(descriptor)


def sweep(folder: Path) -> None:
    """Remove the side folders that killed processes left in a folder; a living process's is left alone.

    If a process was killed while it swapped a folder, the old one is put back in its place.
    """
    for side in folder.iterdir():
        match = _SIDE.fullmatch(side.name)
        if not match:
            continue
        with contextlib.suppress(OSError):  # removed meanwhile, or not ours to remove
            descriptor = lock(side, unknown=False)
            if descriptor is None:
                continue
            place = folder / match[1]
            if (side / "old").exists() and not place.exists():
                (side / "old").rename(place)
            shutil.rmtree(side, ignore_errors=True)
            os.close(descriptor)


def lock(path: Path, *, unknown: bool = True) -> int | None:
    """Lock a file or folder against other processes until the descriptor is closed or this process ends.

    Args:
        unknown: whether to go on where the file system can't lock.

    Returns:
        The descriptor, or None: another process has the lock, or removed or replaced the path meanwhile.

    Raises:
        OSError: the path can't be opened.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        if not unknown:
            os.close(descriptor)
            return None
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    os.close(descriptor)
    return None


def destroy(path: Path) -> None:
    """Overwrite a file's bytes, then remove it.

    The disk may still hold the old bytes elsewhere: SSDs, snapshots and copy-on-write file systems write to
    new places.
    """
    with open(path, "r+b") as file:
        file.write(os.urandom(os.fstat(file.fileno()).st_size))
        file.flush()
        os.fsync(file.fileno())
    path.unlink()
    sync(path.parent)


def sync(folder: Path) -> None:
    """Put a folder's entries on disk: a rename in it then survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    for file in (*folder.rglob("*"), folder):
        if file.is_file() or file.is_dir():
            sync(file)
