"""confide: differentially private fine-tuning of transformers whose releases can be merged.

The names of `confide.api` are here too; they are imported when one is first used, because they need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from confide import personal as personal
    from confide.api import (
        Images,
        Model,
        Settings,
        labelled,
        load,
        load_key,
        load_task,
        merge,
        read_task,
        test_records,
        train,
    )

__all__ = [
    "Images",
    "Model",
    "Settings",
    "labelled",
    "load",
    "load_key",
    "load_task",
    "merge",
    "personal",
    "read_task",
    "test_records",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "personal":
        return import_module("confide.personal")
    if name in __all__:
        return getattr(import_module("confide.api"), name)
    raise AttributeError(f"module 'confide' has no attribute {name!r}")
