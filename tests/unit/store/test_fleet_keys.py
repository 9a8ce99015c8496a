"""The parsers of fleet keys accept every key that is built, and nothing else."""

from __future__ import annotations

import pytest

from deltawire.format.records import fleet_parts
from deltawire.format.records.fleet_parts import AttemptId
from deltawire.store import fleet_keys
from deltawire.store.base import is_key
from deltawire.store.fleet_keys import BatchKey, RolloutKey

HASH = "ab" * 32
PAIRS = [
    (fleet_keys.round_key(7), fleet_keys.parse_round_key, 7),
    (fleet_keys.lease_key(AttemptId(7, 8, 9)), fleet_keys.parse_lease_key, AttemptId(7, 8, 9)),
    (fleet_keys.rollout_key(RolloutKey(7, 8, 9, HASH)), fleet_keys.parse_rollout_key, RolloutKey(7, 8, 9, HASH)),
    (fleet_keys.batch_key(7, 8), fleet_keys.parse_batch_key, BatchKey(7, 8)),
    (fleet_keys.member_key("a-b.c_1"), fleet_keys.parse_member_key, "a-b.c_1"),
]


@pytest.mark.parametrize(("key", "parse", "meaning"), PAIRS)
def test_a_key_is_taken_apart_as_it_was_built(key, parse, meaning) -> None:
    assert is_key(key)
    assert parse(key) == meaning
    for other, _, _ in PAIRS:
        assert (parse(other) is None) == (other != key)
    for wrong in (key + "x", "x" + key, key.replace("/0000000007", "/7"), key.upper(), ""):
        assert parse(wrong) is None or wrong == key


def test_numbers_and_names_that_have_no_key_are_refused() -> None:
    for make in (
        lambda: fleet_keys.round_key(10**10),
        lambda: fleet_keys.round_key(-1),
        lambda: fleet_keys.lease_key(AttemptId(0, fleet_parts.MOST_TASKS, 0)),
        lambda: fleet_keys.lease_key(AttemptId(0, 0, fleet_parts.MOST_ATTEMPTS)),
        lambda: fleet_keys.member_key("../x"),
        lambda: fleet_keys.member_key(""),
    ):
        with pytest.raises(ValueError, match="cannot"):
            make()


def test_keys_are_ordered_by_round() -> None:
    for number in (7, 10, 100, 10**9):
        edge = fleet_keys.first_key_of(fleet_keys.LEASES, number)
        assert fleet_keys.lease_key(AttemptId(number - 1, 99_999, 999)) < edge < fleet_keys.lease_key(AttemptId(number, 0, 0))
    assert fleet_keys.first_key_of(fleet_keys.LEASES, 0) < fleet_keys.lease_key(AttemptId(0, 0, 0))
