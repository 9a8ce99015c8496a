"""The `deltawire` command. Some subcommands work on a chain of versions in an object store, others on a fleet, or on delta files.

commands/       one module per subcommand
options/        options that several commands share
process/        exit codes, signals, and commands that run until a signal
stores/         stores with notices, a trace of requests, and counted bytes
output/         text for people: lines, tables, pictures and progress bars
doctor/         the checks of `doctor`
chain_history   reads what `log` shows
channel_moves   moves a channel, for `promote` and `rollback`
delta_input     opens a delta file, for `apply` and `inspect`
publish_input   checks what `publish` is given
publish_check   compares a checkpoint with the chain, for `publish`

Exit codes: 0 success; 1 an error, after which nothing is left behind; 2 wrong usage; 3 `verify` found damage; 130 and 143 interrupted
(Ctrl-C, SIGTERM). A command imports its libraries when it runs, so that `--help` and `--version` answer at once.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from .. import __version__
from .commands import (
    apply,
    canary,
    channels,
    dashboard,
    diff,
    doctor,
    events,
    fleet,
    follow,
    gate,
    gateway,
    gc,
    inspect,
    keygen,
    log,
    member,
    members,
    plan,
    promote,
    publish,
    pull,
    relay,
    report,
    rollback,
    rollouts,
    serve,
    show,
    sidecar,
    top,
    verify,
)
from .output.help_text import PlainCommand
from .output.log_output import print_no_events
from .output.plain_output import never_fail_to_print
from .process.exit_codes import interrupt_on_termination
from .process.usage_errors import CommandsWithJsonErrors

_CHAINS, _FLEET, _FILES = "Chains of versions in an object store", "Fleets that make rollouts", "Delta files"
_LIVE = "Live traffic"

app = typer.Typer(
    name="deltawire",
    cls=CommandsWithJsonErrors,
    help="Send model weights from a trainer to many readers, as small and bit-exact deltas.\n\n"
    "`deltawire publish CKPT URL` adds a checkpoint to a chain of versions in an object store or a directory. `deltawire pull URL DIR` "
    "fetches a version, and `deltawire follow URL DIR` keeps a directory up to date.",
    epilog="Exit codes: 0 success; 1 an error, which stderr explains; 2 wrong usage; 3 `verify` found damage; "
    "130 interrupted by Ctrl-C, 143 by SIGTERM.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
)
app.command("publish", cls=PlainCommand, rich_help_panel=_CHAINS)(publish.publish)
app.command("pull", cls=PlainCommand, rich_help_panel=_CHAINS)(pull.pull)
app.command("follow", cls=PlainCommand, rich_help_panel=_CHAINS)(follow.follow)
app.command("relay", cls=PlainCommand, rich_help_panel=_CHAINS)(relay.relay)
app.command("sidecar", cls=PlainCommand, rich_help_panel=_CHAINS)(sidecar.sidecar)
app.command("canary", cls=PlainCommand, rich_help_panel=_CHAINS)(canary.canary)
app.command("promote", cls=PlainCommand, rich_help_panel=_CHAINS)(promote.promote)
app.command("rollback", cls=PlainCommand, rich_help_panel=_CHAINS)(rollback.rollback)
app.command("channels", cls=PlainCommand, rich_help_panel=_CHAINS)(channels.channels)
app.command("gate", cls=PlainCommand, rich_help_panel=_CHAINS)(gate.gate)
app.command("log", cls=PlainCommand, rich_help_panel=_CHAINS)(log.log)
app.command("events", cls=PlainCommand, rich_help_panel=_CHAINS)(events.events)
app.command("show", cls=PlainCommand, rich_help_panel=_CHAINS)(show.show)
app.command("verify", cls=PlainCommand, rich_help_panel=_CHAINS)(verify.verify)
app.command("doctor", cls=PlainCommand, rich_help_panel=_CHAINS)(doctor.doctor)
app.command("dashboard", cls=PlainCommand, rich_help_panel=_CHAINS)(dashboard.dashboard)
app.command("report", cls=PlainCommand, rich_help_panel=_CHAINS)(report.report)
app.command("gc", cls=PlainCommand, rich_help_panel=_CHAINS)(gc.gc)
app.command("keygen", cls=PlainCommand, rich_help_panel=_CHAINS)(keygen.keygen)
app.command("member", cls=PlainCommand, rich_help_panel=_FLEET)(member.member)
app.command("fleet", cls=PlainCommand, rich_help_panel=_FLEET)(fleet.fleet)
app.command("members", cls=PlainCommand, rich_help_panel=_FLEET)(members.members)
app.command("rollouts", cls=PlainCommand, rich_help_panel=_FLEET)(rollouts.rollouts)
app.command("plan", cls=PlainCommand, rich_help_panel=_FLEET)(plan.plan)
app.command("top", cls=PlainCommand, rich_help_panel=_FLEET)(top.top)
app.command("gateway", cls=PlainCommand, rich_help_panel=_LIVE)(gateway.gateway)
app.command("serve", cls=PlainCommand, rich_help_panel=_LIVE)(serve.serve)
app.command("diff", cls=PlainCommand, rich_help_panel=_FILES)(diff.diff)
app.command("apply", cls=PlainCommand, rich_help_panel=_FILES)(apply.apply)
app.command("inspect", cls=PlainCommand, rich_help_panel=_FILES)(inspect.inspect)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"deltawire {__version__}")
        raise typer.Exit


_Version: TypeAlias = Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)]


@app.callback()
def _options(version: _Version = False) -> None:
    pass


def main() -> None:
    """Run the command line of this process, and exit with its code."""
    never_fail_to_print()
    print_no_events()
    interrupt_on_termination()
    app(prog_name="deltawire")
