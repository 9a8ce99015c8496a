"""Which members the fleet has, by their heartbeats. Times are those of `FleetClock`. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...format.records.member_records import Heartbeat, Lease
from ...store.base import ObjectInfo

_COARSE = 2.0
"""Some stores tell times in whole seconds, so an object may change without its time: one that was young when it was read is read again."""


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A member as the trainer sees it, for views. `silent` counts seconds since its last heartbeat.

    `rate` is tokens per second as the trainer has measured it, None before that; `share` the part of the work that it would get.
    """

    member: str
    state: str
    alive: bool
    silent: float
    seq: int | None
    step: int | None
    lag: int
    tokens: int
    holding: int
    rate: float | None
    share: float
    why: str | None = None
    """Which error it left because of, if any."""


@dataclass(slots=True)
class _Entry:
    beat: Heartbeat | None
    modified: float
    """By the store's clock: only to notice that the object has changed."""
    since: float
    read_at: float


class Roster:
    """The last heartbeat of every member that is listed."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._entries: dict[str, _Entry] = {}

    def to_read(self, listed: Iterable[tuple[str, ObjectInfo]], now: float) -> list[str]:
        """Which heartbeats must be read, given what is listed now. Forgets members that are not listed any more."""
        unread = []
        listed_now = set()
        for member, info in listed:
            modified = info.modified.timestamp()
            entry = self._entries.get(member)
            listed_now.add(member)
            if entry is None or entry.modified != modified or (entry.read_at < entry.since + _COARSE <= now and modified % 1 == 0):
                unread.append(member)
        self._entries = {member: entry for member, entry in self._entries.items() if member in listed_now}
        return unread

    def heard(self, member: str, beat: Heartbeat | None, modified: float, since: float, now: float) -> None:
        """Take note of a heartbeat that was read. An object that is no heartbeat of this run and member (or None) counts for nothing.

        `modified` is the store's time of the object, `since` the fleet clock's; the first `since` of an object that did not change stays.
        """
        sound = beat is not None and beat.id == self._run and beat.member == member
        before = self._entries.get(member)
        if before is not None and before.modified == modified:
            since = before.since
        self._entries[member] = _Entry(beat if sound else None, modified, since, now)

    def alive(self, now: float, seconds: float) -> dict[str, Heartbeat]:
        """Members that were heard of within so many seconds, and are not on their way out."""
        return {
            member: entry.beat
            for member, entry in self._entries.items()
            if entry.beat is not None and now - entry.since <= seconds and entry.beat.state not in ("leaving", "left")
        }

    def all(self) -> dict[str, tuple[Heartbeat, float]]:
        """Every heartbeat there is, with its time."""
        return {member: (entry.beat, entry.since) for member, entry in self._entries.items() if entry.beat is not None}

    def working_on(self, number: int) -> dict[str, list[tuple[int, int]]]:
        """Which tasks and attempts of a round each member says that it works on."""
        return {
            member: places
            for member, entry in self._entries.items()
            if entry.beat is not None and (places := [(task, attempt) for r, task, attempt in entry.beat.working if r == number])
        }

    def silent_since(self, before: float) -> list[str]:
        """Members whose object was last written before this time."""
        return [member for member, entry in self._entries.items() if entry.since < before]

    def lease_lives(self, lease: Lease, since: float, now: float, seconds: float) -> bool:
        """Whether a lease holds: from its creation for so many seconds, and so many after every heartbeat that names it.

        One of a member that has left since then does not.
        """
        entry = self._entries.get(lease.member)
        if entry is not None and entry.beat is not None:
            if entry.beat.state == "left" and entry.since > since:
                return False
            if (lease.round, lease.task, lease.attempt) in entry.beat.working:
                since = max(since, entry.since)
        return now - since <= seconds
