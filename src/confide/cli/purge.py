"""`confide purge`: destroy what could undo the noise of a run, and say what remains."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from confide.cli.output import print_json

if TYPE_CHECKING:
    from confide.finetune.checkpoint import Unfinished

_REMAINS = {
    "release": "may be shared",
    "report": "scores without noise: for whoever may see the data",
    "private": "losses without noise: never share",
}


def purge(
    run: Annotated[Path, typer.Argument(help="Folder of a run, finished or not.")],
    all_: Annotated[bool, typer.Option("--all", help="Its losses too: everything in private/.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Give up an unfinished run without asking.")] = False,
    ledger: Annotated[
        str | None, typer.Option(help="File or URL that the run was charged to; noted in the run.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document; asks nothing.")] = False,
) -> None:
    """Destroy a run's keys, caches and checkpoints; what it was charged stays charged."""
    from confide import files
    from confide.errors import ResumeError
    from confide.finetune.folder import RunFolder

    folder = RunFolder.of(run)
    destroyed: list[str] = []
    settled = False
    if folder.whole:
        folder.finish()
        destroyed.append("keys and checkpoints")
    elif folder.side.exists():
        with closing(folder.open()) as unfinished:
            if not yes:
                _ask(folder.side, json=json)
            settled = _settle(unfinished, ledger)
            unfinished.destroy()
            folder.remove()
        destroyed.append("keys and checkpoints")
    elif not (folder.out / "release").exists():
        raise ResumeError(f"there is no run in {folder.out}")
    if folder.out.parent.is_dir():
        files.sweep(folder.out.parent)
    if all_ and (folder.out / "private").exists():
        shutil.rmtree(folder.out / "private")
        destroyed.append("private/")
    remains = {name: about for name, about in _REMAINS.items() if (folder.out / name).exists()}
    if json:
        print_json({"destroyed": destroyed, "settled": settled, "remains": sorted(remains)})
        return
    print(f"Destroyed: {', '.join(destroyed) or 'nothing; a finished run has no keys left'}.")
    if destroyed:
        print(
            "The bytes of the keys were overwritten. An SSD, a snapshot or a copy-on-write file system may "
            "still hold them elsewhere; only an encrypted or a wiped disk is certain."
        )
    if settled:
        print("The ledger notes what ran; all that was planned stays charged.")
    for name, about in remains.items():
        print(f"Remains: {folder.out / name} ({about})")


def _ask(side: Path, *, json: bool) -> None:
    from confide.errors import ConfigError

    if json:
        raise ConfigError(f"{side} is unfinished; --yes gives it up")
    typer.confirm(
        f"{side} is unfinished and can't go on afterwards; what it was charged stays charged. Give it up?",
        abort=True,
    )


def _settle(unfinished: Unfinished, url: str | None) -> bool:
    """Note in the ledger what an abandoned run is known to have run; whether there was anything to note."""
    from confide.errors import ConfigError, PrivacyError
    from confide.finetune.charge import find
    from confide.privacy.ledger import Ledger

    noted = unfinished.charge()
    if noted is None:
        return False
    name, hashed = noted
    if url is None and "***" in name:
        raise ConfigError(f"the run was charged to {name}; name it with --ledger, its password is not stored")
    ledger = Ledger.open(url or name)
    charge = find(ledger, lambda entry: entry.hash == hashed)
    if charge is None or charge.entry is None:
        raise PrivacyError(
            f"the run was charged to the ledger {name}, but {ledger.name} doesn't know it: name that one "
            "with --ledger, or restore it"
        )
    if charge.settled or charge.refunded:
        return False
    ledger.settle(charge.entry, unfinished.steps_run())
    return True
