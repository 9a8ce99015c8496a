"""The `deltawire` command, a module per subcommand. Some work on delta files, the others on a chain of versions in an object store.

Exit codes: 0 done; 1 it could not be done, and nothing was left behind; 2 wrong usage; 3 `verify` found damage; 130 and 143 interrupted
(Ctrl-C, SIGTERM). A command imports what it works with when it runs, so that `--help` and `--version` answer at once.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from .. import __version__
from .commands import (
    apply,
    diff,
    fleet,
    follow,
    gc,
    inspect,
    keygen,
    log,
    member,
    members,
    publish,
    pull,
    rollouts,
    show,
    sidecar,
    top,
    verify,
)
from .output.plain_output import never_fail_to_print
from .process.exit_codes import interrupt_on_termination
from .process.usage_errors import CommandsWithJsonErrors

_CHAINS, _FLEET, _FILES = "Versions in an object store", "Rollouts for a run", "Delta files"

app = typer.Typer(
    name="deltawire",
    cls=CommandsWithJsonErrors,
    help="Bit-exact weight updates of safetensors checkpoints: as a chain of versions in an object store, or delta by delta.",
    epilog="Exit codes: 0 done; 1 it could not be done, and stderr says why; 2 wrong usage; 3 verify found damage; "
    "130 interrupted by Ctrl-C, 143 by SIGTERM.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
)
app.command("publish", rich_help_panel=_CHAINS)(publish.publish)
app.command("pull", rich_help_panel=_CHAINS)(pull.pull)
app.command("follow", rich_help_panel=_CHAINS)(follow.follow)
app.command("sidecar", rich_help_panel=_CHAINS)(sidecar.sidecar)
app.command("log", rich_help_panel=_CHAINS)(log.log)
app.command("show", rich_help_panel=_CHAINS)(show.show)
app.command("verify", rich_help_panel=_CHAINS)(verify.verify)
app.command("gc", rich_help_panel=_CHAINS)(gc.gc)
app.command("keygen", rich_help_panel=_CHAINS)(keygen.keygen)
app.command("member", rich_help_panel=_FLEET)(member.member)
app.command("fleet", rich_help_panel=_FLEET)(fleet.fleet)
app.command("members", rich_help_panel=_FLEET)(members.members)
app.command("rollouts", rich_help_panel=_FLEET)(rollouts.rollouts)
app.command("top", rich_help_panel=_FLEET)(top.top)
app.command("diff", rich_help_panel=_FILES)(diff.diff)
app.command("apply", rich_help_panel=_FILES)(apply.apply)
app.command("inspect", rich_help_panel=_FILES)(inspect.inspect)


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
    never_fail_to_print()
    interrupt_on_termination()
    app(prog_name="deltawire")
