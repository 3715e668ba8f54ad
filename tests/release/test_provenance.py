"""Walks every byte of a release and names where each file and key comes from."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from confide.privacy.statement import Base, Claim, Spending, Statement
from confide.release.format import Head, ReleaseInfo
from confide.release.write import provenance, write_release

CONFIG = {
    "architectures": "the class of transformers that saved it",
    "dtype": "the base's dtype",
    "id2label": "the declared labels",
    "label2id": "the declared labels",
    "problem_type": "follows from the kind of task",
    "transformers_version": "the library that saved it",
}


@pytest.fixture
def release(tmp_path: Path, save: Callable[[Path], None], info: ReleaseInfo, statement: Statement) -> Path:
    write_release(tmp_path / "release", save=save, info=info, statement=statement)
    return tmp_path / "release"


def test_every_file_has_an_origin(release: Path) -> None:
    names = [file.relative_to(release).as_posix() for file in release.rglob("*") if file.is_file()]
    assert {"config.json", "model.safetensors", "statement.json", "confide.json", "README.md"} <= set(names)
    for name in names:
        assert provenance(name), f"nobody says where {name} comes from"
    assert provenance("optimizer.safetensors") is None
    assert provenance("model.safetensors/x") is None
    assert provenance("heads/a/b/model.safetensors") is None


def test_every_byte_of_the_weights(release: Path, base: Path, info: ReleaseInfo) -> None:
    content = (release / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    text = content[8 : 8 + length].decode()
    header = json.loads(text)
    assert header.pop("__metadata__", {"format": "pt"}) == {"format": "pt"}
    assert set(text[len(text.rstrip()) :]) <= {" "}

    plain = (base / "model.safetensors").read_bytes()
    encoder = set(json.loads(plain[8 : 8 + struct.unpack("<Q", plain[:8])[0]])) - {"__metadata__"}
    expected = {info.encoder_prefix + name for name in encoder} | set(info.heads[0].tensors)
    assert set(header) == expected

    reached = 0
    for entry in sorted(header.values(), key=lambda entry: entry["data_offsets"]):
        assert set(entry) == {"dtype", "shape", "data_offsets"}
        assert entry["data_offsets"][0] == reached
        reached = entry["data_offsets"][1]
    assert 8 + length + reached == len(content)


def test_every_key_of_the_settings(release: Path, base: Path) -> None:
    config = json.loads((release / "config.json").read_text())
    architecture = json.loads((base / "config.json").read_text())
    for key, value in config.items():
        if key not in CONFIG:
            assert value == architecture[key], f"{key} isn't the base's"
    assert config["id2label"] == {"0": "neg", "1": "pos"}

    for name in ("tokenizer.json", "tokenizer_config.json"):
        ours, theirs = (json.loads((folder / name).read_text()) for folder in (release, base))
        for key in ("is_local", "local_files_only"):
            ours.pop(key, None)
            theirs.pop(key, None)
        assert ours == theirs


def test_every_key_of_our_own_files(release: Path, statement: Statement) -> None:
    own = json.loads((release / "confide.json").read_text())
    assert set(own) == set(ReleaseInfo.model_fields)
    assert set(own["heads"][0]) == set(Head.model_fields)

    said = json.loads((release / "statement.json").read_text())
    assert set(said) == {field.alias or name for name, field in Statement.model_fields.items()}
    assert set(said["claim"]) == set(Claim.model_fields)
    assert set(said["base"]) == set(Base.model_fields)
    assert [set(spending) for spending in said["spendings"]] == [set(Spending.model_fields)]
    assert {**said, "weights": {}, "files": {}} == statement.to_json()
    assert {*said["weights"], *said["files"], "statement.json"} == {
        file.relative_to(release).as_posix() for file in release.rglob("*") if file.is_file()
    }


def test_no_place_on_the_owners_machine_is_told(release: Path, base: Path) -> None:
    for file in release.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            for secret in (str(base), str(release), str(Path.home())):
                assert secret.encode() not in content, f"{file.name} tells {secret}"
