"""Test that processes which read a spool are brought to a version, over any route, and that they can fetch hops themselves."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from spooled_chain import directory_chain, grown_chain
from support import bits_of, copied
from toy_chain import ToyChain, first_state

import deltawire
from deltawire import Subscriber
from deltawire.chain.memory_state import MemoryState
from deltawire.chain.reader_options import ReaderOptions
from deltawire.chain.restore import Hop
from deltawire.errors import BaseMismatch, DataDamaged, SpoolError, VersionUnknown
from deltawire.events import Event
from deltawire.format.records.record_parts import record_hash
from deltawire.format.records.version_records import Commit
from deltawire.subscribe.delta_spool import DeltaSpool, SpooledHop
from deltawire.subscribe.spool_replica import FetchingSpool, SpoolReplica
from deltawire.subscribe.sync_context import SyncContext


class Worker:
    """Weights in this process. A real worker is in another one, and sees only the spool."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.commit: Commit | None = None
        self.state: dict[str, Any] = {}
        self.taken: list[str] = []

    def take(self, hop: SpooledHop) -> None:
        spool = DeltaSpool(self._folder)
        assert self.commit is not None
        assert spool.hop(hop.base.ref(record_hash(hop.base.to_bytes())), hop.target.seq) == hop
        if deltawire.state_digest(self.state) != hop.base.digest:
            raise BaseMismatch("the weights are not those of the base.")
        names = sorted(self.state)
        state = copied(self.state)
        for entry in hop.files:
            part = names[entry.first or 0 :][: entry.count]
            deltawire.apply_delta({name: state[name] for name in part}, spool.open(entry))
        assert deltawire.state_digest(state) == hop.target.digest
        self.state, self.commit = state, hop.target
        self.taken.append(hop.source)

    def load(self, checkpoint: Hop, context: SyncContext) -> None:
        loaded = MemoryState()
        loaded.load_anchor(checkpoint, context.fetcher())
        self.state = copied(loaded)
        self.commit = checkpoint.target
        self.taken.append("checkpoint")


class Following:
    """A worker that follows a chain through a spool."""

    def __init__(self, chain: ToyChain, folder: Path) -> None:
        self.chain = chain
        self.worker = Worker(folder)
        self.events: list[Event] = []
        replica = SpoolReplica(DeltaSpool(folder), self.worker)
        self.subscriber = Subscriber(chain.store, replica=replica, options=ReaderOptions(patience=0), on_event=self.events.append)

    def sync(self) -> list[str]:
        """Reach the newest version. Return how."""
        self.worker.taken.clear()
        version = self.subscriber.sync()
        assert self.worker.commit is not None
        assert version.seq == self.worker.commit.seq
        assert bits_of(self.worker.state) == bits_of(self.chain.state)
        return self.worker.taken


@pytest.fixture
def following(tmp_path: Path) -> Following:
    return Following(grown_chain(versions=2), tmp_path)


def test_weights_follow_deltas_fences_and_rewinds_through_the_spool(following: Following, tmp_path: Path) -> None:
    chain = following.chain
    assert following.sync() == ["checkpoint", "commit"]
    chain.grow(2)
    assert following.sync() == ["commit", "commit"]
    chain.claim(2)
    chain.delta()
    assert following.sync() == ["fence", "commit"]
    chain.rewind(2)
    chain.delta()
    following.sync()
    assert following.sync() == []
    assert len(list(tmp_path.glob("hop-*.json"))) == 2
    assert [event.name for event in following.events if event.name == "synced"] == ["synced"] * 4


def test_a_delta_that_is_lost_is_avoided_and_one_that_is_damaged_alone_stops_the_reader(following: Following) -> None:
    chain = following.chain
    following.sync()
    chain.grow(2)
    chain.damage(chain.commits[3].files[0])
    with pytest.raises(DataDamaged):
        following.subscriber.sync()
    assert following.worker.commit == chain.commits[2]
    chain.add_skip(4, 2)
    assert following.sync() == ["skip"]
    chain.delta()
    chain.lose(chain.commits[5].files[1])
    chain.add_anchor(5)
    assert following.sync() == ["checkpoint"]
    assert [event.fields["source"] for event in following.events if event.name == "avoiding"] == ["commit", "commit", "commit"]


def test_weights_that_are_not_those_of_their_version_are_loaded_anew(following: Following) -> None:
    following.sync()
    following.worker.state["c.bias"][0] += 1
    following.chain.delta()
    assert following.sync() == ["checkpoint", "commit", "commit"]
    assert "state-refused" in [event.name for event in following.events]


def test_a_spool_that_cannot_be_used_ends_the_sync_and_the_weights_stay(following: Following, tmp_path: Path) -> None:
    following.sync()
    following.chain.delta()
    tmp_path.chmod(0o777)
    with pytest.raises(SpoolError):
        following.subscriber.sync()
    assert following.worker.commit == following.chain.commits[2]
    tmp_path.chmod(0o700)
    assert following.sync() == ["commit"]


def test_workers_without_a_sidecar_fetch_a_hop_once(tmp_path: Path) -> None:
    chain = grown_chain()
    events: list[Event] = []
    spools = [FetchingSpool(tmp_path, chain.store, options=ReaderOptions(patience=0), on_event=events.append) for _ in range(3)]
    found: list[SpooledHop | None] = []
    threads = [threading.Thread(target=lambda spool=spool: found.append(spool.hop(chain.ref(3), 4))) for spool in spools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [SpooledHop(chain.commits[3], chain.commits[4], chain.commits[4].files, "commit")] * 3
    for entry in chain.commits[4].files:
        chain.lose(entry)
    assert spools[0].hop(chain.ref(3), 4) == found[0]  # from the spool
    assert [bytes(spools[1].open(entry))[:8] for entry in chain.commits[4].files] == [b"dwdelta3"] * 2


def test_a_worker_without_a_sidecar_gets_no_hop_if_it_needs_several_or_a_checkpoint(tmp_path: Path) -> None:
    chain = grown_chain()
    chain.claim(2)
    chain.anchor(first_state(9))
    spool = FetchingSpool(tmp_path, chain.store, options=ReaderOptions(patience=0))
    assert spool.hop(chain.ref(2), 4) is None
    assert spool.hop(chain.ref(4), 6) is None
    assert spool.hop(chain.ref(4), 5) is None  # a fence
    with pytest.raises(VersionUnknown):
        spool.hop(chain.ref(4), 7)
    assert not list(tmp_path.glob("hop-*"))
    spool.close()


def test_a_fetching_spool_opens_and_closes_its_own_store(tmp_path: Path) -> None:
    chain = directory_chain(tmp_path / "store")
    spool = FetchingSpool(tmp_path / "spool", str(tmp_path / "store"))
    assert spool.hop(chain.ref(1), 2) is not None
    spool.close()
