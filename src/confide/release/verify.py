"""Every check of a release that needs nothing but its folder: what was looked at, and what was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from confide.errors import ConfideError, PrivacyError
from confide.privacy import statement as statements
from confide.privacy.account import Account, accounts
from confide.privacy.calibration import delta_warning
from confide.privacy.chain import Entry
from confide.privacy.chain import canonical as canonical_json
from confide.privacy.composition import canonical, check, recompute
from confide.privacy.lineage import DEEPEST, trace
from confide.privacy.signature import fingerprint, signer
from confide.privacy.statement import Said, Statement
from confide.privacy.words import round_up
from confide.release import card, format
from confide.release.hashes import file_hash
from confide.release.write import (
    check_agreement,
    check_files,
    check_names,
    check_statistics,
    check_tensors,
    check_weights,
)

UNSIGNED = "not signed: nobody asserts that noise was added"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        what: in a word or two.
        result: `note` is no fault, but something that a reader should know.
        detail: what was found, in a sentence.
    """

    what: str
    result: Literal["ok", "note", "failed"]
    detail: str


def examine(
    folder: Path, trusted: Mapping[str, str] | None = None, ledger: Sequence[Entry] | None = None
) -> tuple[Statement | None, tuple[Check, ...]]:
    """Check everything about a release, and go on after a failure where that makes sense.

    Args:
        folder: the release.
        trusted: names by public key. If given, every statement in the release, those of a merge's inputs
            too, must be signed by one of these keys.
        ledger: a whole, checked ledger, in which the run must be charged, or those of a merge's runs that
            are in this ledger.

    Returns:
        The statement (None if it can't be read) and the checks, in the order in which they were made.
        What was really trained can't be seen from the folder; nothing here looks at records.
    """
    folder = Path(folder)
    file = str(folder / statements.FILE_NAME)
    try:
        said = statements.load(folder)
        statement = statements.parse(said, file)
    except PrivacyError as error:
        return None, (Check("statement", "failed", str(error)),)
    checks = [
        Check("statement", "ok", f"of {_what(statement)}, written by confide {statement.confide}"),
        _tried("files", lambda: _files(folder, statement)),
        _tried("weights", lambda: _weights(folder, statement)),
        *_card(folder, statement),
        _tried("claim", lambda: _claim(statement)),
        _tried("signature", lambda: _signature(said, trusted, file)),
        *_inputs(statement, trusted, "input ", {}),
        *(_charged(run, ledger, alone=statement.kind == "training") for run in _runs(statement)),
    ]
    return statement, tuple(checks)


