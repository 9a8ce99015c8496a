"""Measure the time from the end of training until a reader behind a slow link has the version, with and without cut-through.

Publisher, reader, announcements and files are real. The link is emulated, and so is the time that a large model takes to encode and to
decode: the model here is small, and each segment is padded with waiting. So the result does not depend on the cores of this machine.
"""

from __future__ import annotations

import itertools
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from emulated_link import EmulatedLink
from report import Table
from workloads import Array, State, synthetic_update

import deltawire
from deltawire.chain.reader_options import ReaderOptions
from deltawire.delta.prepared import PreparedUpdate
from deltawire.events import Event
from deltawire.publish.upload import data_objects
from deltawire.publish.writer_options import WriterOptions
from deltawire.store import Store
from deltawire.store.memory import MemoryStore

_SEGMENTS = 64
"""As many as 8 B weights have."""
_ENCODE, _DECODE = 16e9 / 10.79e9, 16e9 / 11.31e9
"""Seconds for 8 B weights with two threads (benchmarks/results/codec-speed.json)."""
_DELTA = 74.1e6
"""Bytes of a delta of 8 B weights (`deltawire plan --params 8B`)."""
_LATENCY = 0.08
"""Seconds that each request of the reader takes, besides its bytes."""
_POLL = 0.25


@dataclass(frozen=True)
class _Version:
    """Seconds from the call of `publish` to the synced reader, and the share of the bytes that came before the commit."""

    seconds: float
    ahead: float


def measure(elements: int, versions: int, rates: tuple[float, ...] = (1e9, 400e6, 100e6)) -> Table:
    """Publish deltas of 1% with and without announcements, to a reader behind links of several speeds.

    Parameters
    ----------
    elements
        The number of weights of the small model.
    versions
        The versions that each row measures. The median counts.
    rates
        The bits per second of each link.
    """
    table = Table(
        "cut-through",
        "Trained → synced, with the times of 8 B bf16 weights: 64 segments, a delta of 74.1 MB, a reader 80 ms away",
        ["link", "encode", "link alone", "the longer one", "both", "without cut-through", "with cut-through", "saved", "came ahead"],
    )
    states = [_cut(weights) for weights in synthetic_update(elements, 0.01)]
    with _as_long_as_a_large_model():
        size = _run(states, 1, 1e12, announce=False)[1]
        for rate in rates:
            link = 8 * _DELTA / rate
            plain, cut = (_run(states, versions, size / link, announce=announce)[0] for announce in (False, True))
            without, with_it = (statistics.median(version.seconds for version in found) for found in (plain, cut))
            seconds = [f"{each:.2f} s" for each in (_ENCODE, link, max(_ENCODE, link), _ENCODE + link, without, with_it)]
            share = statistics.median(version.ahead for version in cut)
            table.rows.append([f"{rate / 1e6:,.0f} Mbit/s", *seconds, f"{1 - with_it / without:.0%}", f"{share:.0%}"])
            shorter = min(_ENCODE, max(link, _DECODE))
            goal = (
                f"at {rate / 1e6:,.0f} Mbit/s, at least half of the time that can overlap is saved (is {(without - with_it) / shorter:.0%})"
            )
            table.check(goal, without - with_it >= shorter / 2)
    table.notes += [
        f"The reader looks every {_POLL} s and decodes for {_DECODE:.2f} s; without cut-through it does so while it fetches.",
        "The model has few weights. Encoding, decoding and the link wait as long as they would take for 8 B weights with two threads.",
        "'Came ahead' is the share of the delta's bytes that the reader had, or had begun to fetch, before it saw the commit.",
    ]
    return table


def _cut(weights: Array) -> State:
    """Return weights as a state with a tensor for each segment."""
    return {f"model.layers.{number:02}.weight": part for number, part in enumerate(np.split(weights, _SEGMENTS))}


@contextmanager
def _as_long_as_a_large_model() -> Iterator[None]:
    """Let each segment take as long to encode, and to decode, as one of the large model."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(data_objects, "encode_many", _lasting(_ENCODE / _SEGMENTS, data_objects.encode_many)))
        patches.enter_context(mock.patch.object(PreparedUpdate, "add", _lasting(_DECODE / _SEGMENTS, PreparedUpdate.add)))
        yield


def _lasting(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
    def lasting(*arguments: Any, **options: Any) -> Any:
        end = time.perf_counter() + seconds
        result = function(*arguments, **options)
        time.sleep(max(0.0, end - time.perf_counter()))
        return result

    return lasting


def _run(states: list[State], versions: int, bandwidth: float, *, announce: bool) -> tuple[list[_Version], float]:
    """Publish a checkpoint, and then deltas to a reader that follows. Return them, and the bytes of a delta."""
    store = MemoryStore()
    events: list[Event] = []
    segment_bytes = next(iter(states[0].values())).nbytes
    options = WriterOptions(announce=announce, segment_bytes=segment_bytes, threads=1, skips=False)
    turns = itertools.cycle(states)
    found, size = [], 0.0
    with deltawire.Publisher(store, run="benchmark", attachments={}, options=options, on_event=events.append) as publisher:
        publisher.publish(next(turns))
        reader = _Reader(store, bandwidth, events)
        for _ in range(versions):
            begin = time.perf_counter()
            publisher.publish(next(turns))
            seconds = reader.synced.get(timeout=300) - begin
            synced = next(event.fields for event in reversed(events) if event.name == "synced")
            size = float(synced["bytes"] or 0)
            found.append(_Version(seconds, float(synced["ahead_bytes"] or 0) / size))
        reader.close()
    return found, size


class _Reader:
    """A reader that follows on a thread of its own. `synced` gets the time of each version that it reaches."""

    def __init__(self, store: Store, bandwidth: float, events: list[Event]) -> None:
        self.synced: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._link = _SwitchedLink(store, latency=_LATENCY, bandwidth=bandwidth, streams=8)
        # The versions take turns, and a reader that keeps steps would go back without the link.
        self._subscriber = deltawire.Subscriber(
            self._link, options=ReaderOptions(pin=False), threads=1, undo_bytes=0, on_event=events.append
        )
        self._subscriber.sync()
        self._link.is_slow = True
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._subscriber.close()

    def _follow(self) -> None:
        for _ in self._subscriber.follow(poll=_POLL, stop=self._stop):
            self.synced.put(time.perf_counter())


class _SwitchedLink(EmulatedLink):
    """A link that costs nothing until the first version has crossed it. Records take a round trip and no bytes.

    Files are smaller here than those of the large model, but records are not.
    """

    is_slow = False

    def get(self, key: str, *, limit: int) -> bytes:
        self._wait(0)
        return self.inner.get(key, limit=limit)

    def get_if_changed(self, key: str, *, limit: int, tag: str | None) -> tuple[bytes, str] | None:
        self._wait(0)
        return self.inner.get_if_changed(key, limit=limit, tag=tag)

    def _wait(self, size: int) -> None:
        if self.is_slow:
            super()._wait(size)
