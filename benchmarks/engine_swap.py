"""New weights for a vLLM server under load, at every step: prefetched and patched, against ways that move weights while it is paused.

All ways end in the same vLLM routes on one server. Requests stream all the time and are kept across pauses. Ways take turns, so that what
else the machine does disturbs all of them alike, and before each turn the server's speed without syncs is measured.

Needs vLLM; trainer, server, store and clients share the machine.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import weight_broadcast
from report import Table

from deltawire import Publisher, Subscriber, Version
from deltawire.chain.reader_options import ReaderOptions
from deltawire.engines.vllm.sidecar import Sidecar
from deltawire.events import Event
from deltawire.publish.writer_options import WriterOptions

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "vllm"))

from live_server import LiveServer, free_port
from live_server import plugin_path as test_plugin_path
from tiny_checkpoints import State, TinyModel, runtime_hashes, train

CLIENTS = 4
TOKENS = 200
"""Of each request."""
TURNS = 2
_QUIET_SECONDS = 4.0
_TRAINING_SECONDS = 1.0


@dataclass
class Way:
    """One way of syncing, and what it came to, a value per step. `join` gets the server to where this way can go on from, unmeasured;
    `step` brings the weights as they are now into it: when the pause began and ended, and how many bytes were moved."""

    name: str
    join: Callable[[], None]
    step: Callable[[], tuple[float, float, int]]
    pauses: list[float] = field(default_factory=list)
    behind: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


def measure(scale: int, layers: int, steps: int, open_url: Callable[[], AbstractContextManager[str]]) -> Table:
    model = TinyModel("benchmark", scale=scale, layers=layers)
    state = model.state()
    weight_bytes = sum(tensor.nbytes for tensor in state.values())
    with ExitStack() as opened:
        folder, url = Path(opened.enter_context(tempfile.TemporaryDirectory())), opened.enter_context(open_url())
        plugins = f"{test_plugin_path(folder / 'plugins')}:{weight_broadcast.plugin_path(folder / 'broadcast')}"
        server = LiveServer(folder, model.save(folder / "model", state), environment={"PYTHONPATH": plugins})
        opened.callback(server.kill)
        server.wait()
        ways = _ways(server, state, folder, url, opened)
        requests: list[int] = []
        quiet: list[float] = []
        with _load(server, requests) as stamps:
            for _, way in itertools.product(range(TURNS), ways):
                quiet.append(_take_turn(way, server, state, stamps, steps // TURNS))
    return _table(ways, weight_bytes, quiet, requests)


def _take_turn(way: Way, server: LiveServer, state: State, stamps: list[float], steps: int) -> float:
    """Some steps of one way; returns the tokens per second that came before, without syncs."""
    way.join()
    quiet = _rate(stamps, _QUIET_SECONDS)
    rng = np.random.default_rng(len(stamps))
    for _ in range(steps):
        train(state, rng, 0.01)
        ready = time.monotonic()
        paused, resumed, size = way.step()
        way.pauses.append(resumed - paused)
        way.behind.append(resumed - ready)
        way.sizes.append(size)
        time.sleep(_TRAINING_SECONDS)
        around = sorted(stamp for stamp in list(stamps) if paused - 1 < stamp < resumed + 1)
        way.gaps.append(max((later - stamp for stamp, later in itertools.pairwise(around)), default=float("nan")))
    assert server.routes.checksums() == runtime_hashes(state, 1)
    return quiet


def _ways(server: LiveServer, state: State, folder: Path, url: str, opened: ExitStack) -> list[Way]:
    routes = server.routes

    def pause() -> float:
        paused = time.monotonic()
        routes.pause("keep", clear_cache=True)
        return paused

    def load(mirror: Path, version: Version) -> None:
        routes.initialise({"mirror": str(mirror)})
        routes.start_update()
        routes.update(version.seq)
        routes.finish_update(str(version.seq))

    def resume() -> float:
        routes.resume()
        return time.monotonic()

    broadcast = weight_broadcast.Broadcast(routes, free_port(), state)

    def everything_broadcast() -> tuple[float, float, int]:
        paused = pause()
        routes.start_update()
        size = broadcast.send(state)
        routes.finish_update(None)
        return paused, resume(), size

    numbers = itertools.count()

    def everything_by_the_store() -> tuple[float, float, int]:
        paused, place = pause(), f"everything-{next(numbers)}"
        with Publisher(f"{url}/{place}", options=WriterOptions(skips=False)) as publisher:
            version = _published(publisher, state)
        with Subscriber(f"{url}/{place}", folder / place, options=ReaderOptions(pin=False)) as subscriber:
            subscriber.sync()
        load(folder / place, version)
        return paused, resume(), version.bytes

    inside = opened.enter_context(Publisher(f"{url}/inside"))
    reader = opened.enter_context(Subscriber(f"{url}/inside", folder / "inside"))

    def delta_in_the_pause() -> tuple[float, float, int]:
        version = _published(inside, state)
        paused = pause()
        reader.sync()
        load(folder / "inside", version)
        return paused, resume(), version.bytes

    ours = opened.enter_context(Publisher(f"{url}/ours"))
    events: list[Event] = []
    _published(ours, state)
    sidecar = Sidecar(server.url, f"{url}/ours", folder / "ours", on_event=events.append)
    opened.callback(sidecar.close)

    def prefetched() -> tuple[float, float, int]:
        version = _published(ours, state)
        sidecar.step()
        resumed = time.monotonic()
        (swap,) = [event for event in events if event.name == "swapped" and event.fields["seq"] == version.seq]
        return resumed - float(swap.fields["pause_seconds"] or 0), resumed, version.bytes

    def once(step: Callable[[], tuple[float, float, int]]) -> Callable[[], None]:
        return lambda: step() and None

    return [
        Way("everything, broadcast within the pause (TRL's way)", once(everything_broadcast), everything_broadcast),
        Way("everything, by the store within the pause", lambda: None, everything_by_the_store),
        Way("delta, fetched within the pause", once(delta_in_the_pause), delta_in_the_pause),
        Way("deltawire sidecar: fetched and staged before", once(prefetched), prefetched),
    ]


def _table(ways: list[Way], weight_bytes: int, quiet: list[float], requests: list[int]) -> Table:
    steps, rate = len(ways[0].pauses), statistics.median(quiet)
    table = Table(
        "engine-swap",
        f"vLLM on CPU ({weight_bytes / 1e6:.0f} MB of bf16 weights, {CLIENTS} streams), a sync at each of {steps} steps of 1% changes",
        ["way", "pause, ms", "longest wait for a token, ms", "tokens delayed per sync", "bytes per sync", "seconds behind the trainer"],
    )
    for way in ways:
        table.rows.append(
            [
                way.name,
                f"{1e3 * statistics.median(way.pauses):.0f} (at most {1e3 * max(way.pauses):.0f})",
                f"{1e3 * statistics.median(way.gaps):.0f}",
                f"{statistics.median(way.gaps) * rate:.0f}",
                f"{statistics.mean(way.sizes) / 1e6:.2f} MB",
                f"{statistics.median(way.behind):.2f}",
            ]
        )
    lost = sum(TOKENS - tokens for tokens in requests)
    table.notes = [
        f"{len(requests)} requests were answered meanwhile, and {lost} tokens lost. Delayed are the tokens that would have come in the "
        f"time in which none came, at the speed without syncs ({rate:.0f} tokens/s; {min(quiet):.0f} to {max(quiet):.0f} before turns). "
        "Trainer, store, clients and server share two cores.",
        "TRL's way is that of its NCCL client, here over gloo on loopback (benchmarks/weight_broadcast.py): NCCL needs GPUs.",
        "The time behind the trainer begins when a step ends, so encoding and uploading are in it.",
        "After each turn of each way vLLM's checksums were compared with tensors worked out by hand: equal.",
    ]
    broadcast, store, inside, ours = ways
    table.check("no token is lost", lost == 0)
    for other, what in (
        (broadcast, "sending everything as TRL does"),
        (store, "everything by the store"),
        (inside, "a delta in the pause"),
    ):
        ratio = statistics.median(other.pauses) / statistics.median(ours.pauses)
        table.check(f"a shorter pause than with {what} ({ratio:.1f} times)", ratio > 1)
    fewer = statistics.mean(broadcast.sizes) / statistics.mean(ours.sizes)
    table.check(f"fewer bytes than by sending everything ({fewer:.0f} times)", fewer > 1)
    return table


def _published(publisher: Publisher, state: State) -> Version:
    version = publisher.publish(state)
    assert isinstance(version, Version)
    return version


def _rate(stamps: list[float], seconds: float) -> float:
    began, before = time.monotonic(), len(stamps)
    time.sleep(seconds)
    return (len(stamps) - before) / (time.monotonic() - began)


@contextmanager
def _load(server: LiveServer, requests: list[int]) -> Iterator[list[float]]:
    """Streams without end; the times at which their tokens came. `requests` gets the number of tokens of each that has ended."""
    stamps: list[float] = []
    stop = threading.Event()

    def ask(client: int) -> None:
        while not stop.is_set():
            requests.append(server.stream(TOKENS, prompt=(10 + client, 20), stamps=stamps))

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield stamps
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def measure_here(quick: bool = False) -> Table:
    """With sizes for a small machine, through an S3 server on loopback."""
    import seaweed

    return measure(1 if quick else 8, 2 if quick else 8, 4 if quick else 10, seaweed.bucket)
