"""`deltawire events --from URL`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ..options.chain import URL_HELP, RunOption, TrustOption, check_url, reader_options
from ..options.common import JsonLinesOption
from ..options.metrics import MetricsOption, counted
from ..output import figures
from ..output.terminal import print_json_line, print_labelled, print_notice
from ..process.ending import Ending, on_another_thread
from ..process.exit_codes import exit_codes
from ..stores.opened import opened

if TYPE_CHECKING:
    from ...events import Event
    from ...fleet.store_events import StoreEvents

_LONGEST_ENDING = 5.0
"""The command ends at most this many seconds after a signal, even while the store does not answer."""


def events(
    url: Annotated[str, typer.Option("--from", metavar="URL", help=URL_HELP, show_default=False, callback=check_url)],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until Ctrl-C, and print each event.")] = False,
    count: Annotated[int, typer.Option("-n", "--count", min=1, metavar="N", help="Begin with this many of the newest commits.")] = 20,
    poll: Annotated[float, typer.Option("--poll", min=0.05, metavar="SECONDS", help="Look this often.")] = 2.0,
    metrics: MetricsOption = None,
    trust: TrustOption = None,
    run: RunOption = None,
    json: JsonLinesOption = False,
) -> None:
    """Print what happens in a run, as far as its store alone shows it.

    These are commits, full checkpoints, skips, collections, the reports of engines, and the members, rounds and batches of a fleet. Only
    heartbeats that tell a change are printed. The command only reads. With --follow, it prints a notice if the store does not
    answer, and tries again. With --metrics, it serves what the store tells of versions and members to Prometheus. Ctrl-C and SIGTERM end
    it with code 0.
    """
    if metrics is not None and not follow:
        raise typer.BadParameter("--metrics needs --follow: without it the command ends before Prometheus can ask.")
    with exit_codes(json, one_line=True), Ending(_LONGEST_ENDING) as ending:
        from ...fleet.overview import FleetReader
        from ...fleet.store_events import StoreEvents

        printing = ending.with_output(_print_as_json if json else _print_as_line)
        with counted(metrics, printing) as tell, opened(url) as store:
            log = reader_options(run, trust).open_log(store)
            with FleetReader(store, log.run.id, trusted_keys=trust or ()) as fleet:
                try:
                    for event in _events(StoreEvents(log, fleet, count), poll if follow else None):
                        tell(event)
                except KeyboardInterrupt:
                    return


def _events(seen: StoreEvents, poll: float | None) -> Iterator[Event]:
    from ...errors import DeltawireError

    problem: str | None = None
    while True:
        try:
            yield from on_another_thread(seen.look)
            problem = None
        except DeltawireError as error:
            if poll is None or not error.retryable:
                raise
            if str(error) != problem:  # once while it lasts
                problem = str(error)
                print_notice(f"will try again: {problem}")
        if poll is None:
            return
        time.sleep(poll)


def _print_as_json(event: Event) -> None:
    print_json_line(event.to_json())


def _print_as_line(event: Event) -> None:
    fields = "  ".join(f"{name} {value}" for name, value in event.fields.items() if value is not None and (name, value) != ("void", 0))
    print_labelled("", f"{figures.clock_time(event.time)}  {event.name.removesuffix('-seen'):<10}  {fields}", is_notice=False)
