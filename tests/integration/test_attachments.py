"""Test that every version is read with its own attachments: by pull, mirrors and members, also across collections and in old chains."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attached_files import NEW, OLD, OPTIONS, files_in, objects, states, store_has_weights, write
from support import bits_of, publish_fully
from threads_as_ranks import run_ranks, shards_of
from toy_chain import ToyChain, first_state, next_state

from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.collect import collect
from deltawire.chain.maintenance.verify import verify
from deltawire.chain.reader_options import ReaderOptions
from deltawire.chain.version import Version
from deltawire.errors import ChainStale, CheckpointError, CorruptRecord, DataDamaged, DataMissing, LimitExceeded
from deltawire.events import Event
from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.format.records.file_list import MOST_IN_RECORD
from deltawire.format.records.record_parts import CommitRef, FileEntry, Limits, Signature, link_targets
from deltawire.format.records.version_records import Commit
from deltawire.publish.attachments.read_files import MOST_FILES, MOST_NAME_BYTES
from deltawire.publish.publisher import Publisher
from deltawire.publish.sharded import ShardedPublisher
from deltawire.publish.shortcuts.cadence import AnchorPolicy
from deltawire.publish.writer_options import WriterOptions
from deltawire.store import Store, keys, open_store
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber
from deltawire.subscribe.model_files import FollowedFiles, read_model_files
from deltawire.subscribe.pull import pull
from deltawire.testing import FaultyStore, Reading, call
from deltawire.warnings import AttachmentLeftOut


@pytest.fixture
def changing(tmp_path: Path) -> tuple[Store, list[Any], list[dict[str, bytes]]]:
    """Publish five versions, and return the store, the weights and the files that each version must have.

    One file changes, one is added, one is removed, and one version changes no weights.
    """
    store, folder = MemoryStore(), tmp_path / "attached"
    weights = states(4)
    weights.insert(3, weights[2])  # version 4 has the weights of version 3
    wanted = []
    with Publisher(store, attachments=write(folder, config_json=OLD, tokenizer_json=b"[]"), options=OPTIONS) as publisher:
        for step, state in enumerate(weights):
            if step == 1:
                write(folder, config_json=NEW)
            if step == 3:
                write(folder, chat_jinja=b"{{ messages }}")
                (folder / "tokenizer.json").unlink()
            wanted.append({path.name: path.read_bytes() for path in folder.iterdir()})
            publisher.publish(state, step=step)
    return store, weights, wanted


def test_pull_gives_every_version_its_own_attachments(changing: Any, tmp_path: Path) -> None:
    store, weights, wanted = changing
    assert [commit.kind for commit in ChainLog(store).tail(0)] == ["anchor"] + ["delta"] * 4
    for seq, (state, files) in enumerate(zip(weights, wanted, strict=True), 1):
        pull(store, tmp_path / str(seq), seq=seq, options=ReaderOptions(pin=False))
        assert files_in(tmp_path / str(seq)) == files
        assert {path.name for path in (tmp_path / str(seq)).iterdir()} == {*files, "model.safetensors"}
        assert read_model_files(store, seq=seq).files == files
        with Subscriber(store, options=ReaderOptions(pin=False)) as reader:
            reader.sync(seq=seq)
            assert bits_of(reader.state) == bits_of(state)
    assert read_model_files(store).files == wanted[-1]
    assert verify(store, deep=True).problems == []


def test_a_member_loads_its_files_again_when_attachments_change(changing: Any) -> None:
    store, _, wanted = changing
    loads: list[dict[str, bytes]] = []
    followed = FollowedFiles(store, lambda files: loads.append(dict(files.files)) or loads[-1])
    versions = [Version.of(commit) for commit in ChainLog(store).tail(0)]
    assert followed.at(None) == wanted[-1]
    for version, files in zip([*versions, *reversed(versions)], [*wanted, *reversed(wanted)], strict=True):
        assert followed.at(version) == files
    assert len(loads) == 1 + 3 + 2  # versions 2 and 3 have the same files, and so have 4 and 5


def test_only_what_changed_is_uploaded(changing: Any) -> None:
    store, _, _ = changing
    uploaded = sorted(keys.parse_data_key(key).seq for key in objects(store))  # type: ignore[union-attr]
    assert uploaded == [1, 1, 2, 4]
    fourth = ChainLog(store).read(4)
    assert fourth is not None
    assert (fourth.files, fourth.changed) == ((), 0)


def test_a_mirror_has_the_attachments_of_the_version_that_it_serves(changing: Any, tmp_path: Path) -> None:
    store, _, wanted = changing
    with Subscriber(store, tmp_path / "mirror", options=ReaderOptions(pin=False)) as reader:
        for seq in (1, 2, 3, 4, 5, 4, 3, 1, 5, 2):
            reader.sync(seq=seq)
            assert files_in(reader.path) == wanted[seq - 1]
            links = {path.name for path in (tmp_path / "mirror").iterdir() if path.is_symlink() and path.suffix not in ("", ".safetensors")}
            assert links == set(wanted[seq - 1]) | {"deltawire.json"}


def test_model_files_wait_for_late_data_and_refuse_a_silent_chain(changing: Any) -> None:
    """A replicated store may deliver weights and attachments after their commit."""
    inner, _, wanted = changing
    first, newest = (ChainLog(inner).read(seq) for seq in (1, 5))
    for entry in (first.files[0], newest.attachments[-1]):
        late = FaultyStore(inner, [Reading(call("read_into", entry.key), "missing")])
        with pytest.raises(DataMissing):
            read_model_files(late, options=ReaderOptions(patience=0.0))
        late = FaultyStore(inner, [Reading(call("read_into", entry.key), "missing")])
        assert read_model_files(late).files == wanted[-1]
    for silence in (-1.0, 1e9):
        options = ReaderOptions(max_silence=silence)
        with pytest.raises(ChainStale) if silence < 0 else nullcontext():
            assert FollowedFiles(inner, lambda files: files, options=options).at(None).files == wanted[-1]


def test_a_version_whose_attachment_is_lost_is_not_served_half(changing: Any, tmp_path: Path) -> None:
    store, _, wanted = changing
    commit = ChainLog(store).read(5)
    assert commit is not None
    assert commit.attachments is not None
    lost = next(entry for entry in commit.attachments if entry.name == "chat.jinja")
    data = store.get(lost.key, limit=100)
    with Subscriber(store, tmp_path / "mirror", options=ReaderOptions(pin=False, patience=0.0)) as reader:
        reader.sync(seq=3)
        for damage, error in (((), DataMissing), ((b"x" * len(data),), DataDamaged)):
            store.delete([lost.key])
            for wrong in damage:
                store.put(lost.key, wrong)
            for _ in range(2):
                with pytest.raises(error):
                    reader.sync()
                assert reader.version is not None
                assert reader.version.seq == 3
                assert files_in(reader.path) == wanted[2]
            with pytest.raises(error):
                pull(store, tmp_path / "out", options=ReaderOptions(pin=False, patience=0.0))
            assert not (tmp_path / "out").exists()
            assert [problem.where for problem in verify(store, deep=True).problems] == ["versions 4 to 5"]
            assert verify(store, deep=True).problems[0].what.startswith("chat.jinja, which these versions need: data/")
        store.delete([lost.key])
        store.put(lost.key, data)
        reader.sync()
        assert files_in(reader.path) == wanted[-1]


def test_a_slot_whose_attachments_were_damaged_by_a_power_failure_is_rebuilt(
    changing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _, wanted = changing
    with Subscriber(store, tmp_path / "mirror", options=ReaderOptions(pin=False)) as reader:
        reader.sync()
        assert reader.path is not None
        (reader.path / "config.json").write_bytes(b"")
    monkeypatch.setattr("deltawire.subscribe.mirror.slot.boot_id", lambda: "another boot")
    monkeypatch.setattr("deltawire.subscribe.mirror.mirror.boot_id", lambda: "another boot")
    with Subscriber(store, tmp_path / "mirror", options=ReaderOptions(pin=False)) as reader:
        assert reader.version is None
        reader.sync()
        assert files_in(reader.path) == wanted[-1]


def test_collection_keeps_old_attachments_that_kept_versions_refer_to() -> None:
    store, weights = MemoryStore(), states(9)
    options = replace(OPTIONS, anchor_policy=AnchorPolicy(min_versions=3, max_versions=3))
    files = {"config.json": OLD, "old.json": b"gone soon"}
    with Publisher(store, attachments=files, options=options) as publisher:
        for step, state in enumerate(weights):
            if step == 2:
                del files["old.json"]
            publish_fully(publisher, state, step=step)
    before = objects(store)
    assert len(before) == 2
    assert collect(store, grace=0.0).outcome == "collected"
    assert len(objects(store)) == 1  # config.json was uploaded with version 1, and nothing else of version 1 is left
    assert not store_has_weights(store, 1)
    assert read_model_files(store).files == {"config.json": OLD}
    assert verify(store, deep=True).problems == []


def test_a_publisher_without_attachments_keeps_those_in_force_and_an_empty_mapping_removes_them(tmp_path: Path) -> None:
    store, weights = MemoryStore(), states(5)
    with Publisher(store, attachments={"config.json": OLD}, options=OPTIONS) as publisher:
        publisher.publish(weights[0])
    with Publisher(store, options=OPTIONS) as publisher:
        publisher.publish(weights[1])
        assert read_model_files(store).files == {"config.json": OLD}
    with Publisher(store, attachments={}, options=OPTIONS) as publisher:
        publisher.publish(weights[2])
        assert read_model_files(store).files == {}
    with Publisher(store, resume_from_seq=1, options=OPTIONS) as publisher:
        assert read_model_files(store).files == {"config.json": OLD}  # these files belong to the version that it resumed from
        publisher.publish(weights[3])
    assert read_model_files(store).files == {"config.json": OLD}
    assert len(objects(store)) == 1


@pytest.mark.parametrize("is_marked", [False, True], ids=["no mark", "below a mark"])
@pytest.mark.parametrize("is_sharded", [False, True], ids=["one process", "ranks"])
def test_going_back_to_a_version_leaves_the_files_of_abandoned_ones_behind(is_marked: bool, is_sharded: bool) -> None:
    """This also holds if a collection has announced to delete the version's data, so that a checkpoint replaces the rewind."""
    store, weights = MemoryStore(), states(4)
    with Publisher(store, attachments={"config.json": OLD, "tokenizer.json": b"[]"}, options=OPTIONS) as publisher:
        publisher.publish(weights[0])
        publisher.publish(weights[1])
    with Publisher(store, attachments={"config.json": NEW, "bad.jinja": b"?"}, starts_full=True, options=OPTIONS) as publisher:
        publisher.publish(weights[2])
    if is_marked:
        assert collect(store, grace=1e9, keep_anchors=1).floor == 4
    if not is_sharded:
        with Publisher(store, resume_from_seq=2, options=OPTIONS) as publisher:
            assert publisher.version is not None
            assert publisher.version.kind == ("anchor" if is_marked else "rewind")
            assert read_model_files(store).files == {"config.json": OLD, "tokenizer.json": b"[]"}
            publisher.publish(weights[3])
    else:

        def work(ranks: Any) -> None:
            with ShardedPublisher(ranks, store, options=WriterOptions(threads=1), resume_from_seq=2) as publisher:
                publisher.publish(shards_of(weights[3], 0, 1), files={"config.json": b"model's"})

        run_ranks(1, work)
    found = read_model_files(store).files
    assert found == {"config.json": b"model's" if is_sharded else OLD, "tokenizer.json": b"[]"}


