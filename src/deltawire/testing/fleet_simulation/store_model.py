"""A store behind a network. Requests take time, and may be lost, late or unanswered; reads of overwritten objects may be old.

The store has its own clock, which may be set forward or back.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from random import Random
from typing import Any, Protocol

from blake3 import blake3

from ...errors import LimitExceeded, ObjectExists, ObjectMissing, OutcomeUnknown, StoreUnavailable
from ...fleet.steps.requests import MOST_TOGETHER, Together, Watch
from ...store.base import ObjectInfo, check_create, check_key, check_prefix
from ...store.requests import Create, Delete, Get, Head, List, Put
from .kernel import Kernel, Process
from .wan_link import WanLink

_ORIGIN = datetime(2031, 5, 17, 3, 20, tzinfo=timezone.utc)
"""The store's time at the start. It is far from the clocks of all processes of a simulation."""


@dataclass(slots=True)
class Network:
    """How fast and how reliable the network is.

    Parameters
    ----------
    delay
        About how many seconds a request or an answer takes.
    lost
        The part of all requests that get lost, from 0 to 1.
    unanswered
        The part of all requests that are done, but whose answer gets lost.
    landing_late
        The part of all requests that are done only after their sender has given up.
    stale_hints
        The part of all reads of overwritten objects that return the earlier bytes.
    timeout
        After about how many seconds a sender gives up.
    down
        Whether every request fails.
    can_wait
        Whether the store holds a `Watch` back until the object changes. Otherwise it is asked after the wait.
    """

    delay: float = 0.05
    lost: float = 0.0
    unanswered: float = 0.0
    landing_late: float = 0.0
    stale_hints: float = 0.0
    timeout: float = 10.0
    down: bool = False
    can_wait: bool = False

    def clear(self) -> None:
        """End all faults. The delay stays."""
        self.lost = self.unanswered = self.landing_late = self.stale_hints = 0.0
        self.down = False


@dataclass(frozen=True, slots=True)
class PutWithTime:
    """A `Put` whose object gets a time that is wrong by `seconds`: a process that may write files may also set their times."""

    put: Put
    seconds: float

    @property
    def key(self) -> str:
        return self.put.key


