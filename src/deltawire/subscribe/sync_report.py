"""Count what one sync costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import Lock

from ..events import Stopwatch, Value
from ..format.records.record_parts import FileEntry

_PHASES = ("find", "fetch", "verify", "wait", "resolve", "apply", "total")


class SyncReport:
    """Seconds per phase, and the objects that came from the store. Phases run in parallel, so they may add up to more than the total."""

    def __init__(self, is_ahead: Callable[[FileEntry], bool] = lambda entry: False) -> None:
        self._is_ahead = is_ahead
        self.watch = Stopwatch()
        self.bytes = 0
        self.shared_bytes = 0
        """How many of these bytes another process of this host has fetched."""
        self.objects = 0
        self.ahead_bytes = 0
        """Those of the bytes that came before the commit was read."""
        self.hops = 0
        self.resynced = False
        """Whether the state was rebuilt from a full checkpoint although an earlier version was present."""
        self._lock = Lock()

    def fetched(self, entries: Iterable[FileEntry], *, of: Sequence[FileEntry] = ()) -> None:
        """Count objects that were transferred. Those of the objects `of` that came ahead count, too. May be called from any thread."""
        now = list(entries)
        ahead = [entry for entry in of if entry not in now and self._is_ahead(entry)]
        with self._lock:
            for entry in (*now, *ahead):
                self.bytes += entry.size
                self.objects += 1
        self.came_ahead(ahead)

    def came_ahead(self, entries: Iterable[FileEntry]) -> None:
        """Count objects that were transferred before their commit was read. `fetched` counts them, too. May be called from any thread."""
        with self._lock:
            self.ahead_bytes += sum(entry.size for entry in entries)

    def fields(self) -> dict[str, Value]:
        """Return the numbers for an event. Every phase is included, even with 0."""
        seconds: dict[str, Value] = {f"{phase}_seconds": self.watch.seconds.get(phase, 0.0) for phase in _PHASES}
        bytes_of = {"bytes": self.bytes, "shared_bytes": self.shared_bytes, "ahead_bytes": self.ahead_bytes}
        return {**bytes_of, "objects": self.objects, "hops": self.hops, **seconds}