def test_files_of_the_model_replace_attachments_of_the_same_name_only() -> None:
    store, weights = MemoryStore(), states(2)
    with Publisher(store, attachments={"config.json": OLD, "tokenizer.json": b"[]"}, options=OPTIONS) as publisher:
        publisher.publish(weights[0])
    with Publisher(store, options=OPTIONS) as publisher:
        publisher._attachments.taken["config.json"] = NEW  # a publisher that is given a model does the same
        publisher.publish(weights[1])
    assert read_model_files(store).files == {"config.json": NEW, "tokenizer.json": b"[]"}


def test_a_publisher_in_the_background_takes_attachments_as_they_are_when_publish_is_called(tmp_path: Path) -> None:
    store, weights, folder = MemoryStore(), states(3), write(tmp_path / "attached", config_json=OLD)
    with Publisher(store, attachments=folder, background=True, options=OPTIONS) as publisher:
        for number, state in enumerate(weights):
            handle = publisher.publish(state)
            write(folder, config_json=b"%d" % number)
            assert handle.result(30) is not None  # type: ignore[union-attr]
    found = [read_model_files(store, seq=seq).files["config.json"] for seq in (1, 2, 3)]
    assert found == [OLD, b"0", b"1"]


def test_an_event_reports_changed_attachments() -> None:
    events: list[Event] = []
    files = {"a.json": b"1", "b.json": b"2"}
    with Publisher(MemoryStore(), attachments=files, on_event=events.append, options=OPTIONS) as publisher:
        for state in states(2):
            publisher.publish(state)
        files |= {"a.json": b"3"}
        del files["b.json"]
        publisher.publish(states(3)[2])
    told = [event.fields for event in events if event.name == "attachments-changed"]
    assert told == [{"seq": 3, "files": "a.json, -b.json"}]


