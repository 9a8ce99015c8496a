"""A fleet in one thread: a trainer that publishes to a real chain, and members whose engine invents what it generates.

Members move whenever the trainer sleeps, so every run is the same, and no test waits.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

import numpy as np
from blake3 import blake3
from publications import open_publisher, repeated, state_at

from deltawire import Digest
from deltawire.chain.log import ChainLog
from deltawire.chain.version import Version
from deltawire.errors import DeltawireError, StoreUnavailable
from deltawire.events import Event
from deltawire.fleet import Batch, FleetOptions, StalenessBudget, TrainingLimits
from deltawire.fleet.chain_versions import ChainVersions
from deltawire.fleet.fleet_keyring import FleetKeyring
from deltawire.fleet.rules.staleness import KnownVersion
from deltawire.fleet.steps.claim_steps import claim_steps
from deltawire.fleet.steps.coordinator_steps import CoordinatorSteps
from deltawire.fleet.steps.member_state import MemberState, leave_steps, write_heartbeat
from deltawire.fleet.steps.requests import FindVersion, Generate, Sync, Wait, Watch, run_steps
from deltawire.fleet.steps.trainer_context import TrainerContext
from deltawire.fleet.steps.work_steps import upload_steps, work_steps
from deltawire.format.records.fleet_files import Accepted
from deltawire.format.records.fleet_parts import AttemptId
from deltawire.format.records.member_records import Lease
from deltawire.format.records.signing import SigningKey
from deltawire.format.records.trainer_records import BatchRecord, Round, Sampling
from deltawire.format.rollouts import ClaimedVersion, Completion, Rollouts, TokenSpan
from deltawire.publish import Publisher
from deltawire.store import Store, fleet_keys
from deltawire.store.memory import MemoryStore
from deltawire.store.requests import Sleep, ask_store
from deltawire.testing import FaultyStore

SAMPLING = Sampling(samples=2, max_tokens=8, temperature=0.7, seed=3)
TASKS = 2
LEASE = 60
BIG = 1 << 20


def rows_for(step: int, tasks: int = TASKS) -> list[list[dict[str, Any]]]:
    return [[{"prompt": f"{step}.{task}", "weight": 0.5}] for task in range(tasks)]


def nonce() -> str:
    return secrets.token_hex(16)


def make_rollouts(record: Round, lease: Lease, rows: Sequence[Any], version: KnownVersion, **changes: Any) -> Rollouts:
    """Return what an engine with this version generates for a task. Every call generates different tokens."""
    completions = []
    for prompt in range(len(rows)):
        for _ in range(record.samples):
            length = 3
            tokens = np.frombuffer(secrets.token_bytes(4 * length), "<u4").astype(np.int64) % 50_000
            completions.append(
                Completion(
                    prompt=prompt,
                    tokens=tokens.astype(np.int32),
                    logprobs=np.full(length, -0.5, np.float32),
                    mask=np.ones(length, np.uint8),
                    rewards=(1.0,),
                    spans=(TokenSpan(0, length, version.seq),),
                    finished=True,
                )
            )
    made = Rollouts(
        run=record.id,
        round=lease.round,
        task=lease.task,
        attempt=lease.attempt,
        member=lease.member,
        nonce=lease.nonce,
        prompts=tuple(np.array([1, 2], np.int32) for _ in rows),
        completions=tuple(completions),
        reward_names=("right",),
        versions={version.seq: ClaimedVersion(version.step, version.digest)},
        seconds={"generate": 0.5},
    )
    return replace(made, **changes)


class Member:
    """A member that the test drives. `version` is the version of its engine. If it is None, the engine follows the chain."""

    def __init__(self, store: Store, name: str, log: ChainLog, keyring: FleetKeyring | None = None) -> None:
        self.store = store
        self.version: KnownVersion | None = None
        self.state = MemberState(log.run.id, name, nonce(), nonce, lambda: 0, lambda: 0.5, lambda: 0.0)
        self.state.keyring = keyring or FleetKeyring()
        self._chain = ChainVersions(log)
        self._strands = [_Strand(steps(self.state), self.answer) for steps in (claim_steps, work_steps, upload_steps)]
        self.has_left = False

    @property
    def ended(self) -> bool:
        return self.has_left or all(strand.ended for strand in self._strands)

    def move(self) -> None:
        """Write a heartbeat, then continue until all strands of the member want to wait."""
        if self.ended:
            return
        with contextlib.suppress(StoreUnavailable):
            self.perform_all(write_heartbeat(self.state))
        moved = [strand.move(time_has_passed=True) for strand in self._strands]
        while any(moved):
            moved = [strand.move(time_has_passed=False) for strand in self._strands]

    def leave(self) -> None:
        self.perform_all(leave_steps(self.state))
        self.has_left = True

    def perform_all(self, steps: Any) -> None:
        run_steps(steps, self.store, sleep=lambda seconds: None, perform=self.answer)

    def answer(self, request: Any) -> Any:
        if isinstance(request, Sync):
            return self.version or self._chain.newest()
        if isinstance(request, Generate):
            version = self.version or self._chain.newest()
            return make_rollouts(request.round, request.lease, request.rows, version)
        if isinstance(request, Watch):
            return self.store.get_if_changed(request.key, limit=request.limit, tag=request.tag)
        return ask_store(self.store, request)


class _Strand:
    """One of the steps of a member, and what it waits for. Nothing takes time, except that steps wait until the next move."""

    def __init__(self, steps: Any, answer: Callable[[Any], Any]) -> None:
        self._steps = steps
        self._answer = answer
        self._waits_for: Any = None
        self.ended = False
        self._advance(lambda: next(self._steps))

    def move(self, *, time_has_passed: bool) -> bool:
        """Continue until the steps want to wait. Return whether they have moved."""
        waits_for = self._waits_for
        if self.ended or not (time_has_passed or (isinstance(waits_for, Wait) and waits_for.signal.count != waits_for.seen)):
            return False
        self._ask(None if isinstance(waits_for, (Sleep, Wait)) else waits_for)
        while not self.ended and not _takes_time(self._waits_for):
            self._ask(self._waits_for)
        return True

    def _ask(self, request: Any) -> None:
        try:
            answer = None if request is None else self._answer(request)
        except DeltawireError as error:
            self._advance(lambda error=error: self._steps.throw(error))
        else:
            self._advance(lambda: self._steps.send(answer))

    def _advance(self, move: Callable[[], Any]) -> None:
        try:
            self._waits_for = move()
        except StopIteration:
            self.ended = True


def _takes_time(request: Any) -> bool:
    """Return whether the steps want to wait. A signal that was given since they looked ends their wait at once."""
    if isinstance(request, Wait):
        return request.signal.count == request.seen
    return isinstance(request, Sleep) or (isinstance(request, Watch) and request.seconds > 0)


@dataclass
class Fleet:
    """A store with a chain, and a record of what happened. `time` is the store's clock, in seconds."""

    inner: MemoryStore = field(default_factory=MemoryStore)
    budget: StalenessBudget = field(default_factory=StalenessBudget)
    options: FleetOptions = field(default_factory=lambda: FleetOptions(LEASE, keep_steps=2))
    members: list[Member] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    collected: list[tuple[int, Batch]] = field(default_factory=list)
    time: float = 1_000_000.0
    key: SigningKey | None = None
    meanwhile: Callable[[], object] = lambda: None
    training: TrainingLimits = field(default_factory=TrainingLimits)

    def __post_init__(self) -> None:
        self.store = FaultyStore(self.inner, clock=lambda: datetime.fromtimestamp(self.time, timezone.utc))
        with self.publisher() as publisher:
            publisher.publish(state_at(0), step=0)
        self.log = ChainLog(self.inner)

    def join(self, *names: str) -> list[Member]:
        trusted = () if self.key is None else (self.key.public,)
        new = [Member(self.store, name, self.log, FleetKeyring(trusted_keys=trusted)) for name in names]
        for member in new:
            member.state.on_event = self.events.append
        self.members += new
        for member in new:
            member.move()
        return new

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        for member in self.members:
            member.move()
        self.meanwhile()

    def trainer(self, publisher: Publisher, store: Store | None = None) -> Trainer:
        return Trainer(self, publisher, store or self.store)

    def publisher(self, **options: Any) -> Publisher:
        return open_publisher(self.inner, signing_key=self.key, **options)

    def reasons(self) -> list[str]:
        return [str(event.fields["reason"]) for event in self.events if event.name == "rollout-rejected"]


