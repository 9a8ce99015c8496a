"""The publisher against stores that work and stores that do not, read back by a plain reader made from docs/protocol.md alone."""

from __future__ import annotations

import contextlib
import threading

import ml_dtypes
import numpy as np
import pytest
from plain_reader import apply_files, read_checkpoint, read_commits, read_json, read_states
from support import bits_of, copied

import deltawire
from deltawire.chain.verify import verify
from deltawire.errors import (
    BadTensorName,
    CheckpointError,
    CommitOutcomeUnknown,
    DeltawireError,
    Fenced,
    LimitExceeded,
    ObjectExists,
    OutcomeUnknown,
    PublisherClosed,
    PublishError,
    RunMismatch,
    StoreFull,
    StoreUnavailable,
    UnsupportedDtype,
    UnsupportedTensor,
    VersionUnknown,
)
from deltawire.format.checkpoint import Checkpoint
from deltawire.format.records import Limits
from deltawire.format.signing import SigningKey, check_signature
from deltawire.publish import create
from deltawire.publish.cadence import AnchorPolicy
from deltawire.publish.publisher import Publisher
from deltawire.store import open_store
from deltawire.store.memory import MemoryStore
from deltawire.testing import After, Before, FaultyStore, ProcessDied, call

NEVER = AnchorPolicy(min_versions=10**6, max_versions=None)
SECOND_COMMIT = "commit/00000000000000000002"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(create, "_FIRST_PAUSE", 0.0)


