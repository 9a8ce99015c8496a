"""A complete run on one machine: a trainer, members that join and leave, a live view, and a report. `make demo` runs it.

`python examples/demo --help` lists the options. The demo writes only to one folder, and to the store if you give another one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from conductor import Conductor, Plan
from rich.console import Console
from story import Story
from view import JsonView, LineView, LiveView, View

from deltawire.dashboard import Observer, write_report
from deltawire.errors import DeltawireError
from deltawire.quantise.recipe import SPELLINGS
from deltawire.store import open_store
from deltawire.store.probe import probe

ROOT = Path(__file__).resolve().parents[2]
LOOK = 1.0
"""Seconds between two looks at the store, for the report."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument(
        "--store", default="", metavar="URL", help="the store of trainer and members, such as s3://BUCKET/PREFIX; by default a folder"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "build" / "demo",
        metavar="DIR",
        help="the folder for the report and all other files; it is emptied first",
    )
    parser.add_argument("--steps", type=int, default=120, help="the number of training steps")
    parser.add_argument(
        "--pretraining", type=float, default=30.0, metavar="SECONDS", help="how long the model reads the documentation first"
    )
    parser.add_argument("--quantise", choices=SPELLINGS, metavar="RECIPE", help=f"serve a quantised policy: {', '.join(SPELLINGS)}")
    parser.add_argument("--json", action="store_true", help="print every event as a line of JSON, and a summary at the end")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps must be at least 2, because a member is killed half-way")
    signal.signal(signal.SIGTERM, _terminate)
    plan = _plan(arguments)
    console = Console(highlight=False)
    view: View = JsonView() if arguments.json else LiveView(console) if console.is_terminal else LineView(console)
    conductor = Conductor(plan, view)
    report = arguments.out / "report.html"
    try:
        with _observing(plan.store) as observer:
            with view:
                story = conductor.run()
            observer.look()
            write_report(observer, report, notes=[_proof(story)])
    except (KeyboardInterrupt, SystemExit) as stopped:
        Console(stderr=True).print("interrupted; all processes of the demo have ended", style="yellow")
        return 128 + signal.SIGTERM if isinstance(stopped, SystemExit) else 128 + signal.SIGINT
    if arguments.json:
        print(json.dumps(summary(story, report)))
    else:
        _print_results(console, story, plan, report)
    for name, output in conductor.failures().items():
        Console(stderr=True).print(f"{name} failed:\n{output}", style="red", markup=False)
    return 0 if story.proof is not None and story.proof.holds else 1


@contextmanager
def _observing(url: str) -> Iterator[Observer]:
    """Watch the run through its store, as `deltawire dashboard` does, for the report at the end."""
    stop = threading.Event()
    with open_store(url) as store, Observer(store) as observer:
        thread = threading.Thread(target=observer.follow, args=(stop, LOOK), name="demo-observer")
        thread.start()
        try:
            yield observer
        finally:
            stop.set()
            thread.join()


def _proof(story: Story) -> str:
    return story.proof.line() if story.proof is not None else "NOT PROVEN: the run did not finish"


def _terminate(number: int, frame: object) -> NoReturn:
    """Unwind the process when SIGTERM arrives, so that its child processes are ended."""
    raise SystemExit(128 + number)


def _plan(arguments: argparse.Namespace) -> Plan:
    """Return the plan of this run. Delete the folder of an earlier run; in a store that the user names, use a new location."""
    out: Path = arguments.out
    if out.exists() and not (out / "demo").is_file() and any(out.iterdir()):
        raise SystemExit(f"{out} is not empty, and it is not a folder of this demo. Name another folder with --out.")
    store = f"{arguments.store.rstrip('/')}/demo-{time.strftime('%Y%m%d-%H%M%S')}" if arguments.store else _short(out / "store")
    if arguments.store:
        _check_store(store)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / "demo").write_text("This folder is emptied by the next run of the demo.\n")
    return Plan(store, out / "logs", arguments.steps, arguments.pretraining, arguments.quantise)


def _check_store(url: str) -> None:
    """Check the store now, and not after half a minute of pre-training."""
    try:
        with open_store(url) as store:
            probe(store)
    except DeltawireError as error:
        raise SystemExit(f"error: {error}") from None


def _short(path: Path) -> str:
    """Return the path relative to the current directory, if it is below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def summary(story: Story, report: Path) -> dict[str, Any]:
    """Return the results of the run as numbers."""
    proof = story.proof
    return {
        "event": "summary",
        "seconds": story.now,
        "steps": len(story.steps),
        "reward": [story.first_reward, story.last_reward],
        "density": median(story.densities) if story.densities else None,
        "reduction": story.reduction,
        "recipe": story.recipe,
        "mismatch_kl": median(story.mismatches) if story.mismatches else None,
        "fetched_bytes": story.fetched[0],
        "fetched_bytes_as_full_weights": story.fetched[1],
        "pause_seconds": median(story.pauses) if story.pauses else None,
        "accepted": story.accepted,
        "rejected": dict(story.rejected),
        "takeovers": [{"from": name, "round": work.round, "task": work.task, "by": by} for name, work, by in story.takeovers],
        "bit_identical": proof is not None and proof.holds,
        "proof": proof.line() if proof is not None else "the run did not finish",
        "report": str(report),
    }


def _print_results(console: Console, story: Story, plan: Plan, report: Path) -> None:
    style = "green" if story.proof is not None and story.proof.holds else "red"
    console.print(_proof(story), style=style, soft_wrap=True)
    if story.steps:
        density = (
            f"{100 * median(story.densities):.2f}% of the weights changed in a step, {story.reduction:.0f}× fewer bytes than full weights"
        )
        console.print(f"reward {story.first_reward:.2f} → {story.last_reward:.2f} in {len(story.steps)} steps; {density}", soft_wrap=True)
    if story.mismatches:
        policy = f"the {story.recipe} policy" if story.recipe else "the policy in bf16"
        console.print(f"mismatch between the trainer and {policy}: {median(story.mismatches):.2g} nats per token", soft_wrap=True)
    console.print(f"report     {_short(report)}", soft_wrap=True)
    console.print(f"the store  deltawire dashboard --from {plan.store}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