def test_ranks_that_publish_together_ship_changed_attachments(tmp_path: Path) -> None:
    weights, folder = states(3), write(tmp_path / "attached", config_json=OLD)

    def work(ranks: Any) -> None:
        with ShardedPublisher(
            ranks, tmp_path / "chain", options=WriterOptions(threads=1), attachments=folder if ranks.rank == 0 else None
        ) as publisher:
            for number, state in enumerate(weights):
                publisher.publish(shards_of(state, ranks.rank, ranks.size), step=number)
                if ranks.rank == 0 and number == 0:
                    write(folder, config_json=NEW)

    assert run_ranks(2, work) == [None, None]
    for seq, config in ((1, OLD), (2, NEW), (3, NEW)):
        pull(tmp_path / "chain", tmp_path / str(seq), seq=seq, options=ReaderOptions(pin=False))
        assert files_in(tmp_path / str(seq)) == {"config.json": config}
    assert verify(open_store(tmp_path / "chain"), deep=True).problems == []


def test_the_longest_record_has_room_for_all_attachments() -> None:
    hash_, ident = "ab" * 32, "0" * 32
    most = 2**63 - 1
    key = f"data/{10**10 - 2:010}/{10**18:020}/{hash_}"
    deltas = tuple(FileEntry(f"{key}.safetensors", 64 << 30, 64 << 30, hash_, None, index, 1) for index in range(MOST_IN_RECORD))
    letters = MOST_NAME_BYTES // MOST_FILES - 2
    attached = tuple(FileEntry(f"{key}.file", 64 << 30, 0, hash_, f"{index:0{letters}}") for index in range(MOST_FILES))
    seq = 1 << 40
    commit = Commit(
        ident, seq, 10**10 - 2, ident, "delta", hash_, tuple((m, hash_) for m in link_targets(seq)),
        CommitRef(seq - 1, hash_, first_digest()), seq, 10**9, first_digest(), 1 << 50, MOST_IN_RECORD, most, most, most, deltas,
        {"x": "y" * 7000}, Signature(hash_, hash_ * 2), "r" * 200, attached,
    )  # fmt: skip
    assert Commit.parse(commit.to_bytes()) == commit
    with pytest.raises(LimitExceeded):
        dataclasses.replace(commit, files=(*deltas, *deltas)).to_bytes()
    with pytest.raises(LimitExceeded):
        Limits(file_bytes=1 << 30).check(dataclasses.replace(commit, files=()))


