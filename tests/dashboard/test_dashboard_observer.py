"""The observer reads a run from its store alone, a bounded part of it, and shows what is wrong instead of failing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shown_run import MARKUP, ShownRun
from toy_chain import ToyChain, first_state

from deltawire.dashboard import Observer, ObserverOptions
from deltawire.dashboard.chain_scan import SAMPLES
from deltawire.dashboard.member_history import MOST_POINTS, MOST_SENT, MemberHistory, newest_points
from deltawire.dashboard.read_only import ReadOnlyStore
from deltawire.dashboard.version_details import compare
from deltawire.errors import StoreError, StoreUnavailable
from deltawire.format.records.member_records import Heartbeat, UpdateReport
from deltawire.store import Store, fleet_keys, keys
from deltawire.store.memory import MemoryStore
from deltawire.store.wrapped import StoreCall, WrappedStore


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ShownRun]:
    shown = ShownRun(tmp_path / "run")
    yield shown
    shown.close()


def seen(store: Store, **options: Any) -> dict[str, Any]:
    with Observer(store, ObserverOptions(**options)) as observer:
        assert observer.look()
        return observer.sections()


def toy_store() -> tuple[MemoryStore, ToyChain]:
    store = MemoryStore()
    chain = ToyChain(store)
    chain.anchor(first_state())
    return store, chain


def test_the_sections_tell_what_the_store_holds(run: ShownRun) -> None:
    for _ in range(4):
        run.publish()
    run.beat("steady")
    run.board()
    run.pin("steady", run.seqs[1])
    sections = seen(run.store)
    assert sections["status"]["run"] == "shown run"
    assert [entry["kind"] for entry in sections["chain"]["entries"]] == ["fence", "anchor", "delta", "delta", "delta", "delta"]
    assert sections["chain"]["version"] == 5
    assert [seq for seq, _ in sections["chain"]["skips"]] == [run.seqs[4]]
    assert sections["chain"]["entries"][-1]["metrics"] == {"reward": 0.14, "mismatch_kl": 2e-05}
    assert sections["members"]["shown"][0]["name"] == "steady"
    assert sections["members"]["shown"][0]["behind_ms"] == 230
    assert sections["members"]["shown"][0]["update"]["pause_us"] == 2500
    assert sections["readers"]["pins"][0]["seq"] == run.seqs[1]
    assert sections["faults"] == []


def test_a_rewind_and_what_it_abandons_are_shown() -> None:
    store, chain = toy_store()
    chain.grow(2)
    chain.rewind(1)
    sections = seen(store)
    flags = [(entry["kind"], entry["flags"]) for entry in sections["chain"]["entries"][2:]]
    assert flags == [("delta", ["abandoned"]), ("delta", ["abandoned"]), ("rewind", [])]
    assert "went back to commit 1" in sections["faults"][0]["text"]


def test_a_corrupt_commit_is_an_entry_with_a_reason() -> None:
    store, chain = toy_store()
    chain.grow(5)
    store.put(keys.commit_key(4), b"{nonsense")
    sections = seen(store)
    entries = sections["chain"]["entries"]
    assert [entry["kind"] for entry in entries] == ["fence", "anchor", "delta", "delta", "corrupt", "delta", "delta"]
    assert entries[4]["problem"]
    assert sections["faults"][0]["level"] == "bad"
    assert "Commit 4" in sections["faults"][0]["text"]


def test_a_corrupt_head_is_shown_too() -> None:
    store, chain = toy_store()
    chain.grow(2)
    store.put(keys.commit_key(3), b"")
    sections = seen(store)
    assert sections["chain"]["head"] == 3
    assert sections["chain"]["entries"][-1]["kind"] == "corrupt"


def test_a_commit_that_was_exchanged_is_corrupt_although_it_is_well_formed() -> None:
    store, chain = toy_store()
    chain.grow(3)
    other = MemoryStore()
    forged = ToyChain(other)
    forged.run = chain.run
    forged.anchor(first_state(1))
    forged.grow(1)
    data = json.loads(other.get(keys.commit_key(2), limit=1 << 16)) | {"id": chain.run.id}
    store.put(keys.commit_key(2), json.dumps(data, sort_keys=True, separators=(",", ":")).encode())
    entry = seen(store)["chain"]["entries"][2]
    assert entry["kind"] == "corrupt"
    assert "another than the one that later commits link to" in entry["problem"]


def test_missing_data_of_the_newest_version_are_a_fault() -> None:
    store, chain = toy_store()
    chain.grow(1)
    store.delete([chain.commits[2].files[0].key])
    sections = seen(store)
    assert "missing" in sections["chain"]["entries"][2]["problem"]
    assert sections["faults"][0]["text"].startswith("Version 2 cannot be used")


def test_damaged_data_are_found_when_details_are_asked_for() -> None:
    store, chain = toy_store()
    chain.grow(2)
    entry = chain.commits[2].files[0]
    data = bytearray(store.get(entry.key, limit=1 << 20))
    data[-1] ^= 1
    store.put(entry.key, bytes(data))
    with Observer(store) as observer:
        observer.look()
        details = observer.version(seq=2)
        observer.look()
        assert details["problem"]
        assert observer.sections()["chain"]["entries"][2]["problem"] == details["problem"]
        assert observer.version(seq=3)["problem"] is None, "the files of the version after it are sound"
        assert "another version" in observer.version(seq=3)["note"]


def test_details_count_the_changes_of_each_tensor_exactly(run: ShownRun) -> None:
    run.publish()
    with Observer(run.store) as observer:
        observer.look()
        details = observer.version(seq=run.seqs[-1])
    assert details["problem"] is None
    assert details["note"] is None
    assert sum(one["changed"] for one in details["tensors_changed"]) == details["changed"] > 0
    layer = next(one for one in details["tensors_changed"] if one["name"] == "model.layers.1.mlp.up_proj.weight")
    assert layer["elements"] == 1024
    assert layer["changed"] == 51
    assert sum(layer["steps"]) == 51
    assert sum(sum(payload["steps"]) for segment in details["segments"] for payload in segment["payloads"]) == details["changed"]


def test_steps_are_counted_in_representable_values() -> None:
    old = np.array([1.0, -1.0, 0.0, 5.0], np.float32)
    new = old.copy()
    bits = new.view(np.uint32)
    bits[0] += 1
    bits[1] += 6
    new[2] = -0.0
    (row,) = compare({"w": old}, {"w": new})
    assert row == {"name": "w", "dtype": "F32", "elements": 4, "changed": 3, "steps": [2, 0, 1]}


def test_packed_codes_are_counted_one_by_one() -> None:
    (row,) = compare({"w.weight_packed": np.array([0x21, 0x00], np.uint8)}, {"w.weight_packed": np.array([0x12, 0x00], np.uint8)})
    assert (row["elements"], row["changed"], row["steps"]) == (4, 2, [2])


def test_details_of_a_large_version_are_left_out(run: ShownRun) -> None:
    run.publish()
    with Observer(run.store, ObserverOptions(detail_bytes=10_000)) as observer:
        observer.look()
        details = observer.version(seq=run.seqs[-1])
    assert details["tensors_changed"] is None
    assert "not" in details["note"]


def test_hostile_texts_are_cut_and_numbers_are_finite(run: ShownRun) -> None:
    run.publish({"reward": "nan", "loss": "1e999", "entropy": "x" * 1000, "note": MARKUP + "\x00" * 500})
    run.beat("a", reason="r" * 500, state="leaving")
    run.report("engine", "refused", "e" * 3000)
    run.store.put(fleet_keys.member_key("broken"), b"no record")
    sections = seen(run.store)
    assert sections["chain"]["entries"][-1]["metrics"] == {"mismatch_kl": 2e-05}
    assert all(len(fault["text"]) < 500 for fault in sections["faults"])
    assert [one["name"] for one in sections["members"]["shown"]] == ["a"]


def test_engines_that_serve_nothing_are_faults(run: ShownRun) -> None:
    run.publish()
    run.report("engine-1", "fenced", "half-way.")
    run.report("engine-2", "lost", "no answer.")
    found = {fault["text"]: fault["level"] for fault in seen(run.store)["faults"]}
    assert found == {
        "The engine engine-1 serves nothing, because an update failed half-way: half-way.": "bad",
        "The engine engine-2 serves nothing, because its server does not answer: no answer.": "bad",
    }


def outcomes(observer: Observer) -> dict[str, str]:
    return {bar[0]: bar[6] for bar in observer.sections()["tasks"]["bars"]}


def test_tasks_are_followed_from_lease_to_acknowledgement(run: ShownRun) -> None:
    with Observer(run.store) as observer:
        run.round(0, 3)
        run.lease(0, 0, "steady")
        run.lease(0, 1, "slow")
        run.lease(0, 2, "lost")
        observer.look()
        assert outcomes(observer) == {
            "steady": "working",
            "slow": "working",
            "lost": "working",
        }
        key = run.deliver(0, 0)
        run.deliver(0, 1)
        observer.look()
        assert outcomes(observer) == {
            "steady": "uploaded",
            "slow": "uploaded",
            "lost": "working",
        }
        run.acknowledge(0, {"steady": key})
        observer.look()
        assert outcomes(observer) == {"steady": "accepted", "slow": "unused", "lost": "lost"}
        assert observer.sections()["tasks"]["rounds"][0]["acknowledged"]
        run.store.delete([info.key for info in run.store.list(fleet_keys.LEASES)])
        observer.look()
        assert len(observer.sections()["tasks"]["bars"]) == 3, "what was seen stays after the trainer has swept it"


def test_the_history_of_lag_comes_from_leases_and_then_from_heartbeats(run: ShownRun) -> None:
    old = run.seqs[-1]
    run.publish()
    run.round(0, 1)
    run.lease(0, 0, "steady")
    run.beat("steady", lag=0)
    with Observer(run.store) as observer:
        observer.look()
        run.beat("steady", lag=3, seq=old)
        observer.look()
        history = observer.sections()["history"]["steady"]
    assert [lag for _, lag in history["lag"]] == [0, 3]


def update(pause_us: int | None) -> UpdateReport:
    return UpdateReport(pause_us=pause_us, total_us=90_000)


def test_the_pause_of_each_update_is_kept_while_the_observer_looks(run: ShownRun) -> None:
    first = run.seqs[-1]
    second = run.publish().seq
    with Observer(run.store) as observer:
        for seq, pause in [(first, 2500), (first, 2500), (second, 2500), (second, 2500), (second, None), (second, 4000)]:
            run.beat("steady", seq=seq, update=update(pause))
            observer.look()
        run.beat("new", seq=None, step=None, update=None)
        observer.look()
        history = observer.sections()["history"]
    assert [point[1:] for point in history["steady"]["pause"]] == [(0.0025, first), (0.0025, second), (0.004, second)]
    assert history["new"] == {"lag": [], "pause": []}


def test_the_history_is_bounded_for_each_member_and_for_all_together() -> None:
    one = MemberHistory()
    for number in range(3 * MOST_POINTS):
        one.note(heartbeat(seq=number, lag=number % 2, update=update(number)), float(number))
    assert (len(one.lags), len(one.pauses)) == (MOST_POINTS, MOST_POINTS)
    assert one.pauses[-1] == (719.0, 0.000719, 719)
    points = list(one.pauses)
    assert len(newest_points(points, 4)) == MOST_POINTS
    assert len(newest_points(points, 512)) * 512 <= MOST_SENT
    assert newest_points(points, 10**6)[-1] == points[-1]


def heartbeat(**changes: Any) -> Heartbeat:
    fields: dict[str, Any] = {"state": "working", "seq": 1, "step": 0, "lag": 0, "tokens": 0, "busy_ms": 0, "working": (), "time": 0}
    return Heartbeat(id="ab" * 16, member="m", session="cd" * 16, **{**fields, **changes})


def test_what_members_took_is_counted_from_the_sizes_in_commits(run: ShownRun) -> None:
    run.beat("steady")
    with Observer(run.store) as observer:
        observer.look()
        versions = [run.publish() for _ in range(3)]
        run.beat("steady", seq=versions[1].seq)
        observer.look()
        run.beat("steady", seq=versions[2].seq + 5)
        observer.look()
        observer.look()
        sections = observer.sections()
    deltas = [entry for entry in sections["chain"]["entries"] if entry["kind"] == "delta"]
    expected = {"versions": 3, "bytes": sum(one["bytes"] for one in deltas), "full": sum(one["state_bytes"] for one in deltas)}
    assert sections["members"]["shown"][0]["taken"] == expected


def test_a_look_without_news_reads_little(run: ShownRun) -> None:
    for _ in range(6):
        run.publish()
    run.beat("steady")
    with Observer(run.store) as observer:
        observer.look()
        before = observer.requests, observer.read_bytes
        observer.look()
        assert observer.requests - before[0] < 20
        assert observer.read_bytes - before[1] < 20_000


class LongChain(WrappedStore):
    """Answers for slots that do not exist with the commits of a short chain, so that the chain seems to have a million commits."""

    length = 1_000_000

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.read_seqs: set[int] = set()

    def watch(self, call: StoreCall) -> Any:
        seq = keys.parse_commit_key(call.key)
        if seq is not None and call.operation == "get":
            self.read_seqs.add(seq)
        return super().watch(call)

    def head(self, key: str) -> Any:
        seq = keys.parse_commit_key(key)
        return self.inner.head(keys.commit_key(0)) if seq is not None and seq < self.length else self.inner.head(key)


def test_only_a_bounded_part_of_a_long_chain_is_read() -> None:
    store, _ = toy_store()
    long = LongChain(store)
    with Observer(long, ObserverOptions(window=50)) as observer:
        observer.look()
        sections = observer.sections()
        assert sections["chain"]["head"] == long.length - 1
        assert len(long.read_seqs) <= 50 + SAMPLES + 1
        assert len(json.dumps(sections)) < 400_000


def test_a_fleet_of_any_size_is_read_in_turns_and_listed_up_to_a_limit(run: ShownRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltawire.dashboard.fleet_scan.MOST_MEMBERS", 8)
    monkeypatch.setattr("deltawire.dashboard.fleet_scan._HEARTBEATS_A_LOOK", 3)
    for number in range(12):
        run.beat(f"m{number:02}")
    with Observer(run.store) as observer:
        observer.look()
        members = observer.sections()["members"]
        assert (members["listed"], len(members["shown"])) == (12, 8)
        for number in range(12):
            run.beat(f"m{number:02}", lag=5)
        changed = []
        for _ in range(3):
            observer.look()
            changed.append(sum(one["lag"] == 5 for one in observer.sections()["members"]["shown"]))
        assert changed == [3, 6, 8]


class Unreliable(WrappedStore):
    """Fails every call while `down` is set."""

    down = False

    def watch(self, call: StoreCall) -> Any:
        if self.down:
            raise StoreUnavailable(f"{call.operation} of {call.key} failed.")
        return super().watch(call)


def test_after_a_failed_look_the_last_one_is_shown_with_the_reason() -> None:
    store, chain = toy_store()
    unreliable = Unreliable(store)
    with Observer(unreliable) as observer:
        assert observer.look()
        unreliable.down = True
        chain.grow(1)
        assert not observer.look()
        sections = observer.sections()
        assert "failed" in sections["status"]["problem"]
        assert sections["chain"]["version"] == 1
        unreliable.down = False
        assert observer.look()
        assert observer.sections()["chain"]["version"] == 2
        assert observer.sections()["status"]["problem"] is None


def test_a_store_that_was_set_back_is_noticed() -> None:
    store, chain = toy_store()
    chain.grow(3)
    with Observer(store) as observer:
        observer.look()
        last = store.get(keys.commit_key(4), limit=1 << 16)
        store.delete([keys.commit_key(4), keys.HEAD])
        for _ in range(15):
            observer.look()
        assert "set back" in observer.sections()["faults"][0]["text"]
        store.put(keys.commit_key(4), last)
        observer.look()
        assert observer.sections()["faults"] == []


def test_only_changed_sections_are_told_again(run: ShownRun) -> None:
    with Observer(run.store) as observer:
        observer.look()
        number, sections = observer.changes(0, 0)
        assert set(sections) == {"status", "chain", "channels", "traffic", "gates", "members", "tasks", "readers", "faults"}
        run.beat("steady")
        observer.look()
        number, sections = observer.changes(number, 0)
        assert set(sections) == {"status", "members"}
        assert observer.changes(number, 0) == (number, {})
        assert len(observer.changes(number + 1000, 0)[1]) == 9, "a number of an earlier process"


def test_nothing_can_be_written_through_the_dashboards_store() -> None:
    store = ReadOnlyStore(MemoryStore())
    for write in (lambda: store.put("a", b""), lambda: store.put_if_absent("a", b""), lambda: store.delete(["a"])):
        with pytest.raises(StoreError, match="only reads"):
            write()
