"""A store that fails by script, to crash a publisher at every single call, or to show a subscriber the faults of real stores.

>>> crashed = FaultyStore(inner, [Before(17, "crash")])                    # the process dies before its 17th call
>>> flaky = FaultyStore(inner, [After(call("put_if_absent"), "unknown")])  # the first creation succeeds, but its answer is lost
>>> cached = FaultyStore(inner, [Reading(call("get", "commit/"), "missing", times=3)])
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from ..errors import DataDamaged, ObjectMissing, OutcomeUnknown, StoreFull, StoreUnavailable
from ..store.base import Buffer, ObjectInfo, Progress, Store, check_key, failure
from ..store.memory import MemoryStore

T = TypeVar("T")


class ProcessDied(BaseException):
    """Takes the place of SIGKILL. It is not an `Exception`, so that the code under test does not handle it as an error."""


class Call(NamedTuple):
    """One call of the store, counted from 0. The deletion of many keys counts as one call for each key, because a process may die in
    between.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not needed here
    op: str
    key: str


When: TypeAlias = int | Callable[[Call], bool]
Failure: TypeAlias = Literal["crash", "unknown", "unavailable", "full"]
Lie: TypeAlias = Literal["missing", "stale", "flip", "truncate"]


@dataclass(frozen=True, slots=True)
class Before:
    """Fail without doing anything."""

    when: When
    """The number of a call, counted from 0, or a condition such as `call(...)`."""
    kind: Failure
    """How it fails: "crash" (the process dies), "unknown", "unavailable" or "full"."""
    times: int | None = 1
    """The number of times that the fault happens; None means always."""


@dataclass(frozen=True, slots=True)
class After:
    """Do what was asked, then fail: the answer is lost."""

    when: When
    """The number of a call, counted from 0, or a condition such as `call(...)`."""
    kind: Failure
    """How it fails: "crash" (the process dies), "unknown", "unavailable" or "full"."""
    times: int | None = 1
    """The number of times that the fault happens; None means always."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Answer a reading call wrongly."""

    when: When
    """The number of a call, counted from 0, or a condition such as `call(...)`."""
    kind: Lie
    """The kind of the fault. "missing": the object seems not to exist, or the listing is empty. "stale": the answer is that of the time of
    `FaultyStore.remember`. "flip": one bit is wrong. "truncate": the object is too short. Listings can be "missing" or "stale".
    """
    times: int | None = 1
    """The number of times that the fault happens; None means always."""


Fault: TypeAlias = Before | After | Reading
_READING = {"get", "head", "read_into", "list"}


@dataclass(slots=True)
class _Armed:
    """A fault, and how many times it will still strike."""

    fault: Fault
    left: int | None

    def strikes(self, this: Call) -> bool:
        when = self.fault.when
        if isinstance(self.fault, Reading) and this.op not in _READING:
            return False
        if self.left == 0 or not (this.index == when if isinstance(when, int) else when(this)):
            return False
        if self.left is not None:
            self.left -= 1
        return True


def call(op: str | None = None, prefix: str = "") -> Callable[[Call], bool]:
    """Return a condition for faults, which some calls meet.

    Parameters
    ----------
    op
        The name of a method of the store; None means any.
    prefix
        How the key begins.
    """
    return lambda each: (op is None or each.op == op) and each.key.startswith(prefix)


