"""`deltawire members URL`."""

from __future__ import annotations

import time

from rich.text import Text

from ..options.chain import RunOption, TrustOption, UrlArgument, reader_options
from ..options.common import JsonOption, VerboseOption
from ..output import figures
from ..output.terminal import print_json, print_wrapped, result_console
from ..process.exit_codes import exit_codes
from ..stores.opened import opened


def members(
    url: UrlArgument, trust: TrustOption = None, run: RunOption = None, verbose: VerboseOption = False, json: JsonOption = False
) -> None:
    """List the members of a run's fleet, with their versions, links, tasks and speeds.

    "heard" is the time since the last record of a member. A member without a record for longer than a lease lasts is "silent". "works on"
    names round and task. "update" is how long the last updates took from their publication until the member had them. "link" and "latency"
    are what it measured of its link to the store. A narrow terminal shows fewer columns; --json has all. The command shows what members
    report about themselves, and does not check it. Ages are by this machine's clock.
    """
    with exit_codes(json):
        from ...fleet.overview import FleetReader
        from ..output.fleet_table import member_as_json, member_lines

        with opened(url, verbose=verbose) as store:
            its_run = reader_options(run, trust).open_log(store).run
            with FleetReader(store, its_run.id, trusted_keys=trust or ()) as reader:
                fleet = reader.fleet(0)
            now = time.time()
            if json:
                found = [member_as_json(one, fleet, now) for one in sorted(fleet.members, key=lambda one: one.beat.member)]
                print_json({"url": store.url, "run": its_run.run, "id": its_run.id, "members": found})
                return
            console = result_console()
            print_wrapped(console, f"{figures.printable(its_run.run)}  {_count(len(fleet.members))}", style="bold")
            for number, line in enumerate(member_lines(fleet, width=console.width, now=now)):
                console.print(Text(line, style="bold" if number == 0 else ""), soft_wrap=True)


def _count(members: int) -> str:
    if not members:
        return "no member has joined yet"
    return f"{members:,} member{'s' if members > 1 else ''}"