class Objects:
    """The content of the store: a sorted map from keys to bytes and times. It also keeps the earlier bytes of overwritten objects.

    Parameters
    ----------
    now
        Returns the virtual time.
    granularity
        The store shows times in multiples of this many seconds; 0 for exact times.
    """

    def __init__(self, now: Callable[[], float], *, granularity: float) -> None:
        self._now = now
        self._granularity = granularity
        self.clock_shift = 0.0
        """The seconds by which the store's clock was set forward; negative if it was set back."""
        self._objects: dict[str, tuple[bytes, ObjectInfo]] = {}
        self._keys: list[str] = []
        self._before: dict[str, bytes] = {}
        self.created: Callable[[str, bytes], None] = lambda key, data: None
        """Called with key and bytes of every new object."""
        self.overwritten: Callable[[str, bytes], None] = lambda key, data: None
        """Called with key and bytes of every object that is written again, which also gets a new time."""
        self._waiting: dict[str, list[Callable[[], None]]] = {}

    def time(self) -> datetime:
        """Return the time that the store's clock shows."""
        now = self._now() + self.clock_shift
        return _ORIGIN + timedelta(seconds=now - now % self._granularity if self._granularity else now)

    def read(self, key: str) -> bytes | None:
        """Return the bytes of an object, or None. Simulated processes do not use this."""
        found = self._objects.get(key)
        return None if found is None else found[0]

    def keys(self, prefix: str) -> list[str]:
        """Return the keys with a prefix. Simulated processes do not use this."""
        return [info.key for info in self._list(prefix, None, None)]

    def perform(self, request: Any, *, stale: bool = False) -> Any:
        """Do a request at once. Return its answer, or raise its error."""
        match request:
            case Get(key, limit):
                data = self._find(key)[0]
                if stale:
                    data = self._before.get(key, data)
                if len(data) > limit:
                    raise LimitExceeded(f"{key!r} has {len(data)} bytes.")
                return data
            case Watch(key, limit, tag):
                data = self.perform(Get(key, limit), stale=stale)
                found = blake3(data).hexdigest()
                return None if found == tag else (data, found)
            case List(prefix, after, before, most):
                return self._list(prefix, after, before)[:most]
            case Create(key, data):
                check_create(key, data)
                if key in self._objects:
                    raise ObjectExists(f"{key!r} exists.")
                return self._write(key, data)
            case Put(key, data):
                check_key(key)
                return self._write(key, bytes(data))
            case PutWithTime(Put(key, data), seconds):
                self._write(key, bytes(data), seconds)
                return None
            case Head(key):
                return self._find(key)[1]
            case Delete(keys):
                for key in keys:
                    self._delete(key)
                return None
        raise TypeError(f"the store knows no request {request!r}")

    def call_when_written(self, key: str, call: Callable[[], None]) -> None:
        """Call a function when an object is next written."""
        self._waiting.setdefault(key, []).append(call)

    def _find(self, key: str) -> tuple[bytes, ObjectInfo]:
        found = self._objects.get(check_key(key))
        if found is None:
            raise ObjectMissing(f"there is no {key!r}.")
        return found

    def _write(self, key: str, data: bytes, off: float = 0.0) -> None:
        old = self._objects.get(key)
        self._objects[key] = (data, ObjectInfo(key, len(data), self.time() + timedelta(seconds=off)))
        if old is None:
            insort(self._keys, key)
            self.created(key, data)
        else:
            self._before[key] = old[0]
            self.overwritten(key, data)
        for call in self._waiting.pop(key, ()):
            call()

    def _delete(self, key: str) -> None:
        if self._objects.pop(key, None) is not None:
            del self._keys[bisect_left(self._keys, key)]

    def _list(self, prefix: str, after: str | None, before: str | None) -> list[ObjectInfo]:
        check_prefix(prefix)
        first = bisect_left(self._keys, prefix)
        if after is not None and after > prefix:
            first = bisect_right(self._keys, after)
        last = bisect_left(self._keys, prefix + "\x7f" if before is None else before, first)
        return [self._objects[key][1] for key in self._keys[first:last]]


class StoreModel:
    """Takes requests of processes, and answers them when and if the network delivers them.

    `counts` has the number of requests by kind of process, kind of request and folder.

    Parameters
    ----------
    kernel
        Virtual time.
    random
        Draws delays and faults.
    network
        How fast and how reliable the network is.
    granularity
        The store shows times in multiples of this many seconds; 0 for exact times.
    """

    def __init__(self, kernel: Kernel, random: Random, network: Network, *, granularity: float = 0.0) -> None:
        self.kernel = kernel
        self.random = random
        self.network = network
        self.objects = Objects(lambda: kernel.now, granularity=granularity)
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.trace: Callable[[str, str], None] | None = None
        self.links: dict[str, WanLink] = {}
        """The links of processes that are not at the origin, by their names."""

    def submit(self, thread: Requester, request: Any) -> None:
        """Send a request. The thread gets the answer or an error later."""
        if isinstance(request, Together):
            _RequestGroup(self, thread, request).begin()
            return
        if isinstance(request, Watch) and request.seconds > 0 and not self.network.can_wait:
            self.kernel.later(request.seconds, self.submit, thread, replace(request, seconds=0.0))
            return
        draw, network, later = self.random.random, self.network, self.kernel.later
        self.counts[thread.process.kind, type(request).__name__.lower().replace("watch", "get"), folder_of(request)] += 1
        link = self.links.get(thread.process.name)
        out = network.delay * (0.5 + draw()) + (0.0 if link is None else link.send_seconds(request))
        if thread.process.cut_off or (link is not None and link.is_cut) or network.down or draw() < network.lost:
            later(network.timeout * (0.5 + draw()), thread.fail, self._unclear(request))
            return
        fate = draw()
        if fate < network.unanswered:
            later(out, self._land, thread, request)
            later(out + network.timeout * (0.5 + draw()), thread.fail, self._unclear(request))
        elif fate < network.unanswered + network.landing_late:
            later(network.timeout * (1 + 9 * draw()), self._land, thread, request)
            later(network.timeout, thread.fail, self._unclear(request))
        else:
            later(out, self.answer, thread, request)

    def _land(self, thread: Requester, request: Any) -> None:
        """Do a request whose answer will not arrive."""
        self._log(thread, request, "unanswered")
        with contextlib.suppress(ObjectExists, ObjectMissing, LimitExceeded):
            self.objects.perform(request)

    def answer(self, thread: Requester, request: Any) -> None:
        """Do a request that has arrived, and send the answer."""
        link = self.links.get(thread.process.name)
        back = self.network.delay * (0.5 + self.random.random()) + (0.0 if link is None else link.delay)
        stale = self.network.stale_hints > 0 and self.random.random() < self.network.stale_hints
        try:
            answer = self.objects.perform(request, stale=stale)
        except (ObjectExists, ObjectMissing, LimitExceeded) as error:
            self._log(thread, request, type(error).__name__)
            self.kernel.later(back, thread.fail, error)
        else:
            self._log(thread, request, f"{len(answer)} found" if isinstance(request, List) else "")
            if isinstance(request, Watch) and answer is None and request.seconds > 0:
                held = _HeldWatch(self, thread, request)
                self.objects.call_when_written(request.key, held)
                self.kernel.later(request.seconds, held)
                return
            self.kernel.later(back, thread.resume, answer)

    def _log(self, thread: Requester, request: Any, outcome: str) -> None:
        if self.trace is not None:
            self.trace(thread.process.name, f"{type(request).__name__.lower()} {_subject(request)} {outcome}".rstrip())

    def _unclear(self, request: Any) -> Exception:
        if isinstance(request, Create) and self.random.random() < 0.8:
            return OutcomeUnknown(f"create of {request.key!r} was sent, but no answer came.")
        return StoreUnavailable(f"no answer to {type(request).__name__} of {_subject(request)!r}.")


