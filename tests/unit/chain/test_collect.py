"""Collection deletes only data that no reader needs, and only after its grace period."""

import dataclasses

import pytest
from hand_made_chain import RUN_ID, HandMadeChain, make_state, trained_chain
from support import bits_of

from deltawire.chain.fetch import Fetcher
from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.collect import collect
from deltawire.chain.memory_state import MemoryState
from deltawire.chain.records.pins import lowest_pin, put_pin, read_pins, remove_pin
from deltawire.chain.routes.rebuild import rebuild
from deltawire.errors import NoChain, ObjectMissing
from deltawire.format.records.collection_records import Mark
from deltawire.store import keys

GRACE = 600.0


@pytest.fixture
def chain():
    """Return a chain of versions 1 to 13, with anchors of versions 1, 5, 9 and 12, and skips between some versions."""
    chain = trained_chain(12)
    for seq in (5, 9, 12):
        chain.anchor_shortcut(seq)
    for base, target in [(1, 5), (5, 9), (9, 13)]:
        chain.skip(base, target)
    return chain


def announce_and_collect(chain, **options):
    first = collect(chain.store, grace=GRACE, **options)
    chain.store.pass_time(GRACE + 1)
    return first, collect(chain.store, grace=GRACE, **options)


def can_rebuild(chain, seq, have=None):
    state = MemoryState(threads=1)
    fetcher = Fetcher(chain.store, patience=0)
    if have is not None:
        state.commit, state._arrays, state._names = chain.commits[have], dict(chain.states[have]), sorted(chain.states[have])
    try:
        rebuild(state, ChainLog(chain.store), fetcher, chain.commits[seq])
    except Exception:
        return False
    return bits_of(state) == bits_of(chain.states[seq])


def data_of(record):
    return {entry.key for entry in record.files}


def stored_data(chain):
    return set(chain.store.keys_under("data/"))


def test_collection_keeps_two_anchors_and_what_comes_after_the_older(chain):
    log = ChainLog(chain.store)
    needed = set().union(*(data_of(chain.commits[seq]) for seq in range(10, 14)))
    needed |= data_of(log.shortcut(9)) | data_of(log.shortcut(12)) | data_of(log.shortcut(13, 9))
    announced, collected = announce_and_collect(chain)
    assert (announced.outcome, announced.floor, announced.deleted, announced.wait) == ("waiting", 9, 0, GRACE)
    assert (collected.outcome, collected.floor, collected.mark) == ("collected", 9, 0)
    assert stored_data(chain) == needed
    assert collected.kept == len(needed)
    assert chain.store.keys_under("anchor/") == [keys.anchor_key(9), keys.anchor_key(12)]
    assert chain.store.keys_under("skip/") == [keys.skip_key(13, 9)]
    assert len(chain.store.keys_under("commit/")) == 14
    assert chain.store.keys_under("probe/") == []
    assert all(can_rebuild(chain, seq) for seq in range(9, 14))
    assert not can_rebuild(chain, 4)


def test_nothing_is_deleted_before_the_grace_has_passed(chain):
    before = stored_data(chain)
    for _ in range(3):
        assert collect(chain.store, grace=GRACE).outcome == "waiting"
        chain.store.pass_time(GRACE / 4)
    assert stored_data(chain) == before
    assert chain.store.keys_under("gc/") == [keys.mark_key(0)]


def test_a_rising_floor_does_not_put_collection_off(chain):
    collect(chain.store, grace=GRACE)
    chain.store.pass_time(GRACE - 1)
    chain.anchor_shortcut(13)
    assert collect(chain.store, grace=GRACE).wait == 1
    assert ChainLog(chain.store).floor() == 12
    chain.store.pass_time(2)
    collected = collect(chain.store, grace=GRACE)
    assert (collected.outcome, collected.floor) == ("collected", 9)
    chain.store.pass_time(GRACE)
    collected = collect(chain.store, grace=GRACE)
    assert (collected.outcome, collected.floor) == ("collected", 12)


def test_collecting_again_finds_nothing(chain):
    announce_and_collect(chain)
    assert collect(chain.store, grace=GRACE).outcome == "nothing"
    assert chain.store.keys_under("gc/") == [keys.mark_key(0)]


def test_a_dry_run_writes_and_deletes_nothing(chain):
    before = chain.store.keys_under("")
    planned = collect(chain.store, grace=GRACE, dry_run=True)
    assert chain.store.keys_under("") == before
    _, collected = announce_and_collect(chain)
    assert (planned.floor, planned.deleted, planned.bytes, planned.kept) == (9, collected.deleted, collected.bytes, collected.kept)


def test_without_two_anchors_nothing_can_go():
    chain = trained_chain(5)
    _, collected = announce_and_collect(chain)
    assert collected.outcome == "nothing"
    assert chain.store.keys_under("gc/") == []


