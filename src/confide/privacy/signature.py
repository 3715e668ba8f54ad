"""Who answers for a statement: Ed25519 signatures (RFC 8032) over its canonical JSON.

A signature shows that a statement, hence the weights whose hashes it holds, is as the key's owner released
it. That noise was added can't be seen from outside: the owner of the key asserts it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from confide.errors import PrivacyError
from confide.privacy.chain import canonical
from confide.privacy.statement import Signature, Statement

VARIABLE = "CONFIDE_KEY"
PASSPHRASE = "CONFIDE_PASSPHRASE"
_PREFIX = "ed25519:"


def default_place() -> Path:
    """Where a user's own key lies: `confide/key.pem` in the configuration folder."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "confide" / "key.pem"


def new_key(file: Path, passphrase: str | None = None) -> Ed25519PrivateKey:
    """Make a key and write it, PKCS #8 in PEM, readable by its owner only.

    Args:
        file: must not exist.
        passphrase: encrypts the file; None leaves it plain.

    Raises:
        PrivacyError: the file exists, can't be written, or the passphrase is empty.
    """
    if passphrase == "":
        raise PrivacyError("an empty passphrase protects nothing; leave it out, or type one")
    key = Ed25519PrivateKey.generate()
    content = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(passphrase.encode())
        if passphrase
        else serialization.NoEncryption(),
    )
    side = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(side, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        os.link(side, file)  # unlike a rename, it replaces nothing
    except FileExistsError:
        raise PrivacyError(f"{file} exists already; a key is never replaced, so name another file") from None
    except OSError as error:
        raise PrivacyError(f"can't write the key {file}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            side.unlink()
    return key


def load_key(file: str | Path, passphrase: str | None = None) -> Ed25519PrivateKey:
    """Read a private key.

    Raises:
        PrivacyError: no such file, others can read it, a wrong or missing passphrase, or no Ed25519 key.
    """
    file = Path(file)
    try:
        content = file.read_bytes()
        mode = file.stat().st_mode & 0o077
    except OSError as error:
        raise PrivacyError(f"can't read the key {file}: {error.strerror or error}") from None
    if mode and os.name == "posix":
        raise PrivacyError(f"others than you can read the key {file}; `chmod 600` it, or make a new one")
    try:
        key = serialization.load_pem_private_key(content, passphrase.encode() if passphrase else None)
    except TypeError:
        if passphrase is None:
            raise PrivacyError(
                f"the key {file} needs its passphrase; set {PASSPHRASE}, or run where you can type it"
            ) from None
        return load_key(file)  # a passphrase for a key that has none
    except (ValueError, UnsupportedAlgorithm):
        reason = "the passphrase is wrong, or the file" if passphrase else "the file"
        raise PrivacyError(f"can't read the key {file}: {reason} is no private key in PEM") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise PrivacyError(f"{file} holds no Ed25519 key; `confide keys new` makes one")
    return key


def is_encrypted(file: Path) -> bool:
    """Whether a key's file needs a passphrase."""
    try:
        return b"ENCRYPTED" in file.read_bytes()
    except OSError:
        return False


def public_text(key: Ed25519PrivateKey) -> str:
    """The public key, as statements hold it."""
    raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return _PREFIX + raw.hex()


def fingerprint(public: str) -> str:
    """What two people compare by another way: SHA-256 of a public key, in eight groups.

    All 256 bits: whoever sees less of it can be shown another key with the same fingerprint.

    Raises:
        PrivacyError: not a public key.
    """
    digest = hashlib.sha256(_public(public).public_bytes_raw()).hexdigest()
    return "-".join(digest[start : start + 8] for start in range(0, len(digest), 8))


def sign(statement: Statement, key: Ed25519PrivateKey) -> Statement:
    """The statement with a signature of everything else in it."""
    value = key.sign(_message(statement.to_json())).hex()
    return statement.model_copy(update={"signature": Signature(key=public_text(key), value=value)})


def signer(said: Mapping[str, Any], where: str = "the statement") -> str | None:
    """Check a statement's signature.

    Args:
        said: the statement's JSON, as it was written.
        where: what a message calls it.

    Returns:
        The public key that signed it; None if nobody did.

    Raises:
        PrivacyError: the signature isn't that key's, or the statement was changed after it was signed.
    """
    found = said.get("signature")
    if found is None:
        return None
    try:
        key, value = str(found["key"]), bytes.fromhex(found["value"])
    except (KeyError, TypeError, ValueError):
        raise PrivacyError(f"{where} has a signature that can't be read") from None
    try:
        _public(key).verify(value, _message(said))
    except InvalidSignature:
        raise PrivacyError(
            f"{where} was changed after it was signed, or was never signed by the key that it names "
            f"({fingerprint(key)})"
        ) from None
    return key


def read_trusted(file: Path) -> dict[str, str]:
    """Names by public key, from a file with one `KEY NAME` a line; `#` starts a comment.

    Raises:
        PrivacyError: the file can't be read, or a line is no key.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise PrivacyError(f"can't read the trusted keys {file}: {error}") from None
    names: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        key, _, name = line.partition("#")[0].strip().partition(" ")
        if not key:
            continue
        try:
            names[key] = name.strip() or fingerprint(key)
            _public(key)
        except PrivacyError as error:
            raise PrivacyError(f"{file}, line {number}: {error}") from None
    if not names:
        raise PrivacyError(f"{file} lists no key; write one `KEY NAME` a line")
    return names


def _public(text: str) -> Ed25519PublicKey:
    digits = text.removeprefix(_PREFIX)
    if not text.startswith(_PREFIX) or len(digits) != 64 or set(digits) - set("0123456789abcdef"):
        raise PrivacyError(
            f"{text[:80]!r} is no public key; it looks like {_PREFIX} and 64 hexadecimal digits"
        )
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(digits))


def _message(said: Mapping[str, Any]) -> bytes:
    return canonical({name: value for name, value in said.items() if name != "signature"}).encode()
