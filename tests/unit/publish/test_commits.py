"""Test the writer of a chain: its epochs, its fences, and what it does when it cannot know whether a commit landed."""

from __future__ import annotations

import numpy as np
import pytest
from plain_reader import read_commits

import deltawire
from deltawire.chain.log import ChainLog
from deltawire.errors import CommitOutcomeUnknown, Fenced, LimitExceeded, PublishError, RunMismatch
from deltawire.format.records.record_parts import FileEntry, Limits
from deltawire.publish.commits import ChainWriter, check_meta, open_run
from deltawire.store.memory import MemoryStore
from deltawire.testing import After, Before, FaultyStore, call

DIGEST = deltawire.state_digest({"a": np.zeros(1)})
NO_PAUSE = {"sleep": lambda seconds: None}


def writer(store) -> ChainWriter:
    open_run(store, None, Limits(), **NO_PAUSE)
    return ChainWriter(store, ChainLog(store), **NO_PAUSE)


def first_version(chain: ChainWriter):
    """Return the smallest commit that makes a version: an anchor of one file."""
    content = "0" * 64
    key = f"data/{chain.epoch:010}/{chain.next_seq:020}/{content}.safetensors"
    entry = FileEntry(key, 16, 8, content, "model.safetensors")
    return chain.propose("anchor", base=None, digest=DIGEST, state_bytes=8, tensors=1, files=[entry])


def test_the_first_writer_fences_an_empty_chain():
    store = MemoryStore()
    chain = writer(store)
    assert (chain.epoch, chain.next_seq) == (1, 1)
    [fence] = read_commits(store)
    assert (fence["kind"], fence["base"], fence["state_seq"], fence["digest"], fence["updates"]) == ("fence", None, None, None, 0)


