"""Real servers keep every promise of a store, through their real protocols."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from servers import Server

from deltawire.errors import StoreUnsuitable
from deltawire.format.records.fleet_parts import AttemptId
from deltawire.store import Store, StoreOptions, fleet_keys, probe
from deltawire.testing import StoreConformance

OPTIONS = StoreOptions(retries=2, multipart_bytes=5 << 20)


def _place(server: Server) -> Callable[[], Store]:
    url = server.fresh_url()
    return lambda: server.open(url, OPTIONS)


class TestMoto(StoreConformance):
    test_of_sixteen_creators_exactly_one_wins = None
    """moto checks the condition and writes the object in two steps, so sometimes two creators win. The other servers run this test."""

    @pytest.fixture
    def open_location(self, moto: Server) -> Callable[[], Store]:
        return _place(moto)


class TestSeaweedFS(StoreConformance):
    @pytest.fixture
    def open_location(self, seaweedfs: Server) -> Callable[[], Store]:
        return _place(seaweedfs)


class TestAzurite(StoreConformance):
    @pytest.fixture
    def open_location(self, azurite: Server) -> Callable[[], Store]:
        return _place(azurite)


def test_the_probe_refuses_a_server_that_ignores_the_condition(rclone: Server) -> None:
    with rclone.open() as store:
        with pytest.raises(StoreUnsuitable, match="twice"):
            probe(store)
        assert list(store.list("")) == []


@pytest.mark.parametrize("server", ["moto", "seaweedfs", "azurite"])
def test_a_listing_from_a_round_on_begins_with_that_round(server: str, request: pytest.FixtureRequest) -> None:
    """SeaweedFS once failed this: its listing omits a folder if the listing starts after the folder's name."""
    rounds = (0, 1, 9, 10, 11)
    with request.getfixturevalue(server).open() as store:
        for number in rounds:
            store.put(fleet_keys.lease_key(AttemptId(number, 0, 0)), b"{}")
        for first in range(12):
            listed = store.list(fleet_keys.LEASES, after=fleet_keys.first_key_of(fleet_keys.LEASES, first))
            found = [key.round for info in listed if (key := fleet_keys.parse_lease_key(info.key)) is not None]
            assert found == [number for number in rounds if number >= first]
