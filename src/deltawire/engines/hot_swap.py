"""Keep an engine at the newest version of a chain. The engine stops only for the time that a swap takes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType

from ..chain.reader_options import ReaderOptions
from ..chain.version import Version
from ..errors import EngineUnavailable
from ..events import OnEvent, emit
from ..store.copies.locations import Location
from ..subscribe import Subscriber
from ..subscribe.follow import follow_chain
from .base import Engine, KvCache
from .swap.live_intervals import Attribution, LiveInterval, LiveIntervals
from .swap.swap_controller import SwapController, SwapRecord, SwapState


class HotSwap:
    """Brings an engine from version to version while it generates.

    >>> with HotSwap("s3://bucket/run", ModuleEngine(model)) as policy:
    ...     policy.start()                       # follows the chain on a separate thread
    ...     with policy.generation() as made_by:
    ...         tokens = model.generate(prompt)
    ...     made_by.versions

    The engine generates while updates are fetched, decoded and checked. It is paused only while they are written and confirmed. If a step
    fails, the engine continues with the last good version. If its weights are in an unknown state, it stays paused until the next sync
    repairs them.

    Parameters
    ----------
    url
        The location of the chain, or an open store. Or a list of them: the origin, and copies that relays keep.
    engine
        The engine to keep up to date.
    kv_cache
        What happens to keys and values that the old weights computed.
    confirm_every
        Every `confirm_every`-th swap is confirmed by reading all weights during the pause. For the others, an engine may check only what
        was written, which takes less time.
    options
        Which chain to accept, and how to read it.
    on_event
        Called with each event, on the thread where it happened.
    """

    def __init__(
        self,
        url: Location,
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
        self._controller = SwapController(
            engine, kv_cache=kv_cache, confirm_every=confirm_every, intervals=self._intervals, on_event=on_event
        )
        self._replica = engine.replica(self._controller.swap)
        self._subscriber = Subscriber(url, replica=self._replica, options=options, on_event=on_event)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.last_error: Exception | None = None
        """Why the engine is not at a newer version. None if the last attempt succeeded."""

    @property
    def version(self) -> Version | None:
        """The version that the engine has. None before the first version, and while its weights are unknown."""
        return self._subscriber.version

    @property
    def live(self) -> Version | None:
        """The version whose weights the engine has at this moment. During a forward pass it is the version that computes this pass."""
        return self._intervals.latest

    @property
    def is_quarantined(self) -> bool:
        """Whether the engine stays paused because its weights are in an unknown state."""
        return self._controller.state is SwapState.QUARANTINED

    @property
    def last_swap(self) -> SwapRecord | None:
        """How long the last swap took. None before the first swap."""
        return self._controller.last

    def sync(self, *, seq: int | None = None) -> Version:
        """Bring the engine to the newest version, or to another one. Returns the version that it then has.

        Raises what `Subscriber.sync` raises, or an `EngineError`.

        Parameters
        ----------
        seq
            The number of the version's commit, `Version.seq`. It is not the version number that `deltawire log` shows. The version may be
            older than the present one. None means the newest version.
        """
        try:
            self._controller.ensure_running()
            version = self._subscriber.sync(seq=seq)
            if self._intervals.latest != version:  # it had these weights already, perhaps under another number
                self._intervals.begin(version)
            self._controller.ensure_running()
        except Exception as error:
            self.last_error = error
            raise
        self.last_error = None
        return version

    def follow(self, *, poll: float = 1.0, stop: threading.Event | None = None) -> Iterator[Version]:
        """Follow the chain. Yields each version that the engine reaches. `Subscriber.follow` describes the rest.

        Parameters
        ----------
        poll
            Seconds between two looks for a new version.
        stop
            Set this event to end following.
        """
        return follow_chain(self, poll=poll, is_over=lambda: self._stop.is_set() or (stop is not None and stop.is_set()), stop=stop)

    def start(self, *, poll: float = 1.0) -> None:
        """Follow the chain on a separate thread until `close`.

        If an error ends the thread earlier, `last_error` holds it, and the event `follow-failed` is emitted.

        Parameters
        ----------
        poll
            Seconds between two looks for a new version.
        """
        if self._thread is not None:
            raise ValueError("this HotSwap follows the chain already: call start only once")
        self._thread = threading.Thread(target=self._run, args=(poll,), name="deltawire-hot-swap", daemon=True)
        self._thread.start()

    def wait_for(self, *, seq: int, timeout: float | None = None) -> Version:
        """Wait until the thread of `start` has brought the engine to commit `seq` or a later one. Returns the version that it has.

        If the thread has ended, this raises the error that ended it. Raises `ValueError` after `close`.

        Parameters
        ----------
        seq
            The number of the version's commit, `Version.seq`. It is not the version number that `deltawire log` shows.
        timeout
            Raise `TimeoutError` after this many seconds. None means to wait without limit.
        """
        clock = self._intervals.clock
        deadline = None if timeout is None else clock() + timeout
        while (version := self.version) is None or version.seq < seq:
            has_ended = self._thread is not None and not self._thread.is_alive()
            if has_ended and self.last_error is not None:
                raise self.last_error
            if self._stop.is_set():
                raise ValueError(f"the engine is no longer updated, so it will not get commit {seq}")
            if deadline is not None and clock() > deadline:
                raise TimeoutError(f"the engine does not have commit {seq} after {timeout} seconds; last error: {self.last_error}")
            self._stop.wait(0.01)
        return version

    @contextlib.contextmanager
    def generation(self) -> Iterator[Attribution]:
        """Use this context for one completion. Afterwards the attribution holds the versions that made it."""
        made_by = Attribution()
        with self.engine.generation():
            start = self._intervals.clock()
            try:
                yield made_by
            finally:
                made_by.intervals = self._intervals.between(start, self._intervals.clock())

    def attribute(self, start: float, end: float) -> tuple[LiveInterval, ...]:
        """Return the versions that were live between two times. Raises `LookupError` if `start` is too long ago.

        Parameters
        ----------
        start, end
            Times in seconds by `time.monotonic`.
        """
        return self._intervals.between(start, end)

    def close(self) -> None:
        """Stop following, and release the store and the engine's adapter. The engine keeps its weights. It may be called twice."""
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
        """Return whether there may be a new version, for `follow`. Records errors in `last_error`."""
        try:
            self._controller.ensure_running()
            is_due = self._subscriber._look()
        except Exception as error:
            self.last_error = error
            raise
        self.last_error = None
        return is_due

    def _use_ahead(self, until: float) -> bool:
        """Prepare for the next version with files that have arrived ahead of its commit, for `follow`."""
        return self._subscriber._use_ahead(until)

    def _run(self, poll: float) -> None:
        try:
            for _ in self.follow(poll=poll):
                pass
        except BaseException as error:  # an engine's own code may raise SystemExit, and nothing else would report it on this thread
            name = type(error).__name__
            self.last_error = error if isinstance(error, Exception) else EngineUnavailable(f"{self.engine.name} raised {name}.")
            emit(self._on_event, "follow-failed", engine=self.engine.name, error=name, reason=str(error))
