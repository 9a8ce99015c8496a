"""Measures updates over emulated WAN links: `make bench-wan`, or `python -m wan` in benchmarks/."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from report import Table, keep, show

from . import scenarios, tables
from .emulation import Emulation, emulation
from .network import CannotEmulate, Shape
from .options import RTTS, Options, parse
from .processes import ChildFailed

_LOOP_GENERATION = 20.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is removed
    try:
        with (
            tempfile.TemporaryDirectory(prefix="deltawire-wan-") as folder,
            emulation(Path(folder), [Shape(options.rates[0], rtt) for rtt in RTTS]) as running,
        ):
            made = _measure(running, options)
    except (CannotEmulate, ChildFailed) as error:
        print(f"bench-wan: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench-wan: interrupted. Everything is removed.", file=sys.stderr)
        return 130
    missed = sum(not met for table in made for _, met in table.checks)
    print(f"{missed} goals were not met." if missed else "All goals were met.")
    return 0


def _measure(running: Emulation, options: Options) -> list[Table]:
    """Measure all tables. Each is shown and written as soon as it is complete."""

    def done(table: Table) -> Table:
        show(table)
        if options.keep:
            keep(table)
        return table

    if options.only_ablations:
        return [done(tables.ablations(list(scenarios.ablations(running, options))))]
    made = [done(tables.links(list(scenarios.check_links(running, options))))]
    found = []
    for update in scenarios.updates(running, options):
        found.append(update)
        seconds = ", ".join(f"{each:.2f}" for each in update.serves)
        print(f"{update.weights / 1e9:.2f} B, {update.rate / 1e9:g} Gbit/s, {update.method}: {seconds} s", flush=True)
    made.append(done(tables.updates(found)))
    if options.loop_batches:
        run = scenarios.run_loop(running, _LOOP_GENERATION, options.loop_batches, options.loop_rate)
        made.append(done(tables.loop(run, found)))
    made.append(done(tables.model(list(scenarios.fetches(running, options, found)))))
    if options.ablations:
        made.append(done(tables.ablations(list(scenarios.ablations(running, options)))))
    return made


if __name__ == "__main__":
    sys.exit(main())
