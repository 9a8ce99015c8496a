"""Several processes make skips together. Threads act as the processes, and plain readers use the skips."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest
from plain_reader import apply_files, read_commits, read_json
from support import bits_of
from test_sharded_publisher import follow, publish_all, states
from threads_as_ranks import ThreadRank, run_ranks, shards_of

from deltawire.chain.maintenance.verify import verify
from deltawire.publish import history
from deltawire.publish.sharded import ShardedPublisher
from deltawire.publish.shortcuts.cadence import AnchorPolicy
from deltawire.publish.writer_options import WriterOptions
from deltawire.store import open_store
from deltawire.store.memory import MemoryStore
from deltawire.testing import Before, FaultyStore, call

NO_ANCHORS = AnchorPolicy(min_versions=10**6, max_versions=None)


def skips_in(url):
    store = open_store(url)
    return [read_json(store, info.key) for info in store.list("skip/")]


def skip_lengths(url):
    """Return the target and the number of versions of each skip."""
    return sorted((skip["target"]["seq"], skip["target"]["seq"] - skip["base"]["seq"]) for skip in skips_in(url))


@pytest.mark.parametrize(("size", "segment_bytes"), [(1, 4096), (2, 1 << 20), (3, 4096)])
def test_skips_lead_from_version_to_version_bit_for_bit(tmp_path, size, segment_bytes):
    versions, events = states(22), []
    publish_all(tmp_path, size, versions, anchor_policy=NO_ANCHORS, segment_bytes=segment_bytes, on_event=events.append)
    store = open_store(tmp_path)
    assert skip_lengths(tmp_path) == sorted([(1 + j, 4) for j in range(4, 22, 4)] + [(17, 16)])
    commits = read_commits(store)
    for skip in skips_in(tmp_path):
        target, base = commits[skip["target"]["seq"]], commits[skip["base"]["seq"]]
        assert skip["target"] == {"seq": target["seq"], "commit": target["_hash"], "digest": target["digest"]}
        assert skip["base"] == {"seq": base["seq"], "commit": base["_hash"], "digest": base["digest"]}
        assert bits_of(apply_files(store, versions[base["seq"] - 1], skip["files"])) == bits_of(versions[target["seq"] - 1])
        replaced = commits[base["seq"] + 1 : target["seq"] + 1]
        assert sum(file["size"] for file in skip["files"]) < sum(file["size"] for commit in replaced for file in commit["files"])
    assert [event.name for event in events].count("skip-made") == len(skip_lengths(tmp_path))
    assert verify(store, deep=True).problems == []


def test_a_late_joiner_reads_few_objects(tmp_path):
    versions = states(70)
    publish_all(tmp_path, 2, versions, anchor_policy=NO_ANCHORS)
    store = FaultyStore(open_store(tmp_path))
    assert follow(store)[0] == bits_of(versions[-1])
    read = {each.key for each in store.calls if each.op == "read_into" and each.key.startswith("data/")}
    checkpoint = {file["key"] for file in read_commits(open_store(tmp_path))[1]["files"]}
    assert len(read - checkpoint) == 2 * 3  # both ranks' files, for hops over 64, 4 and 1 versions


def test_skips_can_be_left_out_and_are_counted_again_by_the_next_publisher(tmp_path):
    versions = states(16)
    publish_all(tmp_path, 2, versions[:6], anchor_policy=NO_ANCHORS, skips=False)
    assert skip_lengths(tmp_path) == []
    publish_all(tmp_path, 3, versions[6:12], anchor_policy=NO_ANCHORS)
    ((target, _),) = skip_lengths(tmp_path)
    (skip,) = skips_in(tmp_path)
    commits = read_commits(open_store(tmp_path))
    # the skip leads to a version of the second job, from the last version of the first job
    assert (commits[target]["step"], commits[skip["base"]["seq"]]["step"]) == (3, 5)
    publish_all(tmp_path, 2, versions[12:], anchor_policy=NO_ANCHORS, resume_from_seq=target)
    rewinds = [commit["seq"] for commit in read_commits(open_store(tmp_path)) if commit["kind"] == "rewind"]
    assert [skip["base"]["seq"] for skip in skips_in(tmp_path)[1:]] == rewinds
    assert follow(tmp_path)[0] == bits_of(versions[-1])
    assert verify(open_store(tmp_path), deep=True).problems == []


@pytest.mark.parametrize(("rank", "fault"), [(0, call("put_if_absent", "skip/")), (1, "upload of a skip")])
def test_a_skip_that_fails_at_one_rank_is_reported_and_publishing_continues(tmp_path, rank, fault):
    versions, events = states(18), []
    if fault == "upload of a skip":
        fault = SixthUpload()
    stores = [open_store(tmp_path), open_store(tmp_path)]
    stores[rank] = FaultyStore(stores[rank], [Before(fault, "full")])

    def work(ranks):
        report = events.append if ranks.rank == 0 else None
        with ShardedPublisher(
            ranks, stores[ranks.rank], options=WriterOptions(threads=1, anchor_policy=NO_ANCHORS), on_event=report
        ) as publisher:
            for state in versions:
                publisher.publish(shards_of(state, ranks.rank, 2))
                publisher.flush()

    assert run_ranks(2, work) == [None, None]
    assert [event.fields["kind"] for event in events if event.name == "shortcut-failed"] == ["skip"]
    assert skip_lengths(tmp_path) == [(9, 4), (13, 4), (17, 4), (17, 16)]  # the skip to the fifth version is missing
    assert follow(tmp_path)[0] == bits_of(versions[-1])
    assert verify(open_store(tmp_path), deep=True).problems == []


class SixthUpload:
    """A condition that holds at the sixth upload of data. It is the first of a skip, after one of a checkpoint and four of deltas."""

    def __init__(self):
        self.seen = 0

    def __call__(self, each):
        self.seen += each.op == "put" and each.key.startswith("data/")
        return self.seen == 6 and each.op == "put"


def test_there_is_no_skip_over_versions_whose_deltas_one_rank_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "_LEAST", 0)  # so the limit depends only on the size of a rank's tensors
    versions = states(9)
    half = versions[0]["embed"].shape[0] // 2
    noise = np.random.default_rng(1).standard_normal((half, 96))
    for state in versions[2:]:  # from the third version on, the whole part of the largest tensor that the first rank has is new
        state["embed"][:half] = noise
    publish_all(tmp_path, 2, versions, anchor_policy=NO_ANCHORS)
    assert skip_lengths(tmp_path) == [(9, 4)]
    assert follow(tmp_path)[0] == bits_of(versions[-1])


class SlowShortcuts(MemoryStore):
    """A store that lets the files of shortcuts wait for an event."""

    def __init__(self):
        super().__init__()
        self.may_go_on, self.waiting = threading.Event(), threading.Semaphore(0)

    def put(self, key, *more, **given):
        if threading.current_thread().name.startswith("deltawire-shortcut"):
            self.waiting.release()
            assert self.may_go_on.wait(120)
        return super().put(key, *more, **given)


def test_no_call_waits_for_a_skip_or_an_anchor():
    versions, events, store = states(12), [], SlowShortcuts()
    policy = AnchorPolicy(min_versions=6, max_versions=6)

    def work(ranks):
        report = events.append if ranks.rank == 0 else None
        with ShardedPublisher(ranks, store, options=WriterOptions(threads=1, anchor_policy=policy), on_event=report) as publisher:
            for state in versions:
                publisher.publish(shards_of(state, ranks.rank, 2))
            ranks.exchange(b"all are published")
            if ranks.rank == 0:
                assert store.waiting.acquire(timeout=120)  # the first skip is being made, and nothing else yet
                assert {event.name for event in events} == {"published", "rank-published"}
                with pytest.raises(TimeoutError, match="skips and anchors"):
                    publisher.flush(0)
                store.may_go_on.set()
            publisher.flush()
            return publisher.version.seq

    assert run_ranks(2, work) == [12, 12]
    assert [event.fields["seq"] for event in events if event.name == "skip-made"] == [5, 9]
    assert [event.fields["seq"] for event in events if event.name == "anchored"] == [7]
    commits = read_commits(store)
    [anchor] = [read_json(store, info.key) for info in store.list("anchor/")]
    assert anchor["target"]["digest"] == commits[7]["digest"]
    assert verify(store, deep=True).problems == []


def test_an_anchor_fails_without_harm_if_the_next_version_has_other_tensors(caplog):
    before, events, store = states(2), [], SlowShortcuts()
    after = [{**state, "more": np.ones(5, np.float32)} for state in before]
    # Small files are uploaded one after the other, so the threads still need most of the version when the baselines are freed.
    options = WriterOptions(threads=1, anchor_policy=AnchorPolicy(min_versions=1, max_versions=1), shard_bytes=4096, segment_bytes=4096)

    def work(ranks):
        report = events.append if ranks.rank == 0 else None
        with ShardedPublisher(ranks, store, options=options, on_event=report) as publisher:
            for state in before:
                publisher.publish(shards_of(state, ranks.rank, 2))
            if ranks.rank == 0:
                assert store.waiting.acquire(timeout=120)  # the anchor of the second version is being made
            publisher.publish(shards_of(after[0], ranks.rank, 2))
            store.may_go_on.set()
            publisher.flush()
            publisher.publish(shards_of(after[1], ranks.rank, 2))

    assert run_ranks(2, work) == [None, None]
    assert [(event.fields["kind"], event.fields["seq"]) for event in events if event.name == "shortcut-failed"] == [("anchor", 2)]
    assert [event.fields["seq"] for event in events if event.name == "anchored"] == [4]
    assert [record for record in caplog.records if not hasattr(record, "event")] == []
    assert follow(store)[0] == bits_of(after[1])


def test_a_rank_that_ends_by_an_error_does_not_wait_for_the_shortcuts_of_others():
    store, gone, waited = MemoryStore(), threading.Event(), []

    def silent(ranks):
        """Return another channel in which this rank does not answer before the first rank has ended."""
        channel = ThreadRank.another_channel(ranks)
        exchange = channel.exchange
        channel.exchange = lambda message: waited.append(gone.wait(120)) or exchange(message)
        return channel

    def work(ranks):
        if ranks.rank == 1:
            ranks.another_channel = partial(silent, ranks)
        try:
            with ShardedPublisher(ranks, store, options=WriterOptions(threads=1, anchor_policy=NO_ANCHORS)) as publisher:
                for state in states(6):
                    publisher.publish(shards_of(state, ranks.rank, 2))
                ranks.exchange(b"all are published")
                raise RuntimeError("training failed")
        finally:
            if ranks.rank == 0:
                gone.set()

    assert [str(error) for error in run_ranks(2, work)] == ["training failed"] * 2
    assert False not in waited
    assert len(read_commits(store)) == 7
