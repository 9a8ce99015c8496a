"""Test reading the chain, on hand-made chains."""

import dataclasses

import pytest
from hand_made_chain import RUN_ID, HandMadeChain, make_state, replaced, trained_chain

from deltawire.chain.log import ChainLog
from deltawire.errors import (
    ChainBroken,
    CorruptRecord,
    LimitExceeded,
    NoChain,
    RollbackDetected,
    RunMismatch,
    SignatureInvalid,
    VersionUnknown,
)
from deltawire.format.records.collection_records import Mark
from deltawire.format.records.record_parts import Limits
from deltawire.format.records.signing import SigningKey
from deltawire.store import keys
from deltawire.store.memory import MemoryStore


@pytest.fixture(scope="module")
def long_chain():
    return trained_chain(99)


def commit_reads(store):
    return [key for op, key in store.requests if op == "get" and key.startswith("commit/")]


def test_log_says_that_there_is_no_chain():
    with pytest.raises(NoChain):
        _ = ChainLog(MemoryStore()).run


def test_log_refuses_another_run_than_was_asked_for():
    chain = HandMadeChain()
    assert ChainLog(chain.store, run="a run").run.id == RUN_ID
    with pytest.raises(RunMismatch):
        _ = ChainLog(chain.store, run="another").run


def test_head_of_a_chain_without_commits_is_none():
    assert ChainLog(HandMadeChain().store).head() is None


@pytest.mark.parametrize("hint", [None, 0, 1, 37, 100, 101, 5000, 2**62])
def test_head_is_found_whatever_the_hint_says(long_chain, hint):
    long_chain.store.delete([keys.HEAD])
    if hint is not None:
        long_chain.put_head(hint)
    assert ChainLog(long_chain.store).head() == long_chain.commits[100]


@pytest.mark.parametrize("garbage", [b"", b"garbage", b"x" * 70_000, b'{"deltawire":"head","seq":-1,"version":1}'])
def test_head_is_found_though_the_hint_is_garbage(long_chain, garbage):
    long_chain.store.put(keys.HEAD, garbage)
    assert ChainLog(long_chain.store).head().seq == 100
    long_chain.store.delete([keys.HEAD])


@pytest.mark.parametrize("known", [0, 1, 50, 99, 100])
def test_head_is_found_from_what_is_known(long_chain, known):
    log = ChainLog(long_chain.store, known=long_chain.ref(known))
    assert log.head().seq == 100
    assert log.known == long_chain.ref(100)


def test_head_without_a_hint_takes_few_requests(long_chain):
    long_chain.store.requests.clear()
    ChainLog(long_chain.store).head()
    assert len(commit_reads(long_chain.store)) <= 2 * 7 + 2


def test_polling_for_a_new_version_takes_one_request(long_chain):
    log = ChainLog(long_chain.store)
    log.head()
    long_chain.store.requests.clear()
    assert log.head().seq == 100
    assert long_chain.store.requests == [("get", keys.commit_key(101))]


def test_ancestor_is_reached_in_few_reads(long_chain):
    for seq in (0, 1, 31, 64, 99):
        log = ChainLog(long_chain.store)
        head = log.head()
        long_chain.store.requests.clear()
        assert log.ancestor(head, seq) == long_chain.commits[seq]
        assert len(commit_reads(long_chain.store)) <= 2 * 7
    with pytest.raises(VersionUnknown):
        log.ancestor(head, 101)


def test_head_below_what_was_seen_is_a_rollback():
    chain = trained_chain(5)
    known = chain.ref(6)
    chain.store.delete([keys.commit_key(6)])
    with pytest.raises(RollbackDetected):
        ChainLog(chain.store, known=known).head()


def test_another_commit_in_a_seen_slot_is_a_rollback():
    chain = trained_chain(5)
    known = chain.ref(6)
    replaced(chain, 6, nonce="f" * 32)
    with pytest.raises(RollbackDetected):
        ChainLog(chain.store, known=known).head()


def test_a_head_that_does_not_lead_to_what_was_seen_breaks_the_chain():
    chain = trained_chain(5)
    replaced(chain, 4, nonce="f" * 32)
    with pytest.raises(ChainBroken):
        ChainLog(chain.store, known=chain.ref(3)).head()


