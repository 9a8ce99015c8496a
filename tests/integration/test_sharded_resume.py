"""Several processes resume a chain from an older version, or with other keys. Threads act as the processes, and plain readers follow."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from plain_reader import read_commits
from support import DIGEST_NEUTRAL as DIFFERENCE
from support import bits_of
from test_sharded_publisher import damage, follow, publish_all, states
from threads_as_ranks import run_ranks, shards_of

from deltawire import Subscriber
from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.verify import verify
from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import CommitOutcomeUnknown, DataDamaged, SignatureInvalid, VersionUnknown
from deltawire.format.records.signing import SigningKey
from deltawire.publish.sharded import ShardedPublisher
from deltawire.publish.writer_options import WriterOptions
from deltawire.store import open_store
from deltawire.testing import After, Before, FaultyStore, call

OLDER = 2
"""The version to resume from. It has `states()[1]`, because the first commit is a fence."""


def kinds(url):
    return [commit["kind"] for commit in read_commits(open_store(url))]


@pytest.mark.parametrize("size", [1, 3])
def test_an_older_version_is_taken_up_and_those_after_it_are_abandoned(tmp_path, size):
    before, after = states(4), states(6, seed=0)[4:]
    publish_all(tmp_path, 2, before)
    with Subscriber(tmp_path, options=ReaderOptions(pin=False), threads=1) as reader:
        reader.sync()
        ((first, second), *_) = publish_all(tmp_path, size, after, resume_from_seq=OLDER)
        assert kinds(tmp_path) == ["fence", "anchor", *["delta"] * 3, "fence", "rewind", "delta", "delta"]
        assert (first.kind, second.kind) == ("delta", "delta")
        reader.sync()
        assert bits_of(reader.state) == bits_of(after[-1])
    assert follow(tmp_path)[0] == bits_of(after[-1])
    log = ChainLog(open_store(tmp_path))
    rewind = log.read(6)
    assert rewind.digest == log.read(OLDER).digest
    assert rewind.step == 1
    assert verify(open_store(tmp_path), deep=True).problems == []


def test_the_newest_version_needs_no_rewind(tmp_path):
    versions = states(3)
    publish_all(tmp_path, 2, versions[:2])
    publish_all(tmp_path, 2, versions[2:], resume_from_seq=OLDER)
    assert kinds(tmp_path) == ["fence", "anchor", "delta", "fence", "delta"]


@pytest.mark.parametrize("seq", [0, 9])
def test_a_version_that_does_not_exist_is_refused_before_anybody_is_fenced_off(tmp_path, seq):
    publish_all(tmp_path, 2, states(3))
    before = kinds(tmp_path)
    with pytest.raises(VersionUnknown):
        publish_all(tmp_path, 2, states(1), resume_from_seq=seq)
    assert kinds(tmp_path) == before


def test_a_publisher_does_not_go_back_to_a_version_that_cannot_be_rebuilt(tmp_path):
    versions = states(4)
    publish_all(tmp_path, 2, versions)
    damage(tmp_path, read_commits(open_store(tmp_path))[OLDER]["files"][0]["key"])
    with pytest.raises(DataDamaged):
        publish_all(tmp_path, 2, versions[:1], resume_from_seq=OLDER)
    assert "rewind" not in kinds(tmp_path)


def test_a_damaged_version_is_refused_before_anybody_is_fenced_off(tmp_path):
    versions = states(3)
    publish_all(tmp_path, 2, versions[:2])
    for seq in (2, 1):
        damage(tmp_path, read_commits(open_store(tmp_path))[seq]["files"][0]["key"])
        with pytest.raises(DataDamaged):
            publish_all(tmp_path, 2, versions[2:])
    assert kinds(tmp_path) == ["fence", "anchor", "delta"]


def test_a_chain_whose_newest_version_is_damaged_continues_with_a_full_checkpoint(tmp_path, monkeypatch):
    """This also holds if only the ranks find the damage, because the objects are too large for one process to read."""
    versions = states(4)
    publish_all(tmp_path, 2, versions[:2])
    damage(tmp_path, read_commits(open_store(tmp_path))[1]["files"][0]["key"])
    monkeypatch.setattr("deltawire.publish.resume.MOST_READ", 0)
    with pytest.raises(DataDamaged, match="starts_full"):
        publish_all(tmp_path, 2, versions[2:])
    ((first, second), _) = publish_all(tmp_path, 2, versions[2:], starts_full=True)
    assert (first.kind, second.kind) == ("anchor", "delta")
    assert follow(tmp_path)[0] == bits_of(versions[-1])


def test_a_full_checkpoint_can_follow_a_rewind(tmp_path):
    versions = states(4)
    publish_all(tmp_path, 1, versions[:3])
    publish_all(tmp_path, 1, versions[3:], resume_from_seq=OLDER, starts_full=True)
    assert kinds(tmp_path) == ["fence", "anchor", *["delta"] * 2, "fence", "rewind", "anchor"]


def test_the_head_never_rests_on_data_that_are_announced_to_go(tmp_path, monkeypatch):
    versions = states(4)
    publish_all(tmp_path, 2, versions[:3])
    monkeypatch.setattr(ChainLog, "mark", lambda log: SimpleNamespace(floor=1))
    publish_all(tmp_path, 2, versions[3:], resume_from_seq=OLDER)
    assert kinds(tmp_path)[-2:] == ["fence", "anchor"]
    assert follow(tmp_path)[0] == bits_of(versions[3])


def test_other_tensors_than_those_of_the_older_version_are_published_as_a_checkpoint(tmp_path):
    versions = states(4)
    publish_all(tmp_path, 2, versions[:3])
    other = {name: array for name, array in versions[3].items() if name != "embed"}
    publish_all(tmp_path, 2, [other], resume_from_seq=OLDER)
    assert kinds(tmp_path)[-3:] == ["fence", "rewind", "anchor"]
    assert follow(tmp_path)[0] == bits_of(other)


@pytest.mark.parametrize("landed", [True, False])
def test_a_rewind_whose_outcome_is_unknown_is_found_out_at_the_next_call(tmp_path, landed, monkeypatch):
    monkeypatch.setattr("deltawire.store.create_rule._FIRST_PAUSE", 0.0)
    versions = states(4)
    publish_all(tmp_path, 2, versions[:3])
    slot = "commit/00000000000000000005"
    lost = (After if landed else Before)(call("put_if_absent", slot), "unknown", times=5)
    stores = [FaultyStore(open_store(tmp_path), [lost, Before(call("get", slot), "unavailable", times=5)]), open_store(tmp_path)]

    def work(ranks):
        with ShardedPublisher(ranks, stores[ranks.rank], options=WriterOptions(threads=1), resume_from_seq=OLDER) as publisher:
            with pytest.raises(CommitOutcomeUnknown):
                publisher.publish(shards_of(versions[3], ranks.rank, 2))
            publisher.publish(shards_of(versions[3], ranks.rank, 2))

    assert run_ranks(2, work) == [None, None]
    assert kinds(tmp_path)[-3:] == ["fence", "rewind", "delta"]
    assert follow(tmp_path)[0] == bits_of(versions[3])
    assert verify(open_store(tmp_path), deep=True).problems == []


def test_a_publisher_continues_a_chain_of_an_earlier_key_that_it_trusts(tmp_path):
    old, new = SigningKey.generate(), SigningKey.generate()
    versions = states(3)
    publish_all(tmp_path, 2, versions[:2], signing_key=old)
    with pytest.raises(SignatureInvalid):
        publish_all(tmp_path, 2, versions[2:], signing_key=new)
    publish_all(tmp_path, 2, versions[2:], signing_key=new, trusted_keys=[old.public])
    assert follow(tmp_path, trusted_keys=[old.public, new.public])[0] == bits_of(versions[2])


@pytest.mark.parametrize("size", [1, 3])
def test_a_signed_checkpoint_that_was_changed_without_changing_its_digest_is_not_taken_up(tmp_path, size):
    """A delta to such a base would lead readers, which have the right base, to wrong weights with the right digest."""
    key = SigningKey.generate()
    first, second = ({name: np.full(768, value, np.float16) for name in ("a", "b")} for value in (1, 2))
    second["a"] = first["a"].copy()
    publish_all(tmp_path, 2, [first], signing_key=key)
    with Subscriber(tmp_path, options=ReaderOptions(pin=False, trusted_keys=[key.public]), threads=1) as reader:
        reader.sync()
        file = next(file for file in read_commits(open_store(tmp_path))[1]["files"] if file["raw"])
        shard = tmp_path / file["key"]
        whole = shard.read_bytes()
        words = np.frombuffer(whole[-file["raw"] :], np.int16).copy()
        words[256 : 256 + len(DIFFERENCE)] += np.array(DIFFERENCE, np.int16)
        shard.chmod(0o600)
        shard.write_bytes(whole[: -words.nbytes] + words.tobytes())
        with pytest.raises(DataDamaged):
            publish_all(tmp_path, size, [second], signing_key=key)
        shard.write_bytes(whole)
        publish_all(tmp_path, size, [second], signing_key=key)
        reader.sync()
        assert bits_of(reader.state) == bits_of(second)
