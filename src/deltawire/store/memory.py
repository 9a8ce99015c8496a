"""A store in the memory of this process, for tests, demonstrations, and a publisher and subscriber in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone

from ..errors import DataDamaged, LimitExceeded, ObjectExists, ObjectMissing, StoreError
from .base import Buffer, ObjectInfo, Progress, Store, as_pieces, check_create, check_key, check_prefix, failure


class MemoryStore(Store):
    """Keeps objects in a dictionary. They are lost when the process ends."""

    def __init__(self, name: str = "unnamed") -> None:
        self.url = f"memory://{name}"
        self._objects: dict[str, tuple[bytes, datetime]] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def get(self, key: str, *, limit: int) -> bytes:
        data, _ = self._find("get", key)
        if len(data) > limit:
            raise LimitExceeded(failure("get", key, self.url, f"it has {len(data)} bytes, more than the {limit} allowed."))
        return data

    def head(self, key: str) -> ObjectInfo:
        data, modified = self._find("head", key)
        return ObjectInfo(key, len(data), modified)

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Progress | None = None) -> None:
        target = buffer.cast("B")
        data, _ = self._find("read", key)
        part = memoryview(data)[offset : offset + len(target)]
        if len(part) < len(target):
            raise DataDamaged(failure("read", key, self.url, f"it ends at byte {len(data)}, before {offset + len(target)}."))
        target[:] = part
        if progress is not None:
            progress(len(target))

    def put_if_absent(self, key: str, data: bytes) -> None:
        check_create(key, data)
        with self._lock:
            if key in self._objects:
                raise ObjectExists(failure("create", key, self.url, "an object of this name exists."))
            self._objects[key] = (bytes(data), datetime.now(timezone.utc))
            self._changed.notify_all()

    def put(
        self,
        key: str,
        data: Buffer | Iterable[Buffer],
        *,
        size: int | None = None,
        progress: Progress | None = None,
        durable: bool = True,
    ) -> None:
        check_key(key)
        whole = b"".join(as_pieces(data)[1])
        if size is not None and len(whole) != size:
            raise StoreError(failure("put", key, self.url, f"{size} bytes were announced, {len(whole)} came."))
        with self._lock:
            self._objects[key] = (whole, datetime.now(timezone.utc))
            self._changed.notify_all()
        if progress is not None:
            progress(len(whole))

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with self._lock:
            found = [ObjectInfo(key, len(data), modified) for key, (data, modified) in self._objects.items() if key.startswith(prefix)]
        return iter(sorted((info for info in found if after is None or info.key > after), key=lambda info: info.key))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            check_key(key)
            with self._lock:
                self._objects.pop(key, None)

    @property
    def can_wait(self) -> bool:
        return True

    def wait_for_change(self, key: str, *, limit: int, tag: str | None, timeout: float) -> tuple[bytes, str] | None:
        deadline = time.monotonic() + timeout
        while True:
            is_last = time.monotonic() >= deadline
            with self._lock:
                seen = self._objects.get(key)
            try:
                found = self.get_if_changed(key, limit=limit, tag=tag)
                if found is not None or is_last:
                    return found
            except ObjectMissing:
                if is_last:
                    raise
            with self._changed:
                self._changed.wait_for(lambda seen=seen: self._objects.get(key) is not seen, _seconds_until(deadline))  # type: ignore[misc]

    def close(self) -> None:
        """Do nothing. The objects stay, because other code may have opened the same name."""

    def _find(self, operation: str, key: str) -> tuple[bytes, datetime]:
        check_key(key)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise ObjectMissing(failure(operation, key, self.url, "there is no such object."))
        return found


def _seconds_until(deadline: float) -> float:
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
