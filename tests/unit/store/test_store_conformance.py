"""The stores that need no server pass the conformance tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import obstore.store
import pytest

from deltawire.store import Store, StoreOptions, open_store
from deltawire.store.copies.sources import Sources
from deltawire.store.local import LocalStore
from deltawire.store.memory import MemoryStore
from deltawire.store.remote import Clients, RemoteStore
from deltawire.testing import Before, FaultyStore, StoreConformance, call


class TestLocalStore(StoreConformance):
    @pytest.fixture
    def open_location(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: LocalStore(tmp_path / "not" / "there" / "yet")


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def open_location(self) -> Callable[[], Store]:
        place = MemoryStore("conformance")
        return lambda: place


class TestFaultyStoreWithoutFaults(StoreConformance):
    @pytest.fixture
    def open_location(self) -> Callable[[], Store]:
        place = MemoryStore("conformance")
        return lambda: FaultyStore(place)


class TestSources(StoreConformance):
    """An origin, and copies that hold no chain: one is empty, and one does not answer."""

    @pytest.fixture
    def open_location(self) -> Callable[[], Store]:
        origin, empty = MemoryStore("conformance"), MemoryStore("empty")
        return lambda: Sources(origin, [empty, FaultyStore(empty, [Before(call(), "unavailable", times=None)])])


class TestRemoteStoreOverMemory(StoreConformance):
    """Test the code for remote stores on the library's store in memory. Other suites test it with real services."""

    @pytest.fixture
    def open_location(self) -> Callable[[], Store]:
        memory = obstore.store.MemoryStore()
        clients = Clients(memory, memory, memory, memory)
        return lambda: RemoteStore(
            clients, url="test://bucket/some/prefix", prefix="some/prefix", options=StoreOptions(multipart_bytes=5 << 20)
        )


def test_a_memory_store_is_shared_by_name() -> None:
    first, second, other = (open_store(f"memory://{name}") for name in ("shared-name", "shared-name", "other-name"))
    first.put("key", b"x")
    assert second.get("key", limit=1) == b"x"
    assert list(other.list("")) == []