def _tried(what: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except ConfideError as error:
        return Check(what, "failed", str(error))


def _files(folder: Path, statement: Statement) -> Check:
    info = format.read(folder)
    check_names(folder)
    check_files(folder, statement)
    check_tensors(folder, info)
    check_agreement(folder, statement)
    if not statement.files:
        return Check("files", "note", "nothing besides a release; the statement holds hashes of weights only")
    return Check(
        "files", "ok", f"{len(statement.files)} files beside the weights, nothing missing or besides"
    )


def _weights(folder: Path, statement: Statement) -> Check:
    check_weights(folder, statement)
    check_statistics(folder, statement)
    return Check("weights", "ok", f"SHA-256 as stated: {', '.join(sorted(statement.weights))}")


def _card(folder: Path, statement: Statement) -> list[Check]:
    stated, file = statement.files.get(card.FILE_NAME), folder / card.FILE_NAME
    if stated is None or (file.is_file() and file_hash(file) == stated):
        return []
    said = "was edited or removed since; go by what is printed here, not by the card"
    return [Check("card", "note", f"{card.FILE_NAME} {said}")]


def _claim(statement: Statement) -> Check:
    check(statement)
    if statement.claim is None:
        return Check("claim", "note", f"nothing is claimed: {statement.no_claim}")
    honest = recompute(statement)
    assert honest is not None  # check raises otherwise
    runs = len(statement.spendings)
    warnings = (delta_warning(honest.delta, spending.units) for spending in statement.spendings)
    weak = next((warning for warning in warnings if warning), None)
    return Check(
        "claim",
        "note" if weak else "ok",
        f"ε = {round_up(statement.claim.epsilon)} at δ = {round_up(honest.delta, 3)}; recomputed from the "
        f"events of {runs} run{'s' if runs > 1 else ''}: {round_up(honest.epsilon)}"
        + (f"; {weak}" if weak else ""),
    )


def _signature(said: Said, trusted: Mapping[str, str] | None, where: str, what: str = "signature") -> Check:
    key = signer(said, where)
    if key is None:
        if trusted:
            raise PrivacyError(f"{UNSIGNED}; a signature by one of the given keys was demanded")
        return Check(what, "note", UNSIGNED)
    if trusted and key not in trusted:
        raise PrivacyError(f"signed by {fingerprint(key)} ({key}), which is none of the given keys")
    if not trusted:
        return Check(what, "ok", f"valid, by key {fingerprint(key)}; --key says whose that must be")
    return Check(what, "ok", f"valid, by {trusted[key]} ({fingerprint(key)})")


def _inputs(
    statement: Statement, trusted: Mapping[str, str] | None, prefix: str, seen: dict[str, str]
) -> list[Check]:
    """A line for the statement of every input, at any depth; their arithmetic is part of the claim.

    Args:
        seen: where each content stood first. It is looked into once, whatever the number of ways to it.
    """
    checks: list[Check] = []
    if prefix.count(".") > DEEPEST:
        return checks  # named already
    for number, said in enumerate(statement.inputs, start=1):
        what, content = f"{prefix}{number}", canonical_json(said)
        first = seen.setdefault(content, what)
        if first != what:
            checks.append(Check(what, "ok", f"the same statement as {first}"))
            continue

        def look(said: Said = said, what: str = what) -> Check:
            part = statements.parse(said, what)
            found = _signature(said, trusted, what, what)
            claim = f"ε = {round_up(part.claim.epsilon)}" if part.claim else "claims nothing"
            return Check(what, found.result, f"{_what(part)}, {claim}; {found.detail}")

        checks.append(_tried(what, look))
        if checks[-1].result != "failed":
            checks += _inputs(statements.parse(said, what), trusted, f"{what}.", seen)
    return checks


def _runs(statement: Statement) -> list[Statement]:
    """The training statements in a statement, each once."""
    try:
        found = [part.statement for part in trace(statement).every() if part.statement.kind == "training"]
    except PrivacyError:
        return []  # named already
    return list({run.spendings[0].run: run for run in found if run.spendings}.values())


def _charged(statement: Statement, entries: Sequence[Entry] | None, *, alone: bool) -> Check:
    """Whether a run is charged in the ledger, for what its statement says, and not refunded."""
    spending, noted = statement.spendings[0], statement.ledger
    if noted is None:
        result: Literal["note", "failed"] = "failed" if entries is not None and statement.claim else "note"
        return Check("ledger", result, f"run {spending.run} on {spending.dataset} names no ledger entry")
    if entries is None:
        return Check(
            "ledger", "note", f"run {spending.run}: entry {noted.entry[:12]}…; --ledger would compare it"
        )

    def look() -> Check:
        account = accounts(entries).get(canonical(spending.dataset), Account(""))
        charge = next((charge for charge in account.charges if charge.entry == noted.entry), None)
        hashes = [entry.hash for entry in entries]
        where = f"run {spending.run} on {spending.dataset}"
        if charge is None and not alone:
            return Check("ledger", "note", f"{where} isn't in this ledger; it may be in another owner's")
        if charge is None or noted.head not in hashes:
            raise PrivacyError(f"the ledger doesn't hold {where}, or was cut")
        unran: dict[str, Any] = {"steps_run": {}}
        if charge.spending.model_copy(update=unran) != spending.model_copy(update=unran):
            raise PrivacyError(f"the ledger charged run {spending.run} for something else")
        if charge.state == "refunded":
            raise PrivacyError(f"the ledger refunded run {spending.run}, as if it had asked nothing")
        return Check(
            "ledger", "ok", f"run {spending.run} is charged, as entry {hashes.index(noted.entry) + 1}"
        )

    return _tried("ledger", look)


def _what(statement: Statement) -> str:
    datasets = (
        ", ".join(dict.fromkeys(spending.dataset for spending in statement.spendings)) or "nothing stated"
    )
    return f"{'a run' if statement.kind == 'training' else 'a merge'} on {datasets}"
