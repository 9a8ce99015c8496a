"""`deltawire follow URL DIR`."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options.chain import FromOption, HostCacheOption, PinOption, RelaysOption, RunOption, TrustOption, UrlArgument, reader_options
from ..options.channels import ChannelOption
from ..options.common import JsonLinesOption, ThreadsOption, VerboseOption
from ..options.metrics import MetricsOption, counted
from ..options.network import MaxRateOption, MaxRequestsOption, store_options
from ..output import figures
from ..output.event_notices import print_if_not_shared, print_if_verbose, print_if_waiting
from ..output.progress import progress_bar
from ..output.terminal import print_json_line, print_line, print_notice
from ..process.ending import Ending
from ..process.exit_codes import exit_codes
from ..stores.opened import opened

_LONGEST_ENDING = 30.0
"""The command ends at most this many seconds after a signal. A mirror stays usable wherever the process ends."""

if TYPE_CHECKING:
    from ...chain.version import Version
    from ...events import Event


def follow(
    url: UrlArgument,
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="The directory of the mirror: a new one, or the one of an earlier call.", show_default=False),
    ],
    poll: Annotated[float, typer.Option("--poll", min=0.01, metavar="SECONDS", help="Look for the next version this often.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Fetch the newest version, and end.")] = False,
    max_silence: Annotated[
        float | None,
        typer.Option(
            "--max-silence",
            min=0.0,
            metavar="SECONDS",
            help="Report it as an error if the newest commit is older than this.",
            show_default=False,
        ),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option("--exec", metavar="CMD", help="Run this shell command after each new version. See above.", show_default=False),
    ] = None,
    channel: ChannelOption = None,
    copies: FromOption = None,
    relays: RelaysOption = False,
    trust: TrustOption = None,
    run: RunOption = None,
    pin: PinOption = True,
    max_rate: MaxRateOption = None,
    max_requests: MaxRequestsOption = None,
    host_cache: HostCacheOption = "off",
    metrics: MetricsOption = None,
    threads: ThreadsOption = None,
    verbose: VerboseOption = False,
    json: JsonLinesOption = False,
) -> None:
    """Keep a directory up to date with the newest version of a chain, or with a channel.

    DIR/current is a complete checkpoint at any time. The command prints a line for each version that it reaches. It skips versions if they
    are published faster than it can fetch them. After a temporary error, such as a store that does not answer, it prints a notice on
    stderr, keeps the last version, and tries again. Ctrl-C and SIGTERM end it, with code 0 if DIR holds a version.

    The shell command of --exec runs for each version. Its environment has DELTAWIRE_PATH (the checkpoint's directory, which does not change
    while the shell command runs), DELTAWIRE_VERSION, DELTAWIRE_STEP, DELTAWIRE_SEQ, DELTAWIRE_DIGEST and DELTAWIRE_URL. `follow` fetches
    the next version when the shell command has ended. If the shell command fails, `follow` prints a notice and continues; it runs the
    command again for the next version, or when it is started again. With --once it then ends with code 1.
    """
    with exit_codes(json, one_line=True), Ending(_LONGEST_ENDING) as ending, ExitStack() as stack:
        from ...subscribe.mirror.mirror import Mirror
        from ...subscribe.subscriber import Subscriber
        from ..process.exec_hook import ExecHook
        from ..stores.metered_store import MeteredStore

        Mirror(directory).refuse_misplaced(
            usage="deltawire follow URL DIR"
        )  # now, because `Subscriber` waits if the chain does not exist yet
        bar = stack.enter_context(ExitStack())
        progress = bar.enter_context(progress_bar(f"sync {directory.name}", None, quiet=json or verbose))
        listener = _Listener(json, is_patient=not once, verbose=verbose)
        limits = store_options(max_rate, max_requests)
        reading = reader_options(
            run, trust, max_silence=max_silence, pin=pin, store=limits, host_cache=host_cache, relays=relays, channel=channel
        )
        store = stack.enter_context(opened(url, copies=copies, reading=reading, verbose=verbose))
        on_event = stack.enter_context(counted(metrics, ending.with_output(listener)))
        subscriber = stack.enter_context(
            Subscriber(
                MeteredStore(store, progress),
                directory,
                options=reading,
                threads=threads,
                on_event=on_event,
            )
        )
        hook = None if command is None else ExecHook(command, directory, url, stdout_to_stderr=json)

        def run_command(version: Version | None) -> bool:
            """Return whether the command succeeded, or did not have to run."""
            if hook is None or version is None or subscriber.path is None:
                return True
            status = hook.run(version, subscriber.path)
            if status:
                listener.report_failure(version, status)
            return not status

        if once:
            version = subscriber.sync()
            bar.close()
            listener.report(version)
            if not run_command(version):
                raise typer.Exit(1)
            return
        if subscriber.version is not None and not json:
            print_notice(f"the mirror is at version {subscriber.version.updates}")
        try:
            run_command(subscriber.version)
            for version in subscriber.follow(poll=poll):
                bar.close()  # the bar is only for the first version, which may take long
                listener.report(version)
                run_command(version)
        except KeyboardInterrupt:
            if subscriber.version is None:
                raise


class _Listener:
    """Prints events as lines on stdout and notices on stderr, or as JSON lines."""

    def __init__(self, as_json: bool, *, is_patient: bool, verbose: bool) -> None:
        self._json = as_json
        self._verbose = verbose
        self._is_patient = is_patient
        self._synced: dict[str, Any] = {}
        self._reported: set[str] = set()

    def __call__(self, event: Event) -> None:
        print_if_verbose(event, self._verbose)
        if event.name == "synced":
            self._synced = dict(event.fields)
            return
        if event.name == "sync-failed" and not (self._is_patient and event.fields.get("retryable")):
            return  # the error is raised, too
        if self._json:
            print_json_line(event.to_json())
        elif event.name == "sync-failed":
            print_notice(f"will try again: {event.fields['reason']}")
        elif event.name == "resynced":
            print_notice(f"version {event.fields['updates']} was rebuilt from a full checkpoint, because no deltas led there")
        else:
            print_if_waiting(event, self._reported)
            print_if_not_shared(event, self._reported)

    def report_failure(self, version: Version, status: int) -> None:
        """Report that the command of --exec failed."""
        if self._json:
            print_json_line({"event": "exec-failed", "version": version.updates, "seq": version.seq, "status": status})
        else:
            from ..process.exec_hook import describe_status

            print_notice(f"the command of --exec {describe_status(status)} at version {version.updates}")

    def report(self, version: Version) -> None:
        """Report that a version was reached."""
        synced = self._synced if self._synced.get("seq") == version.seq else {}
        self._synced = {}
        size, shared, seconds = synced.get("bytes", 0), synced.get("shared_bytes", 0), synced.get("total_seconds", 0.0)
        lag = synced.get("lag", 0)
        if self._json:
            print_json_line(
                {
                    "event": "version",
                    "version": version.updates,
                    "seq": version.seq,
                    "step": version.step,
                    "lag": lag,
                    "bytes": size,
                    "shared_bytes": shared,
                    "seconds": seconds,
                    "published": version.time,
                    "digest": version.digest.hex(),
                    "meta": dict(version.meta),
                }
            )
        else:
            parts = [
                f"version {version.updates}",
                "" if version.step is None else f"step {version.step}",
                f"{lag} behind" if lag else "newest",
                f"{figures.size(size)}{f' ({figures.size(shared)} shared)' if shared else ''} in {figures.duration(seconds)}",
                f"{figures.duration(time.time() - version.time)} after it was published",
            ]
            print_line("  ".join(filter(None, parts)))
