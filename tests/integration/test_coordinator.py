"""The trainer's side of a fleet over real stores, with members on their own threads and the history of a real chain."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "faults"))

from publications import open_publisher, state_at
from small_fleet import SAMPLING, Member, rows_for

from deltawire.chain.log import ChainLog
from deltawire.chain.version import Version
from deltawire.errors import Fenced, FleetTimeout, NoChain
from deltawire.fleet import Batch, Coordinator, FleetOptions, StalenessBudget
from deltawire.fleet.chain_versions import ChainVersions
from deltawire.fleet.rules.scheduler import Scheduler
from deltawire.publish import Publisher
from deltawire.store import Store, open_store
from deltawire.store.memory import MemoryStore

OPTIONS = FleetOptions(lease_seconds=600, poll_seconds=0.02)


def patient() -> Scheduler:
    """Return a scheduler that considers no member a straggler, however slow this machine is. Each task is done once."""
    return Scheduler(straggler=1e6, patience=1e6)


class Working:
    """Members that work until the trainer tells them to leave."""

    def __init__(self, store: Store, *names: str) -> None:
        self.members = [Member(store, name, ChainLog(store)) for name in names]
        self._done = threading.Event()
        self.threads = [threading.Thread(target=self._work, args=(member,)) for member in self.members]

    def _work(self, member: Member) -> None:
        while not member.ended and not self._done.wait(0.01):
            member.move()

    def __enter__(self) -> Working:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self.threads:
            thread.join()


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with MemoryStore() if request.param == "memory" else open_store(tmp_path / "run") as opened:
        yield opened


def publish(publisher: Publisher, step: int) -> Version:
    version = publisher.publish(state_at(step), step=step)
    assert isinstance(version, Version)
    return version


@pytest.mark.parametrize("staleness", [0, 1])
def test_training_gets_its_rollouts_from_members_on_other_threads(store: Store, staleness: int) -> None:
    batches: list[Batch] = []
    with open_publisher(store) as publisher:
        publish(publisher, 0)
        budget = StalenessBudget(staleness)
        with (
            Coordinator(store, epoch=publisher.epoch, budget=budget, options=OPTIONS, scheduler=patient()) as fleet,
            Working(store, "a", "b") as working,
        ):
            assert fleet.resume() == []
            for step in range(1, 5):
                for ahead in range(step, budget.newest_open(step - 1) + 1):
                    fleet.open_round(rows_for(ahead), for_step=ahead, sampling=SAMPLING)
                batches.append(fleet.collect(step, timeout=120))
                fleet.published(publish(publisher, step))
            assert {status.member for status in fleet.members()} <= {"a", "b"}
            fleet.stop()
            for thread in working.threads:
                thread.join(120)
            assert all(member.ended for member in working.members)
            assert not fleet.rejected
    steps = {version.seq: version.step for version in (ChainLog(store).version(seq) for seq in range(1, 6))}
    for batch in batches:
        made_by = {steps[seq] for rollouts in batch.rollouts for seq in rollouts.versions}
        assert made_by <= set(range(max(0, batch.step - 1 - staleness), batch.step))
        assert [rows[0]["prompt"] for rows in batch.rows] == [f"{batch.step}.0", f"{batch.step}.1"]


def test_the_fleet_is_polled_while_the_trainer_trains(store: Store) -> None:
    """A member that joins after the round was opened is offered work although the trainer does not collect."""
    accepted = threading.Event()

    def on_event(event: object) -> None:
        if getattr(event, "name", None) == "rollout-accepted":
            accepted.set()

    with open_publisher(store) as publisher:
        publish(publisher, 0)
        with Coordinator(store, epoch=publisher.epoch, options=OPTIONS, on_event=on_event) as fleet:
            fleet.open_round(rows_for(1), for_step=1, sampling=SAMPLING)
            with Working(store, "a"):
                assert accepted.wait(120)
            assert [status.member for status in fleet.members()] == ["a"]


def test_rounds_for_steps_that_are_past_or_too_far_ahead_are_refused() -> None:
    store = MemoryStore()
    with open_publisher(store) as publisher, Coordinator(store, epoch=publisher.epoch, background=False) as fleet:
        with pytest.raises(NoChain):
            fleet.open_round(rows_for(1), for_step=1, sampling=SAMPLING)
        publish(publisher, 0)
        for step in (0, 4):
            with pytest.raises(ValueError, match="1 to 3"):
                fleet.open_round(rows_for(step), for_step=step, sampling=SAMPLING)
        with pytest.raises(ValueError, match="no round"):
            fleet.collect(1)
        first = fleet.open_round(rows_for(1), for_step=1, sampling=SAMPLING)
        assert fleet.open_round(rows_for(2), for_step=1, sampling=SAMPLING) == first  # the round is already open
        with pytest.raises(FleetTimeout):
            fleet.collect(1, timeout=0)


def test_a_fleet_refuses_a_version_without_a_step() -> None:
    store = MemoryStore()
    with open_publisher(store) as publisher, Coordinator(store, epoch=publisher.epoch, background=False) as fleet:
        version = publisher.publish(state_at(0))
        assert isinstance(version, Version)
        with pytest.raises(ValueError, match="step"):
            fleet.published(version)
        with pytest.raises(ValueError, match="step"):
            fleet.poll()


def test_closing_ends_a_wait_on_another_thread() -> None:
    store = MemoryStore()
    ended: list[BaseException] = []
    with open_publisher(store) as publisher:
        publish(publisher, 0)
        fleet = Coordinator(store, epoch=publisher.epoch, options=OPTIONS, background=False)
        fleet.open_round(rows_for(1), for_step=1, sampling=SAMPLING)

        def wait() -> None:
            try:
                fleet.collect(1)
            except FleetTimeout as error:
                ended.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        fleet.close()
        waiting.join(60)
        assert len(ended) == 1


def test_a_trainer_that_was_taken_over_is_told_at_its_next_call() -> None:
    store = MemoryStore()
    with open_publisher(store) as publisher:
        publish(publisher, 0)
        with Coordinator(store, epoch=publisher.epoch, options=OPTIONS) as fleet:
            fleet.open_round(rows_for(1), for_step=1, sampling=SAMPLING)
            with open_publisher(store):
                with pytest.raises(Fenced):
                    fleet.collect(1)
                with pytest.raises(Fenced):
                    fleet.poll()


def test_versions_that_a_rewind_abandoned_are_known_as_abandoned() -> None:
    store = MemoryStore()
    with open_publisher(store) as publisher:
        first = [publish(publisher, step) for step in range(4)]
    with open_publisher(store, resume_from_seq=first[1].seq) as publisher:
        again = [publish(publisher, step) for step in (2, 3)]
        lives = ChainVersions(ChainLog(store))
        assert [found.live for version in first if (found := lives.find(version.seq)) is not None] == [True, True, False, False]
        assert [found.live for version in again if (found := lives.find(version.seq)) is not None] == [True, True]
        later = publish(publisher, 4)
        found = lives.find(later.seq)  # this version did not exist at the first look
        assert found is not None
        assert (found.live, found.step, found.digest) == (True, 4, later.digest)
        assert lives.find(later.seq + 1) is None
        assert lives.newest() == found
        assert lives.find(0) is None  # a fence is not a version


def test_versions_between_a_resumed_one_and_its_anchor_are_abandoned_too() -> None:
    """If the base of an older version may be collected, resuming from it writes an anchor instead of a rewind."""
    store = MemoryStore()
    with open_publisher(store, auto_collect=0.0) as publisher:
        first = [publish(publisher, step) for step in range(14)]
    floor = ChainLog(store).floor()
    resumed = next(version for version in first if version.seq > floor)
    with open_publisher(store, resume_from_seq=resumed.seq) as publisher:
        assert publisher.version is not None
        assert publisher.version.kind == "anchor"
        lives = ChainVersions(ChainLog(store))
        alive = [found.live for version in first if (found := lives.find(version.seq)) is not None]
        assert alive == [version.seq <= resumed.seq for version in first]
        assert lives.newest().seq == publisher.version.seq
