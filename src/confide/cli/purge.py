"""`confide purge`: destroy what could undo the noise of a run, and say what remains."""

from __future__ import annotations

import shutil
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
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


@dataclass
class _Purged:
    """What came of it.

    Attributes:
        destroyed: in words.
        settled: whether the ledger now notes what ran.
        waits: why some of that has to wait, run by run.
    """

    destroyed: list[str] = field(default_factory=list)
    settled: bool = False
    waits: list[str] = field(default_factory=list)

    def give_up(self, unfinished: Unfinished, url: str | None) -> None:
        """Settle a run, or note why that has to wait, and destroy its keys."""
        noted, why = _settled_or_noted(unfinished, url)
        self.settled = self.settled or noted
        self.waits += [why] if why else []
        unfinished.destroy()
        if _KEYS not in self.destroyed:
            self.destroyed.append(_KEYS)


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
    from confide.experiment.finished import is_study, locked
    from confide.finetune.folder import RunFolder

    folder = RunFolder.of(run)
    purged = _Purged()
    study = is_study(folder.out)
    if folder.whole:
        folder.finish()
        purged.destroyed.append(_KEYS)
    elif folder.side.exists():
        with closing(folder.open()) as unfinished:
            if not yes:
                _ask(f"{folder.side} is unfinished and can't go on afterwards", json=json)
            purged.give_up(unfinished, ledger)
            folder.remove()
    elif not study and not (folder.out / "release").exists():
        raise ResumeError(f"there is no run in {folder.out}")
    with locked(folder.out) if study else nullcontext():  # nobody else is at work on a study
        if study:
            _give_up_runs(folder.out, purged, ledger, yes=yes, json=json)
        if folder.out.parent.is_dir():
            files.sweep(folder.out.parent)
        if all_ and (folder.out / "private").exists():
            shutil.rmtree(folder.out / "private")
            purged.destroyed.append("private/")
    remains = {name: about for name, about in _REMAINS.items() if (folder.out / name).exists()}
    if json:
        print_json(
            {
                "destroyed": purged.destroyed,
                "settled": purged.settled,
                "unsettled": "; ".join(purged.waits) or None,
                "remains": sorted(remains),
            }
        )
        return
    print(f"Destroyed: {', '.join(purged.destroyed) or 'nothing; a finished run has no keys left'}.")
    if _KEYS in purged.destroyed:
        print(
            "The bytes of the keys were overwritten. An SSD, a snapshot or a copy-on-write file system may "
            "still hold them elsewhere; only an encrypted or a wiped disk is certain."
        )
    if purged.settled:
        print("The ledger notes what ran; all that was planned stays charged.")
    for why in purged.waits:
        print(f"All that was planned stays charged, but what ran could not be noted in the ledger: {why}.")
    if purged.waits:
        print("What could be written down is noted when you next use that ledger, wherever it is then.")
    for name, about in remains.items():
        print(f"Remains: {folder.out / name} ({about})")


def _give_up_runs(out: Path, purged: _Purged, url: str | None, *, yes: bool, json: bool) -> None:
    """Give up the runs of a study that were broken off: all that can be, whatever one of them holds.

    Raises:
        ConfideError: the first that couldn't be.
    """
    from confide.experiment.finished import unfinished_runs
    from confide.finetune.checkpoint import Unfinished

    broken_off = unfinished_runs(out)
    if broken_off and not yes:
        _ask(
            f"{len(broken_off)} run(s) of the study in {out} are unfinished, and would be charged anew",
            json=json,
        )
    failed: list[ConfideError] = []
    for place in broken_off:
        try:
            with closing(Unfinished.open(place)) as unfinished:
                purged.give_up(unfinished, url)
        except ConfideError as error:
            failed.append(error)
    if failed:
        raise failed[0]


def _ask(what: str, *, json: bool) -> None:
    from confide.errors import ConfigError

    if json:
        raise ConfigError(f"{what}; --yes gives it up")
    typer.confirm(f"{what}; what was charged stays charged. Give it up?", abort=True)


def _settled_or_noted(unfinished: Unfinished, url: str | None) -> tuple[bool, str | None]:
    """Settle an abandoned run, or leave a note for later: no ledger keeps keys from being destroyed.

    Returns:
        Whether it was settled, and why that has to wait.

    Raises:
        PrivacyError: the ledger that was named doesn't know the run.
    """
    from confide.errors import ConfigError, PrivacyError, ReleaseError, ResumeError
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
    try:
        unsettled.note(name, hashed, unfinished.steps_run())
    except ReleaseError as error:  # no ledger, and no note either, keeps keys alive
        return False, f"{reason}; nor could it be written down for later: {error}"
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
