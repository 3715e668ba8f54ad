"""`confide purge`: destroy what could undo the noise of a run, and say what remains."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from confide.cli.output import print_json
from confide.errors import ConfideError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from confide.finetune.checkpoint import Unfinished
    from confide.privacy.ledger import Ledger


class _UnknownRunError(ConfideError):
    """A ledger that can be used, but isn't the one."""


_KEYS = "keys and checkpoints"
_REMAINS = {
    "release": "may be shared",
    "models": "may be shared",
    "merged": "may be shared",
    "report": "scores without noise: for whoever may see the data",
    "private": "losses without noise: never share",
}


def purge(
    run: Annotated[Path, typer.Argument(help="Folder of a run or a study, finished or not.")],
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
    from confide.experiment.finished import desk, unfinished_runs
    from confide.finetune.checkpoint import Unfinished
    from confide.finetune.folder import RunFolder

    folder = RunFolder.of(run)
    destroyed: list[str] = []
    settled, waits = False, None
    if folder.whole:
        folder.finish()
        destroyed.append(_KEYS)
    elif folder.side.exists():
        with closing(folder.open()) as unfinished:
            if not yes:
                _ask(folder.side, json=json)
            settled, waits = _give_up(unfinished, ledger)
            folder.remove()
        destroyed.append(_KEYS)
    elif broken_off := unfinished_runs(folder.out):
        with desk(folder.out):  # nobody else is at work on the study
            if not yes:
                _ask(folder.out, json=json)
            for place in broken_off:
                with closing(Unfinished.open(place)) as unfinished:
                    noted, waits = _give_up(unfinished, ledger)
                    settled = settled or noted
        destroyed.append(_KEYS)
    elif not any((folder.out / name).exists() for name in ("release", "models")):
        raise ResumeError(f"there is no run in {folder.out}")
    if folder.out.parent.is_dir():
        files.sweep(folder.out.parent)
    if all_ and (folder.out / "private").exists():
        shutil.rmtree(folder.out / "private")
        destroyed.append("private/")
    remains = {name: about for name, about in _REMAINS.items() if (folder.out / name).exists()}
    if json:
        print_json(
            {
                "destroyed": destroyed,
                "settled": settled,
                "unsettled": waits,
                "remains": sorted(remains),
            }
        )
        return
    print(f"Destroyed: {', '.join(destroyed) or 'nothing; a finished run has no keys left'}.")
    if _KEYS in destroyed:
        print(
            "The bytes of the keys were overwritten. An SSD, a snapshot or a copy-on-write file system may "
            "still hold them elsewhere; only an encrypted or a wiped disk is certain."
        )
    if settled:
        print("The ledger notes what ran; all that was planned stays charged.")
    if waits:
        print(f"All that was planned stays charged, but what ran could not be noted in the ledger: {waits}.")
        print("It is noted when you next use that ledger, wherever it is then.")
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


def _give_up(unfinished: Unfinished, url: str | None) -> tuple[bool, str | None]:
    """Settle a run, or note why that has to wait (`_settled_or_noted`), and destroy its keys."""
    answer = _settled_or_noted(unfinished, url)
    unfinished.destroy()
    return answer


def _settled_or_noted(unfinished: Unfinished, url: str | None) -> tuple[bool, str | None]:
    """Settle an abandoned run, or leave a note for later: no ledger keeps keys from being destroyed.

    Returns:
        Whether it was settled, and why that has to wait.

    Raises:
        PrivacyError: the ledger that was named doesn't know the run.
    """
    from confide.errors import ConfigError, PrivacyError, ResumeError
    from confide.privacy import unsettled
    from confide.privacy.ledger import Ledger

    try:
        noted = unfinished.charge()
    except ResumeError as error:  # which entry it is can't be known: it stays as it is, charged
        return False, str(error)
    if noted is None:
        return False, None
    name, hashed = noted
    try:
        if url is None and "***" in name:
            raise ConfigError(f"it was charged to {name}, whose password is not stored; --ledger names it")
        ledger = Ledger.open(url or name, start=False)
        return _settle(ledger, hashed, unfinished.steps_run()), None
    except _UnknownRunError as error:
        if url is not None:
            raise PrivacyError(f"{error}: name that one with --ledger, or leave --ledger out") from None
        reason: ConfideError = error
    except (PrivacyError, ConfigError) as error:
        reason = error
    unsettled.note(name, hashed, unfinished.steps_run())
    return False, str(reason)


def _settle(ledger: Ledger, hashed: str, steps_run: Mapping[str, int]) -> bool:
    """Note in the ledger what an abandoned run is known to have run; whether there was anything to note."""
    from confide.finetune.charge import find

    charge = find(ledger, lambda entry: entry.hash == hashed)
    if charge is None or charge.entry is None:
        raise _UnknownRunError(f"the run was charged to another ledger; {ledger.name} doesn't know it")
    if charge.settled or charge.refunded:
        return False
    ledger.settle(charge.entry, steps_run)
    return True
