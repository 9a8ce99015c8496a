"""Measure the time from a rollback of a channel until the last follower serves the old version.

Most followers are engines in this process, each on a thread of its own, that pause for a swap as engines do. One is a process:
`deltawire follow --channel`, with a mirror. Followers look for moves at intervals, so the floor of the time is one interval.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from chain_speed import directory
from chain_updates import training_run
from report import Table

import deltawire
from deltawire.chain.find import find_version
from deltawire.chain.reader_options import ReaderOptions
from deltawire.engines.base import Engine, KvCache
from deltawire.engines.hot_swap import HotSwap
from deltawire.events import Event
from deltawire.publish.channels import ChannelWriter
from deltawire.store import open_store
from deltawire.subscribe.memory_replica import MemoryReplica
from deltawire.subscribe.prepared_swap import Swap
from deltawire.subscribe.replica import Replica

OLD, NEW = 2, 5
"""The versions between which the channel is moved. A promotion leads over two versions that are not on the channel."""


class Served:
    """The versions that the followers serve, and since when."""

    def __init__(self, followers: int) -> None:
        self._changed = threading.Condition()
        self._versions: list[tuple[int, float]] = [(0, 0.0)] * followers

    def note(self, follower: int, version: int) -> None:
        with self._changed:
            self._versions[follower] = version, time.perf_counter()
            self._changed.notify_all()

    def wait_for(self, version: int) -> list[float]:
        """Return when all followers serve a version. Returns the time at which each of them began to."""
        with self._changed:
            self._changed.wait_for(lambda: all(each[0] == version for each in self._versions))
            return [each[1] for each in self._versions]


class PausedEngine(Engine):
    """Weights in this process that are swapped as those of an engine."""

    name = "memory"

    def __init__(self, undo_bytes: int | None) -> None:
        self._undo_bytes = undo_bytes

    def replica(self, swap: Swap) -> Replica:
        return MemoryReplica(swap=swap, threads=1, undo_bytes=self._undo_bytes)

    def pause(self, kv_cache: KvCache) -> None:
        """Do nothing: nothing generates."""

    def resume(self) -> None:
        """Do nothing."""


def measure(
    elements: int = 1 << 24,
    engines: int = 16,
    rounds: int = 5,
    polls: tuple[float, ...] = (1.0, 0.25),
    location: Callable[[], AbstractContextManager[str]] = directory,
    where: str = "a local directory",
) -> Table:
    """Promote and roll back a channel several times.

    Parameters
    ----------
    elements
        The number of weights.
    engines
        The number of engines in this process.
    rounds
        The number of rollbacks for each row.
    polls
        The seconds between two looks of a follower.
    location
        Returns a context manager that yields the URL of an empty location in a store.
    where
        The name of the store in the table.
    """
    table = Table(
        "channel-rollback",
        f"From `rollback` until the old version is served by {engines} engines and one mirror: {2 * elements / 1e6:.0f} MB of bf16 weights "
        f"in {where}, {rounds} rollbacks in each row, over {NEW - OLD} versions",
        ["poll", "old values", "move made", "median follower", "last follower", "last / poll", "promotion, last follower"],
    )
    ratios = []
    with location() as url:
        run = training_run(elements, 0.01)
        with deltawire.Publisher(url, attachments={}) as publisher:
            for _ in range(NEW):
                publisher.publish(next(run))
        for poll in polls:
            for undo in (None, 0):
                made, followed, promoted = _row(url, engines, rounds, poll, undo)
                last = statistics.median(max(each) for each in followed)
                ratios.append(last / poll)
                table.rows.append(
                    [
                        f"{poll:.2f} s",
                        "in memory" if undo is None else "full checkpoint",
                        f"{1e3 * statistics.median(made):.0f} ms",
                        f"{statistics.median(time for each in followed for time in each):.2f} s",
                        f"{last:.2f} s",
                        f"{last / poll:.2f}",
                        f"{statistics.median(promoted):.2f} s",
                    ]
                )
    table.check("with old values in memory, the last follower needs at most two looks", all(ratio <= 2 for ratio in ratios[::2]))
    return table


def _row(url: str, engines: int, rounds: int, poll: float, undo: int | None) -> tuple[list[float], list[list[float]], list[float]]:
    """Return the seconds that each rollback took to be made, those until each follower served it, and those of promotions."""
    made, followed, promoted = [], [], []
    with open_store(url) as store, ExitStack() as stack:
        log = ReaderOptions().open_log(store)
        writer = ChannelWriter(log, f"stable-{time.time_ns()}")
        old, new = find_version(log, OLD), find_version(log, NEW)
        channel = writer.promote(old).channel
        served = Served(engines + 1)
        for number in range(engines):
            stack.enter_context(_engine(url, channel, poll, undo, served, number))
        stack.enter_context(_mirror(url, channel, poll, served, engines))
        served.wait_for(OLD)
        for _ in range(rounds):
            began = time.perf_counter()
            writer.promote(new)
            promoted.append(max(served.wait_for(NEW)) - began)
            time.sleep(poll * 1.3)  # so that looks are not in step with the last move
            began = time.perf_counter()
            writer.rollback()
            made.append(time.perf_counter() - began)
            followed.append([each - began for each in served.wait_for(OLD)])
            time.sleep(poll * 1.3)
    return made, followed, promoted


@contextmanager
def _engine(url: str, channel: str, poll: float, undo: int | None, served: Served, number: int) -> Iterator[None]:
    def note(event: Event) -> None:
        if event.name == "swapped":
            served.note(number, int(event.fields["updates"] or 0))

    options = ReaderOptions(channel=channel, pin=False, reader=f"engine-{number}")
    with HotSwap(url, PausedEngine(undo), options=options, confirm_every=1000, on_event=note) as swap:
        swap.start(poll=poll)
        yield


@contextmanager
def _mirror(url: str, channel: str, poll: float, served: Served, number: int) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        command = ["follow", url, f"{folder}/mirror", "--channel", channel, "--poll", str(poll), "--json"]
        with subprocess.Popen([sys.executable, "-m", "deltawire", *command], stdout=subprocess.PIPE, text=True) as process:

            def read() -> None:
                assert process.stdout is not None
                for line in process.stdout:
                    version = json.loads(line).get("version")
                    if version is not None:
                        served.note(number, int(version))

            thread = threading.Thread(target=read, daemon=True)
            thread.start()
            try:
                yield
            finally:
                process.terminate()
                thread.join()