def test_an_anchor_with_a_missing_or_short_file_does_not_count(chain):
    log = ChainLog(chain.store)
    chain.store.delete([log.shortcut(12).files[0].key])
    assert collect(chain.store, grace=GRACE).floor == 5
    chain.store.put(log.shortcut(9).files[1].key, b"short")
    assert collect(chain.store, grace=GRACE, dry_run=True).floor == 1


def test_an_anchor_damaged_since_the_mark_holds_it(chain):
    collect(chain.store, grace=GRACE)
    chain.store.delete([ChainLog(chain.store).shortcut(12).files[0].key])
    chain.store.pass_time(GRACE + 1)
    before = stored_data(chain)
    assert collect(chain.store, grace=GRACE).outcome == "held"
    assert stored_data(chain) == before


def test_anchors_may_be_commits():
    chain = trained_chain(2)
    chain.anchor(make_state(8))
    chain.train(1)
    _, collected = announce_and_collect(chain)
    assert (collected.outcome, collected.floor) == ("nothing", 1)
    chain.anchor(make_state(9))
    _, collected = announce_and_collect(chain)
    assert (collected.outcome, collected.floor) == ("collected", 4)
    assert stored_data(chain) == set().union(*(data_of(chain.commits[seq]) for seq in (4, 5, 6)))


def test_a_pin_keeps_what_leads_on_from_it(chain):
    run = ChainLog(chain.store).run
    put_pin(chain.store, run, "reader", 3, ttl=10_000)
    _, collected = announce_and_collect(chain)
    assert collected.floor == 3
    assert can_rebuild(chain, 13, have=3)
    assert data_of(chain.commits[4]) <= stored_data(chain)
    chain.store.pass_time(10_000)
    announce_and_collect(chain)
    assert not data_of(chain.commits[4]) & stored_data(chain)


def test_a_pin_set_during_the_grace_holds_the_mark(chain):
    collect(chain.store, grace=GRACE)
    put_pin(chain.store, ChainLog(chain.store).run, "late", 3, ttl=10_000)
    chain.store.pass_time(GRACE + 1)
    before = stored_data(chain)
    assert collect(chain.store, grace=GRACE).outcome == "held"
    assert stored_data(chain) == before
    assert chain.store.keys_under("gc/") == [keys.mark_key(0)]
    remove_pin(chain.store, "late")
    assert collect(chain.store, grace=GRACE).outcome == "collected"


def test_pins_expire_by_the_store_s_clock(chain):
    run = ChainLog(chain.store).run
    put_pin(chain.store, run, "a", 7, ttl=100)
    put_pin(chain.store, run, "b", 9, ttl=200)
    chain.store.put("pin/garbage.json", b"garbage")
    chain.store.put("pin/liar.json", chain.store.get(keys.pin_key("a"), limit=1000))
    put_pin(chain.store, dataclasses.replace(run, id="f" * 32), "stranger", 1)
    assert [placed.pin.reader for placed in read_pins(chain.store, run)] == ["a", "b"]
    assert lowest_pin(chain.store, run, chain.store.now) == 7
    chain.store.pass_time(100)
    assert lowest_pin(chain.store, run, chain.store.now) == 9
    chain.store.pass_time(100)
    assert lowest_pin(chain.store, run, chain.store.now) is None


def test_a_pin_that_is_dated_far_ahead_does_not_hold(chain):
    """The store's clock was set back, or an attacker chose the date. A running reader renews its pin with a correct date."""
    run = ChainLog(chain.store).run
    chain.store.pass_time(10**8)
    put_pin(chain.store, run, "ahead", 3, ttl=100)
    chain.store.pass_time(-(10**8))
    assert lowest_pin(chain.store, run, chain.store.now) is None
    put_pin(chain.store, run, "alive", 5, ttl=100)
    chain.store.pass_time(-50)
    assert lowest_pin(chain.store, run, chain.store.now) == 5
    collect(chain.store, grace=GRACE)
    assert chain.store.keys_under("pin/") == [keys.pin_key("alive")]


def test_a_mark_from_before_the_store_s_clock_was_set_back_is_not_waited_for(chain):
    collect(chain.store, grace=GRACE)
    chain.store.pass_time(-(10**8))
    assert collect(chain.store, grace=GRACE).outcome == "waiting"
    assert chain.store.keys_under("gc/") == [keys.mark_key(0), keys.mark_key(1)]
    chain.store.pass_time(GRACE + 1)
    assert collect(chain.store, grace=GRACE).outcome == "collected"
    assert chain.store.keys_under("gc/") == [keys.mark_key(0), keys.mark_key(1)]


def test_a_new_epoch_during_the_grace_holds_the_mark(chain):
    collect(chain.store, grace=GRACE)
    chain.claim()
    chain.store.pass_time(GRACE + 1)
    assert collect(chain.store, grace=GRACE).outcome == "held"
    chain.epoch -= 1
    chain.store.delete([keys.epoch_key(2)])
    chain.fence()
    assert collect(chain.store, grace=GRACE).outcome == "waiting"
    assert chain.store.keys_under("gc/") == [keys.mark_key(0), keys.mark_key(1)]
    chain.store.pass_time(GRACE + 1)
    assert collect(chain.store, grace=GRACE).outcome == "collected"