class Training:
    """A model of a few tensors, and all states that it was in."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.state = {f"layer.{i}.weight": self.random.standard_normal((16, 24)).astype(ml_dtypes.bfloat16) for i in range(5)}
        self.state["norm"] = self.random.standard_normal(7).astype(np.float32)
        self.state["steps"] = np.array(0, np.int64)

    def step(self) -> dict:
        """Change a few weights in place, not in every tensor, and return a copy."""
        for name in self.random.choice(sorted(self.state), 4, replace=False):
            array = self.state[name]
            bits = array.reshape(-1).view(f"u{array.itemsize}")
            bits[self.random.integers(0, bits.size, 3)] ^= 1
        return copied(self.state)


def publisher(store, **options) -> Publisher:
    return Publisher(store, **({"segment_bytes": 1000, "anchor_policy": NEVER} | options))


def published(store, count: int = 3, training: Training | None = None, **options) -> dict[int, dict]:
    """Publish some versions; the states by sequence number."""
    training = training or Training()
    with publisher(store, **options) as chain:
        return {chain.publish(state).seq: state for state in [training.step() for _ in range(count)]}


def take_step(chain: Publisher, training: Training, states: dict[int, dict]) -> None:
    """Train, publish, and remember what was published."""
    state = training.step()
    states[chain.publish(state).seq] = state


def assert_chain_holds(store, states) -> None:
    found = read_states(store)
    assert found.keys() >= states.keys()
    for seq, state in states.items():
        assert bits_of(found[seq]) == bits_of(state), seq
    report = verify(store, deep=True)  # shortcuts included
    assert report.ok, report


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
def test_what_cannot_be_published_is_refused_before_any_upload(wrong, error):
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
            ({"resume_from": 5}, VersionUnknown),
            ({"resume_from": 0}, VersionUnknown),
            ({"attachments": tmp_path / "missing"}, CheckpointError),
        ]:
            with pytest.raises(error):
                publisher(store, **wrong)
        with pytest.raises(VersionUnknown):
            publisher(MemoryStore(), resume_from=1)
        chain.publish(Training().state)


def test_a_second_publisher_fences_the_first_for_ever():
    store = MemoryStore()
    training = Training()
    events = []
    zombie = publisher(store, on_event=events.append)
    zombie.publish(training.step())
    new = publisher(store)
    for _ in range(3):
        with pytest.raises(Fenced):
            zombie.publish(training.step())
    states = {new.publish(state).seq: state for state in [training.step(), training.step()]}
    assert [event.name for event in events].count("fenced") == 1
    zombie.close()
    new.close()
    assert not any(commit["_void"] for commit in read_commits(store))
    assert_chain_holds(store, states)


def test_a_new_publisher_goes_on_with_a_delta_where_the_last_one_ended():
    store = MemoryStore()
    training = Training()
    states = {}
    for _ in range(3):
        states |= published(store, 3, training)
    kinds = [commit["kind"] for commit in read_commits(store)]
    assert kinds == ["fence", "anchor", "delta", "delta", "fence", "delta", "delta", "delta", "fence", "delta", "delta", "delta"]
    assert_chain_holds(store, states)


def test_a_run_can_be_taken_up_again_from_an_older_version():
    store = MemoryStore()
    states = published(store, 5)
    training = Training(seed=9)
    training.state = copied(states[3])
    with publisher(store, resume_from=3) as chain:
        rewound = chain.version
        assert (rewound.kind, rewound.seq, rewound.updates, rewound.digest) == ("rewind", 7, 6, deltawire.state_digest(states[3]))
        version = chain.publish(training.step())
        assert version.kind == "delta"
    assert_chain_holds(store, states | {7: states[3], 8: training.state})
    assert read_commits(store)[7]["base"]["seq"] == 3
    with publisher(store, resume_from=8) as chain:
        assert chain.version == version, "the head needs no rewind"


def test_going_back_to_what_is_about_to_be_collected_makes_a_checkpoint_of_it():
    store = MemoryStore()
    training = Training()
    states = {}
    with publisher(store, anchor_policy=AnchorPolicy(2, 2)) as chain:
        for _ in range(9):
            take_step(chain, training, states)
        assert chain.collect(grace=3600.0).outcome == "waiting"
    with publisher(store, resume_from=2) as chain:
        assert (chain.version.kind, chain.version.digest) == ("anchor", deltawire.state_digest(states[2]))
        states[chain.version.seq] = states[2]
        training.state = copied(states[2])
        take_step(chain, training, states)
        assert chain.version.kind == "delta"
    assert_chain_holds(store, states)


@pytest.mark.parametrize("fault", [Before, After])
@pytest.mark.parametrize("kind", ["unknown", "unavailable"])
def test_a_lost_answer_to_a_commit_is_no_lost_version(fault, kind):
    store = FaultyStore(MemoryStore(), [fault(call("put_if_absent", SECOND_COMMIT), kind)])
    states = published(store, 4)
    assert_chain_holds(store, states)
    assert len(read_commits(store)) == 5


class Deaf(FaultyStore):
    """While `deaf`, no answer comes back about commits: they are created or not, but nobody learns of it."""

    def __init__(self, *, creates: bool) -> None:
        super().__init__(MemoryStore())
        self.deaf = False
        self._creates = creates

    def put_if_absent(self, key, data):
        if self.deaf and key.startswith("commit/"):
            if self._creates:
                with contextlib.suppress(ObjectExists):
                    self.inner.put_if_absent(key, data)
            raise OutcomeUnknown("no answer.")
        super().put_if_absent(key, data)

    def get(self, key, *, limit):
        if self.deaf and key.startswith("commit/"):
            raise StoreUnavailable("no answer.")
        return super().get(key, limit=limit)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("landed", [True, False])
@pytest.mark.parametrize("open_seq", [1, 3])
def test_an_open_commit_is_settled_before_the_next(landed, open_seq, background):
    store = Deaf(creates=landed)
    training = Training()
    states = {}
    with publisher(store, background=background) as chain:

        def publish(state):
            result = chain.publish(state)
            return result.result(20) if background else result

        for seq in range(1, open_seq + 6):
            state = training.step()
            given = copied(state)
            store.deaf = seq == open_seq
            if store.deaf:
                with pytest.raises(CommitOutcomeUnknown):
                    publish(given)
                with pytest.raises(CommitOutcomeUnknown):
                    publish(training.state)
            else:
                assert publish(given).seq == seq
            for array in given.values():
                array[...] = 0  # what the caller does with its memory afterwards must not matter
            states[seq] = state
    assert_chain_holds(store, states)
    for info in store.list("skip/"):
        skip = read_json(store, info.key)
        assert bits_of(apply_files(store, states[skip["base"]["seq"]], skip["files"])) == bits_of(states[skip["target"]["seq"]])


@pytest.mark.parametrize("landed", [True, False])
def test_closing_finds_out_about_an_open_commit(landed):
    store = Deaf(creates=landed)
    chain = publisher(store)
    training = Training()
    store.deaf = True
    with pytest.raises(CommitOutcomeUnknown):
        chain.publish(training.step())
    store.deaf = False
    chain.close()
    assert chain.version.seq == 1
    assert_chain_holds(store, {1: training.state})


def test_an_open_commit_of_a_publisher_that_is_fenced_meanwhile_is_settled_by_the_fence():
    store = Deaf(creates=False)
    training = Training()
    old = publisher(store)
    old.publish(training.step())
    store.deaf = True
    with pytest.raises(CommitOutcomeUnknown):
        old.publish(training.step())
    store.deaf = False
    states = published(store.inner, 2, training)
    with pytest.raises(Fenced):
        old.publish(training.step())
    old.close()
    assert_chain_holds(store, states)


@pytest.mark.parametrize("kind", ["unavailable", "full"])
def test_a_failed_upload_publishes_nothing_and_may_be_repeated(kind):
    error = {"unavailable": StoreUnavailable, "full": StoreFull}[kind]
    store = FaultyStore(MemoryStore(), [Before(call("put", "data/0000000001/00000000000000000002"), kind)])
    events = []
    training = Training()
    with publisher(store, on_event=events.append) as chain:
        chain.publish(training.step())
        second = training.step()
        with pytest.raises(error):
            chain.publish(second, step=2)
        assert chain.version.seq == 1
        assert isinstance(chain.last_error, error)
        assert chain.publish(second).seq == 2
    assert_chain_holds(store, {2: second})
    assert [(event.name, event.fields["step"]) for event in events if event.name == "publish-failed"] == [("publish-failed", 2)]


def test_a_failing_hint_is_no_failure():
    store = FaultyStore(MemoryStore(), [Before(call("put", "HEAD"), "unavailable", times=None)])
    assert_chain_holds(store, published(store))


class Interrupted(dict):
    """A state that Ctrl-C strikes upon the n-th look at a tensor."""

    def __init__(self, state, after: int) -> None:
        super().__init__(state)
        self.left = after

    def __getitem__(self, name):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().__getitem__(name)


def test_ctrl_c_at_any_look_at_the_state_loses_nothing():
    looks = 0
    while True:
        store = MemoryStore()
        training = Training()
        with publisher(store) as chain:
            states = {1: training.step()}
            chain.publish(states[1])
            state = Interrupted(training.step(), looks)
            interrupted = False
            try:
                chain.publish(state)
            except KeyboardInterrupt:
                interrupted = True
            after = training.step()
            states[chain.publish(after).seq] = after
        assert_chain_holds(store, states)
        if not interrupted:
            return
        looks += 1


def test_ctrl_c_while_a_commit_is_created_is_an_open_commit():
    class Struck(FaultyStore):
        armed = True

        def put_if_absent(self, key, data):
            super().put_if_absent(key, data)
            if key.startswith(SECOND_COMMIT) and self.armed:
                self.armed = False
                raise KeyboardInterrupt

    store = Struck(MemoryStore())
    training = Training()
    states = {}
    with publisher(store) as chain:
        take_step(chain, training, states)
        with pytest.raises(KeyboardInterrupt):
            chain.publish(training.step())
        states[2] = copied(training.state)
        take_step(chain, training, states)
    assert states.keys() == {1, 2, 3}
    assert_chain_holds(store, states)


def test_a_baseline_that_rots_in_memory_is_rebuilt_from_the_store():
    store = MemoryStore()
    training = Training()
    states = {}
    with publisher(store) as chain:
        for damage in [False, True, False]:
            take_step(chain, training, states)
            if damage:
                chain._appender.baseline.arrays["norm"][0] += 1
    assert_chain_holds(store, states)
    assert [commit["kind"] for commit in read_commits(store)] == ["fence", "anchor", "delta", "delta"]


@pytest.mark.parametrize("fault", [Before, After])
def test_a_process_that_dies_at_any_call_loses_no_version_that_it_acknowledged(fault):
    """Every call of a whole session, shortcuts included, is the last one once; then another publisher takes over."""
    index = 0
    while True:
        inner = MemoryStore()
        store = FaultyStore(inner, [fault(index, "crash")])
        training = Training()
        acknowledged = {}
        try:
            with publisher(store, anchor_policy=AnchorPolicy(3, 3)) as chain:
                for _ in range(5):
                    state = training.step()
                    acknowledged[chain.publish(state).seq] = state
        except ProcessDied:
            pass
        acknowledged |= published(inner, 2, training)
        assert_chain_holds(inner, acknowledged)
        if index >= len(store.calls):  # it was over before
            assert index > 35
            return
        index += 1


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_bad_store_does_no_acknowledged_version_is_lost(seed, background):
    """Any call may fail, before or after it was done; whoever published may try on, or give way to another publisher."""
    luck = np.random.default_rng(seed)
    inner = MemoryStore()

    def strikes(each):
        return not each.key.startswith("probe/") and luck.random() < 0.006

    faults = [fault(strikes, kind, times=None) for fault in (Before, After) for kind in ("unknown", "unavailable", "full")]
    training = Training(seed)
    acknowledged = {}
    for _ in range(4):
        store = FaultyStore(inner, faults)
        with contextlib.suppress(DeltawireError), publisher(store, background=background, anchor_policy=AnchorPolicy(3, 5)) as chain:
            for _ in range(15):
                state = training.step()
                with contextlib.suppress(DeltawireError):
                    result = chain.publish(state)
                    version = result.result(20) if background else result
                    acknowledged[version.seq] = state
    acknowledged |= published(inner, 1, training)
    assert len(acknowledged) > 3
    assert_chain_holds(inner, acknowledged)
    states = read_states(inner)
    for info in inner.list("skip/"):
        skip = read_json(inner, info.key)
        assert bits_of(apply_files(inner, states[skip["base"]["seq"]], skip["files"])) == bits_of(states[skip["target"]["seq"]])
    for info in inner.list("anchor/"):
        anchor = read_json(inner, info.key)
        assert bits_of(read_checkpoint(inner, anchor["files"])) == bits_of(states[anchor["target"]["seq"]])


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


def test_skips_can_be_left_out_and_are_counted_anew_after_an_anchor():
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
    assert [info.key[5:-5].split("-") for info in store.list("skip/")] == [[f"{seq:020}", f"{seq - 4:020}"] for seq in (5, 11)]


def test_a_failed_shortcut_is_reported_and_publishing_goes_on():
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
            states[result.result(10).seq if background else result.seq] = state
    anchors = [read_json(store, info.key) for info in store.list("anchor/")]
    assert len(anchors) >= (1 if background else 4)
    for anchor in anchors:
        seq = anchor["target"]["seq"]
        assert bits_of(read_checkpoint(store, anchor["files"])) == bits_of(states[seq])
        directory = tmp_path / str(seq)
        directory.mkdir()
        for file in anchor["files"]:
            (directory / file["name"]).write_bytes(store.get(file["key"], limit=file["size"]))
        assert {path.name for path in directory.iterdir()} >= {"config.json", "tokenizer.json", "model.safetensors.index.json"}
        assert bits_of(Checkpoint(directory)) == bits_of(states[seq])


def test_an_anchor_is_made_of_its_own_version_while_newer_ones_are_published():
    begun, go_on = threading.Event(), threading.Event()

    class Slow(FaultyStore):
        def put(self, key, data, **options):
            if threading.current_thread().name.startswith("deltawire-anchor") and key.endswith("safetensors"):
                begun.set()
                assert go_on.wait(20)
            super().put(key, data, **options)

    store = Slow(MemoryStore())
    training = Training()
    states = {}
    with publisher(store, background=True, anchor_policy=AnchorPolicy(2, 2), skips=False) as chain:
        for _ in range(12):
            state = training.step()
            states[chain.publish(state).result(10).seq] = state
            if len(states) == 3:
                assert begun.wait(20)
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
        before = len(list(store.list("data/")))
        assert chain.collect(grace=0.0, dry_run=True) is not None
        assert len(list(store.list("data/"))) == before
    first = read_commits(store)[1]["files"][0]["key"]
    assert first not in {info.key for info in store.list("data/")}
    with publisher(store) as chain:
        assert chain.version.digest == deltawire.state_digest(training.state)


def test_commits_and_shortcuts_are_signed():
    pytest.importorskip("cryptography")
    from deltawire.format.records import Commit, Shortcut

    store = MemoryStore()
    key = SigningKey.generate()
    published(store, 9, signing_key=key, anchor_policy=AnchorPolicy(3, 3))
    records = [(info, Commit) for info in store.list("commit/")] + [
        (info, Shortcut) for p in ("skip/", "anchor/") for info in store.list(p)
    ]
    assert len(records) > 12
    for info, kind in records:
        check_signature(kind.parse(store.get(info.key, limit=65536)), [key.public])


class Gate(FaultyStore):
    """Commits wait until the gate is opened."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.open = threading.Event()
        self.reached = threading.Event()

    def put_if_absent(self, key, data):
        if threading.current_thread().name == "deltawire-publish":
            self.reached.set()
            assert self.open.wait(20)
        super().put_if_absent(key, data)


