"""Signatures against another implementation's view of them: the cryptography library used by hand."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from confide.errors import PrivacyError
from confide.privacy.composition import training_statement
from confide.privacy.signature import (
    default_place,
    fingerprint,
    load_key,
    new_key,
    public_text,
    read_trusted,
    sign,
    signer,
)
from confide.privacy.statement import Base, Statement
from confide.privacy.streams import Schedule


@pytest.fixture
def statement(schedule: Callable[..., Schedule]) -> Statement:
    return training_statement(
        schedule(noise_multiplier=4.0),
        delta=1e-6,
        dataset="Klinik 2026 – β",
        units=10,
        run="r",
        base=Base(name="base", hash="0" * 64),
        steps_run={"all": 7},
    )


def test_signatures_are_what_the_guide_says(statement: Statement, tmp_path: Path) -> None:
    """Sorted keys, no spaces, UTF-8, everything but the signature itself; no code of ours is used."""
    key = new_key(tmp_path / "key.pem")
    said = json.loads(json.dumps(sign(statement, key).to_json()))
    found = said.pop("signature")
    text = json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(found["key"].removeprefix("ed25519:")))
    public.verify(bytes.fromhex(found["value"]), text.encode())  # raises if it is wrong
    assert found["key"] == public_text(key)
    assert signer({**said, "signature": found}) == public_text(key)
    assert signer(said) is None


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict) and value:
        return [leaf for name, item in value.items() for leaf in _leaves(item, (*path, name))]
    if isinstance(value, list) and value:
        return [leaf for number, item in enumerate(value) for leaf in _leaves(item, (*path, number))]
    return [path]


def test_no_value_of_a_signed_statement_can_be_changed(statement: Statement, tmp_path: Path) -> None:
    said = sign(statement, new_key(tmp_path / "key.pem")).to_json()
    places = _leaves(said)
    assert len(places) > 40
    for path in places:
        forged = json.loads(json.dumps(said))
        place = forged
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = "x" if place[path[-1]] != "x" else "y"
        with pytest.raises(PrivacyError, match=r"signed|signature|no public key"):
            signer(forged)
    for added in ({"note": 1}, {"inputs": [said]}):
        with pytest.raises(PrivacyError, match="changed after it was signed"):
            signer({**said, **added})


@settings(max_examples=25, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=("Cs",))),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    )
)
def test_writing_and_reading_keeps_a_signature(value: Any) -> None:
    """What a later confide puts into a statement stays signed through files that we write."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from confide.privacy.signature import _message

    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    try:
        message = _message({"value": value})
    except UnicodeEncodeError:  # a lone surrogate in a key; `statement.load` refuses it
        return
    said = {"value": value, "signature": {"key": public_text(key), "value": key.sign(message).hex()}}
    assert signer(json.loads(json.dumps(said, indent=2))) == public_text(key)


def test_a_key_file(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "key.pem"
    old = os.umask(0)
    try:
        key = new_key(file)
    finally:
        os.umask(old)
    assert file.stat().st_mode & 0o777 == 0o600
    assert public_text(load_key(file)) == public_text(key)
    assert public_text(load_key(str(file), "not needed")) == public_text(key)
    assert [path.name for path in file.parent.iterdir()] == ["key.pem"]
    content = file.read_bytes()
    with pytest.raises(PrivacyError, match="never replaced"):
        new_key(file)
    assert file.read_bytes() == content


def test_a_passphrase(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    key = new_key(file, "open sesame")
    assert public_text(load_key(file, "open sesame")) == public_text(key)
    with pytest.raises(PrivacyError, match="needs its passphrase"):
        load_key(file)
    with pytest.raises(PrivacyError, match="passphrase is wrong"):
        load_key(file, "open barley")
    with pytest.raises(PrivacyError, match="empty passphrase"):
        new_key(tmp_path / "other.pem", "")
    assert not (tmp_path / "other.pem").exists()


def test_files_that_are_no_keys(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    with pytest.raises(PrivacyError, match="No such file"):
        load_key(file)
    new_key(file)
    whole = file.read_bytes()
    for content in (b"", b"hello", whole[: len(whole) // 2]):
        file.write_bytes(content)
        with pytest.raises(PrivacyError, match="no private key in PEM"):
            load_key(file)
    other = rsa.generate_private_key(65537, 1024)
    file.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(PrivacyError, match="no Ed25519 key"):
        load_key(file)
    file.write_bytes(whole)
    file.chmod(0o640)
    with pytest.raises(PrivacyError, match="others than you can read"):
        load_key(file)
    with pytest.raises(PrivacyError, match="can't write the key"):
        new_key(Path("/proc/nowhere/key.pem"))


def test_where_a_key_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_place() == tmp_path / "confide" / "key.pem"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_place() == tmp_path / ".config" / "confide" / "key.pem"


def test_trusted_keys(tmp_path: Path) -> None:
    one, two = (public_text(new_key(tmp_path / f"{n}.pem")) for n in (1, 2))
    file = tmp_path / "trusted"
    file.write_text(f"# our partners\n{one}  Clinic North\n\n{two}\n")
    assert read_trusted(file) == {one: "Clinic North", two: fingerprint(two)}
    raw = bytes.fromhex(one.removeprefix("ed25519:"))
    assert fingerprint(one).replace("-", "") == hashlib.sha256(raw).hexdigest()
    assert fingerprint(one) != fingerprint(two)
    for text, message in (
        ("", "lists no key"),
        (f"{one}\n{two[:-1]} North", "line 2: .*no public key"),
        (f"{one.upper()} North", "line 1: .*no public key"),
    ):
        file.write_text(text)
        with pytest.raises(PrivacyError, match=message):
            read_trusted(file)
    with pytest.raises(PrivacyError, match="can't read the trusted keys"):
        read_trusted(tmp_path / "nowhere")
