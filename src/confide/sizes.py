"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

from confide.errors import ConfigError

PATTERN = r"^(\d+(?:\.\d+)?)([KMG]i?)?B$"
"""`8GiB`, `500MB`, `1.5GB`."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def bytes_of(text: str, what: str) -> int:
    """Bytes of a size; `what` is the option or key that it was given for.

    Raises:
        ConfigError: no size, or 0.
    """
    match = re.fullmatch(PATTERN, text.strip())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise ConfigError(f"{what} is a size such as 5GB or 500MiB, not {text!r}")
    return size
