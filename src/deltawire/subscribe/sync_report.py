"""Count what one sync costs."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

from ..events import Stopwatch, Value
from ..format.records.record_parts import FileEntry

_PHASES = ("find", "fetch", "verify", "wait", "resolve", "apply", "total")


class SyncReport:
    """Seconds per phase, and the objects that came from the store. Phases run in parallel, so they may add up to more than the total."""

    def __init__(self) -> None:
        self.watch = Stopwatch()
        self.bytes = 0
        self.objects = 0
        self.hops = 0
        self.resynced = False
        """Whether the state was rebuilt from a full checkpoint although an earlier version was present."""
        self._lock = Lock()

    def fetched(self, entries: Iterable[FileEntry]) -> None:
        """Count objects that were transferred. May be called from any thread."""
        with self._lock:
            for entry in entries:
                self.bytes += entry.size
                self.objects += 1

    def fields(self) -> dict[str, Value]:
        """Return the numbers for an event. Every phase is included, even with 0."""
        seconds: dict[str, Value] = {f"{phase}_seconds": self.watch.seconds.get(phase, 0.0) for phase in _PHASES}
        return {"bytes": self.bytes, "objects": self.objects, "hops": self.hops, **seconds}