class Trainer:
    """A trainer of one epoch. `store` is its own connection to the store, which may fail."""

    def __init__(self, fleet: Fleet, publisher: Publisher, store: Store) -> None:
        self.fleet = fleet
        self.publisher = publisher
        self.store = store
        self.chain = ChainVersions(ChainLog(fleet.inner))
        trainer = TrainerContext(
            run=fleet.log.run.id,
            epoch=publisher.epoch,
            draw_nonce=nonce,
            clock=lambda: 0,
            budget=fleet.budget,
            options=fleet.options,
            training=fleet.training,
            keyring=FleetKeyring(fleet.key),
            on_event=fleet.events.append,
        )
        self.steps = CoordinatorSteps(trainer, newest=self.chain.newest(), ticks=lambda: fleet.time)

    def go(self, steps: Any) -> Any:
        def perform(request: Any) -> Any:
            assert isinstance(request, FindVersion)
            return self.chain.find(request.seq)

        return run_steps(steps, self.store, sleep=self.fleet.sleep, perform=perform)

    def open(self, step: int, tasks: int = TASKS) -> Round:
        made = self.go(self.steps.open_round(rows_for(step, tasks), for_step=step, sampling=SAMPLING))
        assert isinstance(made, Round)
        return made

    def collect(self, step: int, **options: Any) -> Batch:
        batch = self.go(self.steps.collect(step, **options))
        assert isinstance(batch, Batch)
        self.fleet.collected.append((self.steps.epoch, batch))
        return batch

    def train(self, batch: Batch) -> Version:
        """Train a step, during which the trainer may die. Then publish the step together with the batch that it was trained on."""
        with contextlib.suppress(StoreUnavailable):
            list(self.store.list("training/"))
        trained = json.dumps(hashes_of(batch))
        version = self.publisher.publish(state_at(batch.step), step=batch.step, meta={"trained": trained})
        assert isinstance(version, Version)
        self.steps.published(KnownVersion(version.seq, batch.step, version.digest))
        return version

    def run_to(self, last: int, *, tries: int = 1) -> None:
        """Train from the newest version of the chain, as far ahead as the budget allows."""
        repeated(lambda: self.go(self.steps.resume()), tries)
        while (step := self.steps.newest.step + 1) <= last:
            for ahead in range(step, min(last, self.fleet.budget.newest_open(step - 1)) + 1):
                repeated(lambda ahead=ahead: self.open(ahead), tries)
            self.train(repeated(lambda step=step: self.collect(step), tries))


