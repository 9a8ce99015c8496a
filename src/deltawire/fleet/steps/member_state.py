"""The state of a member, which all of its steps share, and its heartbeats, as steps."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ...errors import StoreError
from ...events import OnEvent, emit
from ...format.records.fleet_files import Row
from ...format.records.fleet_parts import MAX_WHY, AttemptId
from ...format.records.member_records import MAX_WORKING, Heartbeat, Lease, LinkReport, UpdateReport
from ...format.records.trainer_records import Board, Round
from ...format.rollouts import Rollouts
from ...store import fleet_keys
from ...store.requests import Put, Sleep
from ..fleet_keyring import FleetKeyring
from ..rules.staleness import KnownVersion
from .requests import Steps, Sync
from .signal import Signal

_LEAD_SECONDS = 2.0
"""About how long it may take to lease a task: to read the board, the round and its rows, and to create the lease."""

_LONGEST_SILENCE = 60.0
"""Largest number of seconds between two heartbeats, however long leases are."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A task that the member has leased and has not begun.

    Parameters
    ----------
    attempt
        The attempt at the task.
    record
        The round of the task.
    lease
        The member's lease.
    rows
        The rows of the task.
    """

    attempt: AttemptId
    record: Round
    lease: Lease
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Made:
    """A result that the member has made and not uploaded yet.

    Parameters
    ----------
    attempt
        The attempt at the task.
    rollouts
        The result.
    milliseconds
        How long generation took.
    """

    attempt: AttemptId
    rollouts: Rollouts
    milliseconds: int


@dataclass(slots=True)
class MemberState:
    """One member, shared by all of its steps: claiming, working, uploading and heartbeats.

    Call `leave` to make the member leave when it has finished what it generates. It gives up the tasks in its queue. `policy` and `lag` may
    be set from outside when the engine gets another version.

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
    ticks
        Returns seconds that never run backwards, such as `time.monotonic`. They tell how long tasks take.
    poll_seconds
        Seconds between two looks at the board.
    longest_pause
        Largest number of seconds between two tries.
    tasks_at_a_time
        How many tasks the engine works on at the same time.
    ahead
        How many more tasks the member leases before the engine can begin them.
    lease_seconds
        How long leases last, as the last board said.
    on_event
        Called with every event.
    keyring
        Checks the signatures of boards and rounds.
    measure
        Returns what the member has measured: its link to the store, and how many milliseconds its last updates took from their publication
        until the engine had them. Each is None while it is unknown.
    updates
        Returns where the time of the last update went. None while that is unknown.
    engine
        The name of the engine, and perhaps its release, for people. None if it is unknown. It can be set from outside.
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
        The attempts that it has leased and not delivered.
    queue
        The tasks that it has leased and not begun, in the order in which it leased them.
    begun
        When the engine began each task that it works on, by `ticks`.
    typical_seconds
        About how long a task takes; 0 before the first one.
    made
        The results that are not uploaded yet.
    changed
        Is given whenever one of the three changes, or the member is told to leave.
    board
        The newest board that it may follow.
    board_tag
        The store's tag of the board that it read last.
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
    ticks: Callable[[], float] = time.monotonic
    poll_seconds: float = 1.0
    longest_pause: float = 30.0
    tasks_at_a_time: int = 1
    ahead: int = 1
    lease_seconds: float = 60.0
    on_event: OnEvent | None = None
    keyring: FleetKeyring = field(default_factory=FleetKeyring)
    measure: Callable[[], tuple[LinkReport | None, int | None]] = lambda: (None, None)
    updates: Callable[[], UpdateReport | None] = lambda: None
    engine: str | None = None
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
    queue: deque[Claim] = field(default_factory=deque)
    begun: list[float] = field(default_factory=list)
    typical_seconds: float = 0.0
    made: deque[Made] = field(default_factory=deque)
    changed: Signal = field(default_factory=Signal)
    board: Board | None = None
    board_tag: str | None = None
    reported: tuple[str, tuple[AttemptId, ...]] | None = None
    tried: OrderedDict[AttemptId, None] = field(default_factory=OrderedDict)
    doubtful: dict[AttemptId, Lease] = field(default_factory=dict)
    rounds: OrderedDict[int, tuple[Round, tuple[tuple[Row, ...], ...]]] = field(default_factory=OrderedDict)

    def heartbeat(self) -> Heartbeat:
        """Return the heartbeat of this moment."""
        link, behind_ms = self.measure()
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
            link=link,
            behind_ms=behind_ms,
            engine=self.engine,
            update=self.updates(),
        )

    @property
    def has_room(self) -> bool:
        """True if the member may lease another task."""
        return len(self.queue) + len(self.begun) < self.tasks_at_a_time + self.ahead

    @property
    def is_busy(self) -> bool:
        """True if the engine has all the work that it can do now."""
        return len(self.queue) + len(self.begun) >= self.tasks_at_a_time

    @property
    def seconds_to_spare(self) -> float:
        """How long the next lease can wait, so that others can take the task meanwhile. Until half of a task is over, or a little less."""
        begun = tuple(self.begun)  # other threads may end their tasks at any moment
        if not self.is_busy or not begun:
            return 0.0
        return min(begun) + self.typical_seconds / 2 - _LEAD_SECONDS - self.ticks()

    def begin_task(self) -> tuple[Claim, float] | None:
        """Take the first task of the queue, and return it with the time; None if the queue is empty. Pass the time to `end_task`."""
        if not self.queue:  # other threads must not see work that does not exist, because they would wait for its end
            return None
        began = self.ticks()
        self.begun.append(began)  # before the queue shrinks, so that other threads never see room that does not exist
        try:
            return self.queue.popleft(), began
        except IndexError:
            self.begun.remove(began)
            return None

    def end_task(self, claim: Claim, began: float, made: Made | None) -> None:
        """Note that the engine has finished a task. Its lease is dropped if it made nothing."""
        if made is None:
            self.working.discard(claim.attempt)
        else:
            self.made.append(made)
        self.begun.remove(began)
        self.changed.give()

    def note_duration(self, seconds: float) -> None:
        """Note how long a task took."""
        self.typical_seconds = seconds if not self.typical_seconds else 0.8 * self.typical_seconds + 0.2 * seconds

    def leave(self) -> None:
        """Make the member leave when it has finished what it generates."""
        self.leaving = True
        self.changed.give()

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


def sync_steps(me: MemberState, step: int) -> Steps[KnownVersion | None]:
    """Ask the engine for the version of `step` or a later one. Return the version that it has then."""
    before = me.policy
    policy: KnownVersion | None = yield Sync(step)
    me.policy = policy
    if policy is not None and (before is None or before.seq != policy.seq):
        yield from try_to_write_heartbeat(me)  # offers depend on the version, and the next heartbeat may be far away
    return policy


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
    me.queue.clear()
    me.working.clear()
    yield from try_to_write_heartbeat(me)


def try_to_write_heartbeat(me: MemberState) -> Steps[None]:
    try:
        yield from write_heartbeat(me)
    except StoreError as error:
        emit(me.on_event, "member-retrying", member=me.member, failures=0, error=str(error))
