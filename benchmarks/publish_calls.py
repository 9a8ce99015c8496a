"""Measure how long each call of `publish` takes in the foreground, while skips and anchors are made on a thread.

    python benchmarks/publish_calls.py            # 4 GB of weights: 9 GB of memory, 5 GB on disk
    python benchmarks/publish_calls.py --gb 0.5 --show

`--show` prints the table only. Without it, the table is also written to benchmarks/results/ and into docs/benchmarks.md. 1% of the weights
change between two calls. Skips are due at every fourth call, and the policy makes an anchor due once.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from report import Table, keep, show

from deltawire import Publisher, WriterOptions
from deltawire.publish.shortcuts.cadence import AnchorPolicy
from deltawire.publish.shortcuts.job_thread import JobThread

CALLS = 12
_ELEMENTS = 1 << 25
"""Elements of each tensor: 64 MiB."""
_NEVER = AnchorPolicy(min_versions=10**6, max_versions=None)


@dataclass
class _Thread:
    """The time of the thread of the shortcuts: wall clock and processor time of each job."""

    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def watch(self, jobs: JobThread) -> None:
        begin = jobs.do

        def do(job: Any) -> None:
            def timed() -> None:
                start, worked = time.perf_counter(), time.thread_time()
                job()
                self.seconds.append(time.perf_counter() - start)
                self.processor.append(time.thread_time() - worked)

            begin(timed)

        jobs.do = do  # type: ignore[method-assign]


def measure(gigabytes: float, calls: int = CALLS) -> Table:
    """Publish `calls` versions of a state of this size in several ways."""
    state = _state(gigabytes)
    size = sum(array.nbytes for array in state.values())
    table = Table(
        "publish-calls",
        f"Each call of `publish` in the foreground: {size / 1e9:.3g} GB of bf16 weights, {calls} versions with 1% changes, "
        "to a local directory",
        ["shortcuts", "between two calls", "median call", "longest call", "longest / median", "the thread took for shortcuts"],
    )
    anchors = AnchorPolicy(min_versions=8, max_versions=8)
    plain, _ = _publish(state, calls, 0.0, WriterOptions(skips=False, anchor_policy=_NEVER))
    rest = 2 * statistics.median(plain)
    rows = [
        ("none", 0.0, WriterOptions(skips=False, anchor_policy=_NEVER)),
        ("skips", rest, WriterOptions(anchor_policy=_NEVER)),
        ("skips", 0.0, WriterOptions(anchor_policy=_NEVER)),
        ("skips, and one anchor", rest, WriterOptions(anchor_policy=anchors)),
    ]
    for name, pause, options in rows:
        seconds, thread = (plain, _Thread()) if name == "none" else _publish(state, calls, pause, options)
        middle, longest = statistics.median(seconds), max(seconds)
        count = len(thread.seconds)
        work = f"{count} jobs, at most {max(thread.seconds):.2f} s, {max(thread.processor):.2f} s of processor time" if count else "–"
        between = "nothing" if not pause else f"{pause:.2f} s of training elsewhere"
        table.rows.append([name, between, f"{middle:.2f} s", f"{longest:.2f} s", f"{longest / middle:.2f}", work])
        print(name, between, " ".join(f"{each:.2f}" for each in seconds), flush=True)
        if pause:
            goal = f"with {name}, the longest call takes at most 1.5 times the median ({longest / middle:.2f})"
            table.check(goal, longest <= 1.5 * middle)
    table.notes = ["The first two calls are not counted: a full checkpoint, and the first delta, for which memory is allocated."]
    return table


def _publish(state: dict[str, NDArray[Any]], calls: int, pause: float, options: WriterOptions) -> tuple[list[float], _Thread]:
    random = np.random.default_rng(2)
    seconds: list[float] = []
    thread = _Thread()
    with tempfile.TemporaryDirectory() as folder, Publisher(folder, attachments={}, options=options) as publisher:
        thread.watch(publisher._jobs)
        publisher.publish(state)
        for call in range(calls + 1):
            _train(state, random)
            time.sleep(pause)
            start = time.perf_counter()
            publisher.publish(state)
            if call:
                seconds.append(time.perf_counter() - start)
        publisher.flush()
    return seconds, thread


def _state(gigabytes: float) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(1)
    one = (random.standard_normal(_ELEMENTS, np.float32) * np.float32(0.02)).astype(ml_dtypes.bfloat16)
    return {f"model.layers.{index}.weight": np.roll(one, index) for index in range(max(1, round(gigabytes * 1e9 / one.nbytes)))}


def _train(state: dict[str, NDArray[Any]], random: np.random.Generator) -> None:
    """Change 1% of the weights by one unit in the last place."""
    where = random.integers(0, _ELEMENTS, _ELEMENTS // 100)
    for array in state.values():
        array.view(np.uint16)[where] ^= 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0, help="gigabytes of weights")
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--show", action="store_true", help="do not write the results")
    given = parser.parse_args()
    table = measure(given.gb, given.calls)
    show(table)
    if not given.show:
        keep(table)


if __name__ == "__main__":
    main()
