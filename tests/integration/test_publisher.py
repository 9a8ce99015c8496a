"""A publisher on stores without faults. A plain reader, written from docs/protocol.md alone, reads the chain back."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from plain_reader import apply_files, read_checkpoint, read_commits, read_json, read_states
from small_training import Training, assert_chain_holds, published, publisher, take_step
from support import bits_of

import deltawire
from deltawire.chain.log import ChainLog
from deltawire.chain.routes.remaining_routes import Routes
from deltawire.errors import (
    BadTensorName,
    CheckpointError,
    LimitExceeded,
    PublishError,
    RunMismatch,
    UnsupportedDtype,
    UnsupportedTensor,
    VersionUnknown,
)
from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.format.records.record_parts import Limits
from deltawire.format.records.signing import SigningKey, check_signature
from deltawire.publish.shortcuts.cadence import AnchorPolicy
from deltawire.publish.shortcuts.job_thread import JobThread
from deltawire.publish.upload import data_objects as upload
from deltawire.store import keys, open_store
from deltawire.store.memory import MemoryStore
from deltawire.store.wrapped import WrappedStore
from deltawire.testing import Before, FaultyStore, call


@pytest.mark.parametrize("place", ["memory", "directory"])
def test_every_version_is_read_back_bit_for_bit(place, tmp_path):
    store = open_store(tmp_path / "chain") if place == "directory" else MemoryStore()
    training = Training()
    with publisher(store) as chain:
        assert chain.version is None
        states = {}
        for step in range(6):
            state = training.step()
            before = bits_of(state)
            version = chain.publish(state, step=step, meta={"loss": f"{step}.5"})
            assert bits_of(state) == before
            assert (version.step, version.meta, version.updates, version.epoch) == (step, {"loss": f"{step}.5"}, step + 1, 1)
            assert version == chain.version
            assert version.digest == deltawire.state_digest(state)
            states[version.seq] = state
    assert_chain_holds(store, states)
    assert [commit["kind"] for commit in read_commits(store)] == ["fence", "anchor", *["delta"] * 5]
    assert read_json(store, "HEAD")["seq"] == 6


def test_a_url_is_opened_and_closed_by_the_publisher(tmp_path):
    published(tmp_path / "a")
    published(f"memory://{tmp_path.name}")
    assert len(read_states(open_store(tmp_path / "a"))) == 3
    assert len(read_states(open_store(f"memory://{tmp_path.name}"))) == 3


def test_only_segments_that_change_are_uploaded():
    store = MemoryStore()
    training = Training()
    with publisher(store) as chain:
        chain.publish(training.state)
        training.state["norm"][0] += 1
        assert chain.publish(training.state).changed == 1
        unchanged = chain.publish(training.state)
    commits = read_commits(store)
    [file] = commits[2]["files"]
    assert sorted(training.state)[file["first"] : file["first"] + file["count"]].count("norm") == 1
    assert commits[3]["files"] == []
    assert (unchanged.bytes, unchanged.changed, unchanged.kind) == (0, 0, "delta")
    assert_chain_holds(store, {3: training.state})


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "gone"])
def test_another_table_of_tensors_makes_an_anchor(change):
    store = MemoryStore()
    training = Training()
    states = {}
    with publisher(store) as chain:
        take_step(chain, training, states)
        if change == "name":
            training.state["new"] = np.ones(3)
        elif change == "dtype":
            training.state["norm"] = training.state["norm"].astype(np.float16)
        elif change == "shape":
            training.state["norm"] = training.state["norm"].reshape(7, 1)
        else:
            del training.state["norm"]
        for _ in range(2):
            take_step(chain, training, states)
    assert [commit["kind"] for commit in read_commits(store)] == ["fence", "anchor", "anchor", "delta"]
    assert_chain_holds(store, states)


def test_a_delta_that_is_no_smaller_than_the_state_makes_an_anchor():
    store = MemoryStore()
    random = np.random.default_rng(1)
    states = {}
    with publisher(store) as chain:
        for _ in range(3):
            state = {"noise": random.integers(0, 2**63, 400, dtype=np.uint64)}
            states[chain.publish(state).seq] = state
    assert [commit["kind"] for commit in read_commits(store)] == ["fence", "anchor", "anchor", "anchor"]
    assert_chain_holds(store, states)


def test_inputs_may_have_any_layout_and_share_memory():
    store = MemoryStore()
    grid = np.arange(24, dtype=np.float32).reshape(4, 6)
    state = {"a": grid.T, "b": grid[::-2, ::3], "tied": grid.T, "scalar": np.float32(3), "empty": np.zeros((0, 2))}
    with publisher(store) as chain:
        chain.publish(state)
        grid[0, 0] = -5
        chain.publish(state)
    assert_chain_holds(store, {2: {name: np.asarray(tensor) for name, tensor in state.items()}})


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (({"a": np.zeros(2, np.complex64)},), UnsupportedDtype),
        (({"": np.zeros(2)},), BadTensorName),
        (({"a": [1, 2]},), UnsupportedTensor),
        (({},), PublishError),
        (({"a": np.zeros(2000)},), LimitExceeded),
    ],
)
def test_an_unpublishable_state_is_refused_before_any_upload(wrong, error):
    store = FaultyStore(MemoryStore())
    with publisher(store, limits=Limits(state_bytes=10_000)) as chain:
        calls = len(store.calls)
        with pytest.raises(error):
            chain.publish(*wrong)
        for arguments in [{"step": -1}, {"step": 1.5}, {"step": True}, {"meta": {"a": 1}}]:
            with pytest.raises(TypeError):
                chain.publish({"a": np.zeros(2)}, **arguments)
        with pytest.raises(LimitExceeded):
            chain.publish({"a": np.zeros(2)}, meta={"a": "x" * 70_000})
        assert len(store.calls) == calls


def test_mistakes_in_the_arguments_show_before_anybody_is_fenced(tmp_path):
    store = MemoryStore()
    with publisher(store, run="seven") as chain:
        chain.publish(Training().state)
        for wrong, error in [
            ({"run": "eight"}, RunMismatch),
            ({"resume_from_seq": 5}, VersionUnknown),
            ({"resume_from_seq": 0}, VersionUnknown),
            ({"resume_from_seq": "1"}, VersionUnknown),
            ({"resume_from_seq": True}, VersionUnknown),
            ({"attachments": tmp_path / "missing"}, CheckpointError),
        ]:
            with pytest.raises(error):
                publisher(store, **wrong)
        with pytest.raises(VersionUnknown):
            publisher(MemoryStore(), resume_from_seq=1)
        chain.publish(Training().state)


def test_skips_lead_from_version_to_version_bit_for_bit():
    store = MemoryStore()
    events = []
    states = published(store, 36, on_event=events.append)
    skips = [read_json(store, info.key) for info in store.list("skip/")]
    spans = sorted((skip["target"]["seq"], skip["target"]["seq"] - skip["base"]["seq"]) for skip in skips)
    assert spans == sorted([(1 + j, 4) for j in range(4, 36, 4)] + [(17, 16), (33, 16)])
    commits = read_commits(store)
    for skip in skips:
        target, base = commits[skip["target"]["seq"]], commits[skip["base"]["seq"]]
        assert skip["target"] == {"seq": target["seq"], "commit": target["_hash"], "digest": target["digest"]}
        assert skip["base"] == {"seq": base["seq"], "commit": base["_hash"], "digest": base["digest"]}
        assert bits_of(apply_files(store, states[base["seq"]], skip["files"])) == bits_of(states[target["seq"]])
        replaced = commits[base["seq"] + 1 : target["seq"] + 1]
        assert sum(file["size"] for file in skip["files"]) < sum(file["size"] for commit in replaced for file in commit["files"])
    assert [event.name for event in events].count("skip-made") == len(skips)


def test_from_any_version_the_newest_is_a_few_objects_away():
    """A route has at most three skips of each length, first longer and then shorter ones, across hundreds of versions."""
    store = MemoryStore()
    versions = 4**4 + 3
    with publisher(store, anchor_policy=AnchorPolicy(10**6, None)) as chain:
        for number in range(versions):
            chain.publish({"weight": np.arange(4_000, dtype=np.int32) + 10**6 * (np.arange(4_000) < number)})
    assert not list(store.list("anchor/"))
    log = ChainLog(store)
    newest = log.head()
    for seq in range(1, versions):
        hops = Routes(log).find(log.ref(log.read(seq)), newest)
        assert hops[-1].target == newest
        assert sum(len(hop.files) for hop in hops) <= 6 * 4
    assert sum(len(hop.files) for hop in Routes(log).find(None, newest)) <= 1 + 3 + 4


def test_segments_leave_while_later_ones_are_still_encoded(monkeypatch):
    store = Watched(MemoryStore())
    encode = upload.encode_many
    began: list[bool] = []

    def encode_late(*arguments, **options):
        if began:  # the first segment must have arrived before another one is encoded
            assert store.arrived.wait(300)
        began.append(True)
        return encode(*arguments, **options)

    training = Training()
    with publisher(store) as chain:
        chain.publish(training.step())
        store.arrived.clear()
        monkeypatch.setattr(upload, "encode_many", encode_late)
        version = chain.publish(training.step())
    assert len(began) > 2
    assert_chain_holds(store, {version.seq: training.state})


class Watched(WrappedStore):
    """A store that sets `arrived` when the upload of data has ended."""

    def __init__(self, inner):
        super().__init__(inner)
        self.arrived = threading.Event()

    def put(self, key, *arguments, **options):
        super().put(key, *arguments, **options)
        if key.startswith("data/"):
            self.arrived.set()


def test_skips_can_be_left_out_and_are_counted_again_after_an_anchor():
    store = MemoryStore()
    published(store, 9, skips=False)
    assert list(store.list("skip/")) == []
    store = MemoryStore()
    training = Training()
    with publisher(store) as chain:
        for step in range(12):
            if step == 6:
                training.state["more"] = np.zeros(3)
            chain.publish(training.step())
            chain.flush()
    assert [info.key[5:-5].split("-") for info in store.list("skip/")] == [[f"{seq:020}", f"{seq - 4:020}"] for seq in (5, 11)]


class SlowShortcuts(WrappedStore):
    """A store in which the records of shortcuts wait until they may be created."""

    def __init__(self):
        super().__init__(MemoryStore())
        self.reached, self.may_continue = threading.Event(), threading.Event()

    def put_if_absent(self, key, data):
        if key.startswith(("skip/", "anchor/")):
            self.reached.set()
            assert self.may_continue.wait(120)
        return super().put_if_absent(key, data)


@pytest.mark.parametrize("background", [False, True])
def test_no_publication_waits_for_shortcuts(background):
    store, training, states, events = SlowShortcuts(), Training(), {}, []
    with publisher(store, background=background, anchor_policy=AnchorPolicy(9, 9), on_event=events.append) as chain:
        for _ in range(18):  # none of the shortcuts is made before the last version is published
            state = training.step()
            result = chain.publish(state)
            states[result.result(120).seq if background else result.seq] = state
        assert store.reached.wait(120)
        with pytest.raises(TimeoutError, match="skips and anchors"):
            chain.flush(timeout=0)
        assert not list(store.list("skip/"))
        store.may_continue.set()
        chain.flush()
        made = [
            (event.name, event.fields["seq"], event.fields.get("versions"))
            for event in events
            if "made" in event.name or "anchored" in event.name
        ]
    assert made == [
        ("skip-made", 5, 4),
        ("skip-made", 9, 4),
        ("anchored", 10, None),
        ("skip-made", 13, 4),
        ("skip-made", 17, 4),
        ("skip-made", 17, 16),
    ]
    assert_chain_holds(store, states)


def test_the_thread_of_shortcuts_survives_errors_and_raises_once_what_is_no_exception(caplog):
    jobs, done = JobThread("jobs"), []

    def fail(error):
        raise error

    jobs.wait(0)
    jobs.do(lambda: fail(ValueError("harmless")))
    jobs.do(lambda: done.append(1))
    jobs.wait(120)
    assert done == [1]
    assert "harmless" in caplog.text
    jobs.do(lambda: fail(SystemExit("from a listener")))
    jobs.do(lambda: done.append(2))
    with pytest.raises(SystemExit):
        jobs.wait(120)
    assert done == [1, 2]
    assert "from a listener" in caplog.text
    jobs.wait(120)  # it is raised once
    jobs.do(lambda: fail(KeyboardInterrupt()))
    jobs.do(lambda: done.append(3))
    with pytest.raises(KeyboardInterrupt):
        jobs.close()
    assert done == [1, 2, 3]
    jobs.close()


def test_a_failed_shortcut_is_reported_and_publishing_continues():
    store = FaultyStore(MemoryStore(), [Before(call("put_if_absent", "skip/"), "full"), Before(call("put_if_absent", "anchor/"), "full")])
    events = []
    states = published(store, 9, on_event=events.append, anchor_policy=AnchorPolicy(2, 2))
    assert_chain_holds(store, states)
    failed = [event.fields["kind"] for event in events if event.name == "shortcut-failed"]
    assert sorted(failed) == ["anchor", "skip"]
    assert list(store.list("anchor/"))


@pytest.mark.parametrize("background", [False, True])
def test_anchors_are_checkpoints_that_safetensors_loads(tmp_path, background):
    store = MemoryStore()
    training = Training()
    states = {}
    attachments = {"config.json": b"{}", "tokenizer.json": b"[]"}
    options = {"background": background, "attachments": attachments, "shard_bytes": 2000, "anchor_policy": AnchorPolicy(3, 3)}
    with publisher(store, **options) as chain:
        for _ in range(14):
            state = training.step()
            result = chain.publish(state)
            states[result.result(120).seq if background else result.seq] = state
            chain.flush()
    anchors = [read_json(store, info.key) for info in store.list("anchor/")]
    assert len(anchors) == 4
    for anchor in anchors:
        seq = anchor["target"]["seq"]
        assert bits_of(read_checkpoint(store, anchor["files"])) == bits_of(states[seq])
        directory = tmp_path / str(seq)
        directory.mkdir()
        for file in [*anchor["files"], *read_json(store, keys.commit_key(seq))["attachments"]]:
            (directory / file["name"]).write_bytes(store.get(file["key"], limit=file["size"]))
        assert {path.name for path in directory.iterdir()} >= {"config.json", "tokenizer.json", "model.safetensors.index.json"}
        assert bits_of(Checkpoint(directory)) == bits_of(states[seq])


def test_an_anchor_is_made_of_its_own_version_while_newer_ones_are_published():
    begun, go_on = threading.Event(), threading.Event()

    class Slow(FaultyStore):
        def put(self, key, data, **options):
            if threading.current_thread().name.startswith("deltawire-shortcut") and key.endswith("safetensors"):
                begun.set()
                assert go_on.wait(120)
            super().put(key, data, **options)

    store = Slow(MemoryStore())
    training = Training()
    states = {}
    with publisher(store, background=True, anchor_policy=AnchorPolicy(2, 2), skips=False) as chain:
        for _ in range(12):
            state = training.step()
            states[chain.publish(state).result(120).seq] = state
            if len(states) == 3:
                assert begun.wait(120)
        go_on.set()
    anchors = [read_json(store, info.key) for info in store.list("anchor/")]
    assert anchors[0]["target"]["seq"] == 3
    for anchor in anchors:
        assert bits_of(read_checkpoint(store, anchor["files"])) == bits_of(states[anchor["target"]["seq"]])


def test_garbage_is_collected_after_anchors_if_asked_for():
    store = MemoryStore()
    training = Training()
    with publisher(store, anchor_policy=AnchorPolicy(2, 2), auto_collect=0.0) as chain:
        for _ in range(12):
            chain.publish(training.step())
            chain.flush()
        before = len(list(store.list("data/")))
        assert chain.collect(grace=0.0, dry_run=True) is not None
        assert len(list(store.list("data/"))) == before
    first = read_commits(store)[1]["files"][0]["key"]
    assert first not in {info.key for info in store.list("data/")}
    with publisher(store) as chain:
        assert chain.version.digest == deltawire.state_digest(training.state)


def test_commits_and_shortcuts_are_signed():
    pytest.importorskip("cryptography")
    from deltawire.format.records.version_records import Commit, Shortcut

    store = MemoryStore()
    key = SigningKey.generate()
    published(store, 9, signing_key=key, anchor_policy=AnchorPolicy(3, 3))
    records = [(info, Commit) for info in store.list("commit/")] + [
        (info, Shortcut) for p in ("skip/", "anchor/") for info in store.list(p)
    ]
    assert len(records) > 12
    for info, kind in records:
        check_signature(kind.parse(store.get(info.key, limit=65536)), [key.public])


def test_the_event_of_a_publication_says_what_it_took():
    events = []
    published(MemoryStore(), 2, on_event=events.append)
    fields = [event.fields for event in events if event.name == "published"][1]
    assert fields.keys() >= {"seq", "step", "bytes", "state_bytes", "changed", "ratio", "kind"}
    assert all(fields[f"{phase}_seconds"] >= 0 for phase in ("encode", "upload", "commit", "total"))


def test_a_listener_that_fails_breaks_nothing():
    def listen(event):
        raise ZeroDivisionError

    store = MemoryStore()
    assert_chain_holds(store, published(store, 3, on_event=listen))
