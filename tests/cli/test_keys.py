"""`confide keys`, and what signs when."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from confide.privacy.signature import fingerprint, load_key, public_text, signer
from confide.privacy.statement import load

from .conftest import Answer

Confide = Callable[..., Answer]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own place for a key, without one yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "confide" / "key.pem"


def test_new_and_show(confide: Confide, own: Path, tmp_path: Path) -> None:
    made = confide("keys", "new", "--json").json()
    assert made["file"] == str(own)
    assert made["public"] == public_text(load_key(own))
    assert made["fingerprint"] == fingerprint(made["public"])
    assert confide("keys", "show", "--json").json() == made
    assert own.stat().st_mode & 0o777 == 0o600
    assert "never replaced" in confide("keys", "new").message()
    other = confide("keys", "new", "--out", tmp_path / "other.pem")
    assert "fingerprint" in other.out
    assert "PRIVATE" not in other.out
    assert made["public"] not in confide("keys", "show", tmp_path / "other.pem").out


def test_a_passphrase(confide: Confide, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFIDE_PASSPHRASE", "open sesame")
    public = confide("keys", "new", "--passphrase", "--json").json()["public"]
    assert b"ENCRYPTED" in own.read_bytes()
    assert confide("keys", "show", "--json").json()["public"] == public
    monkeypatch.delenv("CONFIDE_PASSPHRASE")
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115 - nobody is there to type
    assert "needs its passphrase" in confide("keys", "show").message()
    monkeypatch.setenv("CONFIDE_PASSPHRASE", "open barley")
    assert "passphrase is wrong" in confide("keys", "show").message()


def test_no_key(confide: Confide, own: Path) -> None:
    assert "can't read the key" in confide("keys", "show").message()


def test_training_signs(
    train: Callable[..., Answer], confide: Confide, own: Path, reviews: Path, tmp_path: Path
) -> None:
    refused = train(reviews, "--key", tmp_path / "nowhere.pem")
    assert "can't read the key" in refused.message()
    assert not (tmp_path / "run").exists()
    unsigned = train(reviews, out="unsigned")
    assert "Not signed: nobody asserts that noise was added" in unsigned.out
    public = confide("keys", "new", "--json").json()["public"]
    signed = train(reviews, "--json", out="signed").json()
    assert signed["signed_by"] == public
    assert signer(load(tmp_path / "signed" / "release")) == public
    assert public in (tmp_path / "signed" / "release" / "README.md").read_text()
    none = train(reviews, "--json", "--key", "none", out="none").json()
    assert none["signed_by"] is None
