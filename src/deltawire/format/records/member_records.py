"""The records that members of a fleet write, in canonical form (docs/protocol.md §10). They are read like those of the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .canonical import Fields, checked_bytes
from .fleet_parts import MAX_WHY, AttemptId, read_attempt, read_attempts
from .record_parts import NONCE, READER

MAX_WORKING = 256
"""A heartbeat names at most this many tasks."""

STATES = ("joining", "idle", "working", "leaving", "left")
"""States of a member. One that has `left` holds no lease any more."""


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
class Heartbeat:
    """A member's report about itself. The time of its writing keeps leases alive; the other fields are for offers and for people.

    `session` is random and drawn when the process starts. `seq` and `step` describe the member's version, and are None while it has none.
    `lag` counts the versions that it is behind. `tokens` and `busy_ms` sum up what it generated in this session, and the time that took.
    `working` lists the leases that it still holds and keeps alive. `reason` is the error because of which it leaves, if any; with a reason
    the record has version 2, without one version 1.
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

    def to_bytes(self) -> bytes:
        own = {
            name: getattr(self, name) for name in ("id", "member", "session", "state", "seq", "step", "lag", "tokens", "busy_ms", "time")
        }
        added: dict[str, Any] = {"version": 1} if self.reason is None else {"version": 2, "reason": self.reason}
        return checked_bytes(Heartbeat, {"deltawire": "member", **own, **added, "working": [list(attempt) for attempt in self.working]})

    @classmethod
    def parse(cls, data: bytes) -> Heartbeat:
        """Return the record with these bytes."""
        fields = Fields.parse(data, "member", versions=(1, 2))
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
            reason=fields.text("reason") if fields.version == 2 else None,
        )
        fields.done()
        if beat.reason is not None and not 1 <= len(beat.reason) <= MAX_WHY:
            fields.refuse(f"its reason must have 1 to {MAX_WHY} characters")
        if beat.state not in STATES:
            fields.refuse(f"it has the unknown state {beat.state!r}")
        if (beat.seq is None) != (beat.step is None):
            fields.refuse("it has a version, or none")
        if len(beat.working) > MAX_WORKING:
            fields.refuse(f"it works on {len(beat.working)} tasks")
        return beat
