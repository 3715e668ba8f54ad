"""Writing that is all or nothing: build aside, then rename."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from confide.errors import ReleaseError


@contextlib.contextmanager
def new_folder(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside `path` that becomes `path` only if the block succeeds.

    On any exception, Ctrl-C included, the side folder is removed and `path` is untouched. With
    `overwrite`, an existing folder is swapped out at the end, never merged into.

    Raises:
        ReleaseError: `path` exists and `overwrite` is false, or it can't be written.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise ReleaseError(f"{path} exists already; choose another folder or remove it first")
    side = path.parent / f".{path.name}.{secrets.token_hex(4)}.partial"
    try:
        side.mkdir(parents=True)
        yield side
        _sync_tree(side)
        if path.exists():
            old = side.with_suffix(".old")
            path.rename(old)
            try:
                side.rename(path)
            except BaseException:
                old.rename(path)
                raise
            shutil.rmtree(old)
        else:
            side.rename(path)
    except OSError as error:
        culprit = error.filename or path
        raise ReleaseError(f"can't write {path}: {error.strerror or error} ({culprit})") from error
    finally:
        shutil.rmtree(side, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically (a reader sees the old file or the new one, never a part)."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically."""
    path = Path(path)
    side = path.parent / f".{path.name}.{secrets.token_hex(4)}.partial"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(side, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        side.replace(path)
    except OSError as error:
        raise ReleaseError(f"can't write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            side.unlink()


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically; NaN and infinity are refused (they are not JSON)."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _sync_tree(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
