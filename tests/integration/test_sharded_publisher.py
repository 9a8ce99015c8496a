"""Several processes publish one model. Threads act as the processes, and plain readers follow."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from plain_reader import read_commits, read_states
from support import bits_of, copied, publisher_arguments
from threads_as_ranks import run_ranks, shards_of

from deltawire import Publisher, Subscriber, pull
from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.collect import collect
from deltawire.chain.maintenance.verify import verify
from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import (
    CommitOutcomeUnknown,
    DataDamaged,
    Fenced,
    NoChain,
    PublishError,
    RunMismatch,
    StoreUnavailable,
    UnsupportedDtype,
)
from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.publish.sharded import ShardedPublisher
from deltawire.publish.shortcuts.cadence import AnchorPolicy
from deltawire.publish.writer_options import WriterOptions
from deltawire.store import open_store
from deltawire.store.memory import MemoryStore
from deltawire.tensors.bits import TensorPart, tensor_bits
from deltawire.testing import After, Before, FaultyStore, call

SHAPES = {"embed": (301, 96), "layer.0.up": (256, 64), "layer.0.norm": (96,), "layer.1.up": (7, 1000), "scale": (), "none": (0, 4)}


def first_state(seed=0, shapes=SHAPES, dtype=np.float32):
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype(dtype) if shape else np.array(1.5, dtype) for name, shape in shapes.items()}


def next_state(state, seed):
    random = np.random.default_rng(seed)
    new = copied(state)
    for name, array in new.items():
        flat = tensor_bits(name, array).bits.reshape(-1)
        if flat.size:
            flat[random.integers(0, flat.size, 1 + flat.size // 100)] += 1
    return new


def states(count, seed=0):
    found = [first_state(seed)]
    while len(found) < count:
        found.append(next_state(found[-1], len(found)))
    return found


def publish_all(url, size, versions, **given):
    """Publish these states from `size` ranks and return what each rank returned. `given` is as in `publisher_arguments`."""
    arguments = publisher_arguments(threads=1, **given)

    def work(ranks):
        with ShardedPublisher(ranks, url, **arguments) as publisher:
            return [publisher.publish(shards_of(state, ranks.rank, size), step=step) for step, state in enumerate(versions)]

    found = run_ranks(size, work)
    for answer in found:
        if isinstance(answer, BaseException):
            raise answer
    return found


def follow(url, **options):
    with Subscriber(url, options=ReaderOptions(pin=False, **options), threads=1) as subscriber:
        subscriber.sync()
        return bits_of(subscriber.state), subscriber.version


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_readers_get_every_version_bit_for_bit(tmp_path, tmp_path_factory, size):
    mirror_path = tmp_path_factory.mktemp("mirror")
    versions = states(5)
    found = publish_all(tmp_path, size, versions)
    assert all(answer == found[0] for answer in found)
    assert [version.kind for version in found[0]] == ["anchor", "delta", "delta", "delta", "delta"]
    with (
        Subscriber(tmp_path, options=ReaderOptions(pin=False)) as reader,
        Subscriber(tmp_path, mirror_path, options=ReaderOptions(pin=False)) as mirrored,
    ):
        for version, state in zip(found[0], versions, strict=True):
            assert reader.sync(seq=version.seq).digest == version.digest
            assert bits_of(reader.state) == bits_of(state)
            mirrored.sync(seq=version.seq)
            assert bits_of({name: np.array(array) for name, array in mirrored.state.items()}) == bits_of(state)
    assert verify(open_store(tmp_path), deep=True).problems == []
    assert [bits_of(state) for _, state in sorted(read_states(open_store(tmp_path)).items())] == [bits_of(state) for state in versions]


def test_every_rank_uploads_its_own_deltas_of_about_the_same_size(tmp_path):
    base = first_state(0, {f"layer.{index}": (256, 256) for index in range(4)})
    publish_all(tmp_path, 4, [base, next_state(base, 1)])
    files = read_commits(open_store(tmp_path))[-1]["files"]
    assert len(files) == 4
    assert {file["raw"] for file in files} == {4 * 256 * 64 * 4}
    assert max(file["size"] for file in files) < 1.2 * min(file["size"] for file in files)


def test_only_edges_change_hands_for_a_delta(tmp_path):
    versions, moved = states(3), []

    def work(ranks):
        with ShardedPublisher(ranks, tmp_path, options=WriterOptions(threads=1)) as publisher:
            publisher.publish(shards_of(versions[0], ranks.rank, 3))
            before = ranks.moved
            publisher.publish(shards_of(versions[1], ranks.rank, 3))
            moved.append(ranks.moved - before)

    run_ranks(3, work)
    assert sum(moved) < 512 * 2 * len(SHAPES)


def test_a_chain_is_taken_up_by_any_number_of_ranks(tmp_path):
    versions = states(10)
    for start, size in [(0, 2), (2, 4), (4, 3), (6, 1)]:
        found = publish_all(tmp_path, size, versions[start : start + 2], segment_bytes=4096)
        if start:
            assert [version.kind for version in found[0]] == ["delta", "delta"]
        assert follow(tmp_path)[0] == bits_of(versions[start + 1])
    with Publisher(tmp_path, options=WriterOptions(threads=1)) as publisher:
        assert publisher.publish(versions[8]).kind == "delta"
        rewound = publisher.version.seq
        publisher.publish(versions[3])
    with Publisher(tmp_path, options=WriterOptions(threads=1), resume_from_seq=rewound):
        pass
    assert publish_all(tmp_path, 2, [versions[9]])[0][0].kind == "delta"
    assert follow(tmp_path)[0] == bits_of(versions[9])
    assert verify(open_store(tmp_path), deep=True).problems == []


def test_other_tensors_are_published_as_a_checkpoint(tmp_path):
    publish_all(tmp_path, 2, states(2))
    other = first_state(5, {"embed": (301, 96), "head": (5, 5)})
    assert publish_all(tmp_path, 3, [other])[0][0].kind == "anchor"
    assert follow(tmp_path)[0] == bits_of(other)


def test_the_first_rank_collects_garbage_after_an_anchor(tmp_path):
    versions, events = states(9), []
    options = {"anchor_policy": AnchorPolicy(min_versions=2, max_versions=2), "auto_collect": 0.0, "on_event": events.append}
    publish_all(tmp_path, 2, versions, **options)
    assert any(event.name == "collected" and event.fields["deleted"] for event in events), {event.name for event in events}
    assert not [event for event in events if event.name == "shortcut-failed"]
    assert follow(tmp_path)[0] == bits_of(versions[-1])
    assert verify(open_store(tmp_path), deep=True).problems == []


def test_anchors_are_ordinary_checkpoints_written_by_all(tmp_path):
    versions = states(6)
    policy = AnchorPolicy(min_versions=2, max_versions=2)
    publish_all(tmp_path, 3, versions, anchor_policy=policy, attachments={"config.json": b"{}"})
    store = open_store(tmp_path)
    assert len(list(store.list("anchor/"))) == 2
    files = read_commits(store)[1]["files"]
    assert "model.safetensors.index.json" in {file["name"] for file in files}
    assert [[file["name"] for file in commit["attachments"]] for commit in read_commits(store)[1:]] == [["config.json"]] * 6
    assert len([file for file in files if file["raw"]]) == 3
    assert follow(tmp_path)[0] == bits_of(versions[-1])
    assert verify(store, deep=True).problems == []


def publish_through(stores, versions, size=2, failing=1, error=StoreUnavailable):
    """Publish from ranks with these stores. Version number `failing` must fail with this error at all ranks, and is then omitted."""

    def work(ranks):
        messages, found = [], []
        with ShardedPublisher(ranks, stores[ranks.rank], options=WriterOptions(threads=1)) as publisher:
            for step, state in enumerate(versions):
                if step == failing:
                    with pytest.raises(error) as caught:
                        publisher.publish(shards_of(state, ranks.rank, size), step=step)
                    messages.append(str(caught.value))
                else:
                    found.append(publisher.publish(shards_of(state, ranks.rank, size), step=step))
            return messages, found

    answers = run_ranks(size, work)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer[0][0] for answer in answers], answers[0][1]


def test_an_error_at_one_rank_is_raised_at_all_and_nothing_is_published(tmp_path):
    versions = states(3)
    stores = [open_store(tmp_path), FaultyStore(open_store(tmp_path), [Before(SecondUpload(), "unavailable")])]
    messages, found = publish_through(stores, versions)
    assert "rank 1: " in messages[0]
    assert [version.updates for version in found] == [1, 2]
    assert follow(tmp_path)[0] == bits_of(versions[2])


class SecondUpload:
    """A condition that holds at the second upload of data through a store."""

    def __init__(self):
        self.seen = 0

    def __call__(self, each):
        self.seen += each.op == "put" and each.key.startswith("data/")
        return self.seen == 2 and each.op == "put"


@pytest.mark.parametrize("landed", [True, False])
def test_a_commit_whose_outcome_is_unknown_is_found_out_at_the_next_call(tmp_path, landed, monkeypatch):
    monkeypatch.setattr("deltawire.store.create_rule._FIRST_PAUSE", 0.0)
    versions = states(4)
    lost = (After if landed else Before)(call("put_if_absent", "commit/00000000000000000002"), "unknown", times=5)
    blind = Before(call("get", "commit/00000000000000000002"), "unavailable", times=5)
    stores = [FaultyStore(open_store(tmp_path), [lost, blind]), open_store(tmp_path)]
    messages, found = publish_through(stores, versions, error=CommitOutcomeUnknown)
    assert "rank 0: " in messages[1]
    assert [version.kind for version in found] == ["anchor", "delta", "delta"]
    assert found[-1].updates == 4  # the publisher first repeats its own bytes, so the version is published in both cases
    assert follow(tmp_path)[0] == bits_of(versions[3])
    assert verify(open_store(tmp_path), deep=True).problems == []


def test_a_takeover_is_reported_to_all_ranks(tmp_path):
    versions = states(4)

    def work(ranks):
        publisher = ShardedPublisher(ranks, tmp_path, options=WriterOptions(threads=1))
        publisher.publish(shards_of(versions[0], ranks.rank, 2))
        if ranks.rank == 0:
            with Publisher(tmp_path, options=WriterOptions(threads=1)) as other:
                other.publish(versions[1])
        for _ in range(2):
            with pytest.raises(Fenced):
                publisher.publish(shards_of(versions[2], ranks.rank, 2))
        with pytest.raises(Fenced):
            publisher.close()

    assert run_ranks(2, work) == [None, None]
    assert follow(tmp_path)[0] == bits_of(versions[1])


def test_a_bit_that_flips_in_a_ranks_own_copy_is_found_and_the_copy_rebuilt(tmp_path):
    versions = states(3)

    def work(ranks):
        with ShardedPublisher(ranks, tmp_path, options=WriterOptions(threads=1)) as publisher:
            publisher.publish(shards_of(versions[0], ranks.rank, 2))
            if ranks.rank == 1:
                publisher._appender.baseline.parts["embed"].elements.view(np.uint32)[5] ^= 1
            for state in versions[1:]:
                assert publisher.publish(shards_of(state, ranks.rank, 2)).kind == "delta"

    assert run_ranks(2, work) == [None, None]
    assert follow(tmp_path)[0] == bits_of(versions[2])


def test_damaged_data_are_avoided_if_there_is_another_route(tmp_path):
    versions = states(5)
    publish_all(tmp_path, 2, versions[:4], anchor_policy=AnchorPolicy(min_versions=2, max_versions=2))
    delta = read_commits(open_store(tmp_path))[-2]
    damage(tmp_path, delta["files"][0]["key"])
    assert publish_all(tmp_path, 3, versions[4:])[0][0].kind == "delta"
    assert follow(tmp_path)[0] == bits_of(versions[4])


def test_a_chain_that_cannot_be_rebuilt_is_not_taken_up(tmp_path):
    versions = states(3)
    publish_all(tmp_path, 2, versions[:2])
    damage(tmp_path, read_commits(open_store(tmp_path))[-1]["files"][1]["key"])
    with pytest.raises(DataDamaged):
        publish_all(tmp_path, 2, versions[2:])


def damage(path, key):
    file = path / key
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.chmod(0o600)
    file.write_bytes(data)


@pytest.mark.parametrize("other", [{"x": (3, 5)}, {"x": (4, 5), "y": (1,)}, {"y": (4, 5)}])
def test_ranks_that_hold_different_models_are_refused(tmp_path, other):
    def work(ranks):
        with ShardedPublisher(ranks, tmp_path) as publisher, pytest.raises(PublishError, match="one model"):
            publisher.publish(shards_of(first_state(0, other if ranks.rank else {"x": (4, 5)}), ranks.rank, 2))

    assert run_ranks(2, work) == [None, None]


def test_tensors_with_elements_that_no_rank_holds_are_refused(tmp_path):
    def work(ranks):
        with ShardedPublisher(ranks, tmp_path) as publisher, pytest.raises(PublishError, match="'x'"):
            publisher.publish({"x": TensorPart(np.zeros(3, np.float32), (10,), 3 * ranks.rank)})

    assert run_ranks(2, work) == [None, None]


def test_tensors_that_one_rank_cannot_publish_are_refused_by_all(tmp_path):
    def work(ranks):
        with ShardedPublisher(ranks, tmp_path) as publisher, pytest.raises(UnsupportedDtype):
            publisher.publish({"x": TensorPart(np.zeros(3, np.complex64 if ranks.rank else np.float32), (6,), 3 * ranks.rank)})

    assert run_ranks(2, work) == [None, None]


def test_processes_that_do_not_see_the_same_store_are_refused(tmp_path):
    def work(ranks):
        with pytest.raises((NoChain, RunMismatch)):
            ShardedPublisher(ranks, tmp_path / str(ranks.rank))

    assert run_ranks(2, work) == [None, None]
    with Publisher(tmp_path / "1"):
        pass
    assert run_ranks(2, work) == [None, None]


def test_the_files_of_the_model_go_with_every_version_and_what_the_user_attached_replaces_them(tmp_path):
    def work(ranks):
        with ShardedPublisher(
            ranks, tmp_path / "chain", options=WriterOptions(threads=1), attachments={"config.json": b"mine"}
        ) as publisher:
            for state, theirs in zip(states(2), [b"1", b"2"], strict=True):
                held = shards_of(state, ranks.rank, 2)
                publisher.publish(held, files={"config.json": b"theirs", "generation_config.json": theirs} if ranks.rank == 0 else None)

    run_ranks(2, work)
    for version, theirs in [(1, b"1"), (2, b"2")]:
        pull(tmp_path / "chain", tmp_path / f"v{version}", seq=version)
        assert (tmp_path / f"v{version}" / "config.json").read_bytes() == b"mine"
        assert (tmp_path / f"v{version}" / "generation_config.json").read_bytes() == theirs


def test_a_rank_that_holds_what_is_not_finite_stops_the_publication_at_all_ranks(tmp_path):
    good, bad = first_state(), first_state()
    bad["embed"].reshape(-1)[-1] = np.nan

    def work(ranks):
        with ShardedPublisher(ranks, tmp_path, options=WriterOptions(threads=1), refuse_nonfinite=True) as publisher:
            publisher.publish(shards_of(good, ranks.rank, 2))
            with pytest.raises(PublishError, match=r"1 weight is NaN or infinite, in 'embed' \(1\)"):
                publisher.publish(shards_of(bad, ranks.rank, 2))
            return publisher.publish(shards_of(good, ranks.rank, 2)).updates

    assert run_ranks(2, work) == [2, 2]


@pytest.mark.parametrize("size", [1, 2])
def test_the_first_rank_reports_other_tensors_and_a_lower_step(tmp_path, size):
    events = []
    base = first_state()
    other = {name: array for name, array in base.items() if name != "scale"}
    publish_all(tmp_path, size, [base, other, other], on_event=events.append)
    publish_all(tmp_path, size, [other], on_event=events.append)
    publish_all(tmp_path, size, [base], on_event=events.append)
    told = [event for event in events if event.name in ("layout-changed", "step-went-back")]
    assert [event.name for event in told] == ["layout-changed", "step-went-back", "layout-changed"]
    assert ": 1 added ('scale'). It is published" in told[2].fields["message"]
    assert ": 1 removed ('scale'). It is published" in told[0].fields["message"]
    assert (told[1].fields["step"], told[1].fields["newest_step"]) == (0, 2)


def test_hundreds_of_ranks_publish_together_and_every_reader_finds_their_files_in_lists(tmp_path):
    """Small shards are enough: what grows with the number of ranks is the number of files."""
    size = 165
    shapes = {"up": (size, 128), "down": (size, 128), "norm": (30,)}
    versions = [first_state(0, shapes)]
    for seed in range(4):
        versions.append(copied(versions[-1]))
        for name in ("up", "down"):
            versions[-1][name][:, seed] += 1
    policy = AnchorPolicy(min_versions=4, max_versions=4)
    store = MemoryStore()
    found = publish_all(store, size, versions, anchor_policy=policy)[0]
    commits = read_commits(store)
    assert [commit["version"] for commit in commits[-4:]] == [4] * 4
    assert {commit["list"]["files"] for commit in commits[-4:]} == {size}
    assert not any(commit["files"] for commit in commits[-4:])
    states_read = read_states(store)
    assert [bits_of(state) for _, state in sorted(states_read.items())] == [bits_of(state) for state in versions]
    log = ChainLog(store)
    assert log.shortcut(found[4].seq, found[0].seq).file_list.files == size
    with Subscriber(store, tmp_path / "mirror", options=ReaderOptions(pin=False), threads=1) as reader:
        for number in (1, 2, 4):
            reader.sync(seq=found[number].seq)
            assert bits_of({name: np.array(array) for name, array in reader.state.items()}) == bits_of(versions[number])
    pull(store, tmp_path / "pulled", options=ReaderOptions(pin=False))
    assert bits_of({**Checkpoint(tmp_path / "pulled")}) == bits_of(versions[-1])
    assert follow(store)[0] == bits_of(versions[-1])
    assert verify(store, deep=True).problems == []
    assert publish_all(store, 3, [versions[1]])[0][0].kind == "delta"  # the resumed job reads the lists
    assert follow(store)[0] == bits_of(versions[1])
    assert collect(store, grace=0.0, keep_anchors=1).outcome == "collected"
    assert follow(store)[0] == bits_of(versions[1])
    assert verify(store, deep=True).problems == []


def test_too_many_ranks_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("deltawire.publish.sharded.publisher.MOST_RANKS", 2)
    with pytest.raises(PublishError, match="3 processes cannot publish together, at most 2 can"):
        publish_all(tmp_path, 3, [first_state()])


@pytest.mark.parametrize("skips", [True, False])
def test_a_rank_holds_one_copy_of_its_shard_with_and_without_skips(tmp_path, skips):
    """docs/train.md has the table."""
    versions = [first_state(0, {f"w{number}": (128, 1024) for number in range(8)})]
    for number in range(4):
        versions.append(copied(versions[-1]))
        for array in versions[-1].values():
            array[number] += 1
    size = sum(array.nbytes for array in versions[0].values())
    held = {}

    def work(ranks):
        policy = AnchorPolicy(min_versions=100, max_versions=100)
        options = WriterOptions(threads=1, skips=skips, segment_bytes=size // 8, anchor_policy=policy)
        with ShardedPublisher(ranks, tmp_path, options=options) as publisher:
            tracemalloc.start()
            try:
                publisher.publish(shards_of(versions[0], 0, 1))
                tracemalloc.reset_peak()
                for state in versions[1:]:
                    publisher.publish(shards_of(state, 0, 1))
                held["always"], held["most"] = (each / size for each in tracemalloc.get_traced_memory())
            finally:
                tracemalloc.stop()

    assert run_ranks(1, work) == [None]
    assert 1 <= held["always"] < 1.3
    assert held["most"] < 1.5
