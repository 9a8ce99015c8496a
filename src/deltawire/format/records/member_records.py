"""The records that members of a fleet write, in canonical form (docs/protocol.md §10). They are read like those of the trainer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .canonical import Fields, checked_bytes
from .fleet_parts import MAX_WHY, AttemptId, read_attempt, read_attempts
from .record_parts import NONCE, READER

MAX_WORKING = 256
"""A heartbeat names at most this many tasks."""

MAX_GOODPUT = 10**15
"""Most bytes per second that a heartbeat reports. Writers report higher numbers as this one."""
MAX_MILLISECONDS = 10**12
"""Longest time that the report of a link has, about 32 years. Writers report longer times as this one."""
MAX_MICROSECONDS = 10**15
"""Longest time that the report of an update has, about 32 years. Writers report longer times as this one."""
MAX_FAILURES = 10**9
"""Most failed transfers that a heartbeat reports. Writers report more as this number."""

ENGINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+-]{0,63}")
"""The name of an engine."""

STATES = ("joining", "idle", "working", "leaving", "left")
"""States of a member. One that has `left` no longer holds a lease."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A member's claim on one attempt at a task. `seq` is the version that the member had when it claimed it."""

    id: str
    round: int
    task: int
    attempt: int
    member: str
    nonce: str
    seq: int
    time: int

    def to_bytes(self) -> bytes:
        own = {name: getattr(self, name) for name in ("id", "round", "task", "attempt", "member", "nonce", "seq", "time")}
        return checked_bytes(Lease, {"deltawire": "lease", "version": 1, **own})

    @classmethod
    def parse(cls, data: bytes) -> Lease:
        """Return the record with these bytes."""
        fields = Fields.parse(data, "lease")
        attempt = read_attempt(fields)
        lease = cls(
            fields.matching("id", NONCE),
            *attempt,
            member=fields.matching("member", READER),
            nonce=fields.matching("nonce", NONCE),
            seq=fields.integer("seq"),
            time=fields.integer("time"),
        )
        fields.done()
        return lease