def hashes_of(batch: Batch) -> list[str]:
    return sorted(blake3_of(rollouts) for rollouts in batch.rollouts)


def blake3_of(rollouts: Rollouts) -> str:
    return blake3(rollouts.to_bytes()).hexdigest()


def acknowledged(store: Store, epoch: int, step: int) -> list[str] | None:
    """Return what a trainer acknowledged for a step, as the store records it."""
    keys = {info.key for info in store.list(fleet_keys.BATCHES)}
    if fleet_keys.batch_key(epoch, step) not in keys:
        return None
    record = BatchRecord.parse(store.get(fleet_keys.batch_key(epoch, step), limit=BIG))
    accepted = Accepted.parse(store.get(record.accepted.key, limit=BIG))
    return sorted(one.blake3 for one in accepted.results)


def live_versions(store: Store) -> list[Version]:
    """Return the versions of the history that leads to the head, oldest first, without rewinds."""
    log = ChainLog(store)
    head = log.head()
    assert head is not None
    versions = ChainVersions(log)
    found = []
    for seq in range(head.seq + 1):
        known = versions.find(seq)
        commit = log.read(seq)
        if known is not None and known.live and commit is not None and commit.kind != "rewind":
            found.append(log.version(seq))
    return found


def assert_one_line_of_training(store: Store, last: int) -> None:
    """Check that every step was trained once, on the batch that its trainer acknowledged, and that no rollout is in two steps."""
    versions = live_versions(store)
    assert [version.step for version in versions] == list(range(last + 1))
    used: list[str] = []
    for version in versions[1:]:
        trained = json.loads(version.meta["trained"])
        assert len(trained) == TASKS
        kept = acknowledged(store, version.epoch, version.step or 0)
        assert kept == trained or (kept is None and version.step != last)  # records of older steps are swept
        used += trained
    assert len(set(used)) == len(used)


def upload_result(fleet: Fleet, record: Round, lease: Lease, rollouts: Rollouts, *, data: bytes | None = None) -> str:
    """Upload a result for a lease. Return its key."""
    data = rollouts.to_bytes() if data is None else data
    key = fleet_keys.RolloutKey(record.round, lease.task, lease.attempt, blake3(data).hexdigest())
    fleet.store.put(fleet_keys.rollout_key(key), data)
    return fleet_keys.rollout_key(key)


def place_lease(fleet: Fleet, record: Round, task: int = 0, attempt: int = 0, member: str = "x") -> Lease:
    """Write a lease directly to the store."""
    lease = Lease(record.id, record.round, task, attempt, member, nonce(), 0, 0)
    fleet.store.put_if_absent(fleet_keys.lease_key(AttemptId(record.round, task, attempt)), lease.to_bytes())
    return lease


def place_decoys(fleet: Fleet) -> None:
    """Add a second result for every task that has one.

    It is equally valid, and older by the store's clock. Only acknowledgements prefer the first result.
    """
    now, fleet.time = fleet.time, 1000.0
    versions = ChainVersions(ChainLog(fleet.inner))
    for info in list(fleet.inner.list(fleet_keys.ROUNDS)):
        record = Round.parse(fleet.inner.get(info.key, limit=BIG))
        done = {
            key.task
            for each in fleet.inner.list(fleet_keys.ROLLOUTS)
            if (key := fleet_keys.parse_rollout_key(each.key)) and key.round == record.round
        }
        for task in done:
            lease = place_lease(fleet, record, task, attempt=1, member="decoy")
            old = next(known for seq in range(99) if (known := versions.find(seq)) and known.live and known.step >= record.oldest_step)
            upload_result(fleet, record, lease, make_rollouts(record, lease, rows_for(record.for_step)[task], old))
    fleet.time = now


def other_digest(digest: Digest) -> Digest:
    return digest + Digest((1, 0, 0, 0))