def test_in_the_background_the_newest_state_supersedes_one_that_waits():
    store = Gate()
    training = Training()
    events = []
    with publisher(store, background=True, on_event=events.append) as chain:
        first = chain.publish(training.step(), step=0)
        one = copied(training.state)
        assert store.reached.wait(20)
        waiting = [chain.publish(training.step(), step=step) for step in range(1, 5)]
        last = copied(training.state)
        training.step()  # goes on in place: the snapshot is another memory
        assert not first.done()
        with pytest.raises(TimeoutError):
            chain.flush(timeout=0.01)
        with pytest.raises(TimeoutError):
            first.result(timeout=0.01)
        assert [handle.done() for handle in waiting] == [True, True, True, False]
        store.open.set()
        chain.flush(timeout=20)
        assert [handle.result(0) for handle in waiting[:3]] == [None, None, None]
        assert (first.result(0).step, waiting[3].result(0).step) == (0, 4)
        assert chain.version.step == 4
    assert_chain_holds(store, {1: one, 2: last})
    assert [event.fields["step"] for event in events if event.name == "superseded"] == [1, 2, 3]


def test_background_versions_are_bit_for_bit_whatever_the_buffers():
    store = MemoryStore()
    training = Training()
    states = {}
    with publisher(store, background=True) as chain:
        handles = []
        for step in range(60):
            state = training.step()
            handles.append((chain.publish(training.state), state))
            if step == 30:
                training.state["later"] = np.zeros(9, np.float32)
        chain.flush(timeout=30)
        for handle, state in handles:
            version = handle.result(0)
            if version is not None:
                states[version.seq] = state
    assert len(states) >= 2
    assert_chain_holds(store, states)
    for info in store.list("skip/"):
        skip = read_json(store, info.key)
        found = apply_files(store, states[skip["base"]["seq"]], skip["files"])
        assert bits_of(found) == bits_of(states[skip["target"]["seq"]])


