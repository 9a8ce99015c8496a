"""`deltawire fleet N --from URL --env MODULE:FUNCTION`."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from functools import partial
from json import dumps
from typing import TYPE_CHECKING, Annotated

import typer

from ...events import Event, OnEvent
from ..options.adapters import MemberLoraOption, read_member_adapters
from ..options.chain import RelaysOption, RunOption, TrustOption, check_host_cache, host_cache_of
from ..options.channels import ChannelOption
from ..options.common import JsonLinesOption
from ..options.engine import Cache, Canary, MemberCacheOption, MemberCanaryOption, RoutingOption
from ..options.member import DeviceOption, EngineOption, EnvOption, MirrorOption, PollOption, SourcesOption, check_member_name
from ..options.metrics import MetricsOption, counted
from ..options.network import MaxRateOption, MaxRequestsOption, store_options
from ..output import figures
from ..output.fleet_table import short_name
from ..output.member_lines import MemberLines
from ..output.terminal import print_json_line, print_labelled
from ..process.ending import Ending
from ..process.exit_codes import exit_codes

if TYPE_CHECKING:
    from ...fleet.supervision import Running
    from ...rl.member import MemberOptions

_LONGEST_ENDING = 60.0
"""The command ends at most this many seconds after a signal. Its members have 30 of them to leave."""
_WIDEST_NAME = 20
"""Columns for the name before each line. Longer names lose their middle, because members of one fleet differ at the end."""


def fleet(
    sources: SourcesOption,
    env: EnvOption,
    count: Annotated[
        int | None, typer.Argument(metavar="N", min=1, help="Start this many members on this machine.", show_default=False)
    ] = None,
    engine: EngineOption = "transformers",
    ray: Annotated[
        int | None, typer.Option("--ray", min=1, metavar="N", help="Start this many members on a Ray cluster instead.", show_default=False)
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option("--ray-address", metavar="ADDRESS", help="Use this Ray cluster instead of the one that this machine is part of."),
    ] = None,
    cpus: Annotated[float, typer.Option("--cpus", min=0, metavar="X", help="Reserve this many CPUs of a Ray node for each member.")] = 1.0,
    gpus: Annotated[float, typer.Option("--gpus", min=0, metavar="X", help="Reserve this many GPUs of a Ray node for each member.")] = 0.0,
    pass_env: Annotated[
        list[str] | None,
        typer.Option("--pass-env", metavar="NAME", help="Pass this environment variable to members on Ray. May be repeated."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="Call the members NAME-0, NAME-1, and so on.", show_default=False, callback=check_member_name
        ),
    ] = None,
    device: DeviceOption = "auto",
    mirror: MirrorOption = None,
    kv_cache: MemberCacheOption = Cache.drop,
    canary: MemberCanaryOption = Canary.off,
    routing: RoutingOption = False,
    lora: MemberLoraOption = None,
    poll: PollOption = 0.5,
    restarts: Annotated[
        int, typer.Option("--restarts", min=0, metavar="N", help="Restart a member that died at most this many times in an hour.")
    ] = 10,
    channel: ChannelOption = None,
    relays: RelaysOption = False,
    max_rate: MaxRateOption = None,
    max_requests: MaxRequestsOption = None,
    host_cache: Annotated[
        str | None,
        typer.Option(
            "--host-cache",
            callback=check_host_cache,
            metavar="DIR|auto|off",
            help="Fetch each file once for all members of a machine, which share this directory, or the usual ones (auto). By default auto "
            "for several members with `transformers`, otherwise off.",
            show_default=False,
        ),
    ] = None,
    metrics: MetricsOption = None,
    trust: TrustOption = None,
    run: RunOption = None,
    json: JsonLinesOption = False,
) -> None:
    """Start several members and keep them running.

    The command restarts a member that dies, at most --restarts times in an hour. It does not restart a member whose reward function cannot
    be used, or that leaves because the trainer ended the run. It ends with code 0 when all members have left, and with code 1 if it gave
    one of them up. After Ctrl-C or SIGTERM it waits until the members have left.

    Every line of output begins with the name of its member. --metrics serves the metrics of all members, with their names as labels.
    """
    if (count is None) == (ray is None):
        raise typer.BadParameter("give the number of members: either `deltawire fleet N` for this machine, or `--ray N` for a Ray cluster.")
    adapters = read_member_adapters(lora, engine)
    with exit_codes(json, one_line=True), Ending(_LONGEST_ENDING) as ending:
        from ...fleet.supervision import Supervisor
        from ...rl.member import MemberOptions
        from ...subscribe.pin_keeper import reader_name

        total = count or ray or 0
        stem = name or reader_name()
        sharing = host_cache or ("auto" if total > 1 and engine == "transformers" else "off")
        options = {
            f"{stem}-{number}": MemberOptions(
                sources[0],
                engine,
                tuple(env),
                f"{stem}-{number}",
                device,
                str(mirror) if mirror else None,
                tuple(trust or ()),
                poll,
                run,
                kv_cache=kv_cache.value,
                canary=canary.value,
                routing=routing,
                store=store_options(max_rate, max_requests),
                host_cache=host_cache_of(sharing),
                relays=tuple(sources[1:]),
                find_relays=relays,
                channel=channel,
                lora=adapters,
            )
            for number in range(total)
        }
        output = _Output(list(options), as_json=json, takes_events=json or metrics is not None)
        # Threads of Ray print its own messages on stdout.
        with redirect_stdout(sys.stderr) if ray else nullcontext(), counted(metrics, ending.with_output(output)) as on_event:
            printing = ending.with_output(output.relay)
            if ray:
                start, close = _on_ray(output, on_event, printing, ray_address, cpus, gpus, pass_env or [])
            else:
                start, close = _on_this_machine(output, on_event, printing)
            supervisor = Supervisor(list(options), lambda each: start(options[each]), restarts=restarts, on_event=on_event)
            try:
                is_well = supervisor.run(threading.Event())
            except KeyboardInterrupt:
                return
            finally:
                close()
        if not is_well:
            raise typer.Exit(1)


_Print = Callable[[str, str, bool], object]
"""Called with the name of a member, a line that it printed, and whether the line went to stderr."""


def _on_this_machine(output: _Output, on_event: OnEvent, printing: _Print) -> tuple[Callable[[MemberOptions], Running], Callable[[], None]]:
    from ...fleet.local_members import LocalMember
    from ...fleet.member_output import event_of

    def tell(name: str, line: str, is_error: bool) -> None:
        on_event(event_of(name, line, is_error))

    def start(options: MemberOptions) -> Running:
        arguments = [*options.to_arguments(), *(["--json"] if output.takes_events else [])]
        return LocalMember(arguments, partial(tell if output.takes_events else printing, options.name))

    return start, lambda: None


def _on_ray(
    output: _Output, on_event: OnEvent, printing: _Print, address: str | None, cpus: float, gpus: float, pass_env: list[str]
) -> tuple[Callable[[MemberOptions], Running], Callable[[], None]]:
    from ...rl.ray_members import RayCluster

    missing = [name for name in pass_env if name not in os.environ]
    if missing:
        raise typer.BadParameter(f"{missing[0]} is not set in the environment of this command.", param_hint="--pass-env")
    cluster = RayCluster(address, cpus=cpus, gpus=gpus, environment={name: os.environ[name] for name in pass_env})

    def start(options: MemberOptions) -> Running:
        if output.takes_events:
            return cluster.start(options, on_event=on_event)
        return cluster.start(options, on_line=partial(printing, options.name))

    return start, cluster.close


class _Output:
    """Prints the output of all members, and events about them, one line at a time. Each line begins with the name of its member.

    It prints to the stdout of the time at which this object was made.
    """

    def __init__(self, names: list[str], *, as_json: bool, takes_events: bool) -> None:
        self.takes_events = takes_events
        """Whether members are started with --json, so that they print events. Otherwise they print text."""
        self._as_json = as_json
        self._width = min(_WIDEST_NAME, max(map(len, names)))
        self._lock = threading.Lock()
        self._stdout = sys.stdout
        self._lines = {name: MemberLines(partial(self._print, name)) for name in names}

    def relay(self, name: str, line: str, is_error: bool) -> None:
        """Print a line of text that a member printed."""
        with self._lock:
            self._print(name, line, is_error)

    def __call__(self, event: Event) -> None:
        """Print an event of a member, or about it: it started, left, died, or was given up."""
        with self._lock:
            if self._as_json:
                print_json_line(event.to_json(), self._stdout)
                return
            name = str(event.fields["member"])
            text = _describe(event)
            if text:
                calm = event.name in ("member-started", "member-left")
                self._print(name, f"{figures.clock_time(event.time)}  {text}", not calm)
                if event.name == "member-started":  # the process is a new one
                    self._lines[name] = MemberLines(partial(self._print, name))
            elif event.name == "output":
                self._print(name, str(event.fields["line"]), event.fields["stream"] == "stderr")
            elif name in self._lines:  # a member also prints the error of "failed" as text
                try:
                    self._lines[name](event)
                except (KeyError, TypeError, ValueError):  # the user's own code printed an object that looks like an event
                    self._print(name, dumps(event.to_json()), False)

    def _print(self, name: str, line: str, is_notice: bool) -> None:
        if line.strip():
            print_labelled(self._label(name), line, is_notice=is_notice, to=self._stdout)

    def _label(self, name: str) -> str:
        return f"{short_name(name, self._width):<{self._width}}"


def _describe(event: Event) -> str:
    if event.name == "member-started":
        return "starts" + (" again" if event.fields["restarts"] else "")
    if event.name == "member-left":
        return "has left"
    if event.name == "member-died":
        return f"died: {event.fields['reason']}"
    if event.name == "member-given-up":
        return "is not restarted, because it would fail again" if event.fields["permanent"] else "died too often, and is not restarted"
    return ""
