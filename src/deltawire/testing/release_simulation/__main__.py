"""Simulate live traffic: many seeds on all cores, or one seed event by event."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter

from rich.console import Console

from .many_seeds import simulate_many, simulate_traced
from .scenario import Outcome

_MOST_PRINTED = 10
"""Largest number of failing seeds that are printed."""


def main() -> int:
    """Run the command. Return 0 if every seed held, and 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m deltawire.testing.release_simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many seeds to run (default 1000)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes to use (default: all cores)")
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else")
    chosen = parser.parse_args()
    if chosen.seeds < 1:
        parser.error("--seeds must be at least 1")
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    started = time.monotonic()
    outcomes = simulate_traced(seeds) if chosen.trace else simulate_many(seeds, chosen.jobs)
    failed = [one for one in outcomes if one.violation is not None]
    summary = _summary(outcomes, time.monotonic() - started)
    if chosen.json:
        sys.stdout.write(json.dumps(summary, indent=1) + "\n")
    else:
        _print(summary, failed)
    return 1 if failed else 0


def _summary(outcomes: list[Outcome], seconds: float) -> dict[str, object]:
    counts: Counter[str] = Counter()
    for one in outcomes:
        counts.update(one.counts)
    return {
        "seeds": len(outcomes),
        "first": outcomes[0].seed if outcomes else None,
        "failed": [{"seed": one.seed, "violation": one.violation} for one in outcomes if one.violation is not None],
        "events": sum(one.events for one in outcomes),
        "virtual_hours": round(sum(one.seconds for one in outcomes) / 3600, 1),
        "trainers": sum(one.trainers for one in outcomes),
        "counts": dict(sorted(counts.items())),
        "seconds": round(seconds, 1),
    }


def _print(summary: dict[str, object], failed: list[Outcome]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    counts = ", ".join(f"{count:,} {name}" for name, count in summary["counts"].items())  # type: ignore[attr-defined]
    console.print(
        f"{summary['seeds']:,} seeds: {summary['events']:,} events in {summary['virtual_hours']:,} virtual hours, "
        f"{summary['seconds']:,} s of real time.\n{summary['trainers']:,} trainers. {counts}.",
        markup=False,
    )
    for one in failed[:_MOST_PRINTED]:
        again = f"python -m deltawire.testing.release_simulation --first {one.seed} --seeds 1 --trace"
        console.print(f"\nseed {one.seed} FAILED: {one.violation}\n  {again}", markup=False)
    console.print(f"\n{len(failed):,} seeds failed." if failed else "Every seed held.", markup=False)


if __name__ == "__main__":
    sys.exit(main())
