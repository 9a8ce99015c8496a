"""New weights for a vLLM server under load, at every step: prefetched and patched, against the ways that fetch within the pause.

All three ways end in the same vLLM routes on the same server, through the same S3 bucket on loopback. Requests stream all the time and are
kept across pauses, so none is lost; what a way costs them is the time in which no token comes.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from report import Table

from deltawire import Publisher, Subscriber, Version
from deltawire.engines.vllm.sidecar import Sidecar
from deltawire.events import Event

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "vllm"))

from live_server import LiveServer
from tiny_models import State, TinyModel, runtime_hashes, train

CLIENTS = 4


@dataclass
class Way:
    """What one way of syncing came to, a value per step."""

    name: str
    pauses: list[float] = field(default_factory=list)
    behind: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    rate: float = 0.0


def measure(scale: int, layers: int, steps: int, open_url: Callable[[], AbstractContextManager[str]]) -> Table:
    model = TinyModel("benchmark", scale=scale, layers=layers)
    state = model.state()
    weight_bytes = sum(tensor.nbytes for tensor in state.values())
    with tempfile.TemporaryDirectory() as name, open_url() as url:
        folder = Path(name)
        server = LiveServer(folder, model.save(folder / "model", state))
        try:
            server.wait()
            runs = _Runs(server, model, state, folder, url, steps)
            with _load(server) as stamps:
                quiet = _rate(stamps, 5.0)
                ways = [runs.everything(stamps), runs.delta_in_the_pause(stamps), runs.prefetched(stamps)]
        finally:
            server.kill()
    table = Table(
        "engine-swap",
        f"vLLM on CPU ({weight_bytes / 1e6:.0f} MB of bf16 weights, {CLIENTS} streams), a sync at each of {steps} steps of 1% changes",
        ["way", "pause, ms", "longest wait for a token, ms", "tokens/s", "bytes per step", "seconds behind the trainer"],
    )
    for way in ways:
        table.rows.append(
            [
                way.name,
                f"{1e3 * statistics.median(way.pauses):.0f} (at most {1e3 * max(way.pauses):.0f})",
                f"{1e3 * statistics.median(way.gaps):.0f}",
                f"{way.rate:.0f}",
                f"{statistics.mean(way.sizes) / 1e6:.2f} MB",
                f"{statistics.median(way.behind):.2f}",
            ]
        )
    table.notes.append(f"Without syncs: {quiet:.0f} tokens/s. No request was lost in any way: vLLM keeps them while paused.")
    table.notes.append("After the last step of each way vLLM's checksums were compared with tensors worked out by hand: equal.")
    everything, inside, ours = (statistics.median(way.pauses) for way in ways)
    table.check("a shorter pause than by sending everything", ours < everything)
    table.check("a shorter pause than by fetching the delta within it", ours < inside)
    return table


class _Runs:
    """The three ways, one after the other on one server."""

    def __init__(self, server: LiveServer, model: TinyModel, state: State, folder: Path, url: str, steps: int) -> None:
        self._server = server
        self._model = model
        self._state = state
        self._folder = folder
        self._url = url
        self._steps = steps
        self._rng = np.random.default_rng(3)

    def everything(self, stamps: list[float]) -> Way:
        """As trainers do that stream all weights into a paused server: here by way of the bucket, a whole checkpoint each time."""

        def step(number: int) -> tuple[float, float, int]:
            paused = self._pause()
            with Publisher(f"{self._url}/everything-{number}") as publisher:
                version = _published(publisher, self._state)
            mirror = self._folder / f"everything-{number}"
            with Subscriber(f"{self._url}/everything-{number}", mirror) as subscriber:
                subscriber.sync()
            self._server.routes.initialise({"mirror": str(mirror)})
            self._update(version)
            return paused, time.monotonic(), version.bytes

        return self._measure("everything, within the pause", stamps, step)

    def delta_in_the_pause(self, stamps: list[float]) -> Way:
        """The same deltas as ours, fetched and decoded while the server is paused."""
        url, mirror = f"{self._url}/inside", self._folder / "inside"
        with Publisher(url) as publisher, Subscriber(url, mirror) as subscriber:
            version = _published(publisher, self._state)
            subscriber.sync()
            self._pause()
            self._server.routes.initialise({"mirror": str(mirror)})
            self._update(version)

            def step(_: int) -> tuple[float, float, int]:
                version = _published(publisher, self._state)
                paused = self._pause()
                subscriber.sync()
                self._update(version)
                return paused, time.monotonic(), version.bytes

            return self._measure("delta, fetched within the pause", stamps, step)

    def prefetched(self, stamps: list[float]) -> Way:
        """`deltawire sidecar`."""
        url = f"{self._url}/sidecar"
        swaps: list[Event] = []
        with Publisher(url) as publisher:
            _published(publisher, self._state)
            sidecar = Sidecar(self._server.url, url, self._folder / "sidecar", on_event=swaps.append)
            sidecar.step()

            def step(_: int) -> tuple[float, float, int]:
                version = _published(publisher, self._state)
                sidecar.step()
                (swap,) = [event for event in swaps if event.name == "swapped" and event.fields["seq"] == version.seq]
                now = time.monotonic()
                return now - float(swap.fields["pause_seconds"] or 0), now, version.bytes

            way = self._measure("deltawire sidecar", stamps, step)
            sidecar.close()
            return way

    def _measure(self, name: str, stamps: list[float], step: Callable[[int], tuple[float, float, int]]) -> Way:
        way = Way(name)
        began = time.monotonic()
        for number in range(self._steps):
            train(self._state, self._rng, 0.01)
            ready = time.monotonic()
            paused, resumed, size = step(number)
            way.pauses.append(resumed - paused)
            way.behind.append(resumed - ready)
            way.sizes.append(size)
            time.sleep(1.0)  # training
            around = sorted(stamp for stamp in list(stamps) if paused - 1 < stamp < resumed + 1)
            way.gaps.append(max((b - a for a, b in itertools.pairwise(around)), default=float("nan")))
        way.rate = sum(stamp > began for stamp in list(stamps)) / (time.monotonic() - began)
        assert self._server.routes.checksums() == runtime_hashes(self._state, 1)
        return way

    def _pause(self) -> float:
        paused = time.monotonic()
        self._server.routes.pause("keep", clear_cache=True)
        return paused

    def _update(self, version: Version) -> None:
        routes = self._server.routes
        routes.start_update()
        routes.update(version.seq)
        routes.finish_update(str(version.seq))
        routes.resume()


def _published(publisher: Publisher, state: State) -> Version:
    version = publisher.publish(state)
    assert isinstance(version, Version)
    return version


def _rate(stamps: list[float], seconds: float) -> float:
    began = len(stamps)
    time.sleep(seconds)
    return (len(stamps) - began) / seconds


@contextmanager
def _load(server: LiveServer) -> Iterator[list[float]]:
    """Streams without end; the times at which their tokens came."""
    stamps: list[float] = []
    stop = threading.Event()

    def ask(client: int) -> None:
        while not stop.is_set():
            assert server.stream(200, prompt=(10 + client, 20), stamps=stamps) == 200

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield stamps
    finally:
        stop.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    import seaweed
    from report import publish

    quick = "--quick" in sys.argv
    publish(measure(1 if quick else 8, 2 if quick else 8, 3 if quick else 10, seaweed.bucket))
