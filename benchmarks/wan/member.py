"""The process of a region: a member that follows the run, or fetches full weights or XOR deltas on request.

It reads lines of JSON. While it follows a run, it writes a line for each version that it serves.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from peers import DenseXor

import deltawire
from deltawire.chain.log import ChainLog
from deltawire.chain.reader_options import ReaderOptions
from deltawire.chain.version import Version
from deltawire.errors import LimitExceeded
from deltawire.events import Event
from deltawire.relay import Relay
from deltawire.store import Store, StoreOptions, open_store
from deltawire.subscribe.memory_replica import MemoryReplica
from deltawire.subscribe.prepared_swap import PreparedSwap, apply_directly
from deltawire.subscribe.replica import Replica
from deltawire.subscribe.replica_weights import ArrayWeights
from wan.emulated_stores import RegionsStore
from wan.staged_replica import StagedReplica
from wan.weights import Block

_FETCHES = 16
"""XOR deltas that are fetched at the same time; the store has its own limit on streams."""
_MOST_FETCHES = 64


class Member:
    """The weights of a region, and how they are kept up to date."""

    def __init__(self) -> None:
        self._block, self._scratch = Block(), Block()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._swapped: dict[int, tuple[float, float]] = {}
        self._printing = threading.Lock()

    def follow(
        self,
        url: str,
        block: str,
        copies: int,
        poll: float,
        decodes: bool,
        readers: int,
        relay: str | None,
        store: dict[str, Any],
        reader: dict[str, Any],
    ) -> dict[str, Any]:
        """Follow a run from its first version on, which is in the block of another process.

        With `relay`, the endpoint of a server in this region, a relay follows the run, and the readers follow the relay.
        """
        self.leave()
        self._stop.clear()
        options = ReaderOptions(run="wan", pin=False, **reader)
        origin = open_store(url, options=StoreOptions(allow_http=True, **store))
        log = ChainLog(origin, run="wan")
        head = log.head()
        assert head is not None
        first = log.state_commit(head)
        if relay is not None:
            url = f"{url}-copy"
            region = RegionsStore(open_store(url, options=StoreOptions(endpoint=relay)), _checkpoint_files(log))
            copier = Relay(origin, region, options=options, shortcuts="none", on_event=_report)
            copier.copy()
            self._start(lambda: _relay(copier, poll, self._stop))
            store = {"endpoint": relay}
        for number in range(readers):
            replica: Replica = StagedReplica(first)
            if decodes:
                self._block.load(Path(block))
                weights = ArrayWeights()
                weights.state.adopt(self._block.model(copies), first)
                replica = MemoryReplica(weights, functools.partial(self._swap, number), undo_bytes=0)
            source = open_store(url, options=StoreOptions(allow_http=True, **store))
            self._start(functools.partial(self._follow, source, replica, options, poll, number))
        return {"following": url}

    def _start(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()

    def leave(self) -> dict[str, Any]:
        """Stop following."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        return {"left": True}

    def equals(self, block: str) -> dict[str, Any]:
        """Tell whether the weights are those of another process, bit for bit."""
        return {"equal": self._block.equals(Path(block))}

    def full(self, url: str, key: str, size: int, times: int, repeats: int, store: dict[str, Any]) -> dict[str, Any]:
        """Fetch an object this many times, two of them at a time, as the blocks of a model. They are not decoded, and not checked."""
        buffers = [memoryview(bytearray(size)) for _ in range(2)]
        return self._fetch(url, key, times, repeats, store, 2, lambda origin, number: origin.read_into(key, buffers[number % 2]))

    def xor(self, url: str, key: str, size: int, times: int, repeats: int, store: dict[str, Any]) -> dict[str, Any]:
        """Fetch an XOR delta this many times, and apply it to a block each time."""

        def fetch(origin: Store, _: int) -> bytes:
            buffer = bytearray(size)
            origin.read_into(key, memoryview(buffer))
            return bytes(buffer)

        def apply(delta: bytes) -> None:
            DenseXor().apply(self._scratch.weights.view(np.uint16), delta)

        return self._fetch(url, key, times, repeats, store, _FETCHES, fetch, apply)

    def objects(self, url: str, key: str, size: int, times: int, repeats: int, store: dict[str, Any]) -> dict[str, Any]:
        """Fetch an object this many times, and do nothing with it."""
        return self._fetch(
            url, key, times, repeats, store, _MOST_FETCHES, lambda origin, _: origin.read_into(key, memoryview(bytearray(size)))
        )

    def _fetch(
        self,
        url: str,
        key: str,
        times: int,
        repeats: int,
        store: dict[str, Any],
        at_once: int,
        fetch: Callable[[Store, int], Any],
        use: Callable[[Any], None] = lambda _: None,
    ) -> dict[str, Any]:
        """Fetch a version in parts, again for each repeat, from one store, as a reader does that follows a run. Return the seconds of each.

        Like a reader, it asks for something small first.
        """
        seconds: list[float] = []
        using = 0.0
        with open_store(url, options=StoreOptions(allow_http=True, **store)) as origin, ThreadPoolExecutor(at_once) as pool:
            for _ in range(repeats):
                with contextlib.suppress(LimitExceeded):
                    origin.get(key, limit=0)
                begin = time.monotonic()
                for part in pool.map(functools.partial(fetch, origin), range(times)):
                    start = time.monotonic()
                    use(part)
                    using += time.monotonic() - start
                seconds.append(time.monotonic() - begin)
        return {"seconds": seconds, "decode": using / repeats}

    def _follow(self, store: Store, replica: Replica, options: ReaderOptions, poll: float, number: int) -> None:
        synced: dict[str, Any] = {}

        def note(event: Event) -> None:
            if event.name == "synced":
                synced.update({key: value for key, value in event.fields.items() if key.endswith("_seconds")})
            _report(event)

        with store, deltawire.Subscriber(store, replica=replica, options=options, on_event=note) as subscriber:
            for version in subscriber.follow(poll=poll, stop=self._stop):
                if version.step:
                    now = time.monotonic()
                    begin, end = self._swapped.pop(number, (now, now))
                    with self._printing:
                        print(json.dumps({"served": version.step, "begin": begin, "end": end, **synced}), flush=True)

    def _swap(self, number: int, change: PreparedSwap, version: Version) -> None:
        begin = time.monotonic()
        apply_directly(change, version)
        self._swapped[number] = (begin, time.monotonic())


def _checkpoint_files(log: ChainLog) -> dict[str, int]:
    """Return the sizes of the files of the first version, which follows the first fence."""
    first = log.read(1)
    assert first is not None
    assert first.kind == "anchor"
    return {file.key: file.size for file in first.files}


def _relay(relay: Relay, poll: float, stop: threading.Event) -> None:
    with relay:
        for _ in relay.follow(poll=poll, stop=stop):
            pass


def _report(event: Event) -> None:
    if event.name in ("sync-failed", "relay-failed", "retrying", "state-refused"):
        print(event, file=sys.stderr, flush=True)


def main() -> int:
    member = Member()
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        method: Callable[..., dict[str, Any]] = getattr(member, message.pop("do"))
        print(json.dumps(method(**message)), flush=True)
    member.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
