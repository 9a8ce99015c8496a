"""Knows the members of the fleet by their heartbeats. Times are those of `FleetClock`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...format.records.fleet_parts import AttemptId
from ...format.records.member_records import Heartbeat, Lease
from ...store.base import ObjectInfo
from .version_delays import VersionDelays

_MOST_DROPPED = 64
"""The last attempts of a member that it ceased to name. Its leases on earlier ones have long expired, or are delivered."""

_COARSEST_TIME = 2.0
"""Some stores show times in whole seconds, so an object may change and keep its time. An object that was read this young is read again."""


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A member as the trainer sees it, for views.

    Parameters
    ----------
    member
        The member's name.
    state
        What its last heartbeat says: joining, idle, working, leaving or left.
    alive
        Whether it has written a heartbeat lately and is not leaving.
    silent
        Seconds since its last heartbeat.
    seq
        The commit of the version that it has; None while it has none.
    step
        The training step of that version.
    lag
        How many versions it is behind.
    tokens
        How many tokens it says that it has generated.
    holding
        How many tasks it holds leases on.
    rate
        Tokens per second as the trainer has measured it; None before that.
    share
        The part of the work that it would get, from 0 to 1.
    why
        The error because of which it left; None if it did not leave because of an error.
    update_seconds
        How many seconds versions take to reach it, as far as the trainer believes that; None before that is known.
    goodput
        How many bytes per second its link to the store carries, as it says; None before it says so.
    latency
        Seconds from a request to the first byte of the store's answer, as it says; None before it says so.
    engine
        The name of its engine, as it says; None if it says none.
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
    update_seconds: float | None = None
    goodput: int | None = None
    latency: float | None = None
    engine: str | None = None


@dataclass(slots=True)
class _Entry:
    beat: Heartbeat | None
    modified: float
    """The store's time of the object. It only shows whether the object has changed."""
    since: float
    read_at: float
    dropped: dict[AttemptId, float]
    """Attempts that earlier heartbeats named and later ones do not, with the time of the look that showed it."""


class Roster:
    """The last heartbeat of every member that is listed.

    Parameters
    ----------
    run
        The run's id.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._entries: dict[str, _Entry] = {}
        self.delays = VersionDelays()
        """How long versions take to reach members."""

    def to_read(self, listed: Iterable[tuple[str, ObjectInfo]], now: float) -> list[str]:
        """Return the members whose heartbeats must be read, given the listed ones. Forget members that are no longer listed."""
        unread = []
        listed_now = set()
        for member, info in listed:
            modified = info.modified.timestamp()
            entry = self._entries.get(member)
            listed_now.add(member)
            if entry is None or entry.modified != modified or (entry.read_at < entry.since + _COARSEST_TIME <= now and modified % 1 == 0):
                unread.append(member)
        self._entries = {member: entry for member, entry in self._entries.items() if member in listed_now}
        self.delays.keep(listed_now)
        return unread

    def heard(self, member: str, beat: Heartbeat | None, modified: float, since: float, now: float) -> None:
        """Note a heartbeat that was read. An object that is not a heartbeat of this run and member, or None, counts for nothing.

        `modified` is the store's time of the object, and `since` the fleet clock's. The first `since` of an unchanged object stays.
        """
        is_sound = beat is not None and beat.id == self._run and beat.member == member
        before = self._entries.get(member)
        if before is not None and before.modified == modified:
            since = before.since
        dropped = {} if before is None else before.dropped
        if beat is not None and is_sound and before is not None and before.beat is not None:
            dropped = dict.fromkeys(before.beat.working, now) | dropped
            dropped = {attempt: at for attempt, at in dropped.items() if attempt not in beat.working}
            dropped = dict(sorted(dropped.items(), key=lambda each: -each[1])[:_MOST_DROPPED])
        self._entries[member] = _Entry(beat if is_sound else None, modified, since, now, dropped)
        if beat is not None and is_sound:
            self.delays.heard(member, beat.seq, None if beat.behind_ms is None else beat.behind_ms / 1000, since)

    def alive(self, now: float, seconds: float) -> dict[str, Heartbeat]:
        """Return the members that wrote a heartbeat within this many seconds and are not leaving."""
        return {
            member: entry.beat
            for member, entry in self._entries.items()
            if entry.beat is not None and now - entry.since <= seconds and entry.beat.state not in ("leaving", "left")
        }

    def all(self) -> dict[str, tuple[Heartbeat, float]]:
        """Return every heartbeat with its time."""
        return {member: (entry.beat, entry.since) for member, entry in self._entries.items() if entry.beat is not None}

    def working_on(self, number: int) -> dict[str, list[tuple[int, int]]]:
        """Return the tasks and attempts of round `number` that each member says it works on."""
        return {
            member: attempts
            for member, entry in self._entries.items()
            if entry.beat is not None and (attempts := [(task, attempt) for r, task, attempt in entry.beat.working if r == number])
        }

    def silent_since(self, before: float) -> list[str]:
        """Return the members whose heartbeat was last written before this time."""
        return [member for member, entry in self._entries.items() if entry.since < before]

    def is_lease_alive(self, lease: Lease, since: float, now: float, seconds: float) -> bool:
        """Return whether a lease that was taken at `since` still holds.

        It holds for `seconds` after it was taken, and for `seconds` after every heartbeat that names it. It ends when its member leaves or
        no longer names it. A member also ceases to name a task when it has delivered it, and the listing of results may be
        older than the heartbeat. So such a lease ends at the look after the one that showed the heartbeat.
        """
        entry = self._entries.get(lease.member)
        if entry is not None and entry.beat is not None:
            if entry.beat.state == "left" and entry.since > since:
                return False
            attempt = AttemptId(lease.round, lease.task, lease.attempt)
            if attempt in entry.beat.working:
                since = max(since, entry.since)
            elif entry.dropped.get(attempt, now) < now:
                return False
        return now - since <= seconds
