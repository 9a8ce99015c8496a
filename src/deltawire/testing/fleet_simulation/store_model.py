"""A store across a WAN: requests take time, are lost, land late or land unanswered; hints may be old; its clock is its own, and steps."""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from random import Random
from typing import Any, Protocol

from ...errors import LimitExceeded, ObjectExists, ObjectMissing, OutcomeUnknown, StoreUnavailable
from ...fleet.steps.requests import MOST_TOGETHER, Together
from ...store.base import ObjectInfo, check_create, check_key, check_prefix
from ...store.requests import Create, Delete, Get, Head, List, Put
from .kernel import Kernel, Process

_ORIGIN = datetime(2031, 5, 17, 3, 20, tzinfo=timezone.utc)
"""Nobody else in a simulation has this time, or one near it."""


@dataclass(slots=True)
class Weather:
    """How bad the network is. Shares of all requests; `down` makes every one of them fail. Times are in seconds."""

    delay: float = 0.05
    lost: float = 0.0
    unanswered: float = 0.0
    landing_late: float = 0.0
    stale_hints: float = 0.0
    timeout: float = 10.0
    down: bool = False

    def clear(self) -> None:
        """From now on nothing fails; distances stay."""
        self.lost = self.unanswered = self.landing_late = self.stale_hints = 0.0
        self.down = False


@dataclass(frozen=True, slots=True)
class Dated:
    """A put whose object gets a time that lies this many seconds off: who may write to a directory may also set the times of its files."""

    put: Put
    seconds: float

    @property
    def key(self) -> str:
        return self.put.key


class Objects:
    """The content: a sorted map from keys to bytes with the store's times, and for hints what they were before."""

    def __init__(self, now: Callable[[], float], *, granularity: float) -> None:
        self._now = now
        self._granularity = granularity
        self.clock_shift = 0.0
        """Somebody has set the store's clock this many seconds forward, or back."""
        self._objects: dict[str, tuple[bytes, ObjectInfo]] = {}
        self._keys: list[str] = []
        self._before: dict[str, bytes] = {}
        self.created: Callable[[str, bytes], None] = lambda key, data: None
        """Told of every object that was created where there was none."""

    def time(self) -> datetime:
        """The store's clock, as coarse as it shows it."""
        now = self._now() + self.clock_shift
        return _ORIGIN + timedelta(seconds=now - now % self._granularity if self._granularity else now)

    def read(self, key: str) -> bytes | None:
        """What lies there, for who looks from outside."""
        found = self._objects.get(key)
        return None if found is None else found[0]

    def keys(self, prefix: str) -> list[str]:
        """For who looks from outside."""
        return [info.key for info in self._list(prefix, None, None)]

    def perform(self, request: Any, *, stale: bool = False) -> Any:
        """Do what a request asks, at once, and give or raise its answer."""
        match request:
            case Get(key, limit):
                data = self._find(key)[0]
                if stale:
                    data = self._before.get(key, data)
                if len(data) > limit:
                    raise LimitExceeded(f"{key!r} has {len(data)} bytes.")
                return data
            case List(prefix, after, before):
                return self._list(prefix, after, before)
            case Create(key, data):
                check_create(key, data)
                if key in self._objects:
                    raise ObjectExists(f"{key!r} exists.")
                return self._write(key, data)
            case Put(key, data):
                check_key(key)
                return self._write(key, bytes(data))
            case Dated(Put(key, data), seconds):
                self._write(key, bytes(data), seconds)
                return None
            case Head(key):
                return self._find(key)[1]
            case Delete(keys):
                for key in keys:
                    self._delete(key)
                return None
        raise TypeError(f"the store knows no request {request!r}")

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
    """Takes requests of processes, and answers them when and if the weather lets it. `counts` tells requests by (process, kind, folder)."""

    def __init__(self, kernel: Kernel, random: Random, weather: Weather, *, granularity: float = 0.0) -> None:
        self.kernel = kernel
        self.random = random
        self.weather = weather
        self.objects = Objects(lambda: kernel.now, granularity=granularity)
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.trace: Callable[[str, str], None] | None = None

    def submit(self, strand: Asker, request: Any) -> None:
        """Send a request off. The strand is resumed with the answer or an error, later."""
        if isinstance(request, Together):
            _Several(self, strand, request).begin()
            return
        draw, weather, later = self.random.random, self.weather, self.kernel.later
        self.counts[strand.process.kind, type(request).__name__.lower(), _folder(request)] += 1
        out = weather.delay * (0.5 + draw())
        if strand.process.cut_off or weather.down or draw() < weather.lost:
            later(weather.timeout * (0.5 + draw()), strand.fail, self._unclear(request))
            return
        fate = draw()
        if fate < weather.unanswered:
            later(out, self._land, strand, request)
            later(out + weather.timeout * (0.5 + draw()), strand.fail, self._unclear(request))
        elif fate < weather.unanswered + weather.landing_late:
            later(weather.timeout * (1 + 9 * draw()), self._land, strand, request)
            later(weather.timeout, strand.fail, self._unclear(request))
        else:
            later(out, self._answer, strand, request)

    def _land(self, strand: Asker, request: Any) -> None:
        """Nobody will hear how it went."""
        self._tell(strand, request, "unheard")
        with contextlib.suppress(ObjectExists, ObjectMissing, LimitExceeded):
            self.objects.perform(request)

    def _answer(self, strand: Asker, request: Any) -> None:
        back = self.weather.delay * (0.5 + self.random.random())
        stale = self.weather.stale_hints > 0 and self.random.random() < self.weather.stale_hints
        try:
            answer = self.objects.perform(request, stale=stale)
        except (ObjectExists, ObjectMissing, LimitExceeded) as error:
            self._tell(strand, request, type(error).__name__)
            self.kernel.later(back, strand.fail, error)
        else:
            self._tell(strand, request, f"{len(answer)} found" if isinstance(request, List) else "")
            self.kernel.later(back, strand.resume, answer)

    def _tell(self, strand: Asker, request: Any, outcome: str) -> None:
        if self.trace is not None:
            self.trace(strand.process.name, f"{type(request).__name__.lower()} {_subject(request)} {outcome}".rstrip())

    def _unclear(self, request: Any) -> Exception:
        if isinstance(request, Create) and self.random.random() < 0.8:
            return OutcomeUnknown(f"create of {request.key!r} was sent, and no answer came.")
        return StoreUnavailable(f"no answer to {type(request).__name__} of {_subject(request)!r}.")


