"""RL from live traffic on one machine: users, a gateway, engines, late feedback, a trainer, canaries and a gate. `make demo-live` runs it.

The loop is closed for 90% of the users: a trainer learns from their feedback, and a gate releases what it learned. The other 10% always get
the first version. One version is damaged on purpose, and the gate rolls it back by itself. `python examples/live_demo --help` lists the
options.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from pathlib import Path
from statistics import mean, median
from typing import Any, NoReturn

from measure import CLOSED, OPEN, curve, feedback_to_release, parts, rollback_seconds
from plots import Chart, Page
from releases import LiveDemo, Plan, Story

ROOT = Path(__file__).resolve().parents[2]
_LAST = 20.0
"""The results are those of this many seconds at the end."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="live_demo", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "demo-live", metavar="DIR", help="the folder for everything; it is emptied first"
    )
    parser.add_argument("--seconds", type=float, default=170.0, help="how long users ask, at least")
    parser.add_argument("--longest", type=float, default=230.0, metavar="SECONDS", help="how long users ask at most")
    parser.add_argument("--damaged-step", type=int, default=14, metavar="STEP", help="the training step whose version is damaged")
    parser.add_argument("--alpha", type=float, default=0.05, metavar="P", help="the error probability of the gate")
    parser.add_argument("--learning-rate", type=float, default=6e-4, metavar="RATE", help="the learning rate of the trainer")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminate)
    out: Path = arguments.out
    if out.exists() and not (out / "demo").is_file() and any(out.iterdir()):
        parser.error(f"{out} is not empty, and it is not a folder of this demo. Name another folder with --out.")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / "demo").write_text("This folder is emptied by the next run of the demo.\n")
    plan = Plan(
        out / "store",
        out / "logs",
        arguments.seconds,
        arguments.longest,
        arguments.damaged_step,
        arguments.alpha,
        arguments.learning_rate,
    )
    demo = LiveDemo(plan, lambda line: None if arguments.json else print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True))
    started = time.monotonic()
    story = demo.run()
    results = {**results_of(story, plan.store), "seconds": time.monotonic() - started, "page": str(out / "report.html")}
    (out / "report.html").write_text(page(story, results).html())
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in story.events))
    if arguments.json:
        print(json.dumps(results))
    else:
        print(summary(results))
    return 0 if results["failed"] == 0 and results["damaged_rolled_back"] and results["promoted"] else 1


def _terminate(number: int, frame: object) -> NoReturn:
    """Unwind the process when SIGTERM arrives, so that its child processes are ended."""
    raise SystemExit(128 + number)


def results_of(story: Story, store: Path) -> dict[str, Any]:
    """Return the results as numbers."""
    assert story.crowd is not None
    reactions = story.crowd.reactions
    last = max((each.at for each in reactions), default=0.0) - _LAST
    ends = {name: [each.rating for each in reactions if each.at >= last and each.channel in channels] for name, channels in _LOOPS.items()}
    latencies = feedback_to_release(store)
    return {
        "answers": len(reactions),
        "failed": len(story.failures),
        "failures": story.failures[:5],
        "reward": {name: mean(values) if values else None for name, values in ends.items()},
        "promoted": len(story.moves("stable", "promote")),
        "rolled_back": len(story.moves("canary", "rollback")),
        "damaged_rolled_back": story.was_rolled_back,
        "rollback_seconds": rollback_seconds(story),
        "feedback_to_release_seconds": median(seconds for _, seconds in latencies) if latencies else None,
        "releases": latencies,
        "asked_seconds": max((each.at for each in reactions), default=story.began) - story.began,
        "last_seconds": _LAST,
        "parts": parts(story),
    }


_LOOPS = {"closed": CLOSED, "open": OPEN}


def page(story: Story, results: dict[str, Any]) -> Page:
    """Return the page of plots."""
    assert story.crowd is not None
    made = Page("RL from live traffic")
    made.add_text(summary(results))
    curves = {
        "loop closed": curve(story.crowd.reactions, story.began, CLOSED),
        "loop open": curve(story.crowd.reactions, story.began, OPEN),
    }
    decided = [each for each in story.events if each["event"] == "gate-decided"]
    marks = [(each["at"] - story.began, each["outcome"]) for each in decided]
    made.add_chart(Chart("Rating of answered requests, mean of five seconds", curves, 1.0, marks))
    both = {name: curve(story.crowd.reactions, story.began, {name}) for name in ("stable", "canary")}
    made.add_chart(Chart("The same by channel", both, 1.0, marks))
    releases = results["releases"]
    highest = max([1.0, *(seconds for _, seconds in releases)])
    made.add_chart(Chart("Seconds from feedback to the release of a version that learned from it", {"median": releases}, 1.1 * highest))
    rows = [[f"{each['at'] - story.began:.1f} s", each["outcome"], f"commit {each['seq']}", each["why"]] for each in decided]
    made.add_table("Decisions of the gate", ["time", "outcome", "version", "why"], rows)
    return made


def summary(results: dict[str, Any]) -> str:
    """Return the results in sentences."""
    reward, rollback, latency = results["reward"], results["rollback_seconds"], results["feedback_to_release_seconds"]
    parts = [f"{results['answers']:,} requests were answered, and {results['failed']} failed."]
    if None not in reward.values():
        parts.append(f"At the end the mean rating is {reward['closed']:.2f} with the loop closed, and {reward['open']:.2f} with it open.")
    parts.append(f"The gate promoted {results['promoted']} versions.")
    parts.append(f"It {'rolled the damaged version back' if results['damaged_rolled_back'] else 'did not roll the damaged version back'}.")
    if latency is not None:
        parts.append(f"A released version learned from feedback that came {latency:.1f} s before (median).")
    if rollback is not None:
        parts.append(f"The last engine served the version before {rollback:.2f} s after the gate had decided to roll back.")
    return " ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