class _HeldWatch:
    """Answers a `Watch` when it is first called: when the object was written, or when the time is over."""

    def __init__(self, store: StoreModel, thread: Requester, request: Watch) -> None:
        self._store = store
        self._thread = thread
        self._request: Watch | None = request

    def __call__(self) -> None:
        if self._request is not None:
            request, self._request = replace(self._request, seconds=0.0), None
            self._store.kernel.later(0.0, self._store.answer, self._thread, request)


class Requester(Protocol):
    """Waits for the answer to a request."""

    process: Process

    def resume(self, value: Any) -> None: ...

    def fail(self, error: Exception) -> None: ...


class _RequestGroup:
    """The requests of a `Together`. A bounded number is sent at once, and answers and errors are collected in their order."""

    def __init__(self, store: StoreModel, thread: Requester, request: Together) -> None:
        self.store = store
        self.thread = thread
        self.requests = request.requests
        self.answers: list[Any] = [None] * len(request.requests)
        self.sent = self.done = 0

    def begin(self) -> None:
        if not self.requests:
            self.store.kernel.later(0.0, self.thread.resume, [])
        while self.sent < min(len(self.requests), MOST_TOGETHER):
            self.send()

    def send(self) -> None:
        self.sent += 1
        self.store.submit(_GroupAnswer(self, self.sent - 1), self.requests[self.sent - 1])

    def answered(self, index: int, answer: Any) -> None:
        self.answers[index] = answer
        self.done += 1
        if self.done == len(self.requests):
            self.thread.resume(self.answers)
        elif self.sent < len(self.requests) and self.thread.process.alive:
            self.send()


class _GroupAnswer:
    """Waits for one answer of a group."""

    def __init__(self, group: _RequestGroup, index: int) -> None:
        self.process = group.thread.process
        self.resume: Callable[[Any], None] = lambda value: group.answered(index, value)
        self.fail: Callable[[Exception], None] = lambda error: group.answered(index, error)


def _subject(request: Any) -> str:
    if isinstance(request, List):
        return str(request.prefix)
    return str(request.keys[0]) if isinstance(request, Delete) else str(request.key)


def folder_of(request: Any) -> str:
    """Return the folder of the fleet, or of the chain, that a request is about."""
    first, _, rest = _subject(request).partition("/")
    return (rest.split("/")[0] if first == "fleet" else first).partition(".")[0]