def test_every_writer_gets_a_higher_epoch_and_links_hold_across_them():
    store = MemoryStore()
    for epoch in range(1, 19):
        chain = writer(store)
        assert chain.epoch == epoch
        chain.land(first_version(chain))
    commits = read_commits(store)
    assert [commit["kind"] for commit in commits] == ["fence", "anchor"] * 18
    assert [commit["updates"] for commit in commits] == [n // 2 for n in range(1, 37)]
    assert commits[-2]["state_seq"] == commits[-2]["base"]["seq"] == commits[-3]["seq"]
    assert not any(commit["_void"] for commit in commits)


def test_a_fence_upon_a_fence_leaves_the_version_in_force():
    store = MemoryStore()
    first = writer(store)
    first.land(first_version(first))
    writer(store)
    writer(store)
    last = read_commits(store)[-1]
    assert (last["kind"], last["seq"], last["state_seq"], last["base"]["seq"]) == ("fence", 3, 1, 2)


def test_the_older_of_two_writers_is_fenced_for_good():
    store = MemoryStore()
    old = writer(store)
    attempt = first_version(old)
    new = writer(store)
    for _ in range(3):
        with pytest.raises(Fenced, match="epoch 2"):
            old.land(attempt)
    with pytest.raises(Fenced):
        old.propose("fence", base=None, digest=None, state_bytes=0, tensors=0)
    new.land(first_version(new))
    assert [commit["epoch"] for commit in read_commits(store)] == [1, 2, 2]


def test_a_commit_of_an_old_writer_that_comes_before_the_fence_is_kept():
    store = MemoryStore()
    old = writer(store)

    class Racing(FaultyStore):
        def put_if_absent(self, key, data):
            if key.startswith("commit/") and key.endswith("1.json"):
                old.land(first_version(old))
            super().put_if_absent(key, data)

    new = ChainWriter(Racing(store), ChainLog(store), **NO_PAUSE)
    assert new.fence.seq == 2
    assert new.fence.state_seq == new.fence.base.seq == 1
    assert new.fence.digest == DIGEST


def test_a_stray_commit_of_an_old_writer_after_the_fence_is_stepped_over():
    store = MemoryStore()
    stray = writer(store)
    new = writer(store)
    stray._head = new._head  # a broken writer that does not read the chain
    stray.land(first_version(stray))
    attempt = first_version(new)
    before = attempt.commit.nonce
    new.land(attempt)
    assert attempt.commit.seq == 3
    assert attempt.commit.nonce != before
    commits = read_commits(store)
    assert [commit["_void"] for commit in commits] == [False, False, True, False]
    assert (commits[3]["updates"], new.tip.seq) == (1, 3)
    latest = writer(store)
    assert latest.fence.base.seq == 3


def test_a_commit_of_another_publisher_in_the_same_epoch_halts():
    store = MemoryStore()
    chain = writer(store)
    twin = ChainWriter.__new__(ChainWriter)
    for slot, value in vars(chain).items():
        setattr(twin, slot, value)
    twin.land(first_version(twin))
    with pytest.raises(Fenced, match="this publisher's epoch 1"):
        chain.land(first_version(chain))


def test_a_writer_that_is_overtaken_while_it_starts_is_fenced():
    store = MemoryStore()

    class Overtaking(FaultyStore):
        def put_if_absent(self, key, data):
            super().put_if_absent(key, data)
            if key.startswith("epoch/"):
                writer(store)

    open_run(store, None, Limits())
    with pytest.raises(Fenced, match="took over"):
        ChainWriter(Overtaking(store), ChainLog(store), **NO_PAUSE)


@pytest.mark.parametrize("fault", [Before, After])
@pytest.mark.parametrize("kind", ["unknown", "unavailable"])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_a_commit_whose_answer_is_lost_lands_once(fault, kind, times):
    store = FaultyStore(MemoryStore(), [fault(call("put_if_absent", "commit/00000000000000000001"), kind, times=times)])
    chain = writer(store)
    attempt = first_version(chain)
    chain.land(attempt)
    assert attempt.landed
    commits = read_commits(store)
    assert [commit["nonce"] for commit in commits[1:]] == [attempt.commit.nonce]
    chain.land(first_version(chain))
    assert len(read_commits(store)) == 3


def test_a_commit_that_stays_open_is_asked_for_again_with_the_same_bytes():
    inner = MemoryStore()
    blocked = [Before(call("get", "commit/00000000000000000001"), "unavailable", times=5)]
    store = FaultyStore(inner, [After(call("put_if_absent", "commit/00000000000000000001"), "unknown", times=5), *blocked])
    chain = writer(store)
    attempt = first_version(chain)
    data = attempt.data
    with pytest.raises(CommitOutcomeUnknown) as raised:
        chain.land(attempt)
    assert raised.value.retryable
    assert not attempt.landed
    chain.land(attempt)
    assert attempt.landed
    assert inner.get("commit/00000000000000000001.json", limit=65536) == attempt.data == data


def test_a_commit_once_in_doubt_is_not_given_up_for_a_later_failure():
    """Its bytes may still arrive. Another commit for the same slot would then look like a conflict with another writer."""
    slot = "commit/00000000000000000001"
    puts = [Before(call("put_if_absent", slot), "unknown", times=5), Before(call("put_if_absent", slot), "full", times=10)]
    store = FaultyStore(MemoryStore(), puts)
    chain = writer(store)
    attempt = first_version(chain)
    for _ in range(2):
        with pytest.raises(CommitOutcomeUnknown):
            chain.land(attempt)
    chain.land(attempt)
    assert attempt.landed


def test_a_run_is_begun_once_and_keeps_its_name_and_limits():
    store = MemoryStore()
    first = open_run(store, "seven", Limits(state_bytes=100))
    assert open_run(store, "seven", Limits(state_bytes=5)) == first
    assert open_run(store, None, Limits()) == first
    with pytest.raises(RunMismatch, match="'seven', not 'eight'"):
        open_run(store, "eight", Limits())
    with pytest.raises(PublishError, match="cannot name a run") as refused:
        open_run(MemoryStore(), "x" * 300, Limits())
    assert "verify" not in str(refused.value)  # there is no chain yet that the user could verify


def test_a_writer_keeps_to_the_limits_of_the_run():
    store = MemoryStore()
    open_run(store, None, Limits(state_bytes=4))
    with pytest.raises(LimitExceeded):
        first_version(writer(store))


def test_meta_is_strings_and_small():
    assert check_meta(None) == {}
    assert check_meta({"a": "ü"}) == {"a": "ü"}
    with pytest.raises(TypeError):
        check_meta({"a": 1})
    with pytest.raises(LimitExceeded):
        check_meta({"a": "x" * 9000})
