"""The doctor names what is wrong with a run and what to do, changes nothing, and never fails itself."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relayed_chain import relay_once
from servers import free_port
from shown_run import ShownRun
from support import publisher_arguments
from toy_chain import ToyChain, first_state, next_state

from deltawire import Publisher
from deltawire.chain.reader_options import ReaderOptions
from deltawire.chain.records.published_relays import publish_relay
from deltawire.chain.records.reports import LOST, QUARANTINED, REFUSED, SERVING, put_report
from deltawire.cli.doctor.chain_checks import ChainState
from deltawire.cli.doctor.engine_checks import OLDEST, check_packages, is_older
from deltawire.cli.doctor.examine import _judge_rate, examine
from deltawire.cli.doctor.findings import Examination
from deltawire.dashboard.read_only import ReadOnlyStore
from deltawire.errors import StoreDenied
from deltawire.format.records.collection_records import Mark, Pin
from deltawire.format.records.signing import SigningKey
from deltawire.store import Store, fleet_keys, keys, open_store
from deltawire.store.base import ObjectInfo
from deltawire.store.memory import MemoryStore
from deltawire.store.wrapped import WrappedStore
from deltawire.testing.faulty_store import Before, FaultyStore

SMALL = 100_000
"""Bytes for the measurement of bandwidth."""
Found = list[tuple[str, str, str, str]]


def look(store: Store, level: str | None = None, **options: Any) -> Found:
    """Return check, level, text and remedy of the findings, or of those of one level."""
    found = examine(store, "URL", **{"test_bytes": SMALL, **options}).findings
    assert all(each.remedy or each.level in ("ok", "note") for each in found), "a problem without advice"
    return [(each.check, each.level, each.what, each.remedy) for each in found if level in (None, each.level)]


def wrong(store: Store, **options: Any) -> str:
    """Return the text and the advice of the only thing that is wrong."""
    ((check, _, what, remedy),) = look(store, "wrong", **options)
    return f"{check}: {what} | {remedy}"


def warned(store: Store, **options: Any) -> str:
    ((check, _, what, remedy),) = look(store, "warning", **options)
    return f"{check}: {what} | {remedy}"


@pytest.fixture
def shown() -> Iterator[ShownRun]:
    run = ShownRun(MemoryStore())
    for _ in range(3):
        run.publish()
    yield run
    run.close()


@pytest.fixture
def toy() -> ToyChain:
    chain = ToyChain(MemoryStore())
    chain.anchor(first_state())
    chain.grow(4)
    return chain


def contents(store: Store) -> dict[str, bytes]:
    return {info.key: store.get(info.key, limit=info.size) for info in store.list("")}


def test_a_sound_run_is_well_and_stays_as_it_is(shown: ShownRun) -> None:
    shown.beat("member-1")
    shown.board(lease_seconds=10**6)
    shown.pin("reader-1", shown.seqs[-1])
    shown.report("engine-1", SERVING, None)
    before = contents(shown.store)
    found = look(shown.store)
    assert {level for _, level, _, _ in found} == {"ok", "note"}
    expected = {"access", "create if absent", "clock", "link", "chain", "signatures", "data", "full checkpoints", "collection"}
    assert {check for check, *_ in found} == expected | {"members", "readers", "engines", "codec", "packages"}
    assert contents(shown.store) == before


def test_with_read_only_nothing_is_written(shown: ShownRun) -> None:
    found = examine(ReadOnlyStore(shown.store), "URL", read_only=True, test_bytes=SMALL)
    assert found.is_well
    assert {"latency_seconds", "read_bytes_per_second"} < found.measured.keys()
    assert not {"write_bytes_per_second", "clock_offset_seconds"} & found.measured.keys()


class Denying(WrappedStore):
    """A store whose credentials do not allow some calls."""

    def __init__(self, inner: Store, *denied: str) -> None:
        super().__init__(inner)
        self._denied = denied

    def _check(self, operation: str) -> None:
        if operation in self._denied:
            raise StoreDenied(f"{operation} is denied.")

    def get(self, key: str, *, limit: int) -> bytes:
        self._check("get")
        return self.inner.get(key, limit=limit)

    def put(self, key: str, data: Any, **options: Any) -> None:
        self._check("put")
        self.inner.put(key, data, **options)

    def delete(self, keys: Any) -> None:
        self._check("delete")
        self.inner.delete(keys)


def test_rights_that_are_missing_are_named(shown: ShownRun) -> None:
    assert "reading is not allowed: get is denied" in wrong(Denying(shown.store, "get"))
    assert "may not write | Readers then need `--no-pin`" in warned(Denying(shown.store, "put", "delete"))
    assert "deleting does not | `deltawire gc`" in warned(Denying(shown.store, "delete"))
    assert len(list(shown.store.list(keys.PROBES))) == 2  # those that could not be deleted: its own, and the one of the probe


class Overwriting(WrappedStore):
    """A store that accepts create-if-absent and ignores the condition, as some S3 servers do."""

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.inner.put(key, data)


def test_a_store_that_overwrites_is_wrong(shown: ShownRun) -> None:
    assert "create if absent: " in wrong(Overwriting(shown.store))


NOW = int(time.time()) + 0.5
"""It is exact as a float, so that differences to it are exact, too."""


class Dated(WrappedStore):
    """A store whose clock, as the doctor measures it, stands still."""

    def __init__(self, inner: Store, now: float) -> None:
        super().__init__(inner)
        self._now = datetime.fromtimestamp(now, timezone.utc)

    def head(self, key: str) -> ObjectInfo:
        info = self.inner.head(key)
        return replace(info, modified=self._now) if key.startswith(keys.PROBES) else info


def look_later(store: Store, seconds: float) -> Found:
    """Return the warnings of a doctor who looks this many seconds from now."""
    then = time.time() + seconds
    return look(Dated(store, then), "warning", clock=lambda: then)


@pytest.mark.parametrize(
    ("store_time", "own_time", "level", "text"),
    [
        (NOW, NOW, "ok", "differ by less than 5 s"),
        (NOW, NOW + 4, "ok", "differ by less than 5 s"),
        (NOW, NOW + 30, "warning", "the store's clock is 30 s behind"),
        (NOW, NOW - 30, "warning", "the store's clock is 30 s ahead of"),
        (NOW, NOW - 600, "wrong", "the store's clock is 10 min ahead of this machine's. Services refuse requests"),
        (int(NOW), int(NOW) + 5.9, "ok", "differ by less than 5 s"),  # many stores tell whole seconds
        (int(NOW), int(NOW) + 6.1, "warning", "the store's clock is 5.1 s behind"),
    ],
)
def test_a_skewed_clock_is_measured(shown: ShownRun, store_time: float, own_time: float, level: str, text: str) -> None:
    (found,) = [each for each in look(Dated(shown.store, store_time), clock=lambda: own_time) if each[0] == "clock"]
    assert found[1] == level
    assert text in found[2]
    assert level == "ok" or "NTP" in found[3]


def test_ages_are_judged_by_the_clock_of_the_store(shown: ShownRun) -> None:
    """A machine whose clock is two hours ahead does not call members silent and pins expired."""
    shown.beat("member-1")
    shown.board(lease_seconds=3600)
    shown.pin("reader-1", shown.seqs[-1])
    now = time.time()
    found = look(Dated(shown.store, now), clock=lambda: now + 7200)
    assert {check for check, level, *_ in found if level not in ("ok", "note")} == {"clock"}


def test_a_publisher_whose_clock_is_ahead_is_named(toy: ToyChain) -> None:
    newest = toy.commits[-1]
    toy.store.put(keys.commit_key(newest.seq), replace(newest, time=int((time.time() + 10_900) * 1000)).to_bytes())
    assert "clock: the publisher's clock was 3.0 h ahead" in warned(toy.store)


def test_nothing_is_published(tmp_path: Path) -> None:
    assert "chain: nothing is published" in wrong(MemoryStore())
    assert "Check the URL" in wrong(open_store(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    occupied = MemoryStore()
    occupied.put("model.safetensors", b"weights")
    assert ["nothing is published" in what or "not a chain" in what for _, _, what, _ in look(occupied, "wrong")] == [True, True]


def test_data_that_new_readers_need_are_missing(toy: ToyChain) -> None:
    (first, *_) = toy.commits[1].files
    toy.store.delete([first.key])
    text = wrong(toy.store)
    assert "data: no new reader can get to the newest version" in text
    assert first.key in text
    assert "deltawire verify --deep URL" in text


def test_data_of_another_size_are_named(toy: ToyChain) -> None:
    entry = toy.commits[-1].files[0]
    toy.store.put(entry.key, b"short")
    assert entry.key in wrong(toy.store)


def test_a_damaged_shortcut_is_a_warning(toy: ToyChain) -> None:
    anchor = toy.add_anchor(5)
    assert not look(toy.store, "warning")
    toy.store.delete([anchor.files[0].key])
    text = warned(toy.store)
    assert "all of which exist, but shorter routes are damaged" in text
    assert anchor.files[0].key in text


def test_a_missing_attachment_is_named(shown: ShownRun) -> None:
    for info in list(shown.store.list(keys.DATA)):
        if info.key.endswith(".file") and info.size == 2:
            shown.store.delete([info.key])
    assert "files of the newest version are missing: config.json | Publish a directory" in wrong(shown.store)


def test_a_commit_that_cannot_be_read_is_wrong(toy: ToyChain) -> None:
    toy.store.put(keys.commit_key(5), b"{}")
    (found,) = look(toy.store, "wrong")
    assert found[0] == "chain"
    assert found[3]


def test_void_commits_are_told(toy: ToyChain) -> None:
    toy.claim(2)
    assert not look(toy.store, "warning")
    toy.epoch = 1
    toy.delta(next_state(toy.state, 99))
    assert "chain: the newest commit is void" in warned(toy.store)


def test_a_forged_mark_is_wrong(toy: ToyChain) -> None:
    mark = Mark(toy.run.id, 0, 1, 10**6, "ab" * 16, 0)
    toy.store.put(keys.mark_key(0), mark.to_bytes())
    assert "No collector wrote it" in wrong(toy.store)


def test_full_checkpoints_that_are_never_made_or_never_collected(toy: ToyChain) -> None:
    toy.grow(110)
    assert "full checkpoints: the newest is 114 versions old" in warned(toy.store)
    for seq in range(20, 112, 15):
        toy.add_anchor(seq)
    notes = [what for check, _, what, _ in look(toy.store, "note") if check == "collection"]
    assert notes == ["7 full checkpoints could be reduced to two"]


def test_signatures(tmp_path: Path) -> None:
    key, other = SigningKey.generate(), SigningKey.generate()
    store = MemoryStore()
    with Publisher(store, "run", **publisher_arguments(signing_key=key)) as publisher:
        publisher.publish({"w": np.zeros(100, np.float16)}, step=0)
    told = {check: (level, what, remedy) for check, level, what, remedy in look(store)}
    assert told["signatures"][0] == "note"
    assert f"--trust {key.public}" in told["signatures"][2]
    trusting = look(store, options=ReaderOptions(run="run", trusted_keys=[key.public]))
    assert ("signatures", "ok") in [(check, level) for check, level, *_ in trusting]
    assert "chain: " in wrong(store, options=ReaderOptions(run="run", trusted_keys=[other.public]))


def test_members_that_lag_are_silent_or_failed_are_named(shown: ShownRun) -> None:
    shown.board(lease_seconds=10_000)
    shown.beat("late", lag=9)
    shown.beat("broken", state="left", reason="no memory")
    shown.beat("wrong-clock", time=int((time.time() + 10_000) * 1000))
    found = [what for _, _, what, _ in look(shown.store, "warning")]
    assert found[0].endswith("broken left because of an error: no memory")
    assert "1 member up to 9 versions behind: late" in found
    assert any("the clocks of wrong-clock" in what for what in found)
    later = look_later(shown.store, 30_000)
    silent = [what for check, _, what, _ in later if check == "members" and "silent" in what]
    assert silent == ["2 members silent for up to 8.3 h: late, wrong-clock"]


def test_a_trainer_that_publishes_nothing_although_members_wait(shown: ShownRun) -> None:
    shown.beat("member-1")
    shown.board(lease_seconds=10**6)
    assert not [check for check, *_ in look(shown.store) if check == "trainer"]
    later = look_later(shown.store, 5400)
    assert [what.partition(",")[0] for check, _, what, _ in later if check == "trainer"] == ["nothing was published for 1.5 h"]
    shown.board(lease_seconds=10**6, stop=True)  # the run is over
    assert not look_later(shown.store, 5400)


def test_readers_and_engines_that_lag_or_failed_are_named(toy: ToyChain) -> None:
    toy.grow(10)
    run, store = toy.run, toy.store
    put_report(store, run, "engine-1", QUARANTINED, None, "half \x1b[2J written")
    put_report(store, run, "engine-2", REFUSED, 3, "other shapes")
    put_report(store, run, "engine-3", SERVING, 2)
    put_report(store, run, "engine-4", SERVING, 15)
    put_report(store, run, "engine-5", LOST, None, "no answer")
    store.put(keys.pin_key("reader-1"), Pin(run.id, "reader-1", 3, 3600).to_bytes())
    store.put(keys.pin_key("reader-2"), Pin(run.id, "reader-2", 15, 3600).to_bytes())
    found = look(store)
    told = {what.split(" ")[0]: level for check, level, what, _ in found if check == "engines"}
    assert told == {"engine-1": "wrong", "engine-2": "warning", "engine-3": "warning", "engine-5": "wrong"}
    assert "1 reader up to 12 versions behind: reader-1" in [what for check, _, what, _ in found if check == "readers"]
    later = look_later(store, 5000)
    silent = [what for check, _, what, _ in later if check == "readers"]
    assert silent == ["2 pins expired, so these readers ended or hang: reader-1, reader-2"]


def test_relays_are_asked_only_if_the_user_wants_it(tmp_path: Path) -> None:
    with open_store(tmp_path / "origin") as origin, open_store(tmp_path / "copy") as copy:
        chain = ToyChain(origin)
        chain.anchor(first_state())
        relay_once(origin, copy)
        publish_relay(origin, chain.run, "near", copy.url)
        publish_relay(origin, chain.run, "empty", (tmp_path / "empty").as_uri())
        ((_, _, what, remedy),) = [each for each in look(origin) if each[0] == "relays"]
        assert (what, remedy) == ("2 relays not asked", "Pass --relays to ask the stores of their copies.")
        told = {level: what for check, level, what, _ in look(origin, relays=True) if check == "relays"}
        assert told["ok"] == f"{copy.url} is up to date"
        assert "empty" in told["warning"]
        chain.grow(9)
        told = [what for check, _, what, _ in look(origin, "warning", relays=True) if check == "relays"]
        assert f"{copy.url} is 9 versions behind" in told


def test_after_any_request_that_failed_the_rest_is_checked(shown: ShownRun) -> None:
    shown.beat("member-1")
    shown.board(lease_seconds=10**6)
    shown.pin("reader-1", shown.seqs[-1])
    whole = FaultyStore(shown.store)
    assert not look(whole, "wrong")
    for failing in range(len(whole.calls)):
        store = FaultyStore(shown.store, [Before(failing, "unavailable")])
        levels = {level for _, level, *_ in look(store)}
        call = store.calls[failing]
        # The probe ignores that its deletion fails, because not every writer may delete. The board is a hint.
        assert levels > {"ok", "note"} or levels & {"wrong"} or call.op == "delete" or call.key == fleet_keys.BOARD, call
        left = [info.key for info in shown.store.list(keys.PROBES)]
        assert len(left) <= (call.op == "delete")
        shown.store.delete(left)


def test_a_link_that_is_too_slow_for_the_run_is_a_warning(toy: ToyChain) -> None:
    versions = [replace(commit, time=10_000 * number) for number, commit in enumerate(toy.commits[1:])]
    chain = ChainState(versions, versions, ())
    size = chain.update_bytes
    assert chain.interval == 10.0
    assert size is not None
    for rate, expected in ((size // 20, ["link"]), (size // 2, [])):
        found = Examination(measured={"read_bytes_per_second": rate})
        _judge_rate(found, chain)
        assert [each.check for each in found.findings] == expected


def test_old_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Examination()
    check_packages(found, {"vllm": "0.31.1", "torch": "2.13.0+cpu", "sglang": "0.5.9"}.get)
    told = [(each.level, each.what.split(" is ")[0]) for each in found.findings if each.check == "packages"]
    assert told == [("warning", "vllm 0.31.1"), ("note", "sglang 0.5.9")]
    assert [is_older(*pair) for pair in (("0.32.0", "0.32"), ("0.9", "0.32"), ("1.0rc1", "0.32"), ("dev", "0.32"))] == [0, 1, 0, 1]


def test_the_oldest_releases_are_those_of_the_extras() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    wanted = set(re.findall(r'"(\w+)>=([\d.]+)"', text))
    assert set(OLDEST.items()) <= wanted


def test_old_engines_of_members_are_named(shown: ShownRun) -> None:
    shown.board(lease_seconds=10**6)
    shown.beat("new", engine="vllm 0.32.1")
    shown.beat("unknown", engine="transformers")
    engines = [each for each in look(shown.store) if each[0] == "engines"]
    assert [(level, what) for _, level, what, _ in engines] == [("ok", "1 member with transformers, 1 member with vllm 0.32.1")]
    shown.beat("old", engine="vllm 0.31.2")
    assert "engines: 1 member with an engine that is too old: old | Members need vllm 0.32" in warned(shown.store)


def test_a_server_that_does_not_answer_is_wrong(shown: ShownRun) -> None:
    assert "server: " in wrong(shown.store, engine=f"http://127.0.0.1:{free_port()}")
