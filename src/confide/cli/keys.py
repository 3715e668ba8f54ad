"""`confide keys`: the key by which a release's owner answers for its statement."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from confide.cli.output import print_json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from confide.privacy.statement import Statement

app = typer.Typer(help="Make and show the key that signs your statements.", no_args_is_help=True)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Key = Annotated[
    str | None,
    typer.Option(
        help="File of the key that signs the statement, or none; $CONFIDE_KEY or your own if left out."
    ),
]


@app.command("new")
def new(
    out: Annotated[
        Path | None,
        typer.Option(help="File to write; your own place in the configuration folder if left out."),
    ] = None,
    passphrase: Annotated[
        bool,
        typer.Option("--passphrase", help="Encrypt the file; asks, or reads $CONFIDE_PASSPHRASE."),
    ] = False,
    json: _Json = False,
) -> None:
    """Make a new Ed25519 key; it never replaces one."""
    from confide.errors import ConfigError
    from confide.privacy import signature

    file = out or signature.default_place()
    if file.exists():
        raise ConfigError(f"{file} exists already; a key is never replaced, so name another file with --out")
    secret = None
    if passphrase:
        secret = os.environ.get(signature.PASSPHRASE) or typer.prompt(
            "Passphrase", hide_input=True, confirmation_prompt=True, err=True
        )
    _show(file, signature.public_text(signature.new_key(file, secret)), json=json)


@app.command("show")
def show(
    file: Annotated[Path | None, typer.Argument(help="File of the key; your own if left out.")] = None,
    json: _Json = False,
) -> None:
    """Print the public key and its fingerprint: what others need to check your signature."""
    from confide.privacy import signature

    place = file or Path(os.environ.get(signature.VARIABLE) or signature.default_place())
    _show(place, signature.public_text(_load(place)), json=json)


def signing_key(option: str | None) -> Ed25519PrivateKey | None:
    """The key that a command signs with; None if there is none, or none is wanted.

    Raises:
        PrivacyError: a key that was asked for can't be read.
    """
    from confide.privacy import signature

    chosen = option or os.environ.get(signature.VARIABLE)
    if chosen == "none":
        return None
    if chosen is None and not signature.default_place().exists():
        return None
    return _load(Path(chosen) if chosen else signature.default_place())


def signed(statement: Statement) -> str:
    """What a command says of the signature of the statement that it wrote."""
    from confide.privacy.signature import fingerprint

    if statement.signature is None:
        return "Not signed: nobody asserts that noise was added. `confide keys new` makes a key."
    by = f"Signed by {fingerprint(statement.signature.key)}"
    if statement.kind == "merge":
        return f"{by}, which answers for the merge; the inputs' keys answer for the noise."
    return f"{by}, whose owner asserts that noise was added as stated."


def _load(file: Path) -> Ed25519PrivateKey:
    from confide.privacy import signature

    secret = os.environ.get(signature.PASSPHRASE)
    if secret is None and signature.is_encrypted(file) and sys.stdin.isatty():
        secret = typer.prompt(f"Passphrase of {file}", hide_input=True, err=True)
    return signature.load_key(file, secret)


def _show(file: Path, public: str, *, json: bool) -> None:
    from confide.privacy.signature import fingerprint

    if json:
        print_json({"file": str(file), "public": public, "fingerprint": fingerprint(public)})
        return
    print(f"file         {file}")
    print(f"public key   {public}")
    print(f"fingerprint  {fingerprint(public)}")
    print("Give others the public key, and compare the fingerprint by another way. The file stays with you.")
