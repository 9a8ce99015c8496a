"""`deltawire relay SRC DST`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..options.chain import PinOption, RunOption, TrustOption, check_url, reader_options
from ..options.common import JsonLinesOption, ThreadsOption, VerboseOption
from ..options.member import check_member_name
from ..options.metrics import MetricsOption, counted
from ..options.network import MaxRateOption, MaxRequestsOption, store_options
from ..output import figures
from ..output.event_notices import print_if_verbose, print_if_waiting
from ..output.progress import progress_bar
from ..output.terminal import print_json_line, print_line, print_notice
from ..process.ending import Ending
from ..process.exit_codes import exit_codes
from ..stores.opened import opened

if TYPE_CHECKING:
    from ...events import Event

_LONGEST_ENDING = 30.0
"""The command ends at most this many seconds after a signal. The next relay continues wherever the process ends."""


class Shortcuts(str, Enum):
    """The shortcuts that a relay makes in its region."""

    ALL = "all"
    ANCHORS = "anchors"
    NONE = "none"


def relay(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="The location of the chain to copy: the trainer's, or another relay's.", callback=check_url),
    ],
    target: Annotated[str, typer.Argument(metavar="DST", help="The location of the copy. Only relays write there.", callback=check_url)],
    poll: Annotated[float, typer.Option("--poll", min=0.01, metavar="SECONDS", help="Look for the next version this often.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Copy what there is, and end.")] = False,
    shortcuts: Annotated[
        Shortcuts,
        typer.Option(
            "--shortcuts",
            help="Make full checkpoints and skips in the region (all), only full checkpoints (anchors), or none, which needs no replica.",
        ),
    ] = Shortcuts.ALL,
    mirror: Annotated[
        Path | None,
        typer.Option("--mirror", metavar="DIR", help="Keep the replica in this directory, instead of in memory.", show_default=False),
    ] = None,
    spool: Annotated[
        Path | None,
        typer.Option(
            "--spool",
            metavar="DIR",
            help="Keep large objects in transit here. A relay that is started again with this directory continues their transfer.",
            show_default=False,
        ),
    ] = None,
    publish_as: Annotated[
        str | None,
        typer.Option(
            "--publish-as",
            metavar="NAME",
            help="Say in SRC where the copy is, for readers with --relays, as long as this command runs.",
            show_default=False,
            callback=check_member_name,
        ),
    ] = None,
    trust: TrustOption = None,
    run: RunOption = None,
    pin: PinOption = True,
    max_rate: MaxRateOption = None,
    max_requests: MaxRequestsOption = None,
    metrics: MetricsOption = None,
    threads: ThreadsOption = None,
    verbose: VerboseOption = False,
    json: JsonLinesOption = False,
) -> None:
    """Copy a chain to a store in another region, and keep the copy up to date.

    One copy of each version crosses the link, however many readers the region has: they read from DST (`--from DST`). The copy is the same
    chain, byte for byte, with the same hashes and signatures. Data come before commits, so readers of DST never see half a version. Full
    checkpoints and skips that the trainer makes later do not cross the link; they are made in the region from a replica of the model.

    The command prints a line for each version that it has copied. After a temporary error it prints a notice on stderr and tries again. It
    may be killed at any time, and several relays may write to the same DST. Ctrl-C and SIGTERM end it, with code 0 if DST has a version.
    --max-rate and --max-requests hold for SRC only.
    """
    with exit_codes(json, one_line=True), Ending(_LONGEST_ENDING) as ending, ExitStack() as stack:
        from ...relay import Relay
        from ...relay.relay import refuse_same_location

        origin = stack.enter_context(opened(source, verbose=verbose, options=store_options(max_rate, max_requests)))
        copy = stack.enter_context(opened(target, verbose=verbose))
        refuse_same_location(source, origin, target, copy)
        bar = stack.enter_context(ExitStack())  # the bar is only for the first version, which may take long
        listener = _Listener(json, verbose=verbose, before_line=bar.close)
        progress = bar.enter_context(progress_bar("relay", None, quiet=json or verbose))
        on_event = stack.enter_context(counted(metrics, ending.with_output(listener), publish_as))
        copier = stack.enter_context(
            Relay(
                origin,
                copy,
                options=reader_options(run, trust, pin=pin),
                mirror=mirror,
                spool=spool,
                shortcuts=shortcuts.value,
                publish_as=publish_as,
                threads=threads,
                progress=progress,
                on_event=on_event,
            )
        )
        if once:
            copied = copier.copy()
            made = copier.copy_shortcuts()
            listener.report_end(copied, made, copier.bytes_read)
            return
        try:
            for _ in copier.follow(poll=poll):
                pass  # the listener prints a line for each version
        except KeyboardInterrupt:
            if copier.version is None:
                raise


class _Listener:
    """Prints events as lines on stdout and notices on stderr, or as JSON lines."""

    def __init__(self, as_json: bool, *, verbose: bool, before_line: Callable[[], object]) -> None:
        self._json = as_json
        self._verbose = verbose
        self._before_line = before_line
        self._waited_for: set[str] = set()

    def __call__(self, event: Event) -> None:
        print_if_verbose(event, self._verbose)
        fields = event.fields
        if event.name == "relay-failed" and not fields.get("retryable"):
            return  # the error is raised, too
        if self._json:
            print_json_line(event.to_json())
        elif event.name == "relayed":
            behind = int(fields["behind"] or 0)
            parts = [
                f"version {fields['updates']}",
                "" if fields["step"] is None else f"step {fields['step']}",
                f"{behind} behind" if behind else "newest",
                figures.size(int(fields["bytes"] or 0)),
            ]
            self._before_line()
            print_line("  ".join(filter(None, parts)))
        elif event.name == "relay-failed":
            print_notice(f"will try again: {fields['reason']}")
        elif event.name == "shortcut-failed":
            print_notice(f"a shortcut could not be made: {fields['reason']}")
        else:
            print_if_waiting(event, self._waited_for)

    def report_end(self, copied: int, made: int, size: int) -> None:
        """Report what `--once` has done."""
        self._before_line()
        if self._json:
            print_json_line({"event": "relay-ended", "commits": copied, "shortcuts": made, "bytes": size})
        else:
            print_line(f"{copied:,} commits and {made:,} shortcuts copied; {figures.size(size)} were read")
