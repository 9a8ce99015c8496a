"""Test that the workers of an engine can fetch hops and full checkpoints themselves, through a spool."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from spooled_chain import directory_chain, grown_chain
from toy_chain import first_state

from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import DataDamaged, VersionUnknown
from deltawire.events import Event
from deltawire.subscribe.spool.delta_spool import DeltaSpool
from deltawire.subscribe.spool.fetching_spool import FetchingSpool
from deltawire.subscribe.spool.spooled_hop import SpooledHop


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
    for seq in (5, 7):  # a fence, and nothing
        with pytest.raises(VersionUnknown):
            spool.hop(chain.ref(4), seq)
    assert not list(tmp_path.glob("hop-*"))
    spool.close()


def test_a_worker_without_a_sidecar_gets_the_delta_after_a_fence(tmp_path: Path) -> None:
    chain = grown_chain()
    chain.claim(2)
    chain.delta()
    spool = FetchingSpool(tmp_path, chain.store, options=ReaderOptions(patience=0))
    assert spool.hop(chain.ref(4), 6) == SpooledHop(chain.commits[4], chain.commits[6], chain.commits[6].files, "commit")
    assert DeltaSpool(tmp_path).hop(chain.ref(4), 6) is not None
    assert spool.hop(chain.ref(3), 6) is None  # two deltas
    spool.close()


def test_a_fetching_spool_opens_and_closes_its_own_store(tmp_path: Path) -> None:
    chain = directory_chain(tmp_path / "store")
    spool = FetchingSpool(tmp_path / "spool", str(tmp_path / "store"))
    assert spool.hop(chain.ref(1), 2) is not None
    spool.close()


def test_a_hop_that_is_damaged_in_the_store_is_an_error_until_it_is_repaired(tmp_path: Path) -> None:
    chain = grown_chain()
    chain.damage(chain.commits[4].files[0])
    spool = FetchingSpool(tmp_path, chain.store, options=ReaderOptions(patience=0))
    with pytest.raises(DataDamaged):
        spool.hop(chain.ref(3), 4)
    assert DeltaSpool(tmp_path).hop(chain.ref(3), 4) is None
    chain.damage(chain.commits[4].files[0])  # flips the same bit back
    found = spool.hop(chain.ref(3), 4)
    assert found is not None
    assert DeltaSpool(tmp_path).hop(chain.ref(3), 4) == found


def test_a_worker_finds_a_route_from_its_version_or_from_a_full_checkpoint(tmp_path: Path) -> None:
    chain = grown_chain()
    spool = FetchingSpool(tmp_path, chain.store, options=ReaderOptions(patience=0))
    hops, context = spool.route(None, 3)
    assert [(hop.base, hop.target.seq) for hop in hops] == [(None, 1), (1, 2), (2, 3)]
    with spool.loading():
        path = spool.shard(hops[0], hops[0].files[0], context)
        assert path.read_bytes() == chain.store.get(hops[0].files[0].key, limit=1 << 20)
    assert spool.put(hops[1], context).target == chain.commits[2]
    hops, _ = spool.route(chain.ref(2), 4)
    assert [hop.target.seq for hop in hops] == [3, 4]
    assert spool.route(chain.ref(4), 4)[0] == []
    with pytest.raises(VersionUnknown):
        spool.route(None, 9)
