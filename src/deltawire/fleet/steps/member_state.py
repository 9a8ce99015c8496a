"""The state of a member, which all of its steps share, and its heartbeats, as steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from ...errors import (
    StoreError,
)
from ...events import OnEvent, emit
from ...format.records.fleet_files import Row
from ...format.records.fleet_parts import MAX_WHY, AttemptId
from ...format.records.member_records import MAX_WORKING, Heartbeat, Lease
from ...format.records.trainer_records import Round
from ...store import fleet_keys
from ...store.requests import Put, Sleep
from ..fleet_keyring import FleetKeyring
from ..rules.staleness import KnownVersion
from .requests import Steps

_LONGEST_SILENCE = 60.0
"""Largest number of seconds between two heartbeats, however long leases are."""


@dataclass(slots=True)
class MemberState:
    """One member, shared by all of its steps.

    Set `leaving` to make the member leave when it has finished its task. `policy` and `lag` may be set from outside when the engine gets
    another version.

    Parameters
    ----------
    run
        The run's id.
    member
        The member's name.
    session
        A nonce that is drawn when the process starts.
    draw_nonce
        Returns 32 random hexadecimal digits.
    clock
        Returns milliseconds since 1970. They are written into records for people, and no decision depends on them.
    draw
        Returns random numbers in [0, 1), so that members that fail at the same time do not try again at the same time.
    poll_seconds
        Seconds between two looks at the board.
    longest_pause
        Largest number of seconds between two tries.
    lease_seconds
        How long leases last, as the last board said.
    on_event
        Called with every event.
    keyring
        Checks the signatures of boards and rounds.
    newest_board
        Epoch and number of the newest trusted board.
    policy
        The version that the engine has.
    lag
        How many versions that is behind.
    tokens
        How many tokens the member has generated.
    busy_ms
        How many milliseconds that took.
    leaving
        Whether the member is to leave.
    left
        Whether the member has left.
    reason
        The error because of which it leaves.
    distrusted
        Whether the last board was not trusted.
    working
        The attempts that it works on.
    reported
        State and attempts as the last heartbeat said them.
    tried
        Attempts that it does not try again.
    doubtful
        Leases whose creation had an unknown outcome.
    rounds
        The rounds that it read last, with the rows of their tasks.
    """

    run: str
    member: str
    session: str
    draw_nonce: Callable[[], str]
    clock: Callable[[], int]
    draw: Callable[[], float]
    poll_seconds: float = 1.0
    longest_pause: float = 30.0
    lease_seconds: float = 60.0
    on_event: OnEvent | None = None
    keyring: FleetKeyring = field(default_factory=FleetKeyring)
    newest_board: tuple[int, int] = (-1, -1)
    policy: KnownVersion | None = None
    lag: int = 0
    tokens: int = 0
    busy_ms: int = 0
    leaving: bool = False
    left: bool = False
    reason: str | None = None
    distrusted: bool = False
    working: set[AttemptId] = field(default_factory=set)
    reported: tuple[str, tuple[AttemptId, ...]] | None = None
    tried: OrderedDict[AttemptId, None] = field(default_factory=OrderedDict)
    doubtful: dict[AttemptId, Lease] = field(default_factory=dict)
    rounds: OrderedDict[int, tuple[Round, tuple[tuple[Row, ...], ...]]] = field(default_factory=OrderedDict)

    def heartbeat(self) -> Heartbeat:
        """Return the heartbeat of this moment."""
        state = "left" if self.left else "leaving" if self.leaving else "joining" if self.policy is None else "idle"
        return Heartbeat(
            id=self.run,
            member=self.member,
            session=self.session,
            state="working" if self.working and state in ("idle", "joining") else state,
            seq=None if self.policy is None else self.policy.seq,
            step=None if self.policy is None else self.policy.step,
            lag=self.lag,
            tokens=self.tokens,
            busy_ms=self.busy_ms,
            working=tuple(sorted(self.working)[:MAX_WORKING]),
            time=self.clock(),
            reason=self.reason,
        )

    @property
    def has_news(self) -> bool:
        """True if its state or its attempts differ from what the last heartbeat says."""
        beat = self.heartbeat()
        return self.reported != (beat.state, beat.working)

    def leave_because(self, error: BaseException) -> None:
        """Make all later heartbeats name the error because of which it leaves."""
        self.reason = reason_text(error)

    def pause(self, failures: int) -> float:
        """Return how many seconds to wait after this many failures in a row."""
        return min(self.longest_pause, self.poll_seconds * 2.0 ** min(failures, 16)) * (1 + self.draw()) / 2


def reason_text(error: BaseException) -> str:
    """Return in one line why a member leaves, as heartbeats carry it."""
    words = " ".join(f"{type(error).__name__}: {error}".encode(errors="replace").decode().split())
    return words[:MAX_WHY]


def write_heartbeat(me: MemberState) -> Steps[None]:
    """Write the heartbeat. Raises the errors of the store."""
    beat = me.heartbeat()
    yield Put(fleet_keys.member_key(me.member), beat.to_bytes(), durable=False)
    me.reported = beat.state, beat.working


def heartbeat_steps(me: MemberState) -> Steps[None]:
    """Write the heartbeat four times per lease until the member has left. Try again while the store is unavailable."""
    while not me.left:
        pause = min(me.lease_seconds / 4, _LONGEST_SILENCE)
        try:
            yield from write_heartbeat(me)
        except StoreError as error:
            if not error.retryable:
                raise
            pause = min(pause, me.pause(1))
        yield Sleep(pause)


def leave_steps(me: MemberState) -> Steps[None]:
    """Write the last heartbeat after all other steps have ended. Leases that the member still holds go to others at once."""
    me.leaving = me.left = True
    me.working.clear()
    yield from try_to_write_heartbeat(me)


def try_to_write_heartbeat(me: MemberState) -> Steps[None]:
    try:
        yield from write_heartbeat(me)
    except StoreError as error:
        emit(me.on_event, "member-retrying", member=me.member, failures=0, error=str(error))
