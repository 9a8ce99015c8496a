"""Verification finds every problem, says where it is, and reports nothing for a sound chain."""

import dataclasses

import pytest
from hand_made_chain import RUN_ID, HandMadeChain, make_state, replaced, trained_chain

from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.collect import collect
from deltawire.chain.maintenance.verify import verify
from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import NoChain
from deltawire.format.records.collection_records import Mark
from deltawire.format.records.signing import SigningKey
from deltawire.store import keys


@pytest.fixture
def chain():
    """Return a chain with every kind of commit, a void commit, and shortcuts."""
    chain = trained_chain(4)
    chain.anchor_shortcut(4)
    chain.skip(1, 5)
    chain.fence()
    old = chain.commits[5]
    chain.append(
        "delta", epoch=1, base=chain.ref(5), state_seq=7, updates=6, digest=old.digest, state_bytes=old.state_bytes, tensors=old.tensors
    )
    chain.rewind(3)
    chain.train(2)
    chain.anchor(make_state(4))
    chain.train(1)
    return chain


def problems(chain, deep=False, **options):
    return problem_pairs(verify(chain.store, deep, threads=1, options=ReaderOptions(**options)).problems)


def problem_pairs(found):
    return [(problem.where, problem.what) for problem in found]


@pytest.mark.parametrize("deep", [False, True])
def test_a_sound_chain_has_no_problems(chain, deep):
    seen = []
    report = verify(chain.store, deep, lambda done, all_: seen.append((done, all_)), threads=1)
    assert report.problems == []
    assert report.ok
    assert (report.commits, report.versions, report.void, report.shortcuts) == (13, 10, 1, 2)
    assert report.rebuilt == (10 if deep else 0)
    assert seen == ([(i, 12) for i in range(1, 13)] if deep else [])


@pytest.mark.parametrize("deep", [False, True])
def test_a_collected_chain_has_no_problems(deep):
    chain = trained_chain(9)
    chain.anchor_shortcut(5)
    chain.anchor_shortcut(8)
    collect(chain.store, grace=0)
    report = verify(chain.store, deep, threads=1)
    assert (report.problems, report.floor) == ([], 5)
    assert report.rebuilt == (6 if deep else 0)  # this includes the checkpoint at the floor


NO_ROUTE = "no new reader can get to the newest version: no undamaged route leads there"


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("head", [7, 5])
def test_the_checkpoint_that_the_floor_stands_on_must_be_there(head, deep):
    chain = trained_chain(3)
    chain.anchor(make_state(4))
    chain.train(head - 5)
    collect(chain.store, grace=0, keep_anchors=1)
    assert verify(chain.store, deep, threads=1).ok
    lost = chain.commits[5].files[0]
    chain.store.delete([lost.key])
    report = verify(chain.store, deep, threads=1)
    assert (report.floor, report.ok) == (5, False)
    assert ("version 5 (commit 5)", f"{lost.key} is missing") in problem_pairs(report.problems)
    assert (f"version {head} (commit {head})", NO_ROUTE) in problem_pairs(report.problems)


def test_a_flipped_bit_in_the_checkpoint_that_the_floor_stands_on_is_found():
    chain = trained_chain(3)
    chain.anchor(make_state(4))
    collect(chain.store, grace=0, keep_anchors=1)
    damage(chain, chain.commits[5].files[0])
    assert problems(chain) == []
    assert [where for where, _ in problems(chain, deep=True)] == ["version 5 (commit 5)"] * 2


@pytest.mark.parametrize("deep", [False, True])
def test_shortcuts_of_an_earlier_writer_that_lead_nowhere_are_a_problem_if_nothing_else_leads_to_the_newest_version(deep):
    chain = trained_chain(9)
    chain.anchor_shortcut(5)
    chain.anchor_shortcut(8)
    collect(chain.store, grace=0)
    chain.fence()
    chain.train(1)
    anchors = [ChainLog(chain.store).shortcut(seq) for seq in (5, 8)]
    chain.store.delete([anchors[0].files[0].key])
    report = verify(chain.store, deep, threads=1)
    assert (report.ok, [note.where for note in report.notes]) == (True, [keys.anchor_key(5)])
    chain.store.delete([anchors[1].files[0].key])
    report = verify(chain.store, deep, threads=1)
    assert report.notes == []
    assert {keys.anchor_key(5), keys.anchor_key(8)} < {where for where, _ in problem_pairs(report.problems)}


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("floor", [10**9, 3])
def test_a_mark_that_anybody_wrote_hides_no_damage(floor, deep):
    key = SigningKey.generate()
    chain = trained_chain(2, sign=key.sign)
    chain.store.put(keys.mark_key(0), Mark(RUN_ID, 0, 1, floor, "0" * 32, 0).to_bytes())
    chain.store.delete([info.key for info in list(chain.store.list(keys.DATA))])
    report = verify(chain.store, deep, threads=1, options=ReaderOptions(trusted_keys=[key.public]))
    assert ("version 3 (commit 3)", NO_ROUTE) in problem_pairs(report.problems)
    assert (floor > 3) == any("no collector wrote it" in what for _, what in problem_pairs(report.problems))


def test_a_missing_and_a_short_file_are_found(chain):
    missing, short = chain.commits[2].files[0], chain.commits[11].files[1]
    chain.store.delete([missing.key])
    chain.store.put(short.key, b"short")
    found = problems(chain)
    assert [(where, what.split()[0]) for where, what in found] == [
        (chain.commits[2].describe(), missing.key),
        (chain.commits[11].describe(), short.key),
        ("version 10 (commit 12)", "no"),  # no new reader can reach it
    ]