def test_background_errors_are_raised_once_by_the_next_call():
    store = FaultyStore(MemoryStore(), [Before(call("put", "data/"), "full", times=2)])
    training = Training()
    with publisher(store, background=True) as chain:
        failed = chain.publish(training.step())
        with pytest.raises(StoreFull):
            chain.flush(timeout=20)
        assert failed.done()
        chain.flush()
        again = chain.publish(training.step())
        with pytest.raises(StoreFull):
            again.result(20)
        final = training.step()
        assert chain.publish(final).result(20).seq == 1, "what result() raised is not raised again"
    assert_chain_holds(store, {1: final})


def test_closing_raises_what_nobody_has_heard_of_yet():
    store = FaultyStore(MemoryStore(), [Before(call("put", "data/"), "full")])
    chain = publisher(store, background=True)
    chain.publish(Training().state)
    with pytest.raises(StoreFull):
        chain.close()
    chain.close()
    with pytest.raises(PublisherClosed):
        chain.publish(Training().state)
    with pytest.raises(PublisherClosed):
        chain.flush()


def test_closing_finishes_what_was_given():
    store = Gate()
    chain = publisher(store, background=True)
    training = Training()
    chain.publish(training.step())
    assert store.reached.wait(20)
    last = chain.publish(training.step())
    threading.Timer(0.05, store.open.set).start()
    chain.close()
    assert last.result(0).seq == 2
    assert_chain_holds(store, {2: training.state})


