"""A member of the fleet in a process: an engine, rewards, and the steps of a member.

Claiming, each task that the engine works on, uploading and heartbeats have a thread each. So the engine never waits for the store, and
leaving never waits for a store that does not answer. The steps decide what to do; this module does what they ask for.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from blake3 import blake3

from ..chain.log import ChainLog
from ..chain.reader_options import ReaderOptions
from ..chain.version import Version
from ..errors import DeltawireError, EngineError, EngineUnavailable, RewardError, UnusableReward
from ..events import OnEvent, emit, with_fields
from ..format.records.fleet_files import Row
from ..format.records.fleet_parts import AttemptId
from ..format.records.member_records import ENGINE
from ..format.records.trainer_records import Sampling
from ..format.rollouts import ClaimedVersion, Completion, Rollouts, TokenSpan
from ..store.base import Store
from ..store.fleet_keys import member_key
from .fleet_keyring import FleetKeyring
from .generation import Generated, Generator, Interrupted
from .member_link import MemberLink
from .member_routing import join_routing
from .rules.live_tasks import LIVE_MEMBER
from .rules.staleness import KnownVersion
from .rules.training_limits import LARGEST_REWARD
from .steps.claim_steps import claim_steps
from .steps.member_state import MemberState, heartbeat_steps, leave_steps
from .steps.requests import FindVersion, Generate, Steps, Sync, run_steps
from .steps.work_steps import TaskFailed, upload_steps, work_steps
from .update_times import UpdateTimes

_LOOK = 0.02
_SHORTEST_BEAT = 1.0
"""Seconds between two heartbeats of a member whose state changes all the time. Each of them is a request to the store."""
_LONGEST_TRACEBACK = 16_000
_MOST_FAILURES = 3
"""After this many failed tasks in a row, by rewards or rows, the member ends: the fault is then not in a single row."""


class Score(Protocol):
    """Scores completions. `names` are the names of the rewards that each completion gets."""

    names: tuple[str, ...]

    def __call__(
        self, rows: Sequence[Row], completions: Sequence[Any], completion_ids: Sequence[Sequence[int]]
    ) -> list[tuple[float | None, ...]]:
        """Return the rewards of each completion; `completions[i]` was made for `rows[i]`. Raise `RewardError` if that fails."""


class Member:
    """Takes part in a run: it follows the policy, leases tasks, generates, scores and uploads.

    The member leases the next task while the engine works, and uploads results during the next task.

    Events: "joined", "generating", "generated", "work-failed", "left", and those of the steps.

    Parameters
    ----------
    store
        The store that the run is in.
    generator
        The engine. The caller closes it.
    score
        The rewards.
    name
        The member's name. No other member of the run may have it.
    options
        Which chain the member accepts.
    tasks
        How many tasks the engine works on at the same time. With more than 1, several threads call the generator at once.
    poll
        Seconds between two looks at the board. If the store can wait for a change, the member sees a new board at once.
    patience
        How many seconds to wait, before each task, for a version that the trainer has published.
    grace
        How many seconds leaving may take while the store does not answer.
    clock
        Returns seconds since 1970. They are written into records for people, and no decision depends on them.
    updates
        Listens to the engine, so that heartbeats say where the time of its last update went. None says nothing about it.
    on_event
        Called with every event.
    """

    def __init__(
        self,
        store: Store,
        generator: Generator,
        score: Score,
        *,
        name: str,
        options: ReaderOptions | None = None,
        tasks: int = 1,
        poll: float = 0.5,
        patience: float = 1.0,
        grace: float = 5.0,
        clock: Callable[[], float] = time.time,
        updates: UpdateTimes | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        member_key(name)  # raises ValueError for a name that no member can have
        if name == LIVE_MEMBER:
            raise ValueError(f"no member can have the name {LIVE_MEMBER!r}: the results of live traffic have it")
        if tasks < 1:
            raise ValueError(f"a member works on at least 1 task, not {tasks}")
        self._store = store
        self._generator = generator
        self._score = score
        self._name = name
        self._log = (options or ReaderOptions()).open_log(store)
        self._tasks = tasks
        self._poll = poll
        self._patience = patience
        self._grace = grace
        self._clock = clock
        self._on_event = with_fields(on_event, member=name)
        self._failures = 0
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._of_thread = threading.local()
        self._link = MemberLink(store, clock)
        self._updates = updates or UpdateTimes()

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set or the trainer ends the run; then leave. Raises errors that are not retryable.

        Once it is told to leave, the member drops what it generates, and returns within `grace` seconds whatever the store does.

        Parameters
        ----------
        stop
            Tells the member to leave.
        """
        self._generator.start()
        state = self._join(stop)
        if state is None:
            return
        emit(self._on_event, "joined", member=self._name, rewards=", ".join(self._score.names))
        beat = self._thread("heartbeat", lambda: heartbeat_steps(state), lambda seconds: self._wait_for_heartbeat(state, seconds))
        claim = self._thread("claim", lambda: claim_steps(state))
        others = [self._thread("upload", lambda: upload_steps(state))]
        others += [self._thread(f"work-{number}", lambda: work_steps(state)) for number in range(self._tasks)]
        try:
            while claim.is_alive() and self._error is None and not stop.is_set():
                stop.wait(_LOOK)
        finally:
            self._stop.set()
            state.leave()
            deadline = time.monotonic() + self._grace
            for thread in (claim, *others):
                thread.join(max(0.0, deadline - time.monotonic()))
            if self._error is not None:
                state.leave_because(self._error)
            state.left = True
            beat.join(max(0.0, deadline - time.monotonic()))
            self._thread("goodbye", lambda: leave_steps(state)).join(max(1.0, deadline - time.monotonic()))
            emit(self._on_event, "left", member=self._name, tokens=state.tokens)
        if self._error is not None:
            raise self._error

    def _join(self, stop: threading.Event) -> MemberState | None:
        """Wait until the store says which run it holds. Return None if `stop` is set first."""
        while not stop.is_set():
            try:
                return self._state(self._log.run.id)
            except DeltawireError as error:
                if not error.retryable:
                    raise
                emit(self._on_event, "waiting", reason=str(error))
                stop.wait(self._poll)
        return None

    def _state(self, run: str) -> MemberState:
        return MemberState(
            run=run,
            member=self._name,
            session=secrets.token_hex(16),
            draw_nonce=lambda: secrets.token_hex(16),
            clock=lambda: max(0, int(self._clock() * 1000)),
            draw=random.random,
            tasks_at_a_time=self._tasks,
            poll_seconds=self._poll,
            on_event=self._on_event,
            keyring=FleetKeyring(trusted_keys=self._log.trusted_keys),
            measure=self._link.report,
            updates=self._updates.report,
            engine=_engine_of(self._generator),
        )

    def _wait(self, seconds: float) -> None:
        self._stop.wait(seconds)

    def _wait_for_heartbeat(self, state: MemberState, seconds: float) -> None:
        """Wait between two heartbeats: for less time if leases are short, if the state has changed, or if the engine has a new version."""
        started = time.monotonic()
        state.engine = _engine_of(self._generator)  # it may know more of its engine now
        while not self._stop.is_set():
            passed = time.monotonic() - started
            version = self._generator.version
            self._link.saw(version)
            if version is not None and version.step is not None and (state.policy is None or state.policy.seq != version.seq):
                state.policy = KnownVersion(version.seq, version.step, version.digest)
                return  # the trainer makes offers by the version that the heartbeat names
            if passed >= min(seconds, state.lease_seconds / 4) or (passed >= _SHORTEST_BEAT and state.has_news):
                return
            self._stop.wait(_LOOK)

    def _thread(self, title: str, steps: Callable[[], Steps[None]], sleep: Callable[[float], None] | None = None) -> threading.Thread:
        def drive() -> None:
            try:
                run_steps(steps(), self._store, sleep=sleep or self._wait, perform=self._perform)
            except BaseException as error:
                if not self._stop.is_set():
                    self._error = error

        thread = threading.Thread(target=drive, name=f"deltawire-member-{title}", daemon=True)
        thread.start()
        return thread

    def _perform(self, request: FindVersion | Sync | Generate) -> Any:
        if isinstance(request, Sync):
            return self._sync(request.step)
        assert isinstance(request, Generate)
        try:
            rollouts = self._generate(request)
        except Interrupted:
            return None
        except DeltawireError as error:
            if error.retryable:
                raise
            self._failures += 1
            is_final = self._failures >= _MOST_FAILURES or isinstance(error, UnusableReward)
            trace = _traceback(error)
            emit(self._on_event, "work-failed", error=type(error).__name__, reason=str(error), traceback=trace, final=is_final)
            if is_final:
                raise
            raise TaskFailed(f"a task could not be done: {error}") from error
        self._failures = 0
        return rollouts

    def _sync(self, step: int) -> KnownVersion | None:
        """Return the engine's version. Wait up to `patience` seconds if it is older than `step`; the engine follows the chain by itself."""
        started = time.monotonic()
        while not self._stop.is_set():
            version = self._generator.version
            problem = self._generator.problem
            if isinstance(problem, DeltawireError) and not problem.retryable:
                raise problem
            if (version is not None and _step(version) >= step) or time.monotonic() - started > self._patience:
                break
            self._stop.wait(_LOOK)
        self._of_thread.synced = time.monotonic() - started
        version = self._generator.version
        return None if version is None else KnownVersion(version.seq, _step(version), version.digest)

    def _generate(self, request: Generate) -> Rollouts:
        record, lease, rows = request.round, request.lease, request.rows
        attempt = AttemptId(lease.round, lease.task, lease.attempt)
        version = self._generator.version
        if version is None or not record.oldest_step <= _step(version) < record.for_step:  # it may have changed since `Sync`
            raise EngineUnavailable(f"the engine has no version that may work on round {record.round}.")
        emit(self._on_event, "generating", round=attempt.round, task=attempt.task, attempt=attempt.attempt, seq=version.seq)
        start = time.monotonic()
        sampling = record.sampling
        prompts = self._generator.encode(rows)
        seeded = Sampling(sampling.samples, sampling.max_tokens, sampling.temperature, sampling.top_p, _seed(sampling.seed, attempt))
        made = self._generator.generate(prompts, seeded, stop=self._stop.is_set)
        generated = time.monotonic()
        repeated = [row for row in rows for _ in range(sampling.samples)]
        tokens = [each.tokens.tolist() for each in made]
        rewards = self._score(repeated, self._generator.decode(repeated, tokens), tokens)
        scored = time.monotonic()
        if len(rewards) != len(made):
            raise RewardError(f"there are {len(rewards)} rewards for {len(made)} completions.")
        if any(reward is not None and not abs(reward) <= LARGEST_REWARD for each in rewards for reward in each):  # NaN compares false
            raise RewardError(f"a reward is not a number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}.")
        seconds = {"sync": getattr(self._of_thread, "synced", 0.0), "generate": generated - start, "score": scored - generated}
        emit(self._on_event, "generated", round=attempt.round, task=attempt.task, tokens=sum(map(len, tokens)), seconds=scored - start)
        whole = tuple(np.array(prompt, np.int32) for prompt in prompts)
        completions = tuple(_completion(index // sampling.samples, each, rewards[index]) for index, each in enumerate(made))
        return Rollouts(
            self._log.run.id,
            *attempt,
            member=lease.member,
            nonce=lease.nonce,
            prompts=whole,
            completions=completions,
            reward_names=self._score.names,
            versions={span.version.seq: ClaimedVersion(_step(span.version), span.version.digest) for each in made for span in each.spans},
            seconds=seconds,
            routing=join_routing(whole, completions, [each.routing for each in made], on_event=self._on_event),
        )


def tell_failure(store: Store, name: str, error: BaseException, *, clock: Callable[[], float] = time.time) -> None:
    """Write a heartbeat that says why a member leaves before it could begin. Write nothing if there is no run yet, or the store fails.

    Parameters
    ----------
    store
        The store that the run is in.
    name
        The member's name.
    error
        Why it leaves.
    clock
        Returns seconds since 1970.
    """
    with contextlib.suppress(DeltawireError):
        state = MemberState(ChainLog(store).run.id, name, secrets.token_hex(16), lambda: "", lambda: int(clock() * 1000), lambda: 0.0)
        state.leave_because(error)
        run_steps(leave_steps(state), store)


def _completion(prompt: int, made: Generated, rewards: tuple[float | None, ...]) -> Completion:
    spans = tuple(TokenSpan(span.start, span.end, span.version.seq) for span in made.spans)
    return Completion(prompt, made.tokens, made.logprobs, np.ones(len(made.tokens), np.uint8), rewards, spans, made.finished)


def _step(version: Version) -> int:
    if version.step is None:
        raise EngineError(f"{version.describe()} was published without a training step, which rollouts need.")
    return version.step


def _traceback(error: DeltawireError) -> str | None:
    """Return the traceback of the user's own code; None if the error is not from there."""
    cause = error.__cause__
    return None if cause is None else "".join(traceback.format_exception(cause))[-_LONGEST_TRACEBACK:].rstrip()


def _seed(seed: int, attempt: AttemptId) -> int:
    """Return a seed that differs for every attempt at every task, and does not depend on the member."""
    text = "/".join(map(str, (seed, *attempt)))
    return int.from_bytes(blake3(text.encode()).digest()[:6], "little")


def _engine_of(generator: Generator) -> str | None:
    """Return the name of a generator's engine, if it has one that a heartbeat can hold."""
    name = getattr(generator, "engine", None)
    return name if isinstance(name, str) and ENGINE.fullmatch(name) else None