def test_accept_refuses_a_history_without_what_was_seen():
    chain = trained_chain(5)
    log = ChainLog(chain.store, known=dataclasses.replace(chain.ref(3), commit="0" * 64))
    with pytest.raises(RollbackDetected):
        log.accept(chain.commits[6])
    assert log.known.seq == 3


def test_tail_gives_commits_in_order_and_moves_what_is_known():
    chain = trained_chain(4)
    log = ChainLog(chain.store, known=chain.ref(2))
    assert [commit.seq for commit in log.tail(2)] == [3, 4, 5]
    assert log.known == chain.ref(5)
    assert [commit.seq for commit in ChainLog(chain.store).tail(-1)] == [0, 1, 2, 3, 4, 5]
    assert list(log.tail(5)) == []
    with pytest.raises(VersionUnknown):
        list(log.tail(6))


def test_tail_refuses_a_broken_parent():
    chain = trained_chain(4)
    replaced(chain, 4, parent="0" * 64)
    with pytest.raises(ChainBroken):
        list(ChainLog(chain.store).tail(1))
    replaced(chain, 3, nonce="f" * 32)
    with pytest.raises(ChainBroken):
        list(ChainLog(chain.store).tail(1))


def chain_with_void_commits():
    """Return a chain: 0 fence, 1 anchor, 2 fence of epoch 2, 3 and 4 void, 5 delta, 6 void."""
    chain = trained_chain(0)
    chain.fence()
    for slots in (2, 1):
        for _ in range(slots):
            zombie = chain.commits[1]
            chain.append("delta", epoch=1, base=chain.ref(1), state_seq=len(chain.commits), updates=2, digest=zombie.digest,
                         state_bytes=zombie.state_bytes, tensors=zombie.tensors)  # fmt: skip
        if slots == 2:
            chain.train(1)
    return chain


def test_void_commits_are_passed_over():
    chain = chain_with_void_commits()
    log = ChainLog(chain.store)
    assert [commit.seq for commit in log.tail(-1)] == [0, 1, 2, 5]
    assert [commit.seq for commit in log.tail(3)] == [5]


def test_a_void_head_is_not_in_force():
    chain = chain_with_void_commits()
    for known in (None, 0, 2, 5):
        log = ChainLog(chain.store, known=None if known is None else chain.ref(known))
        head = log.head()
        assert head.seq == 6
        assert log.in_force(head).seq == 5
    assert [log.is_void(commit) for commit in chain.commits] == [False, False, False, True, True, False, True]
    fresh = ChainLog(chain.store)
    assert [fresh.is_void(commit) for commit in reversed(chain.commits)] == [True, False, True, True, False, False, False]


def test_an_epoch_that_was_used_unclaimed_breaks_the_chain():
    chain = chain_with_void_commits()
    chain.store.delete([keys.epoch_key(2)])
    log = ChainLog(chain.store)
    head = log.in_force(log.head())
    with pytest.raises(ChainBroken):
        log.ancestor(head, 5)


def test_previous_passes_over_void_commits():
    chain = chain_with_void_commits()
    log = ChainLog(chain.store)
    assert [log.previous(chain.commits[seq]).seq for seq in (5, 2, 1)] == [2, 1, 0]
    assert log.previous(chain.commits[0]) is None


def test_version_of_a_fence_is_the_one_in_force():
    chain = trained_chain(2)
    chain.fence()
    log = ChainLog(chain.store)
    assert log.version(4) == log.version(3)
    assert (log.version(3).seq, log.version(3).updates, log.version(3).kind) == (3, 3, "delta")
    assert log.version(3).bytes == chain.commits[3].stored_bytes
    for seq in (0, 5):
        with pytest.raises(VersionUnknown):
            log.version(seq)


def test_void_version_is_unknown():
    chain = chain_with_void_commits()
    with pytest.raises(VersionUnknown):
        ChainLog(chain.store).version(3)


def test_a_commit_in_the_wrong_slot_is_corrupt():
    chain = trained_chain(2)
    chain.store.put(keys.commit_key(3), chain.raw[2])
    with pytest.raises(CorruptRecord):
        ChainLog(chain.store).read(3)


def test_a_commit_of_another_run_is_corrupt():
    chain = trained_chain(2)
    replaced(chain, 3, id="f" * 32)
    with pytest.raises(CorruptRecord):
        ChainLog(chain.store).read(3)