def test_a_writer_that_has_not_fenced_yet_holds_every_mark(chain):
    """The earlier writer may still commit objects that it has uploaded."""
    chain.claim()
    chain.store.put_if_absent(keys.mark_key(0), Mark(RUN_ID, 0, 2, 9, "b" * 32, 1).to_bytes())
    chain.store.pass_time(GRACE + 1)
    assert collect(chain.store, grace=GRACE).outcome == "held"


def test_uncommitted_data_above_the_floor_stay_and_orphans_of_older_epochs_or_numbers_go(chain):
    """The writer of the head has committed a higher number than 3, so it will never commit what it uploaded for 3."""
    old = [chain.upload(b"an upload that was never committed", None, 1, 0, 1)]
    chain.fence()
    chain.train(2)
    current = [chain.upload(b"about to be committed", None, 1, 0, 1)]
    orphan = keys.data_key(chain.epoch, 3, current[0].blake3, "safetensors")
    later = keys.data_key(chain.epoch + 1, 3, current[0].blake3, "safetensors")
    for key in (orphan, later):
        chain.store.put(key, b"about to be committed")
    announce_and_collect(chain)
    assert {current[0].key, later} <= stored_data(chain)
    assert not {old[0].key, orphan} & stored_data(chain)
    assert can_rebuild(chain, chain.newest.seq)


def test_committed_data_of_the_current_epoch_goes(chain):
    assert {entry.key for entry in chain.commits[3].files} <= stored_data(chain)
    announce_and_collect(chain)
    assert not {entry.key for entry in chain.commits[3].files} & stored_data(chain)


def test_anchors_that_a_rewind_abandoned_do_not_count():
    chain = trained_chain(8)
    for seq in (3, 6, 8):
        chain.anchor_shortcut(seq)
    chain.fence()
    chain.rewind(4)
    chain.train(2)
    _, collected = announce_and_collect(chain)
    assert collected.floor == 1
    assert can_rebuild(chain, chain.newest.seq)
    chain.anchor_shortcut(chain.newest.seq)
    _, collected = announce_and_collect(chain)
    assert collected.floor == 3
    assert can_rebuild(chain, chain.newest.seq)


def test_floors_never_fall(chain):
    announce_and_collect(chain)
    put_pin(chain.store, ChainLog(chain.store).run, "reader", 3, ttl=10_000)
    announce_and_collect(chain)
    assert ChainLog(chain.store).floor() == 9


def test_two_collectors_do_not_disturb_each_other(chain):
    class Raced(type(chain.store)):
        def put_if_absent(self, key, data):
            if key == keys.mark_key(0):
                super().put_if_absent(key, Mark(RUN_ID, 0, 1, 9, "b" * 32, 1).to_bytes())
            super().put_if_absent(key, data)

    chain.store.__class__ = Raced
    assert collect(chain.store, grace=GRACE).outcome == "nothing"
    assert collect(chain.store, grace=GRACE).outcome == "waiting"


def test_collection_without_a_chain():
    with pytest.raises(NoChain):
        collect(HandMadeChain().store, grace=GRACE)


def test_the_current_time_can_be_given(chain):
    collect(chain.store, grace=GRACE)
    later = chain.store.now.replace(year=2027)
    assert collect(chain.store, grace=GRACE, now=later).outcome == "collected"


def test_the_data_of_an_anchor_whose_record_a_cache_hides_stay(chain):
    class Hiding(type(chain.store)):
        def get(self, key, *, limit):
            if key == keys.anchor_key(12):
                raise ObjectMissing("not here yet")
            return super().get(key, limit=limit)

    chain.fence()  # now objects to which the new writer does not refer are garbage
    plain = chain.store.__class__
    chain.store.__class__ = Hiding
    _, collected = announce_and_collect(chain)
    chain.store.__class__ = plain
    assert collected.outcome == "collected"
    shortcut = ChainLog(chain.store).shortcut(12)
    assert data_of(shortcut) <= stored_data(chain)


def test_a_mark_that_cannot_be_read_is_passed_over_by_readers(chain):
    announce_and_collect(chain)
    chain.store.put(keys.mark_key(7), b"{}")
    assert ChainLog(chain.store).floor() == 9
    assert can_rebuild(chain, 13)


@pytest.mark.parametrize("floor", [10**9, 13, 12])
def test_a_mark_that_anybody_wrote_deletes_nothing_that_is_needed(chain, floor):
    head = len(chain.commits) - 1
    chain.store.put(keys.mark_key(0), Mark(RUN_ID, 0, 1, floor, "0" * 32, 0).to_bytes())
    before = stored_data(chain)
    chain.store.pass_time(1000)
    assert collect(chain.store, grace=60).outcome in {"held", "waiting"}
    assert stored_data(chain) == before
    if floor > head:  # collectors never write such marks, so the next mark counts
        chain.store.pass_time(1000)
        assert collect(chain.store, grace=60).outcome == "collected"
    assert can_rebuild(chain, head)
