"""Compare methods that bring new weights into a vLLM server under load after every training step.

deltawire's sidecar fetches and decodes an update before it pauses the server. The other methods move weights while the server is paused.
All methods end in the same vLLM routes on one server. Clients stream requests all the time, and vLLM keeps these requests across pauses.
The methods take turns, so that other load on the machine affects all of them alike. Before each turn the benchmark measures the speed of
the server without syncs.

It needs vLLM. Trainer, server, store and clients share the machine.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import weight_broadcast
from report import Table
from vllm_server import State, VllmServer, free_port, new_model, runtime_hashes

from deltawire import Publisher, Subscriber, Version
from deltawire.chain.reader_options import ReaderOptions
from deltawire.engines.vllm.driver.sidecar import Sidecar
from deltawire.events import Event
from deltawire.publish.writer_options import WriterOptions

CLIENTS = 4
TOKENS = 200
"""The number of tokens that each request asks for."""
TURNS = 2
_QUIET_SECONDS = 4.0
_TRAINING_SECONDS = 1.0


class Sync(NamedTuple):
    """One sync: when the pause began and ended, how many bytes were moved, and how many HTTP requests the server got within the pause.

    The requests that pause and resume the server count too. `write` is the number of seconds in which the worker wrote changes to its
    weights. It is None if the method has no such step, because it loads all weights.
    """

    paused: float
    resumed: float
    size: int
    calls: int
    write: float | None = None


@dataclass
class Method:
    """One method of syncing, and its measurements, a value per step.

    `join` brings the server to a state from which this method can continue; this is not measured. `step` brings the current weights into
    the server. It returns what that took.
    """

    name: str
    join: Callable[[], None]
    step: Callable[[], Sync]
    pauses: list[float] = field(default_factory=list)
    behind: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    writes: list[float] = field(default_factory=list)


def measure(width: int, layers: int, steps: int, open_url: Callable[[], AbstractContextManager[str]]) -> Table:
    """Measure all methods.

    Parameters
    ----------
    width, layers
        The size of the model.
    steps
        Training steps for each method.
    open_url
        Returns a context manager that yields the URL of an empty location in a store.
    """
    with ExitStack() as opened:
        folder, url = Path(opened.enter_context(tempfile.TemporaryDirectory())), opened.enter_context(open_url())
        state = new_model(folder / "model", width=width, layers=layers)
        weight_bytes = sum(tensor.nbytes for tensor in state.values())
        server = VllmServer(folder / "model", folder / "server.log", weight_broadcast.plugin_path(folder / "broadcast"))
        opened.callback(server.kill)
        server.wait()
        methods = _methods(server, state, folder, url, opened)
        requests: list[int] = []
        quiet: list[float] = []
        with _load(server, requests) as stamps:
            for _, method in itertools.product(range(TURNS), methods):
                quiet.append(_take_turn(method, server, state, stamps, steps // TURNS))
    return _table(methods, weight_bytes, quiet, requests)


def _take_turn(method: Method, server: VllmServer, state: State, stamps: list[float], steps: int) -> float:
    """Measure some steps of one method. Return the tokens per second of the server before them, without syncs."""
    method.join()
    quiet = _rate(stamps, _QUIET_SECONDS)
    rng = np.random.default_rng(len(stamps))
    for _ in range(steps):
        _train(state, rng)
        ready = time.monotonic()
        paused, resumed, size, calls, write = method.step()
        method.pauses.append(resumed - paused)
        method.behind.append(resumed - ready)
        method.sizes.append(size)
        method.calls.append(calls)
        method.writes += [] if write is None else [write]
        time.sleep(_TRAINING_SECONDS)
        around = sorted(stamp for stamp in list(stamps) if paused - 1 < stamp < resumed + 1)
        method.gaps.append(max((later - stamp for stamp, later in itertools.pairwise(around)), default=float("nan")))
    assert server.routes.checksums() == runtime_hashes(state)
    return quiet


def _methods(server: VllmServer, state: State, folder: Path, url: str, opened: ExitStack) -> list[Method]:
    routes = server.routes

    def pause() -> tuple[float, int]:
        paused, requests = time.monotonic(), routes.requests
        routes.pause("keep", clear_cache=True)
        return paused, requests

    def load(source: dict[str, str], version: Version, *, anew: bool) -> None:
        routes.initialise(source)
        routes.start_update()
        routes.update(version.seq, anew=anew)
        routes.finish_update(str(version.seq))

    def resume(pause: tuple[float, int], size: int) -> Sync:
        routes.resume()
        return Sync(pause[0], time.monotonic(), size, routes.requests - pause[1])

    def written() -> float | None:
        """Return the seconds of the last update in which the worker wrote changes."""
        (worker,) = routes.status()
        milliseconds = worker["last"].get("write_ms")
        return None if milliseconds is None or worker["last"].get("loaded_anew") else float(milliseconds) / 1e3

    broadcast = weight_broadcast.Broadcast(routes, free_port(), state)

    def broadcast_all() -> Sync:
        paused = pause()
        routes.start_update()
        size = broadcast.send(state)
        routes.finish_update(None)
        return resume(paused, size)

    numbers = itertools.count()

    def all_through_the_store() -> Sync:
        paused, name = pause(), f"everything-{next(numbers)}"
        with Publisher(f"{url}/{name}", options=WriterOptions(skips=False)) as publisher:
            version = _published(publisher, state)
        with Subscriber(f"{url}/{name}", folder / name, options=ReaderOptions(pin=False)) as subscriber:
            subscriber.sync()
        load({"mirror": str(folder / name)}, version, anew=True)
        return resume(paused, version.bytes)

    inside = opened.enter_context(Publisher(f"{url}/inside"))

    def delta_in_the_pause(*, anew: bool = False) -> Sync:
        version = _published(inside, state)
        paused = pause()
        load({"url": f"{url}/inside", "spool": str(folder / "spool")}, version, anew=anew)
        return resume(paused, version.bytes)._replace(write=written())

    ours = opened.enter_context(Publisher(f"{url}/ours"))
    events: list[Event] = []
    _published(ours, state)
    sidecar = Sidecar(server.url, f"{url}/ours", folder / "ours", on_event=events.append)
    opened.callback(sidecar.close)

    def prefetched() -> Sync:
        version = _published(ours, state)
        sidecar.step()
        resumed = time.monotonic()
        (swap,) = [event for event in events if event.name == "swapped" and event.fields["seq"] == version.seq]
        pause_seconds, calls = float(swap.fields["pause_seconds"] or 0), int(swap.fields["http_calls"] or 0)
        return Sync(resumed - pause_seconds, resumed, version.bytes, calls, written())

    def join_sidecar() -> None:
        _published(ours, state)
        sidecar.step()  # it may find that the server has this version already

    def once(step: Callable[[], Sync]) -> Callable[[], None]:
        return lambda: step() and None

    return [
        Method("all weights, broadcast within the pause (TRL's method, re-implemented)", once(broadcast_all), broadcast_all),
        Method("all weights, through the store within the pause", lambda: None, all_through_the_store),
        Method("a delta, fetched within the pause", once(partial(delta_in_the_pause, anew=True)), delta_in_the_pause),
        Method("deltawire sidecar: a delta, fetched and decoded before the pause", join_sidecar, prefetched),
    ]


def _table(methods: list[Method], weight_bytes: int, quiet: list[float], requests: list[int]) -> Table:
    steps, rate = len(methods[0].pauses), statistics.median(quiet)
    table = Table(
        "engine-swap",
        f"vLLM on CPU ({weight_bytes / 1e6:.0f} MB of bf16 weights, {CLIENTS} streams), a sync at each of {steps} steps of 1% changes",
        [
            "method",
            "pause, ms",
            "of it writing changes, ms",
            "HTTP requests in the pause",
            "longest wait for a token, ms",
            "tokens delayed per sync",
            "bytes per sync",
            "seconds behind the trainer",
        ],
    )
    for method in methods:
        table.rows.append(
            [
                method.name,
                f"{1e3 * statistics.median(method.pauses):.0f} (at most {1e3 * max(method.pauses):.0f})",
                f"{1e3 * statistics.median(method.writes):.1f}" if method.writes else "–",
                str(max(method.calls)),
                f"{1e3 * statistics.median(method.gaps):.0f}",
                f"{statistics.median(method.gaps) * rate:.0f}",
                f"{statistics.mean(method.sizes) / 1e6:.2f} MB",
                f"{statistics.median(method.behind):.2f}",
            ]
        )
    lost = sum(TOKENS - tokens for tokens in requests)
    table.notes = [
        f"The server answered {len(requests)} requests, and {lost} tokens were lost. The delayed tokens are those that the server "
        f"would have produced in the time in which no token came, at its speed without syncs ({rate:.0f} tokens/s; {min(quiet):.0f} to "
        f"{max(quiet):.0f} before the turns). Trainer, store, clients and server share two cores.",
        "TRL's method is re-implemented here after TRL's NCCL client (benchmarks/weight_broadcast.py), over gloo on loopback, because NCCL "
        "needs GPUs.",
        "The time behind the trainer begins when a step ends, so it includes encoding and uploading.",
        "After each turn of each method the benchmark compared vLLM's checksums with those of the trainer's weights: they were equal.",
    ]
    broadcast, store, inside, ours = methods
    table.check("no token is lost", lost == 0)
    for other, what in (
        (broadcast, "all weights broadcast as TRL does"),
        (store, "all weights through the store"),
        (inside, "a delta in the pause"),
    ):
        ratio = statistics.median(other.pauses) / statistics.median(ours.pauses)
        table.check(f"a shorter pause than with {what} ({ratio:.1f} times)", ratio > 1)
    table.check(f"at most 3 HTTP requests in the pause ({max(ours.calls)})", max(ours.calls) <= 3)
    pause, write = 1e3 * statistics.median(ours.pauses), 1e3 * statistics.median(ours.writes) if ours.writes else float("inf")
    table.check(f"a pause of at most 40 ms ({pause:.0f})", pause <= 40)
    table.check(f"of it, at most 5 ms for writing ({write:.1f})", write <= 5)
    fewer = statistics.mean(broadcast.sizes) / statistics.mean(ours.sizes)
    table.check(f"fewer bytes than with all weights ({fewer:.0f} times)", fewer > 1)
    return table


def _published(publisher: Publisher, state: State) -> Version:
    version = publisher.publish(state)
    assert isinstance(version, Version)
    return version


def _train(state: State, rng: np.random.Generator) -> None:
    """Change 1% of the elements of every tensor in some of their last bits, as a small learning rate does."""
    for tensor in state.values():
        bits = tensor.reshape(-1).view(np.uint16)
        where = rng.choice(bits.size, max(1, bits.size // 100), replace=False)
        bits[where] ^= rng.integers(1, 64, where.size).astype(np.uint16)


def _rate(stamps: list[float], seconds: float) -> float:
    began, before = time.monotonic(), len(stamps)
    time.sleep(seconds)
    return (len(stamps) - before) / (time.monotonic() - began)


@contextmanager
def _load(server: VllmServer, requests: list[int]) -> Iterator[list[float]]:
    """Stream requests until the block ends. Yield a list of the times at which tokens arrived.

    Every finished request appends its number of tokens to `requests`.
    """
    stamps: list[float] = []
    stop = threading.Event()

    def ask(client: int) -> None:
        while not stop.is_set():
            arrived = 0
            for tokens in server.stream((10 + client, 20), TOKENS):
                arrived += tokens
                stamps.extend([time.monotonic()] * tokens)
            requests.append(arrived)

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
    """Measure with sizes for a small machine, through an S3 server on loopback."""
    import seaweed

    return measure(1 if quick else 8, 2 if quick else 8, 4 if quick else 10, seaweed.bucket)