def first_digest() -> Any:
    import deltawire

    return deltawire.state_digest(first_state())


def test_a_chain_of_version_1_continues_with_its_attachments(tmp_path: Path) -> None:
    """The versions of the chain have the files of its anchors. The first new version names them, and the publisher uploads them again."""
    store = MemoryStore()
    chain = ToyChain(store)
    chain.anchor(first_state(), extra={"tokenizer.json": b"[]"})
    chain.delta()
    old = {"config.json": b'{"model_type": "toy"}', "tokenizer.json": b"[]"}
    assert read_model_files(store).files == old
    with Subscriber(store, tmp_path / "mirror", options=ReaderOptions(pin=False)) as reader:
        reader.sync()
        with Publisher(store, options=OPTIONS) as publisher:
            publisher.publish(next_state(chain.state, 7))
        newest = ChainLog(store).head()
        assert newest is not None
        assert newest.run == "toy"
        assert read_model_files(store).files == old
        reader.sync()
        assert files_in(reader.path) == old
        with Publisher(store, attachments={"config.json": NEW}, options=OPTIONS) as publisher:
            publisher.publish(next_state(chain.state, 8))
        reader.sync()
        assert files_in(reader.path) == {"config.json": NEW}
    pull(store, tmp_path / "pulled", options=ReaderOptions(pin=False))
    assert files_in(tmp_path / "pulled") == {"config.json": NEW}  # and not the files of the checkpoint that its weights come from
    assert bits_of(Checkpoint(tmp_path / "pulled")) == bits_of(next_state(chain.state, 8))


