"""Prints the results of a run of the live demo (examples/live_demo) as two tables, and keeps them as the other benchmarks do.

    make demo-live && python benchmarks/live_demo_table.py

The tables go to benchmarks/results/ and into docs/benchmarks.md, unless --no-keep is given.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from report import ROOT, Table, keep, show

_NONE = "–"
_WORDS = {"promote": "promoted", "rollback": "rolled back"}


def tables_of(results: dict[str, Any]) -> list[Table]:
    """Return the table of figures and the table of ratings over time.

    Parameters
    ----------
    results
        The content of results.json, which the demo writes.
    """
    reward, last = results["reward"], results["last_seconds"]
    figures = Table("live-demo", f"The live demo: users ask for {results['asked_seconds']:.0f} s", ["figure", "value"])
    figures.rows = [
        ["requests answered", f"{results['answers']:,}"],
        ["failures of requests, feedback and processes", f"{results['failed']:,}"],
        ["versions that the gate promoted", str(results["promoted"])],
        ["versions that the gate rolled back", str(results["rolled_back"])],
        [f"mean rating of the last {last:g} s, loop closed", _number(reward["closed"], 2)],
        [f"mean rating of the last {last:g} s, loop open", _number(reward["open"], 2)],
        ["from feedback to the release of a version that learned from it (median)", _seconds(results["feedback_to_release_seconds"], 1)],
        ["from the decision to roll back until the last engine served the version before", _seconds(results["rollback_seconds"], 2)],
    ]
    figures.check(f"no request failed ({results['failed']})", results["failed"] == 0)
    figures.check("the damaged version was rolled back by itself", results["damaged_rolled_back"])
    is_better = None not in reward.values() and reward["closed"] > reward["open"]
    figures.check("at the end, users with the loop closed give better ratings than those with the loop open", is_better)
    curve = Table("live-demo-curve", "Its ratings over time", ["from", "answers", "loop closed", "loop open", "the gate"])
    for part in results["parts"]:
        rating = [_number(part[name], 2) for name in ("closed", "open")]
        decided = Counter(_WORDS.get(outcome, outcome) for outcome in part["decided"])
        told = ", ".join(f"{count} {what}" for what, count in sorted(decided.items()))
        curve.rows.append([f"{part['from_seconds']:g} s", f"{part['answers']:,}", *rating, told])
    return [figures, curve]


def _number(value: float | None, digits: int) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"


def _seconds(value: float | None, digits: int) -> str:
    return _NONE if value is None else f"{value:.{digits}f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=ROOT / "build" / "demo-live" / "results.json", help="what the demo wrote")
    parser.add_argument("--no-keep", action="store_true", help="write no results")
    arguments = parser.parse_args()
    for table in tables_of(json.loads(arguments.results.read_text())):
        show(table)
        if not arguments.no_keep:
            keep(table)


if __name__ == "__main__":
    main()
