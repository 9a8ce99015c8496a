"""Test engines that reload from a directory: one calls a callback, and one calls SGLang's routes as its contract records them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from sglang_contract import SglangContract
from toy_chain import first_state, next_state

from deltawire.chain.version import Version
from deltawire.engines import DiskEngine, HotSwap, KvCache, SglangEngine
from deltawire.engines.swap.forward_lock import ForwardLock
from deltawire.errors import EngineQuarantined, EngineUnavailable, RollbackDetected, SwapFailed
from deltawire.publish import Publisher
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber
from deltawire.subscribe.mirror.slot import Slot
from deltawire.testing import EngineConformance, EngineRig


def states(count: int = 6) -> list[dict[str, Any]]:
    found = [first_state()]
    for seed in range(1, count):
        found.append(next_state(found[-1], seed))
    return found


def load(path: Path) -> dict[str, Any]:
    weights: dict[str, Any] = {}
    for file in sorted(path.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


class DiskRig(EngineRig):
    def __init__(self, mirror: Path) -> None:
        self._states = states()
        self._weights: dict[str, Any] = {name: array * 0 for name, array in self._states[0].items()}
        self._forward_lock = ForwardLock()
        self.engine = DiskEngine(
            mirror, self._reload, pause=lambda kv_cache: self._forward_lock.acquire(kv_cache, 60), resume=self._forward_lock.release
        )

    def _reload(self, path: Path, version: Version) -> None:
        self._weights = load(path)

    def state(self, number: int) -> Any:
        return self._states[number]

    def weights(self) -> Any:
        return self._weights

    def generate(self) -> bytes:
        self._forward_lock.enter()
        try:
            return b"".join(self._weights[name].tobytes() for name in sorted(self._weights))
        finally:
            self._forward_lock.leave()


class TestDiskEngine(EngineConformance):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> DiskRig:
        return DiskRig(tmp_path / "mirror")


class SglangRig(EngineRig):
    def __init__(self, mirror: Path) -> None:
        self._states = states()
        self.server = SglangContract({name: array * 0 for name, array in self._states[0].items()}, "secret", "more secret")
        self.engine = SglangEngine(self.server.url, mirror, api_key="secret", admin_api_key="more secret")

    def state(self, number: int) -> Any:
        return self._states[number]

    def weights(self) -> Any:
        return self.server.weights

    def generate(self) -> bytes:
        return self.server.generate()


class TestSglang(EngineConformance):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[SglangRig]:
        rig = SglangRig(tmp_path / "mirror")
        yield rig
        rig.server.close()
        assert rig.server.breaches == []


@pytest.fixture
def server() -> Iterator[SglangContract]:
    server = SglangContract({name: array * 0 for name, array in first_state().items()})
    yield server
    server.close()
    assert server.breaches == []


@pytest.mark.parametrize(("kv_cache", "mode"), [(KvCache.KEEP, "in_place"), (KvCache.DROP, "retract")])
def test_sglang_is_asked_for_what_the_cache_policy_says(server: SglangContract, tmp_path: Path, kv_cache: KvCache, mode: str) -> None:
    store = MemoryStore()
    with Publisher(store) as publisher, HotSwap(store, SglangEngine(server.url, tmp_path), kv_cache=kv_cache) as swap:
        publisher.publish(first_state())
        version = swap.sync()
    assert [route for route, _ in server.log] == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/model_info",
        "/continue_generation",
    ]
    assert server.log[0][1] == {"mode": mode}
    assert server.log[1][1]["flush_cache"] is (kv_cache is KvCache.DROP)
    assert server.weight_version == str(version.seq)


@pytest.mark.parametrize(
    ("method", "route", "body"),
    [
        ("POST", "/pause_generation", {"mode": "wait"}),
        ("POST", "/update_weights_from_disk", {"weight_version": "1"}),
        ("POST", "/update_weights_from_disk", {"model_path": "/x", "weight_version": 1}),
        ("POST", "/update_weights_from_disk", {"model_path": "/x", "version": "1"}),
        ("GET", "/continue_generation", {}),
        ("POST", "/reload", {}),
    ],
)
def test_the_recorded_contract_of_sglang_refuses_what_is_not_in_it(method: str, route: str, body: dict[str, Any]) -> None:
    server = SglangContract({})
    assert server.answer(method, route, body, None)[0] == 422
    assert len(server.breaches) == 1
    server.close()


def test_one_api_key_of_an_sglang_is_enough_where_there_is_no_other(tmp_path: Path) -> None:
    server = SglangContract({name: array * 0 for name, array in first_state().items()}, "secret")
    store = MemoryStore()
    with Publisher(store) as publisher:
        publisher.publish(first_state())
        with HotSwap(store, SglangEngine(server.url, tmp_path / "with", api_key="secret")) as swap:
            swap.sync()
        with HotSwap(store, SglangEngine(server.url, tmp_path / "without")) as swap, pytest.raises(EngineUnavailable, match="401"):
            swap.sync()
    server.close()


def test_an_sglang_that_cannot_load_continues_with_the_old_version(server: SglangContract, tmp_path: Path) -> None:
    store = MemoryStore()
    with Publisher(store) as publisher, HotSwap(store, SglangEngine(server.url, tmp_path)) as swap:
        publisher.publish(first_state())
        swap.sync()
        before = server.generate()
        publisher.publish(next_state(first_state(), 1))
        server.broken = 1
        with pytest.raises(SwapFailed, match="out of memory"):
            swap.sync()
        assert server.generate() == before
        swap.sync()
        assert server.generate() != before


def test_an_unreachable_sglang_is_a_retryable_error(server: SglangContract, tmp_path: Path) -> None:
    store = MemoryStore()
    url = server.url
    server.close()
    with Publisher(store) as publisher, HotSwap(store, SglangEngine(url, tmp_path, timeout=5)) as swap:
        publisher.publish(first_state())
        with pytest.raises(EngineUnavailable):
            swap.sync()
    server._server.server_close()


def test_an_engine_whose_first_reload_fails_is_quarantined_because_it_cannot_be_reverted(tmp_path: Path) -> None:
    store = MemoryStore()
    broken = [True]

    def reload(path: Path, version: Version) -> None:
        if broken:
            raise OSError("no room")

    with Publisher(store) as publisher, HotSwap(store, DiskEngine(tmp_path / "mirror", reload)) as swap:
        publisher.publish(first_state())
        with pytest.raises(EngineQuarantined, match="no room"):
            swap.sync()
        broken.clear()
        assert swap.sync().seq == 1


def test_an_engine_that_was_started_from_the_mirror_is_not_told_to_load_it_again(tmp_path: Path) -> None:
    store = MemoryStore()
    loaded: list[int] = []
    with Publisher(store) as publisher:
        publisher.publish(first_state())
        with Subscriber(store, tmp_path / "mirror") as subscriber:
            seq = subscriber.sync().seq
        engine = DiskEngine(tmp_path / "mirror", lambda path, version: loaded.append(version.seq), loaded_seq=seq)
        with HotSwap(store, engine) as swap:
            assert swap.version is None, "nothing has compared the mirror's record with the chain yet"
            assert swap.sync().seq == seq
            assert loaded == []
            publisher.publish(next_state(first_state(), 1))
            swap.sync()
            assert loaded == [seq + 1]


def test_an_engine_that_was_started_from_a_slot_of_no_version_does_not_report_it(tmp_path: Path) -> None:
    store = MemoryStore()
    loaded: list[int] = []
    with Publisher(store) as publisher:
        publisher.publish(first_state())
        seq = publisher.publish(next_state(first_state(), 1)).seq
        with Subscriber(store, tmp_path / "mirror") as subscriber:
            subscriber.sync(seq=seq - 1)
            slot = Slot(subscriber.path)
        record = slot.record()
        slot.write_record(replace(record, commit=replace(record.commit, step=99)))
        engine = DiskEngine(tmp_path / "mirror", lambda path, version: loaded.append(version.seq), loaded_seq=seq - 1)
        with HotSwap(store, engine) as swap:
            assert swap.version is None
            for target in (seq - 1, None):
                with pytest.raises(RollbackDetected):
                    swap.sync(seq=target)
                assert swap.version is None
        assert loaded == []


def test_the_directory_that_an_engine_serves_from_stays_as_it_is_whatever_others_do(tmp_path: Path) -> None:
    store = MemoryStore()
    paths: list[Path] = []
    all_states = states()
    with Publisher(store) as publisher:
        publisher.publish(all_states[0])
        with HotSwap(store, DiskEngine(tmp_path / "mirror", lambda path, version: paths.append(path))) as swap:
            swap.sync()
            served = load(paths[0])
            with Subscriber(store, tmp_path / "mirror") as other:
                for state in all_states[1:]:
                    publisher.publish(state)
                    other.sync()
            assert all((load(paths[0])[name] == served[name]).all() for name in served)
            swap.sync()
            assert load(paths[1]).keys() == served.keys()


def test_an_interrupt_while_the_engine_resumes_does_not_mislabel_its_weights(tmp_path: Path) -> None:
    store = MemoryStore()
    every = states(3)
    with Publisher(store, "run") as publisher:
        versions = [publisher.publish(state) for state in every]
    loaded: list[Version] = []
    interrupts: list[BaseException] = []

    def resume() -> None:
        if interrupts:
            raise interrupts.pop()

    engine = DiskEngine(tmp_path / "mirror", lambda path, version: loaded.append(version), resume=resume)
    with HotSwap(store, engine) as policy:
        policy.sync(seq=versions[0].seq)
        interrupts.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            policy.sync(seq=versions[1].seq)
        assert policy.version == policy.live == loaded[-1] == versions[1]
        policy.sync(seq=versions[0].seq)
        assert policy.version == policy.live == loaded[-1] == versions[0]


def test_a_follow_thread_that_an_engine_ends_is_reported(tmp_path: Path) -> None:
    store = MemoryStore()
    with Publisher(store, "run") as publisher:
        version = publisher.publish(first_state())

    def pause(kv_cache: KvCache) -> None:
        raise SystemExit(3)

    events: list[str] = []
    engine = DiskEngine(tmp_path / "mirror", lambda path, version: None, pause=pause)
    with HotSwap(store, engine, on_event=lambda event: events.append(event.name)) as policy:
        policy.start()
        with pytest.raises(EngineUnavailable, match="raised SystemExit"):
            policy.wait_for(seq=version.seq, timeout=300)
    assert "follow-failed" in events
