"""`deltawire follow URL DIR`."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..chain_options import PinOption, RunOption, TrustOption, UrlArgument, VerboseOption, opened, tell_if_verbose, tell_of_waiting
from ..ending import Ending
from ..output import figures
from ..output.terminal import JsonOption, ThreadsOption, exit_codes, print_json_line, print_line, print_notice, progress_bar

_LONGEST_ENDING = 30.0
"""Seconds after a signal within which the command ends. A mirror survives an end at any point."""

if TYPE_CHECKING:
    from ...chain.version import Version
    from ...events import Event


def follow(
    url: UrlArgument,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The mirror: a new directory, or that of an earlier call.", show_default=False)
    ],
    poll: Annotated[float, typer.Option("--poll", min=0.01, metavar="SECONDS", help="How often to look for the next version.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Get to the newest version, and end.")] = False,
    max_silence: Annotated[
        float | None,
        typer.Option("--max-silence", min=0.0, metavar="SECONDS", help="Report a chain whose newest commit is older.", show_default=False),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option("--exec", metavar="CMD", help="Run this shell command after each new version; see above.", show_default=False),
    ] = None,
    trust: TrustOption = None,
    run: RunOption = None,
    pin: PinOption = True,
    threads: ThreadsOption = None,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """Keep a directory at the newest version of a chain. DIR/current is a checkpoint at any time, and never half of one.

    The command prints a line for each version that it reaches. It skips versions that are published faster than it can fetch them. It
    reports temporary failures, such as a store that does not answer, on stderr, keeps the last version, and tries again. Ctrl-C and SIGTERM
    end it, with code 0 if DIR holds a version by then. With --json it prints one JSON object per line.

    The command of --exec runs for each version, until it has succeeded once for that version. Its environment has DELTAWIRE_PATH (the
    checkpoint's directory, which does not change while it runs), DELTAWIRE_VERSION, DELTAWIRE_STEP, DELTAWIRE_SEQ, DELTAWIRE_DIGEST and
    DELTAWIRE_URL. The next version is fetched when it has ended. If it fails, `follow` reports that and goes on; the command runs again
    for the next version, or when `follow` starts again. With --once the exit code is then 1.
    """
    with exit_codes(json, one_line=True), Ending(_LONGEST_ENDING) as ending, ExitStack() as stack:
        from ...chain.reader_options import ReaderOptions
        from ...subscribe.mirror.mirror import Mirror
        from ...subscribe.subscriber import Subscriber
        from ..exec_hook import ExecHook
        from ..metered_store import MeteredStore

        Mirror(directory).refuse_misplaced()  # now, since a follower waits for a chain that is not there yet
        bar = stack.enter_context(ExitStack())
        progress = bar.enter_context(progress_bar(f"sync {directory.name}", None, quiet=json or verbose))
        listener = _Listener(json, is_patient=not once, verbose=verbose)
        subscriber = stack.enter_context(
            Subscriber(
                MeteredStore(stack.enter_context(opened(url, verbose=verbose)), progress),
                directory,
                options=ReaderOptions(run=run, trusted_keys=trust or (), max_silence=max_silence, pin=pin),
                threads=threads,
                on_event=ending.with_output(listener),
            )
        )
        hook = None if command is None else ExecHook(command, directory, url, stdout_to_stderr=json)

        def run_command(version: Version | None) -> bool:
            """Return whether the command has succeeded, or did not have to run."""
            if hook is None or version is None or subscriber.path is None:
                return True
            status = hook.run(version, subscriber.path)
            if status:
                listener.tell_of_failure(version, status)
            return not status

        if once:
            version = subscriber.sync()
            bar.close()
            listener.tell(version)
            if not run_command(version):
                raise typer.Exit(1)
            return
        if subscriber.version is not None and not json:
            print_notice(f"the mirror is at version {subscriber.version.updates}")
        try:
            run_command(subscriber.version)
            for version in subscriber.follow(poll=poll):
                bar.close()  # it is for the first version, which may be long in coming
                listener.tell(version)
                run_command(version)
        except KeyboardInterrupt:
            if subscriber.version is None:
                raise


class _Listener:
    """Tells what happens, as lines on stdout and notices on stderr, or as JSON lines."""

    def __init__(self, as_json: bool, *, is_patient: bool, verbose: bool) -> None:
        self._json = as_json
        self._verbose = verbose
        self._is_patient = is_patient
        self._synced: dict[str, Any] = {}
        self._waited_for: set[str] = set()

    def __call__(self, event: Event) -> None:
        tell_if_verbose(event, self._verbose)
        if event.name == "synced":
            self._synced = dict(event.fields)
            return
        if event.name == "sync-failed" and not (self._is_patient and event.fields.get("retryable")):
            return  # it is raised as well
        if self._json:
            print_json_line(event.to_json())
        elif event.name == "sync-failed":
            print_notice(f"will try again: {event.fields['reason']}")
        elif event.name == "resynced":
            print_notice(f"version {event.fields['updates']} was rebuilt from a full checkpoint: nothing else led there")
        else:
            tell_of_waiting(event, self._waited_for)

    def tell_of_failure(self, version: Version, status: int) -> None:
        """The command of --exec failed."""
        if self._json:
            print_json_line({"event": "exec-failed", "version": version.updates, "seq": version.seq, "status": status})
        else:
            from ..exec_hook import describe_status

            print_notice(f"the command of --exec {describe_status(status)} at version {version.updates}")

    def tell(self, version: Version) -> None:
        """A version was reached."""
        synced = self._synced if self._synced.get("seq") == version.seq else {}
        self._synced = {}
        size, seconds, lag = synced.get("bytes", 0), synced.get("total_seconds", 0.0), synced.get("lag", 0)
        if self._json:
            print_json_line(
                {
                    "event": "version",
                    "version": version.updates,
                    "seq": version.seq,
                    "step": version.step,
                    "lag": lag,
                    "bytes": size,
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
                f"{figures.size(size)} in {figures.duration(seconds)}",
                f"{figures.duration(time.time() - version.time)} after it was published",
            ]
            print_line("  ".join(filter(None, parts)))
