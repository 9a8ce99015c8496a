"""`deltawire member --from URL --engine ENGINE --env MODULE:FUNCTION`."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.status import Status

from ...errors import UnusableReward
from ..options.adapters import MemberLoraOption, read_member_adapters
from ..options.chain import HostCacheOption, RelaysOption, RunOption, TrustOption, host_cache_of
from ..options.channels import ChannelOption
from ..options.common import JsonLinesOption
from ..options.engine import Cache, Canary, MemberCacheOption, MemberCanaryOption, RoutingOption
from ..options.member import DeviceOption, EngineOption, EnvOption, MirrorOption, PollOption, SourcesOption, check_member_name
from ..options.metrics import MetricsOption, counted
from ..options.network import MaxRateOption, MaxRequestsOption, store_options
from ..output.member_lines import MemberLines
from ..output.terminal import print_json_line, print_labelled, print_wrapped
from ..process.ending import Ending
from ..process.exit_codes import exit_codes
from ..process.leaving import leaving_on_signals

_LONGEST_ENDING = 30.0
"""The command ends at most this many seconds after a signal. Leaving takes less time, unless something hangs."""

if TYPE_CHECKING:
    from ...events import Event


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
    lora: MemberLoraOption = None,
    poll: PollOption = 0.5,
    channel: ChannelOption = None,
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

    adapters = read_member_adapters(lora, engine)
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
            channel=channel,
            lora=adapters,
        )
        stop = threading.Event()
        if leave_with_stdin:
            threading.Thread(target=_leave_with_stdin, args=(stop,), name="deltawire-stdin", daemon=True).start()
        with (
            leaving_on_signals(stop),
            Ending(_LONGEST_ENDING) as ending,
            nullcontext(_print_as_json) if json else _View() as output,
            counted(metrics, ending.with_output(output), name) as on_event,
        ):
            serve(options, stop=stop, on_event=on_event)


def _print_as_json(event: Event) -> None:
    print_json_line(event.to_json())


def _leave_with_stdin(stop: threading.Event) -> None:
    """Leave when stdin closes, because then the process that started this one has ended.

    Reads without Python's buffers, whose locks must be free at exit.
    """
    while os.read(0, 4096):
        pass
    stop.set()


class _View:
    """Prints what the member does. On a terminal the last line shows the current state."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._status: Status | None = self._console.status("joining") if self._console.is_terminal else None
        self._lines = MemberLines(self._print)
        self._lock = threading.Lock()

    def __enter__(self) -> _View:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._lines(event)
            if self._status is not None:
                self._status.update(self._lines.state)

    def _print(self, line: str, is_notice: bool) -> None:
        if self._status is None:
            print_labelled("", line, is_notice=is_notice)
        else:  # another console would print into the line with the current state
            print_wrapped(self._console, line, style="yellow" if is_notice else "", indent=4)
