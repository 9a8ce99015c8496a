"""Keep an engine at the newest version of a chain, without stopping it for longer than a swap takes."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from ..chain.reader_options import ReaderOptions
from ..chain.version import Version
from ..events import OnEvent, emit
from ..store import Store
from ..subscribe import Subscriber
from ..subscribe.follow import follow_chain
from .base import Engine, KvCache
from .swap.live_intervals import Attribution, LiveInterval, LiveIntervals
from .swap.swap_controller import SwapController, SwapRecord


class HotSwap:
    """Brings an engine from version to version while it generates.

    >>> with HotSwap("s3://bucket/run", ModuleEngine(model)) as policy:
    ...     policy.start()                       # follows the chain on a thread of its own
    ...     with policy.generation() as made_by:
    ...         tokens = model.generate(prompt)
    ...     made_by.versions

    Fetching, decoding and checking happen while the engine generates; it is paused only for writing and confirming. Whatever fails, it goes
    on with the last good version, or, where nobody knows what its weights are, stays paused until the next sync repairs them.

    `kv_cache` says what becomes of caches that old weights made. Every `confirm_every`-th swap is confirmed by reading all weights, in the
    pause; the others by what each engine checks in less time. `options` say which chain to accept and how to read it.
    """

    def __init__(
        self,
        url: str | Path | Store,
        engine: Engine,
        *,
        kv_cache: KvCache = KvCache.KEEP,
        confirm_every: int = 1,
        options: ReaderOptions | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self.engine = engine
        self._on_event = on_event
        self._intervals = LiveIntervals()
        self._controller = SwapController(engine, self._intervals, kv_cache=kv_cache, confirm_every=confirm_every, on_event=on_event)
        self._replica = engine.replica(self._controller.swap)
        self._subscriber = Subscriber(url, replica=self._replica, options=options, on_event=on_event)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.last_error: Exception | None = None
        """Why the engine is not at a newer version; None if nothing went wrong since."""

    @property
    def version(self) -> Version | None:
        """The version that the engine is at; None before the first, and while nobody knows."""
        return self._subscriber.version

    @property
    def live(self) -> Version | None:
        """The version whose weights the engine has at this moment. Inside a forward pass it is exactly the one that makes that pass."""
        return self._intervals.all()[-1].version

    @property
    def is_quarantined(self) -> bool:
        """Whether the engine is paused because its weights are not known to be whole."""
        return self._controller.quarantined is not None

    @property
    def last_swap(self) -> SwapRecord | None:
        """What the last swap cost."""
        return self._controller.last

    def sync(self, target: int | None = None) -> Version:
        """Bring the engine to the newest version, or to version `target`. Returns the version that it is then at.

        Raises as `Subscriber.sync` does, or an `EngineError`.
        """
        try:
            self._controller.ensure_running()
            version = self._subscriber.sync(target)
            if self._intervals.all()[-1].version != version:  # it had those weights already, or the same under another number
                self._intervals.begin(version)
            self._controller.ensure_running()
        except Exception as error:
            self.last_error = error
            raise
        self.last_error = None
        return version

    def follow(self, *, poll: float = 1.0, stop: threading.Event | None = None) -> Iterator[Version]:
        """Keep up with the chain. Yields each version that the engine gets to; otherwise as `Subscriber.follow`."""
        return follow_chain(self, poll=poll, is_over=lambda: self._stop.is_set() or (stop is not None and stop.is_set()), stop=stop)

    def start(self, *, poll: float = 1.0) -> None:
        """Follow on a thread, until `close`. What ends it before that is in `last_error`, and an event "follow-failed"."""
        if self._thread is not None:
            raise ValueError("it follows already")
        self._thread = threading.Thread(target=self._run, args=(poll,), name="deltawire-hot-swap", daemon=True)
        self._thread.start()

    def wait_for(self, seq: int, timeout: float | None = None) -> Version:
        """Wait until a thread that follows has brought the engine to version `seq` or a later one.

        Raises `TimeoutError` after `timeout` seconds, what ended the thread if it has ended, and `ValueError` after `close`.
        """
        clock = self._intervals.clock
        deadline = None if timeout is None else clock() + timeout
        while (version := self.version) is None or version.seq < seq:
            if self._thread is not None and not self._thread.is_alive() and self.last_error is not None:
                raise self.last_error
            if self._stop.is_set():
                raise ValueError(f"the engine is no longer updated, so commit {seq} will not come")
            if deadline is not None and clock() > deadline:
                raise TimeoutError(f"commit {seq} is not there after {timeout} seconds; last error: {self.last_error}")
            self._stop.wait(0.01)
        return version

    @contextlib.contextmanager
    def generation(self) -> Iterator[Attribution]:
        """Around one completion: says afterwards which versions made it."""
        made_by = Attribution()
        with self.engine.generation():
            start = self._intervals.clock()
            try:
                yield made_by
            finally:
                made_by.intervals = self._intervals.between(start, self._intervals.clock())

    def attribute(self, start: float, end: float) -> tuple[LiveInterval, ...]:
        """The versions that were live between two times of `time.monotonic`. `LookupError` for what is too long ago."""
        return self._intervals.between(start, end)

    def close(self) -> None:
        """Stop following, and let go. The engine goes on with the weights that it has. Doing so twice is fine."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._subscriber.close()
        self.engine.close()

    def __enter__(self) -> HotSwap:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _look(self) -> bool:
        """For `follow`: whether there may be something new. Records in `last_error` what goes wrong."""
        try:
            self._controller.ensure_running()
            is_due = self._subscriber._look()
        except Exception as error:
            self.last_error = error
            raise
        self.last_error = None
        return is_due

    def _run(self, poll: float) -> None:
        try:
            for _ in self.follow(poll=poll):
                pass
        except Exception as error:
            self.last_error = error
            emit(self._on_event, "follow-failed", engine=self.engine.name, error=type(error).__name__, reason=str(error))
            logging.getLogger("deltawire").error("%s does not follow any more: %s", self.engine.name, error)
