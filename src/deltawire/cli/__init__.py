"""The `deltawire` command: `diff` makes a delta of two checkpoints, `apply` turns one into the other, `inspect` shows what a delta holds.

Exit codes: 0 done; 1 it could not be done, and nothing was left behind; 2 wrong usage; 130 and 143 interrupted (Ctrl-C, SIGTERM).
A command imports what it works with when it runs, so that `--help` and `--version` answer at once.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from .. import __version__
from . import apply, diff, inspect
from .terminal import interrupt_on_termination

app = typer.Typer(
    name="deltawire",
    help="Bit-exact weight updates: make, apply and inspect deltas of safetensors checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("diff")(diff.diff)
app.command("apply")(apply.apply)
app.command("inspect")(inspect.inspect)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"deltawire {__version__}")
        raise typer.Exit


_Version: TypeAlias = Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)]


@app.callback()
def _options(version: _Version = False) -> None:
    pass


def main() -> None:
    """Run the command line of this process and exit with its code."""
    interrupt_on_termination()
    app(prog_name="deltawire")
