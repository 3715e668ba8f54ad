"""`confide verify`: does a release hold what it claims, and who answers for it?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from confide.cli.output import print_json, print_table

if TYPE_CHECKING:
    from confide.privacy.chain import Entry
    from confide.release.verify import Check


def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A release folder.")],
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="A public key: everything must be signed by this one, or another one that you name."
        ),
    ] = None,
    trusted: Annotated[
        list[Path] | None, typer.Option(help="A file of such keys, one `KEY NAME` a line.")
    ] = None,
    ledger: Annotated[
        str | None,
        typer.Option(help="A ledger, or what `confide ledger export` wrote: the runs must be charged in it."),
    ] = None,
    inputs: Annotated[
        list[Path] | None,
        typer.Option(
            "--input",
            help="A model that was merged. With all of them and --base, some tensors are merged again.",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="The public base of the --input models: a folder, hub id or package:NAME."),
    ] = None,
    statistics: Annotated[
        list[Path] | None,
        typer.Option(help="What it was merged by, as in `confide merge`; released statistics are found."),
    ] = None,
    sample: Annotated[int, typer.Option(min=1, help="How many tensors to merge again, drawn at random.")] = 5,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check a release: files, claim and signatures, also those of what was merged."""
    from confide.errors import ReleaseError
    from confide.privacy.signature import fingerprint, read_trusted
    from confide.release.verify import examine

    names = {public: fingerprint(public) for public in key or ()}
    for file in trusted or ():
        names |= read_trusted(file)
    statement, checks = examine(folder, names, _entries(ledger) if ledger is not None else None)
    if inputs or base:
        checks = (*checks, _rederived(folder, inputs or [], base, sample, statistics or []))
    failed = [check for check in checks if check.result == "failed"]
    if json:
        print_json(
            {
                "release": str(folder),
                "verified": not failed,
                "signed_by": statement.signature.key if statement and statement.signature else None,
                "checks": [dataclasses.asdict(check) for check in checks],
            }
        )
    else:
        rows = [(check.what, check.result, check.detail) for check in checks]
        print_table(str(folder), ("what", "result", "detail"), rows, words=3)
    if failed:
        raise ReleaseError(f"{folder} is not what it claims to be: {failed[0].what}: {failed[0].detail}")
    if not json:
        signed = statement is not None and statement.signature is not None
        print(
            "Arithmetic and integrity were checked. That noise was added can't be seen: "
            + ("it is asserted by who signed." if signed else "nobody signed, so nobody asserts it.")
        )


def _rederived(
    folder: Path, inputs: list[Path], base: str | None, sample: int, statistics: list[Path]
) -> Check:
    """Whether some tensors of a merge come out of its inputs again."""
    from confide.errors import ConfideError, ConfigError
    from confide.merging.statistics import split
    from confide.merging.verify import rederive
    from confide.models.resolve import resolve
    from confide.release.verify import Check

    if base is None or not inputs:
        raise ConfigError("to merge tensors again, give both --base and every model as --input")
    try:
        given, text = split(statistics)
        with _files(given, text, folder, inputs, resolve(base)) as files:
            found = rederive(folder, inputs, resolve(base), sample, statistics=files)
    except ConfideError as error:
        return Check("tensors", "failed", str(error))
    if found.differing:
        return Check("tensors", "failed", f"merged again, {', '.join(found.differing)} came out different")
    return Check(
        "tensors", "ok", f"{len(found.checked)} of {found.of}, drawn at random, came out the same again"
    )


def _files(
    given: Sequence[Path], text: Path | None, folder: Path, inputs: list[Path], base: Path
) -> AbstractContextManager[Sequence[Path]]:
    """Files of statistics: as given, or computed again on the public text."""
    if text is None:
        return nullcontext(given)
    from confide.finetune.statistics import statistics_on
    from confide.merging.verify import needs

    return statistics_on(text, inputs, needs(folder), base)


def _entries(source: str) -> tuple[Entry, ...]:
    from confide.errors import PrivacyError
    from confide.privacy import chain
    from confide.privacy.ledger import Ledger

    if "://" in source:
        return Ledger.open(source).verify()
    if not Path(source).exists():
        raise PrivacyError(f"there is no ledger {source}")
    if Path(source).suffix == ".json":
        return chain.read_export(Path(source))
    return Ledger.open(source).verify()
