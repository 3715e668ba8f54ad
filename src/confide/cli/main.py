"""The `confide` command. Each command has a file of its own and imports what is heavy when it runs."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import TextIO

import typer

import confide
from confide.cli import (
    agree,
    evaluate,
    export,
    keys,
    ledger,
    merge,
    moe,
    personal,
    predict,
    privacy,
    purge,
    run,
    statistics,
    train,
    verify,
)
from confide.cli.output import shown
from confide.errors import ConfideError

_plain_warning = warnings.showwarning
_INTERRUPTED = (130, 128 + signal.SIGTERM)

app = typer.Typer(
    name="confide",
    help="Fine-tune transformers under differential privacy, merge the releases, and carry the claim along.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("agree")(agree.agree)
app.command("train")(train.train)
app.command("merge")(merge.merge)
app.command("statistics")(statistics.statistics)
app.command("export")(export.export)
app.command("predict")(predict.predict)
app.command("evaluate")(evaluate.evaluate)
app.command("run")(run.run)
app.command("verify")(verify.verify)
app.command("purge")(purge.purge)
app.add_typer(privacy.app, name="privacy")
app.add_typer(ledger.app, name="ledger")
app.add_typer(keys.app, name="keys")
app.add_typer(personal.app, name="personal")
app.add_typer(moe.app, name="moe")


@app.callback()
def options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
) -> None:
    """Options before the command."""
    if debug:
        os.environ["CONFIDE_DEBUG"] = "1"


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """confide's own warnings, without a place in its code that says nothing to a user."""
    if Path(filename).is_relative_to(Path(confide.__file__).parent):
        print(f"confide: warning: {shown(str(message))}", file=sys.stderr)
    else:
        _plain_warning(message, category, filename, lineno, file, line)


def main() -> None:
    """Run the command line; an error is one message on stderr and exit code 2, Ctrl-C is 130, SIGTERM 143."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(_INTERRUPTED[1]))
    warnings.showwarning = _warn
    try:
        app()
    except ConfideError as error:
        if os.environ.get("CONFIDE_DEBUG"):
            raise
        print(f"confide: {shown(str(error))}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:
        if end.code in _INTERRUPTED:  # typer turns Ctrl-C into the first
            print(
                "confide: interrupted; no half-written release was left, and noisy steps stay charged",
                file=sys.stderr,
            )
        raise
    except Exception as error:
        if os.environ.get("CONFIDE_DEBUG"):
            raise
        print(
            f"confide: unexpected {type(error).__name__}: {error}; `confide --debug` shows where",
            file=sys.stderr,
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
