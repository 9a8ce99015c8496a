"""`deltawire member --from URL --engine ENGINE --env MODULE:FUNCTION`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.status import Status

from ...errors import UnusableReward
from ..options.chain import HostCacheOption, RelaysOption, RunOption, TrustOption, host_cache_of
from ..options.common import JsonLinesOption
from ..options.engine import Cache, Canary, MemberCacheOption, MemberCanaryOption, RoutingOption
from ..options.member import DeviceOption, EngineOption, EnvOption, MirrorOption, PollOption, SourcesOption, check_member_name
from ..options.metrics import MetricsOption, counted
from ..options.network import MaxRateOption, MaxRequestsOption, store_options
from ..output import figures
from ..output.event_notices import notice_of
from ..output.terminal import print_json_line, print_labelled, print_wrapped
from ..process.ending import Ending
from ..process.exit_codes import exit_codes

_LONGEST_ENDING = 30.0
"""The command ends at most this many seconds after a signal. Leaving takes less time, unless something hangs."""

if TYPE_CHECKING:
    from ...events import Event, Value


def member(
    sources: SourcesOption,
    env: EnvOption,
    engine: EngineOption = "transformers",
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="Call this member NAME, which no other member may have.",
            show_default=False,
            callback=check_member_name,
        ),
    ] = None,
    device: DeviceOption = "auto",
    mirror: MirrorOption = None,
    kv_cache: MemberCacheOption = Cache.drop,
    canary: MemberCanaryOption = Canary.off,
    routing: RoutingOption = False,
    poll: PollOption = 0.5,
    relays: RelaysOption = False,
    max_rate: MaxRateOption = None,
    max_requests: MaxRequestsOption = None,
    host_cache: HostCacheOption = "off",
    metrics: MetricsOption = None,
    trust: TrustOption = None,
    run: RunOption = None,
    leave_with_stdin: Annotated[bool, typer.Option("--leave-with-stdin", hidden=True)] = False,
    json: JsonLinesOption = False,
) -> None:
    """Join the fleet of a run, and make rollouts for its trainer.

    A member follows the policy, leases tasks, generates completions, scores them and uploads the results. It needs nothing except access to
    the store. It may join, leave, be killed or lose its connection at any time; other members then do the work that it did not finish.

    Ctrl-C and SIGTERM make it give back its unfinished tasks and leave, with code 0. A second signal ends it at once. It also leaves when
    the trainer ends the run.
    """
    from ...fleet.local_members import PERMANENT_FAILURE_CODE

    with exit_codes(json, one_line=True, codes={UnusableReward: PERMANENT_FAILURE_CODE} if leave_with_stdin else None):
        from ...rl.member import MemberOptions, serve

        sys.path.insert(0, os.getcwd())  # the module of the reward function is usually here, as with `python -m`
        options = MemberOptions(
            sources[0],
            engine,
            tuple(env),
            name or "",
            device,
            str(mirror) if mirror else None,
            tuple(trust or ()),
            poll,
            run,
            kv_cache=kv_cache.value,
            canary=canary.value,
            routing=routing,
            store=store_options(max_rate, max_requests),
            host_cache=host_cache_of(host_cache),
            relays=tuple(sources[1:]),
            find_relays=relays,
        )
        stop = threading.Event()
        if leave_with_stdin:
            threading.Thread(target=_leave_with_stdin, args=(stop,), name="deltawire-stdin", daemon=True).start()
        with (
            _leaving_on_signals(stop),
            Ending(_LONGEST_ENDING) as ending,
            nullcontext(_print_as_json) if json else _View() as output,
            counted(metrics, ending.with_output(output), name) as on_event,
        ):
            serve(options, stop=stop, on_event=on_event)


def _print_as_json(event: Event) -> None:
    print_json_line(event.to_json())


@contextmanager
def _leaving_on_signals(stop: threading.Event) -> Iterator[None]:
    def leave(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    numbers = [number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in numbers}  # `nohup` ignores SIGHUP, and so do we
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_with_stdin(stop: threading.Event) -> None:
    """Leave when stdin closes, because then the process that started this one has ended.

    Reads without Python's buffers, whose locks must be free at exit.
    """
    while os.read(0, 4096):
        pass
    stop.set()


class _View:
    """Prints a line for each important event, and each notice once. On a terminal the last line shows the current state."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._status: Status | None = self._console.status("joining") if self._console.is_terminal else None
        self._reported: str | None = None
        self._reported_failure: str | None = None
        self._has_left = False
        self._version, self._work = "no version yet", "waiting for work"
        self._results = self._tokens = 0
        self._seconds = 0.0
        self._lock = threading.Lock()
        self._time = 0.0

    def __enter__(self) -> _View:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._time = event.time
            self._print_event(event)
            if self._status is not None:
                rate = f"{self._tokens / self._seconds:,.0f} tokens/s" if self._seconds else ""
                self._status.update("  ".join(filter(None, [self._version, self._work, f"{self._results} results", rate])))

    def _print_event(self, event: Event) -> None:
        fields = event.fields
        if self._has_left:
            return  # the engine may still report the end of its last work
        if event.name == "joined":
            self._line(f"joined as {fields['member']}")
        elif event.name == "swapped":
            self._reported = None
            step = "" if fields["step"] is None else f" (step {fields['step']})"
            self._version = f"version {fields['updates']}{step}"
            self._line(f"{self._version}  paused {1e3 * float(fields['pause_seconds'] or 0):.0f} ms")
        elif event.name == "generating":
            self._work = f"round {fields['round']} task {fields['task']}"
        elif event.name == "generated":
            self._tokens += int(fields["tokens"] or 0)
            self._seconds += (seconds := float(fields["seconds"] or 0))
            self._line(f"round {fields['round']} task {fields['task']}  {fields['tokens']} tokens  in {figures.duration(seconds)}")
        elif event.name == "rollout-uploaded":
            self._reported = self._reported_failure = None
            self._work = "waiting for work"
            self._results += 1
        elif event.name == "left":
            self._has_left = True
            self._line(f"left after {self._results} results")
        elif event.name == "run-over":
            self._line(f"the trainer ended the run at step {fields['step']}, so this member leaves")
        elif event.name == "work-failed":
            self._report_failure(fields)
        elif event.name in ("waiting", "sync-failed", "swap-failed", "engine-lost"):
            self._notice(f"will try again: {fields['reason']}")
        elif event.name == "board-refused":
            self._notice(f"this member takes no work: {fields['reason']}")
        elif event.name == "member-retrying":
            self._notice(f"will try again: {fields['error']}")
        elif event.name == "engine-quarantined":
            self._notice(f"this member generates nothing until it has loaded a full checkpoint: {fields['reason']}")
        elif (notice := notice_of(event)) is not None:
            self._notice(notice)

    def _line(self, text: str) -> None:
        text = f"{figures.clock_time(self._time)}  {text}"
        if self._status is None:
            print_labelled("", text, is_notice=False)
        else:
            print_wrapped(self._console, text, indent=4)

    def _report_failure(self, fields: Mapping[str, Value]) -> None:
        """Print why a task failed, once until a task succeeds. After the final failure the command prints its error itself."""
        reason = str(fields["reason"])
        if reason == self._reported_failure or (fields.get("final") and not fields.get("traceback")):
            return
        self._reported_failure = reason
        self._print_notice(f"{'failed' if fields.get('final') else 'will try again'}: {reason}", str(fields.get("traceback") or ""))

    def _notice(self, text: str) -> None:
        """Print a notice, unless it is the one that was printed last."""
        if text != self._reported:
            self._reported = text
            self._print_notice(text)

    def _print_notice(self, text: str, details: str = "") -> None:
        for line in [f"{figures.clock_time(self._time)}  {text}", *(f"    {line}" for line in details.splitlines())]:
            if self._status is None:
                print_labelled("", line, is_notice=True)
            else:  # another console would print into the line with the current state
                print_wrapped(self._console, line, style="yellow", indent=4)
