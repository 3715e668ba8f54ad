"""Content hashes: the same weights have the same hash, whoever saved them and under whichever names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path

from confide.errors import ReleaseError
from confide.release.names import DECODERS, OUTPUT, encoder_prefix, encoder_tensors, model_type
from confide.release.tensors import Checkpoint
from confide.threads import in_order


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes, as `sha256:…`.

    Raises:
        ReleaseError: the file can't be read.
    """
    try:
        with open(path, "rb") as file:
            return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ReleaseError(f"can't read {path}: {error.strerror or error}") from error


def encoder_hash(checkpoint: Checkpoint, prefix: str, heads: Collection[str] = ()) -> str:
    """Hash of an encoder's content: canonical names, dtypes, shapes and values; heads excluded.

    Each tensor is hashed by itself and the combination is over the sorted names, so neither sharding nor
    order matters. Which tensors count, and which old buffers don't: `names.encoder_tensors`.

    Args:
        checkpoint: plain encoder or whole classifier.
        prefix: what stands before the encoder's names in it.
        heads: names of tensors that are no part of the encoder.

    Returns:
        `sha256:…`
    """
    return tensors_hash(checkpoint, encoder_tensors(checkpoint, prefix, heads))


def tensors_hash(checkpoint: Checkpoint, tensors: Mapping[str, str]) -> str:
    """`encoder_hash` of some tensors.

    Args:
        tensors: canonical name → name in the checkpoint.
    """

    def line(item: tuple[str, str]) -> bytes:
        name, stored = item
        about = json.dumps([name, checkpoint.dtype(stored), list(checkpoint.shape(stored))])
        content = hashlib.sha256()
        for piece in checkpoint.pieces(stored):
            content.update(piece)
        return f"{about} {content.hexdigest()}\n".encode()

    total = hashlib.sha256(b"confide.encoder/1\n")
    for text in in_order(line, sorted(tensors.items())):
        total.update(text)
    return "sha256:" + total.hexdigest()


def base_hash(folder: Path, prefix: str | None = None) -> str:
    """Hash of the encoder in a Hugging Face folder: the public base w₀, or any model built on one.

    Args:
        folder: config.json and safetensors weights.
        prefix: what stands before the encoder's names; found from `model_type` if None.

    Raises:
        ModelError: no readable weights, or a family whose encoder can't be told from its head.
    """
    checkpoint, family = Checkpoint.open(Path(folder)), model_type(Path(folder))
    if prefix is None:
        prefix = encoder_prefix(checkpoint, family)
    own = [name for name in checkpoint.names if name.startswith(OUTPUT)] if family in DECODERS else []
    return encoder_hash(checkpoint, prefix, own)
