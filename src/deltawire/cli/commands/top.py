"""`deltawire top URL`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options.chain import RunOption, TrustOption, UrlArgument, reader_options
from ..options.common import JsonLinesOption
from ..output import figures
from ..output.terminal import print_json_line, print_notice, result_console
from ..process.ending import Ending, on_another_thread
from ..process.exit_codes import exit_codes
from ..stores.opened import opened

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ...fleet.overview import FleetReader, SeenFleet
    from ...format.records.run_records import Run

_LONGEST_ENDING = 5.0
"""The command ends at most this many seconds after a signal, even while the store does not answer."""
_OTHER_LINES = 4
"""The number of lines of a screen that are neither rounds nor members."""


def top(
    url: UrlArgument,
    every: Annotated[float, typer.Option("--every", min=0.1, metavar="SECONDS", help="Refresh this often.")] = 2.0,
    count: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--count",
            min=1,
            metavar="N",
            help="Show the fleet this many times, then end. The default is to continue until Ctrl-C.",
            show_default=False,
        ),
    ] = None,
    trust: TrustOption = None,
    run: RunOption = None,
    json: JsonLinesOption = False,
) -> None:
    """Watch the rounds and members of a run's fleet until Ctrl-C.

    For each round the command counts the tasks, those with a lease, and those with a result. If the store does not answer, it prints a
    notice and tries again.
    """
    with exit_codes(json, one_line=True), Ending(_LONGEST_ENDING):
        from ...fleet.overview import FleetReader

        with opened(url) as store:
            its_run = reader_options(run, trust).open_log(store).run
            with FleetReader(store, its_run.id, trusted_keys=trust or ()) as reader:
                looks = _looks(reader, every, count)
                try:
                    if json:
                        _print_as_json(its_run, looks)
                    else:
                        _show(its_run, looks)
                except KeyboardInterrupt:
                    return


Look = tuple["SeenFleet | None", "str | None"]
"""The fleet, or the reason why it could not be read."""


def _looks(reader: FleetReader, every: float, count: int | None) -> Iterator[Look]:
    from ...errors import DeltawireError

    number = 0
    while count is None or number < count:
        if number:
            time.sleep(every)
        number += 1
        try:
            yield on_another_thread(reader.fleet), None
        except DeltawireError as error:
            if not error.retryable:
                raise
            yield None, str(error)


def _print_as_json(run: Run, looks: Iterator[Look]) -> None:
    from ..output.fleet_table import member_as_json, round_as_json

    for fleet, problem in looks:
        if fleet is None:
            print_notice(f"will try again: {problem}")
            continue
        now, board = time.time(), fleet.board
        document: dict[str, Any] = {
            "run": run.run,
            "time": now,
            "board": None if board is None else {"epoch": board.epoch, "seq": board.seq, "step": board.step, "stop": board.stop},
            "board_seconds_ago": None if fleet.board_modified is None else round(max(0.0, now - fleet.board_modified), 3),
            "rounds": [round_as_json(one) for one in fleet.rounds],
            "members": [member_as_json(one, fleet, now) for one in sorted(fleet.members, key=lambda one: one.beat.member)],
        }
        print_json_line(document)


def _show(run: Run, looks: Iterator[Look]) -> None:
    """Redraw one picture on a terminal; elsewhere print one picture after the other."""
    from rich.live import Live

    console = result_console()
    if not console.is_terminal:
        for fleet, problem in looks:
            console.print(_picture(run, fleet, problem, console), soft_wrap=True)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for fleet, problem in looks:
            live.update(_picture(run, fleet, problem, console), refresh=True)


def _picture(run: Run, fleet: SeenFleet | None, problem: str | None, console: Console) -> Text:
    from rich.text import Text

    from ..output.fleet_table import member_lines, round_lines

    lines = [Text(figures.printable(f"{run.run}  {figures.clock_time(time.time())}"), style="bold")]
    if fleet is None:
        lines += [Text(part, style="yellow") for part in figures.wrap_words(figures.printable(f"will try again: {problem}"), console.width)]
        return Text("\n").join(lines)
    now = time.time()
    lines += [Text(part) for part in figures.wrap_words(_summary(fleet, now), console.width)]
    for group in (round_lines(fleet.rounds, width=console.width), member_lines(fleet, width=console.width, now=now)):
        room = max(3, console.height - _OTHER_LINES - len(lines)) if console.is_terminal else len(group)
        lines += [Text(line, style="bold" if number == 0 else "") for number, line in enumerate(group[:room])]
        if len(group) > room:
            lines.append(Text(f"… and {len(group) - room:,} more", style="dim"))
    return Text("\n").join(lines)


def _summary(fleet: SeenFleet, now: float) -> str:
    from ..output.fleet_table import is_silent

    board = fleet.board
    if board is None or fleet.board_modified is None:
        return "the trainer has not offered work yet"
    here = [one for one in fleet.members if one.beat.state not in ("leaving", "left") and not is_silent(one, fleet, now)]
    working = sum(1 for one in here if one.beat.working)
    parts = [
        f"step {board.step}",
        "the trainer ended the run" if board.stop else f"board {figures.duration(max(0.0, now - fleet.board_modified))} old",
        f"{len(here):,} member{'s' if len(here) != 1 else ''}, {working:,} working",
    ]
    return "  ".join(parts)