class Asker(Protocol):
    """Who waits for an answer."""

    process: Process

    def resume(self, value: Any) -> None: ...

    def fail(self, error: Exception) -> None: ...


class _Several:
    """The requests of a `Together`, a bounded number of them at once. Answers and errors are gathered in their order."""

    def __init__(self, store: StoreModel, strand: Asker, request: Together) -> None:
        self.store = store
        self.strand = strand
        self.requests = request.requests
        self.answers: list[Any] = [None] * len(request.requests)
        self.sent = self.done = 0

    def begin(self) -> None:
        if not self.requests:
            self.store.kernel.later(0.0, self.strand.resume, [])
        while self.sent < min(len(self.requests), MOST_TOGETHER):
            self.send()

    def send(self) -> None:
        self.sent += 1
        self.store.submit(_OneOf(self, self.sent - 1), self.requests[self.sent - 1])

    def answered(self, index: int, answer: Any) -> None:
        self.answers[index] = answer
        self.done += 1
        if self.done == len(self.requests):
            self.strand.resume(self.answers)
        elif self.sent < len(self.requests) and self.strand.process.alive:
            self.send()


class _OneOf:
    """Waits for one answer among several."""

    def __init__(self, group: _Several, index: int) -> None:
        self.process = group.strand.process
        self.resume: Callable[[Any], None] = lambda value: group.answered(index, value)
        self.fail: Callable[[Exception], None] = lambda error: group.answered(index, error)


def _subject(request: Any) -> str:
    if isinstance(request, List):
        return str(request.prefix)
    return str(request.keys[0]) if isinstance(request, Delete) else str(request.key)


def _folder(request: Any) -> str:
    return _subject(request).split("/")[1].partition(".")[0]