@dataclass(frozen=True, slots=True)
class LinkReport:
    """A member's own report about its link to the store. It is a claim: the trainer compares it with its own observations.

    `goodput` is in bytes per second, and `latency_ms` is the time from a request to the first byte of its answer; both are None until they
    are measured. `failures` counts transfers that failed in this session.
    """

    goodput: int | None
    latency_ms: int | None
    failures: int

    def plain(self) -> dict[str, Any]:
        return {"goodput": self.goodput, "latency_ms": self.latency_ms, "failures": self.failures}

    @classmethod
    def of(cls, fields: Fields) -> LinkReport:
        report = cls(fields.nullable("goodput", fields.integer), fields.nullable("latency_ms", fields.integer), fields.integer("failures"))
        fields.done()
        if (report.goodput or 0) > MAX_GOODPUT or (report.latency_ms or 0) > MAX_MILLISECONDS or report.failures > MAX_FAILURES:
            fields.refuse("a number in it is larger than any link can have")
        return report


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """Where the time of a member's last update went, in microseconds, for people. Each time is None if it is unknown.

    `fetch_us`, `verify_us` and `resolve_us` are for reading, checking and decoding its files; they overlap. `total_us` is the whole sync.
    `pause_us` is the time in which the engine could not generate.
    """

    fetch_us: int | None = None
    verify_us: int | None = None
    resolve_us: int | None = None
    pause_us: int | None = None
    total_us: int | None = None

    def plain(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def of(cls, fields: Fields) -> UpdateReport:
        report = cls(*(fields.nullable(name, fields.integer) for name in cls.__slots__))
        fields.done()
        if any((time or 0) > MAX_MICROSECONDS for time in report.plain().values()):
            fields.refuse("a time in it is longer than any update can take")
        return report


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A member's report about itself. The time of its writing keeps leases alive; the other fields are for offers and for people.

    `session` is random and drawn when the process starts. `seq` and `step` describe the member's version, and are None while it has none.
    `lag` counts the versions that it is behind. `tokens` and `busy_ms` sum up what it generated in this session, and the time that took.
    `working` lists the leases that it still holds and keeps alive. `reason` is the error because of which it leaves, if any. `link` is what
    it measured of its link to the store, and `behind_ms` how long its last updates took from their publication until it had them; both are
    None while they are unknown. `engine` is the name of the member's engine, if it is known.

    `update` is where the time of its last update went, if that is known.

    With an update the record has version 5, otherwise with an engine version 4, without one but with `link` or `behind_ms` version 3, only
    with a reason version 2, and otherwise version 1.
    """

    id: str
    member: str
    session: str
    state: str
    seq: int | None
    step: int | None
    lag: int
    tokens: int
    busy_ms: int
    working: tuple[AttemptId, ...]
    time: int
    reason: str | None = None
    link: LinkReport | None = None
    behind_ms: int | None = None
    engine: str | None = None
    update: UpdateReport | None = None

    def to_bytes(self) -> bytes:
        own = {
            name: getattr(self, name) for name in ("id", "member", "session", "state", "seq", "step", "lag", "tokens", "busy_ms", "time")
        }
        added: dict[str, Any] = {"version": 1} if self.reason is None else {"version": 2, "reason": self.reason}
        if any(part is not None for part in (self.link, self.behind_ms, self.engine, self.update)):
            link = None if self.link is None else self.link.plain()
            added = {"version": 3, "reason": self.reason, "link": link, "behind_ms": self.behind_ms}
        if self.engine is not None:
            added |= {"version": 4, "engine": self.engine}
        if self.update is not None:
            added |= {"version": 5, "engine": self.engine, "update": self.update.plain()}
        return checked_bytes(Heartbeat, {"deltawire": "member", **own, **added, "working": [list(attempt) for attempt in self.working]})

    @classmethod
    def parse(cls, data: bytes) -> Heartbeat:
        """Return the record with these bytes."""
        fields = Fields.parse(data, "member", versions=(1, 2, 3, 4, 5))
        beat = cls(
            id=fields.matching("id", NONCE),
            member=fields.matching("member", READER),
            session=fields.matching("session", NONCE),
            state=fields.text("state"),
            seq=fields.nullable("seq", fields.integer),
            step=fields.nullable("step", fields.integer),
            lag=fields.integer("lag"),
            tokens=fields.integer("tokens"),
            busy_ms=fields.integer("busy_ms"),
            working=read_attempts(fields, "working", fields.items("working")),
            time=fields.integer("time"),
            reason=_reason(fields),
            link=fields.nullable("link", lambda name: LinkReport.of(fields.object(name))) if fields.version >= 3 else None,
            behind_ms=fields.nullable("behind_ms", fields.integer) if fields.version >= 3 else None,
            engine=_engine(fields),
            update=UpdateReport.of(fields.object("update")) if fields.version == 5 else None,
        )
        fields.done()
        if beat.reason is not None and not 1 <= len(beat.reason) <= MAX_WHY:
            fields.refuse(f"its reason must have 1 to {MAX_WHY} characters")
        if (beat.behind_ms or 0) > MAX_MILLISECONDS:
            fields.refuse("behind_ms is longer than any update can take")
        if fields.version == 3 and beat.link is None and beat.behind_ms is None:
            fields.refuse("version 3 has a link or behind_ms")
        if beat.state not in STATES:
            fields.refuse(f"it has the unknown state {beat.state!r}")
        if (beat.seq is None) != (beat.step is None):
            fields.refuse("it has a version, or none")
        if len(beat.working) > MAX_WORKING:
            fields.refuse(f"it works on {len(beat.working)} tasks")
        return beat


def _reason(fields: Fields) -> str | None:
    """Return the reason, which version 1 never has, version 2 always has, and later ones may have."""
    if fields.version == 1:
        return None
    return fields.text("reason") if fields.version == 2 else fields.nullable("reason", fields.text)


def _engine(fields: Fields) -> str | None:
    """Return the name of the engine, which version 4 always has, and version 5 may have."""
    if fields.version < 4:
        return None

    def read(name: str) -> str:
        return fields.matching(name, ENGINE)

    return read("engine") if fields.version == 4 else fields.nullable("engine", read)