def test_an_object_that_is_no_commit_is_corrupt_and_the_error_names_its_number():
    chain = trained_chain(2)
    chain.store.put(keys.commit_key(3), b"{}")
    with pytest.raises(CorruptRecord, match=r"^commit 3 in "):
        ChainLog(chain.store).read(3)


def test_an_object_too_large_for_a_record_is_corrupt():
    chain = trained_chain(1)
    chain.store.put(keys.commit_key(2), b"{" * 70_000)
    with pytest.raises(CorruptRecord):
        ChainLog(chain.store).read(2)


@pytest.mark.parametrize("limits", [Limits(state_bytes=100), Limits(tensors=2), Limits(file_bytes=50)])
def test_claims_beyond_the_limits_are_refused(limits):
    chain = trained_chain(1)
    assert ChainLog(chain.store, limits=limits).read(0) is not None
    with pytest.raises(LimitExceeded):
        ChainLog(chain.store, limits=limits).read(1)
    bounded = HandMadeChain(limits=limits)
    bounded.fence()
    bounded.anchor(make_state())
    with pytest.raises(LimitExceeded):
        ChainLog(bounded.store).read(1)


def test_a_shortcut_beyond_the_limits_is_refused():
    chain = trained_chain(1)
    chain.anchor_shortcut(2)
    assert ChainLog(chain.store).shortcut(2) is not None
    with pytest.raises(LimitExceeded):
        ChainLog(chain.store, limits=Limits(file_bytes=500)).shortcut(2)


def test_many_files_may_not_claim_what_one_may_not():
    chain = trained_chain(1)
    entry = chain.commits[2].files[0]
    files = tuple(dataclasses.replace(entry, size=4000, raw=0, first=i, count=1) for i in range(4))
    commit = dataclasses.replace(chain.commits[2], files=files)
    Limits(state_bytes=12_000, file_bytes=4000).check(commit)
    with pytest.raises(LimitExceeded):
        Limits(state_bytes=11_000, file_bytes=4000).check(commit)


def test_only_what_a_trusted_key_signed_is_read():
    key, other = SigningKey.generate(), SigningKey.generate()
    chain = trained_chain(2, sign=key.sign)
    chain.anchor_shortcut(3)
    assert ChainLog(chain.store, trusted_keys=[other.public, key.public]).head().seq == 3
    assert ChainLog(chain.store, trusted_keys=[key.public]).shortcut(3) is not None
    with pytest.raises(SignatureInvalid):
        ChainLog(chain.store, trusted_keys=[other.public]).head()
    with pytest.raises(SignatureInvalid):
        ChainLog(chain.store, trusted_keys=[other.public]).shortcut(3)
    replaced(chain, 3, step=77)
    with pytest.raises(SignatureInvalid):
        ChainLog(chain.store, trusted_keys=[key.public]).read(3)
    replaced(chain, 3, signature=None)
    with pytest.raises(SignatureInvalid):
        ChainLog(chain.store, trusted_keys=[key.public]).read(3)


def test_shortcuts_are_listed_by_name():
    chain = trained_chain(9)
    for seq in (4, 8):
        chain.anchor_shortcut(seq)
    for base, target in [(1, 5), (5, 9), (1, 9)]:
        chain.skip(base, target)
    chain.store.put("anchor/readme.txt", b"not ours")
    log = ChainLog(chain.store)
    assert log.shortcuts(None, 10) == ([4, 8], [(5, 1), (9, 1), (9, 5)])
    assert log.shortcuts(4, 8) == ([8], [(5, 1)])
    assert log.shortcuts(5, 10) == ([8], [(9, 1), (9, 5)])
    assert log.shortcut(4).target == chain.ref(4)
    assert log.shortcut(5, 1).base == chain.ref(1)
    assert log.shortcut(6) is None


def test_a_shortcut_under_another_name_is_corrupt():
    chain = trained_chain(3)
    record = chain.anchor_shortcut(3)
    chain.store.put(keys.anchor_key(2), record.to_bytes())
    with pytest.raises(CorruptRecord):
        ChainLog(chain.store).shortcut(2)


def test_floor_is_that_of_the_newest_mark():
    chain = trained_chain(1)
    log = ChainLog(chain.store)
    assert (log.mark(), log.floor()) == (None, -1)
    for number, floor in [(0, 3), (1, 8)]:
        chain.store.put_if_absent(keys.mark_key(number), Mark(RUN_ID, number, 1, floor, "a" * 32, 1).to_bytes())
    assert log.floor() == 8
