"""`confide privacy`: what a setting costs, what a budget needs, what a release claims."""

from __future__ import annotations

import typer

app = typer.Typer(help="Compute and check privacy claims.", no_args_is_help=True)