def test_leaving_by_an_error_drops_what_has_not_begun_and_does_not_hide_the_error():
    store = Gate()
    handles = []

    def train():
        with publisher(store, background=True) as chain:
            handles.append(chain.publish(Training().state))
            assert store.reached.wait(20)
            handles.append(chain.publish(Training().state))
            threading.Timer(0.05, store.open.set).start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert handles[0].result(0).seq == 1
    with pytest.raises(PublisherClosed):
        handles[1].result(0)


def test_a_background_publisher_that_is_fenced_says_so_at_every_later_call():
    store = MemoryStore()
    chain = publisher(store, background=True)
    chain.publish(Training().state).result(20)
    publisher(store).close()
    with pytest.raises(Fenced):
        chain.publish(Training().state).result(20)
    for _ in range(2):
        with pytest.raises(Fenced):
            chain.publish(Training().state)
    chain.close()


def test_a_background_publisher_resumes_too():
    store = MemoryStore()
    training = Training()
    states = {}
    for _ in range(3):
        with publisher(store, background=True) as chain:
            for _ in range(3):
                state = training.step()
                states[chain.publish(state).result(20).seq] = state
    assert_chain_holds(store, states)
    assert [commit["kind"] for commit in read_commits(store)].count("anchor") == 1


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


def test_a_signal_handler_may_close_in_the_middle_of_a_publication():
    """It runs on the thread that publishes, as listeners do."""
    store = MemoryStore()
    states, training = {}, Training()

    def handle(event):
        if event.name == "published" and event.fields["seq"] == 2:
            chain.close()
            with pytest.raises(PublishError):
                chain.publish(training.state)

    chain = publisher(store, on_event=handle)
    take_step(chain, training, states)
    take_step(chain, training, states)
    with pytest.raises(PublisherClosed):
        take_step(chain, training, {})
    chain.close()
    assert_chain_holds(store, states)
