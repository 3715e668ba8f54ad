"""confide: differentially private fine-tuning of transformers whose releases can be merged.

The names of `confide.api` are here too, imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from confide.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    from confide import api

    if name in api.__all__:
        return getattr(api, name)
    raise AttributeError(f"module 'confide' has no attribute {name!r}")