def damage(chain, *entries):
    """Flip a bit of each of these files."""
    for entry in entries:
        data = bytearray(chain.store.get(entry.key, limit=1 << 20))
        data[-1] ^= 1
        chain.store.put(entry.key, bytes(data))


@pytest.fixture
def straight_chain():
    """Return a chain of one writer with five versions. Only the first version is a checkpoint itself."""
    chain = trained_chain(4)
    chain.anchor_shortcut(4)
    chain.skip(1, 5)
    return chain


def test_a_flipped_bit_is_found_only_by_going_deep(straight_chain):
    log = ChainLog(straight_chain.store)
    damage(straight_chain, straight_chain.commits[5].files[0], log.shortcut(5, 1).files[0], log.shortcut(4).files[2])
    assert problems(straight_chain) == []
    assert [where for where, _ in problems(straight_chain, deep=True)] == [
        "the skip from commit 1 to 5",
        "version 5 (commit 5)",
        "the full checkpoint of commit 4",
        "version 5 (commit 5)",  # no new reader can reach it
    ]


@pytest.mark.parametrize("deep", [False, True])
def test_damage_below_the_newest_sound_checkpoint_is_superseded(straight_chain, deep):
    """No reader needs the deltas of versions 2 and 4 or the skip, because the checkpoint of version 4 leads to version 5."""
    files = [straight_chain.commits[seq].files[0] for seq in (2, 4)]
    straight_chain.store.delete([entry.key for entry in files])
    report = verify(straight_chain.store, deep, threads=1)
    assert (report.ok, report.problems) == (True, [])
    assert {what.split()[0] for _, what in problem_pairs(report.superseded)} >= {entry.key for entry in files}
    straight_chain.store.delete([straight_chain.commits[5].files[0].key])
    assert not verify(straight_chain.store, deep, threads=1).ok


def test_damage_is_not_superseded_by_a_checkpoint_that_is_damaged_itself(straight_chain):
    damage(straight_chain, straight_chain.commits[2].files[0])
    assert verify(straight_chain.store, deep=True, threads=1).ok
    damage(straight_chain, ChainLog(straight_chain.store).shortcut(4).files[0])
    assert "version 2 (commit 2)" in [where for where, _ in problems(straight_chain, deep=True)]


def test_damage_to_abandoned_versions_is_superseded(straight_chain):
    straight_chain.store.delete([keys.anchor_key(4)])
    straight_chain.rewind(3)
    straight_chain.train(1)
    damage(straight_chain, straight_chain.commits[4].files[0])
    report = verify(straight_chain.store, deep=True, threads=1)
    assert report.ok
    assert {where for where, _ in problem_pairs(report.superseded)} == {"version 4 (commit 4)"}
    damage(straight_chain, straight_chain.commits[2].files[0])  # version 2 is on the route to the rewind's target
    assert not verify(straight_chain.store, deep=True, threads=1).ok


def test_damaged_records_are_never_superseded(straight_chain):
    straight_chain.anchor(make_state(4))
    straight_chain.store.put(keys.commit_key(2), b"garbage")
    assert keys.commit_key(2) in [where for where, _ in problems(straight_chain)]


def test_broken_links_are_found(chain):
    replaced(chain, 6, nonce="f" * 32)
    where = {where for where, what in problems(chain) if "links" in what}
    assert where == {keys.commit_key(7), keys.commit_key(8)}


def test_a_corrupt_commit_does_not_end_the_check(chain):
    chain.store.put(keys.commit_key(4), b"garbage")
    assert verify(chain.store).commits == 13
    assert keys.commit_key(4) in [where for where, _ in problems(chain)]


def test_wrong_counts_and_bases_are_found(chain):
    last = len(chain.commits) - 1
    replaced(chain, last, updates=7)
    assert any("updates" in what for _, what in problems(chain))
    replaced(chain, last, base=chain.ref(10))
    assert any("base" in what for _, what in problems(chain))
    replaced(chain, last, tensors=9)
    assert any("tensors" in what for _, what in problems(chain))


def test_verify_reports_an_epoch_without_a_claim(chain):
    chain.store.delete([keys.epoch_key(2)])
    assert problems(chain) == [(keys.commit_key(6), "epoch 2 was never claimed")]


def test_an_epoch_without_a_fence_is_found(chain):
    chain.claim()
    chain.train(1)
    assert problems(chain) == [(keys.commit_key(13), "epoch 3 does not begin with a fence")]


def test_a_commit_beyond_a_gap_is_found(chain):
    chain.store.put(keys.commit_key(40), chain.raw[5])
    assert problems(chain) == [(keys.commit_key(13), "commit 13 is missing, but 1 later commit exists: no reader gets past it")]


def test_a_shortcut_that_does_not_fit_is_found(chain):
    record = ChainLog(chain.store).shortcut(4)
    wrong = dataclasses.replace(record, target=dataclasses.replace(record.target, commit="0" * 64))
    chain.store.put(keys.anchor_key(4), wrong.to_bytes())
    chain.store.put(keys.skip_key(5, 1), b"garbage")
    assert [where for where, _ in problems(chain)] == [keys.anchor_key(4), keys.skip_key(5, 1)]


def test_an_unsigned_commit_in_a_signed_chain_is_found_whether_or_not_keys_are_given():
    key = SigningKey.generate()
    chain = trained_chain(2, sign=key.sign)
    assert problems(chain, trusted_keys=[key.public]) == []
    assert problems(chain) == []
    replaced(chain, 3, signature=None)
    assert [where for where, _ in problems(chain)] == [keys.commit_key(3)]
    assert [where for where, _ in problems(chain, trusted_keys=[key.public])] == [keys.commit_key(3)]


def test_verification_without_a_chain():
    with pytest.raises(NoChain):
        verify(HandMadeChain().store)