def test_no_attachment_has_the_name_of_a_mirror_s_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    with pytest.raises(CheckpointError, match="record that mirrors keep"):
        Publisher(store, attachments={"DeltaWire.json": OLD}, options=OPTIONS)
    folder = write(tmp_path / "slot", config_json=OLD, deltawire_json=b"of a mirror")
    with Publisher(store, attachments=folder, options=OPTIONS) as publisher:
        assert set(publisher.publish(first_state()).attachments) == {"config.json"}
    monkeypatch.setattr("deltawire.publish.attachments.read_files.MIRROR_RECORD_FILE", "-")  # earlier releases behaved like this
    with Publisher(store, attachments={"config.json": OLD, "deltawire.json": NEW}, options=OPTIONS) as publisher:
        publisher.publish(next_state(first_state(), 1))
    with Subscriber(store, tmp_path / "mirror") as subscriber:
        with pytest.warns(AttachmentLeftOut, match=r"deltawire\.json of version 2"):
            subscriber.sync()
        assert files_in(subscriber.path) == {"config.json": OLD}
    pull(store, tmp_path / "pulled")
    assert (tmp_path / "pulled" / "deltawire.json").read_bytes() == NEW


def test_a_name_that_the_locale_cannot_write_is_a_named_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    with Publisher(store, attachments={"config.json": OLD, "\u65e5\u672c.txt": NEW}, options=OPTIONS) as publisher:
        publisher.publish(first_state())
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "ascii")
    told = r"'\\u65e5\\u672c\.txt' cannot be written, since this process encodes file names as ascii"
    with pytest.raises(CheckpointError, match=told):
        pull(store, tmp_path / "pulled")
    with Subscriber(store, tmp_path / "mirror") as subscriber, pytest.raises(CheckpointError, match=told):
        subscriber.sync()
    with pytest.raises(CheckpointError, match=told):
        read_model_files(store).write(tmp_path / "written")
    assert not (tmp_path / "pulled").exists()


def test_an_attachment_cannot_stand_for_weights() -> None:
    store = MemoryStore()
    with Publisher(store, attachments={"config.json": OLD}, options=OPTIONS) as publisher:
        publisher.publish(first_state())
    commit = ChainLog(store).read(1)
    assert commit is not None
    assert commit.attachments is not None
    for name in ("model.safetensors", "model.safetensors.index.json", "../config.json"):
        with pytest.raises(CorruptRecord):
            dataclasses.replace(commit, attachments=(dataclasses.replace(commit.attachments[0], name=name),)).to_bytes()
