"""Simulate live traffic: many seeds on all cores, or one seed event by event."""

from __future__ import annotations

import argparse
import os
import sys
import time

from .many_seeds import simulate_many
from .scenario import Outcome, simulate

_MOST_PRINTED = 10


def main() -> int:
    """Run the command. Return 0 if every seed held, and 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m deltawire.testing.live_simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many seeds to run (default 1000)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes to use (default: all cores)")
    parser.add_argument("--trace", action="store_true", help="print every event")
    chosen = parser.parse_args()
    if chosen.seeds < 1:
        parser.error("--seeds must be at least 1")
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    started = time.monotonic()
    outcomes = [simulate(seed, trace=lambda line: print(line)) for seed in seeds] if chosen.trace else simulate_many(seeds, chosen.jobs)
    return _report(outcomes, time.monotonic() - started)


def _report(outcomes: list[Outcome], seconds: float) -> int:
    failed = [one for one in outcomes if one.violation is not None]
    answers, trained, trainers, events = (
        sum(getattr(one, name) for one in outcomes) for name in ("answers", "trained", "trainers", "events")
    )
    print(
        f"{len(outcomes):,} seeds: {answers:,} interactions, {trained:,} of them trained on by {trainers:,} trainers; "
        f"{events:,} events in {seconds:.0f} s."
    )
    for one in failed[:_MOST_PRINTED]:
        print(f"\nseed {one.seed} FAILED: {one.violation}")
        print(f"  python -m deltawire.testing.live_simulation --first {one.seed} --seeds 1 --trace")
    print(f"\n{len(failed):,} seeds failed." if failed else "Every seed held.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
