"""Writers, readers and collectors of one chain crash, freeze, wake up fenced and lose answers, in any order, while clocks jump.

After every step there is one serial history with everything that was acknowledged, every reader holds one whole version, bit for bit
as it was published, and all objects above the floor exist.

Continuous integration takes the same few hundred steps each time. Take other steps with:

    DELTAWIRE_CHAIN_EXAMPLES=2000 python -m pytest tests/property/test_chain_machine.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from chain_world import Mishap, Outcome, Process, State, World, changed_state, first_state
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from support import bits_of, publish_fully

from deltawire import Publisher
from deltawire.chain.fetch import Fetcher
from deltawire.chain.maintenance.collect import collect
from deltawire.chain.maintenance.verify import verify
from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import (
    CommitOutcomeUnknown,
    DataMissing,
    DeltawireError,
    Fenced,
    NoChain,
    OutcomeUnknown,
    StoreUnavailable,
    VersionGone,
)
from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.format.records.record_parts import link_targets
from deltawire.format.records.version_records import Commit
from deltawire.publish.commits import ChainWriter
from deltawire.publish.shortcuts.cadence import AnchorPolicy
from deltawire.publish.writer_options import WriterOptions
from deltawire.store import create_rule, keys
from deltawire.subscribe import Subscriber, reading_mirror
from deltawire.subscribe.chain_view import ChainView
from deltawire.testing import Call, ProcessDied

EXAMPLES = int(os.environ.get("DELTAWIRE_CHAIN_EXAMPLES", "0"))
TRANSIENT = (StoreUnavailable, OutcomeUnknown, CommitOutcomeUnknown)
OFTEN_ANCHORED = AnchorPolicy(min_versions=2, max_versions=3)
GRACE = 1000.0

CALLS = [("", ""), *3 * [("put_if_absent", "commit/")], ("get", "commit/"), ("read_into", ""), ("list", ""), ("put_if_absent", "epoch/")]
CALLS += [
    ("put", "data/"),
    ("put_if_absent", "anchor/"),
    ("put_if_absent", "skip/"),
    ("put_if_absent", "gc/"),
    ("delete", ""),
    ("put", "HEAD"),
]


class LocalClock:
    """The time of day that processes see."""

    error = 0.0

    @classmethod
    def now(cls) -> float:
        return time.time() + cls.error


@st.composite
def mishaps(draw: st.DrawFn) -> Mishap | None:
    """Draw a mishap or None. Later work continues to count calls, so a mishap may strike after the work it was drawn for."""
    kind = draw(st.sampled_from([None, None, "crash", "freeze", "unavailable", "unknown"]))
    if kind is None:
        return None
    op, prefix = draw(st.sampled_from(CALLS))
    return Mishap(kind, draw(st.booleans()), op, prefix, draw(st.sampled_from([0, 0, 0, 1, 3]) if op else st.integers(0, 40)))


@dataclasses.dataclass
class Writer:
    process: Process
    state: State
    publisher: Publisher | None = None
    step: int | None = None
    """The step of the publication in progress."""
    began_in: int = 0
    """The highest epoch when the work in progress began."""
    resumed_from: int | None = None


@dataclasses.dataclass
class Reader:
    process: Process
    mirror: Path | None
    subscriber: Subscriber | None = None
    target: int | None = None


class ChainMachine(RuleBasedStateMachine):
    @initialize(versions=st.sampled_from([0, 2, 9, 17]), seed=st.integers(0, 1000))
    def begin(self, versions: int, seed: int) -> None:
        self.world = World()
        LocalClock.error = 0.0
        self.folder = Path(tempfile.mkdtemp(prefix="deltawire-machine-"))
        self.writers: dict[int, Writer] = {}
        self.readers: dict[int, Reader] = {}
        self.collector: Process | None = None
        if versions:
            self.publish(0, [("few", "added")[(seed + number) % 7 == 0] for number in range(versions)], None, seed)

    # Writers

    @rule(number=st.integers(0, 2), mishap=mishaps(), back=st.one_of(st.none(), st.none(), st.integers(0, 12)))
    def open_writer(self, number: int, mishap: Mishap | None, back: int | None) -> None:
        """Take over the run with a new process. The process before it is dropped like a lost machine if it was not closed."""
        self._lose_writer(number)
        resume_from_seq = None if back is None else self._earlier(back)
        process = Process(self.world.store)
        process.mishap = mishap
        writer = self.writers[number] = Writer(process, first_state(), began_in=self.world.epoch, resumed_from=resume_from_seq)
        self._writer_came_to(number, process.do(lambda: self._opened(writer, resume_from_seq)))

    @rule(
        number=st.integers(0, 2),
        changes=st.lists(st.sampled_from(["few", "few", "few", "same", "all", "added", "removed", "reshaped"]), min_size=1, max_size=8),
        mishap=mishaps(),
        seed=st.integers(0, 1000),
    )
    def publish(self, number: int, changes: list[str], mishap: Mishap | None, seed: int) -> None:
        """Publish one or more versions. Open the writer first if there is none, or wake it if it is frozen."""
        if number not in self.writers:
            self.open_writer(number, None, None)
        for index, change in enumerate(changes):
            writer = self.writers.get(number)
            if writer is None:
                return
            if writer.process.frozen:
                self._writer_came_to(number, writer.process.wake())
                return
            assert writer.publisher is not None
            if index and writer.began_in > writer.publisher.epoch:
                return  # a later writer has fenced this one
            publisher, state, step = writer.publisher, changed_state(writer.state, change, seed + index), len(self.world.published)
            self.world.published.append(state)
            writer.step, writer.began_in = step, self.world.epoch
            writer.process.mishap = writer.process.mishap or (mishap if index == len(changes) - 1 else None)
            writer.state = state
            self._writer_came_to(number, writer.process.do(lambda: publish_fully(publisher, state, step=step)))  # noqa: B023

    @rule(number=st.integers(0, 2))
    def close_writer(self, number: int) -> None:
        writer = self.writers.get(number)
        if writer is None or writer.process.frozen:
            return
        assert writer.publisher is not None
        publisher, writer.step, writer.process.mishap = writer.publisher, None, None
        outcome = writer.process.do(publisher.close)
        assert outcome is not None
        assert outcome.error is None or (isinstance(outcome.error, Fenced) and publisher.epoch < self.world.epoch), outcome
        del self.writers[number]

    def _opened(self, writer: Writer, resume_from_seq: int | None) -> None:
        options = WriterOptions(segment_bytes=300, anchor_policy=OFTEN_ANCHORED, threads=1)
        writer.publisher = Publisher(writer.process.store, resume_from_seq=resume_from_seq, options=options)

    def _writer_came_to(self, number: int, outcome: Outcome | None) -> None:
        """Check how a writer's work ended, if it has ended."""
        if outcome is None:
            return
        writer = self.writers[number]
        self.world.read_new_commits()
        error, publisher = outcome.error, writer.publisher
        if error is not None:
            self._judge_writer(writer, error)
            if publisher is None or isinstance(error, ProcessDied):
                self._lose_writer(number)
        elif writer.step is None:  # it has just been opened
            assert publisher is not None
            if publisher.version is not None:
                writer.state = self.world.state_at(publisher.version.seq)
            epochs = [other.publisher.epoch for other in self.writers.values() if other.publisher is not None]
            assert len(set(epochs)) == len(epochs)
        else:
            assert publisher is not None
            assert publisher.epoch == writer.began_in or writer.process.was_frozen, "an earlier epoch published after a later one began"
            assert outcome.value.seq not in self.world.acknowledged
            self.world.acknowledge(outcome.value.seq, writer.step)
        writer.step = None

    def _judge_writer(self, writer: Writer, error: BaseException) -> None:
        if isinstance(error, (ProcessDied, *TRANSIENT)):
            excused = writer.process.struck
        elif isinstance(error, Fenced):
            own = 0 if writer.publisher is None else writer.publisher.epoch
            excused = self.world.epoch > own
        elif isinstance(error, (VersionGone, DataMissing)):
            is_gone = writer.resumed_from is not None and writer.resumed_from not in self.world.reachable()
            excused = is_gone or writer.process.was_frozen or writer.process.struck
        else:
            excused = False
        if not excused:
            raise AssertionError(f"a writer failed without cause: {error!r}") from error

    def _lose_writer(self, number: int) -> None:
        writer = self.writers.pop(number, None)
        if writer is None:
            return
        if writer.process.frozen:
            assert writer.process.wake(only_to_die=True) is not None
        if writer.publisher is not None:
            writer.publisher.__exit__(ProcessDied, ProcessDied(), None)  # its threads end and write nothing more

    # Readers. Reader 0 reads into memory, readers 1 and 2 have a mirror each, and reader 3 shares the mirror of reader 1.

    @rule(number=st.integers(0, 3), mishap=mishaps(), back=st.one_of(st.none(), st.none(), st.integers(0, 15)))
    def sync(self, number: int, mishap: Mishap | None, back: int | None) -> None:
        """Sync a reader to the newest or an older version. Open the reader first if there is none."""
        reader = self.readers.get(number) or self._open_reader(number)
        if reader.process.frozen:
            self._reader_came_to(number, reader.process.wake())
            return
        if mishap is not None and mishap.kind == "freeze" and number in (1, 3):
            mishap = None  # a frozen reader would hold the mirror's lock, and the other reader would wait for it
        reader.process.mishap = reader.process.mishap or mishap
        reader.target = None if back is None else self._earlier(back)
        subscriber, target = reader.subscriber, reader.target
        assert subscriber is not None
        self._reader_came_to(number, reader.process.do(lambda: subscriber.sync(seq=target)))

    @rule(number=st.integers(0, 3))
    def close_reader(self, number: int) -> None:
        reader = self.readers.get(number)
        if reader is None or reader.process.frozen:
            return
        assert reader.subscriber is not None
        reader.process.mishap = None
        outcome = reader.process.do(reader.subscriber.close)
        assert outcome is not None
        assert outcome.error is None, outcome
        del self.readers[number]

    def _open_reader(self, number: int) -> Reader:
        process = Process(self.world.store)
        mirror = None if number == 0 else self.folder / f"mirror-{1 if number == 3 else number}"
        reader = self.readers[number] = Reader(process, mirror)
        reader.subscriber = Subscriber(process.store, mirror, options=ReaderOptions(patience=0.0, reader=f"reader-{number}"), threads=1)
        return reader

    def _reader_came_to(self, number: int, outcome: Outcome | None) -> None:
        if outcome is None:
            return
        reader = self.readers[number]
        error, subscriber = outcome.error, reader.subscriber
        assert subscriber is not None
        self.world.read_new_commits()
        if error is None:
            assert outcome.value == subscriber.version
            if not reader.process.was_frozen:
                assert outcome.value.seq == (self.world.head if reader.target is None else reader.target)
            return
        if isinstance(error, ProcessDied):
            subscriber._replica.close()  # the kernel closes the files of a dead process
            del self.readers[number]
            return
        if isinstance(error, TRANSIENT):
            excused = reader.process.struck
        elif isinstance(error, NoChain):
            excused = self.world.head is None or reader.process.was_frozen
        elif isinstance(error, (VersionGone, DataMissing)):
            target = self.world.head if reader.target is None else reader.target
            excused = target not in self.world.reachable() or reader.process.was_frozen
        else:
            excused = False
        if not excused:
            raise AssertionError(f"a reader failed without cause: {error!r}") from error

    # Collection, time, and a writer that commits without reading the chain

    @rule(mishap=mishaps(), grace=st.sampled_from([0.0, GRACE]))
    def collect_garbage(self, mishap: Mishap | None, grace: float) -> None:
        process = self.collector
        if process is not None and process.frozen:
            outcome = process.wake()
        else:
            process = self.collector = Process(self.world.store)
            is_late = grace == 0.0 and mishap is not None and mishap.kind == "freeze"  # only grace protects against a late collector
            process.mishap = None if is_late else mishap
            outcome = process.do(lambda: collect(process.store, grace=grace))
        if outcome is not None and outcome.error is not None:
            excused = process.struck or (isinstance(outcome.error, NoChain) and self.world.head is None)
            assert excused, f"the collector failed without cause: {outcome.error!r}"

    @rule(seconds=st.sampled_from([1.0, GRACE + 1, 1300.0, 4000.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(seconds=st.sampled_from([-1e6, -1300.0, 4000.0, 1e6]), is_the_stores=st.booleans())
    def clock_jumps(self, seconds: float, is_the_stores: bool) -> None:
        """Move the store's clock or the clock of all processes, forward or back."""
        if is_the_stores:
            self.world.pass_time(seconds)
        else:
            LocalClock.error += seconds

    @precondition(lambda self: any(commit["epoch"] < self.world.epoch and commit["kind"] != "fence" for commit in self.world.commits))
    @rule(pick=st.integers(0, 100))
    def blind_zombie_commits(self, pick: int) -> None:
        """Commit to the next slot as a writer that was fenced long ago and does not read the chain, as another implementation might."""
        self.world.read_new_commits()
        old = [commit for commit in self.world.commits if commit["epoch"] < self.world.epoch and commit["kind"] != "fence"]
        seq = len(self.world.commits)
        model = Commit.parse(self.world.store.get(keys.commit_key(old[pick % len(old)]["seq"]), limit=65536))
        links = tuple((target, self.world.commits[target]["_hash"]) for target in link_targets(seq))
        parent = self.world.commits[-1]["_hash"]
        void = dataclasses.replace(model, seq=seq, state_seq=seq, nonce=secrets.token_hex(16), parent=parent, links=links)
        self.world.store.put_if_absent(keys.commit_key(seq), void.to_bytes())
        self.world.read_new_commits()
        assert self.world.commits[seq]["_void"]

    @rule(pick=st.integers(0, 100))
    def read_any_version(self, pick: int) -> None:
        """Check that a new reader can read every version that the store can rebuild, and reports the others as gone."""
        seq = self._earlier(pick)
        if seq is not None:
            self._read_from_nothing(seq)

    def _earlier(self, back: int) -> int | None:
        """Return the version this many versions before the newest one."""
        versions = [commit["seq"] for commit in self.world.commits if self.world.is_version(commit["seq"])]
        return versions[-1 - back % len(versions)] if versions else None

    def _read_from_nothing(self, seq: int) -> None:
        is_reachable = seq in self.world.reachable()
        with Subscriber(self.world.store, options=ReaderOptions(pin=False, patience=0.0), threads=1) as subscriber:
            try:
                version = subscriber.sync(seq=seq)
            except (VersionGone, DataMissing):
                assert not is_reachable, f"version {seq} can be rebuilt, but the reader did not find a route"
                assert seq != self.world.head
                return
            self.world.assert_is_version(version, subscriber.state)

    # Invariants

    @invariant()
    def there_is_one_history_and_nothing_acknowledged_is_lost(self) -> None:
        self.world.read_new_commits()
        for seq, step in self.world.acknowledged.items():
            assert self.world.is_version(seq)
            assert self.world.commits[seq]["step"] == step
        if self.world.commits:
            assert verify(self.world.store).problems == []
        if self.world.head is not None:
            assert self.world.head in self.world.reachable()

    @invariant()
    def every_reader_holds_one_whole_version(self) -> None:
        for number, reader in self.readers.items():
            subscriber = reader.subscriber
            if subscriber is None or subscriber.version is None or (reader.process.frozen and number == 0):
                continue  # a sync in memory changes the arrays in place
            self.world.assert_is_version(subscriber.version, subscriber.state)

    @invariant()
    def every_mirror_serves_one_whole_version(self) -> None:
        for mirror in self.folder.glob("mirror-*/current"):
            with reading_mirror(mirror.parent) as path:
                seq = json.loads((path / "deltawire.json").read_text())["seq"]
                assert bits_of(Checkpoint(path)) == bits_of(self.world.state_at(seq))

    def teardown(self) -> None:
        """Check at the end that all remaining processes can continue."""
        if not hasattr(self, "world"):
            return
        try:
            for number in [*self.writers]:
                self._lose_writer(number)
            for number, reader in [*self.readers.items()]:
                if reader.process.frozen:
                    outcome = reader.process.wake(only_to_die=True)
                    self._reader_came_to(number, outcome)
            if self.collector is not None and self.collector.frozen:
                self.collector.wake(only_to_die=True)
            for number in [*self.readers, 0]:
                self.publish(0, ["few"], None, number)
                if number in self.readers:
                    self.readers[number].process.mishap = None
                self.sync(number, None, None)
            self.there_is_one_history_and_nothing_acknowledged_is_lost()
            self.every_reader_holds_one_whole_version()
            assert self.world.head is not None
            self._read_from_nothing(self.world.head)
            assert verify(self.world.store, deep=True).problems == []
        finally:
            for number in [*self.writers]:
                self._lose_writer(number)
            for reader in self.readers.values():
                with contextlib.suppress(DeltawireError, ProcessDied):
                    assert reader.subscriber is not None
                    reader.subscriber.close()
            shutil.rmtree(self.folder)


def test_chain_survives_whatever_its_processes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create_rule, "_FIRST_PAUSE", 0.0)
    monkeypatch.setitem(Fetcher.__init__.__kwdefaults__, "patience", 0.0)  # missing objects never arrive later in this test
    monkeypatch.setitem(ChainWriter.__init__.__kwdefaults__, "clock", LocalClock.now)
    monkeypatch.setitem(ChainView.__init__.__kwdefaults__, "clock", LocalClock.now)
    options: dict[str, Any] = {"max_examples": EXAMPLES, "derandomize": False} if EXAMPLES else {"max_examples": 25}
    run_state_machine_as_test(ChainMachine, settings=settings(stateful_step_count=50, **options))


class HungCollector(Process):
    """A collector that freezes before its first deletion of data or shortcuts."""

    def _watch(self, call: Call) -> bool:
        if self.mishap is None and not self.was_frozen and call.op == "delete" and not call.key.startswith("probe/"):
            self.mishap = Mishap("freeze", False, "delete", "", 0)
        return super()._watch(call)


def test_collector_that_hung_takes_nothing_that_a_resumed_version_rests_on() -> None:
    world, state, seqs = World(), first_state(), []
    with Publisher(world.store, options=WriterOptions(anchor_policy=OFTEN_ANCHORED)) as publisher:
        for step in range(10):
            state = changed_state(state, "few", step)
            world.published.append(state)
            seqs.append(publish_fully(publisher, state, step=step).seq)
    assert collect(world.store, grace=GRACE).outcome == "waiting"
    world.pass_time(GRACE + 1)
    collector = HungCollector(world.store)
    assert collector.do(lambda: collect(collector.store, grace=GRACE)) is None
    with Publisher(world.store, resume_from_seq=seqs[1]) as publisher:
        outcome = collector.wake()
        assert outcome is not None
        assert outcome.value.outcome == "collected"
        world.read_new_commits()
        assert seqs[1] not in world.reachable()
        with Subscriber(world.store, options=ReaderOptions(patience=0.0)) as subscriber:
            world.assert_is_version(subscriber.sync(), subscriber.state)
            assert bits_of(subscriber.state) == bits_of(world.published[1])