class FaultyStore(Store):
    """Passes calls on to `inner`, except for the faults in `script`. `calls` records all calls. After a "crash" every call raises
    `ProcessDied`.

    `close` leaves the inner store open, because the process dies and not the store.

    Parameters
    ----------
    inner
        The store that does the work.
    script
        The faults that happen.
    clock
        Objects that are written through this store have the times of this clock. Others keep the inner store's times.
    """

    def __init__(self, inner: Store, script: Iterable[Fault] = (), *, clock: Callable[[], datetime] | None = None) -> None:
        self.inner = inner
        self.url = inner.url
        self.calls: list[Call] = []
        self.died = False
        self._script = [_Armed(fault, fault.times) for fault in script]
        self._clock = clock
        self._times: dict[str, datetime] = {}
        self._past: MemoryStore | None = None
        self._lock = threading.Lock()

    def remember(self) -> None:
        """Take the present content as the content that "stale" answers show from now on."""
        past = MemoryStore("past")
        for info in self.inner.list(""):
            past.put(info.key, self.inner.get(info.key, limit=info.size))
        self._past = past

    def get(self, key: str, *, limit: int) -> bytes:
        with self._calling("get", key) as (lie, store):
            data = store.get(key, limit=limit)
            if lie == "flip" and data:
                data = bytes([data[0] ^ 1]) + data[1:]
            return data[: len(data) // 2] if lie == "truncate" else data

    def head(self, key: str) -> ObjectInfo:
        with self._calling("head", key) as (lie, store):
            info = self._timed(store.head(key))
            return ObjectInfo(key, info.size // 2, info.modified) if lie == "truncate" else info

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Progress | None = None) -> None:
        with self._calling("read_into", key) as (lie, store):
            store.read_into(key, buffer, offset=offset, progress=progress)
            if lie == "flip" and buffer.nbytes:
                buffer.cast("B")[buffer.nbytes // 2] ^= 1
            if lie == "truncate":
                raise DataDamaged(failure("read", key, self.url, "it ends early, by script."))

    def put_if_absent(self, key: str, data: bytes) -> None:
        with self._calling("put_if_absent", key):
            self.inner.put_if_absent(key, data)
            self._stamp(key)

    def put(
        self,
        key: str,
        data: Buffer | Iterable[Buffer],
        *,
        size: int | None = None,
        progress: Progress | None = None,
        durable: bool = True,
    ) -> None:
        with self._calling("put", key):
            self.inner.put(key, data, size=size, progress=progress, durable=durable)
            self._stamp(key)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        try:
            with self._calling("list", prefix) as (_, store):
                return self._alive(store.list(prefix, after=after))
        except ObjectMissing:
            return iter(())

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with self._calling("delete", check_key(key)):
                self.inner.delete([key])

    def close(self) -> None:
        """Leave the inner store open."""

    @contextlib.contextmanager
    def _calling(self, op: str, key: str) -> Iterator[tuple[Lie | None, Store]]:
        """Record a call, and raise the scripted error before or after it. Yield the wrong answer to give, if any, and the store to ask."""
        with self._lock:
            self._check_alive()
            this = Call(len(self.calls), op, key)
            self.calls.append(this)
            faults = [armed.fault for armed in self._script if armed.strikes(this)]
        for fault in faults:
            if isinstance(fault, Before):
                self._fail(fault.kind, this)
        lie = next((fault.kind for fault in faults if isinstance(fault, Reading)), None)
        if lie == "missing":
            raise ObjectMissing(failure(op, key, self.url, "it is not to be seen, by script."))
        if lie == "stale" and self._past is None:
            raise ValueError("call remember() before a stale answer is due")
        try:
            yield lie, self._past if lie == "stale" and self._past is not None else self.inner
        finally:
            for fault in faults:
                if isinstance(fault, After):
                    self._fail(fault.kind, this)

    def _fail(self, kind: Failure, this: Call) -> None:
        why = failure(this.op, this.key, self.url, f"call {this.index} fails by script.")
        if kind == "crash":
            self.died = True
            raise ProcessDied(why)
        raise {"unknown": OutcomeUnknown, "unavailable": StoreUnavailable, "full": StoreFull}[kind](why)

    def _check_alive(self) -> None:
        if self.died:
            raise ProcessDied("this process died before, by script")

    def _alive(self, found: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
        for info in found:
            self._check_alive()
            yield self._timed(info)

    def _stamp(self, key: str) -> None:
        if self._clock is not None:
            self._times[key] = self._clock()

    def _timed(self, info: ObjectInfo) -> ObjectInfo:
        return ObjectInfo(info.key, info.size, self._times.get(info.key, info.modified))
