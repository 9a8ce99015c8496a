"""Real servers keep every promise, through their real protocols."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from servers import Server

from deltawire.errors import StoreUnsuitable
from deltawire.store import Store, StoreOptions, probe
from deltawire.testing import StoreConformance

OPTIONS = StoreOptions(retries=2, part_bytes=5 << 20)


def _place(server: Server) -> Callable[[], Store]:
    url = server.fresh_url()
    return lambda: server.open(url, OPTIONS)


class TestMoto(StoreConformance):
    @pytest.fixture
    def open_place(self, moto: Server) -> Callable[[], Store]:
        return _place(moto)


class TestSeaweedFS(StoreConformance):
    @pytest.fixture
    def open_place(self, seaweedfs: Server) -> Callable[[], Store]:
        return _place(seaweedfs)


class TestAzurite(StoreConformance):
    @pytest.fixture
    def open_place(self, azurite: Server) -> Callable[[], Store]:
        return _place(azurite)


def test_the_probe_refuses_a_server_that_ignores_the_condition(rclone: Server) -> None:
    with rclone.open() as store:
        with pytest.raises(StoreUnsuitable, match="twice"):
            probe(store)
        assert list(store.list("")) == []
