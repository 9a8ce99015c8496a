"""Simulate fleets: many seeds on all cores, or one seed event by event."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter

from rich.console import Console

from .many_seeds import Fleet, simulate_many, simulate_traced
from .scenario import Outcome

_MOST_PRINTED = 10
"""Largest number of failing seeds that are printed."""


def main() -> int:
    """Run the command. Return 0 if every seed held, and 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m deltawire.testing.fleet_simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many seeds to run (default 1000)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first seed (default 0)")
    parser.add_argument("--members", type=int, metavar="N", help="members at the start of every run (default: chosen by the seed)")
    parser.add_argument("--regions", action="store_true", help="let members live in regions, whose links and relays also fail")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes to use (default: all cores)")
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else")
    chosen = parser.parse_args()
    if chosen.seeds < 1:
        parser.error("--seeds must be at least 1")
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    started = time.monotonic()
    fleet = Fleet(chosen.members, chosen.regions)
    outcomes = simulate_traced(seeds, fleet) if chosen.trace else simulate_many(seeds, fleet, chosen.jobs)
    failed = [one for one in outcomes if one.violation is not None]
    if chosen.json:
        sys.stdout.write(json.dumps(_summary(outcomes, time.monotonic() - started), indent=1) + "\n")
    else:
        _print(outcomes, failed, fleet, time.monotonic() - started)
    return 1 if failed else 0


def _summary(outcomes: list[Outcome], seconds: float) -> dict[str, object]:
    rejected: Counter[str] = Counter()
    for one in outcomes:
        rejected.update(one.rejected)
    return {
        "seeds": len(outcomes),
        "first": outcomes[0].seed if outcomes else None,
        "failed": [{"seed": one.seed, "violation": one.violation} for one in outcomes if one.violation is not None],
        "most_members": max((one.members for one in outcomes), default=0),
        "events": sum(one.events for one in outcomes),
        "virtual_hours": round(sum(one.seconds for one in outcomes) / 3600, 1),
        "trainers": sum(one.trainers for one in outcomes),
        "rollouts_trained": sum(one.accepted for one in outcomes),
        "rollouts_refused": dict(sorted(rejected.items())),
        "versions_copied_by_relays": sum(one.copied for one in outcomes),
        "versions_fetched_from_the_origin": sum(one.direct for one in outcomes),
        "seconds": round(seconds, 1),
    }


def _print(outcomes: list[Outcome], failed: list[Outcome], fleet: Fleet, seconds: float) -> None:
    console = Console(highlight=False, soft_wrap=True)
    summary = _summary(outcomes, seconds)
    refused = ", ".join(f"{count:,} {reason}" for reason, count in summary["rollouts_refused"].items())  # type: ignore[attr-defined]
    console.print(
        f"{len(outcomes):,} seeds with up to {summary['most_members']:,} members: {summary['events']:,} events in "
        f"{summary['virtual_hours']:,} virtual hours, {seconds:.0f} s of real time.\n"
        f"{summary['trainers']:,} trainers trained on {summary['rollouts_trained']:,} rollouts and refused {refused or 'none'}.",
        markup=False,
    )
    if fleet.regions:
        console.print(
            f"{summary['versions_copied_by_relays']:,} versions crossed links once for a relay, and readers fetched "
            f"{summary['versions_fetched_from_the_origin']:,} past relays that did not work.",
            markup=False,
        )
    for one in failed[:_MOST_PRINTED]:
        again = f"python -m deltawire.testing.fleet_simulation --first {one.seed} --seeds 1 --trace"
        again += "" if fleet.members is None else f" --members {fleet.members}"
        again += " --regions" if fleet.regions else ""
        console.print(f"\nseed {one.seed} FAILED: {one.violation}\n  {again}", markup=False)
    console.print(f"\n{len(failed):,} seeds failed." if failed else "Every seed held.", markup=False)


if __name__ == "__main__":
    sys.exit(main())
