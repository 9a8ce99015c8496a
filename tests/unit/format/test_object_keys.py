"""One module builds and parses all keys."""

import pytest

from deltawire.errors import CorruptRecord
from deltawire.format.records.record_parts import link_targets
from deltawire.store import keys
from deltawire.store.base import is_key

HASH = "ab" * 32


@pytest.mark.parametrize(
    ("key", "parse", "expected"),
    [
        (keys.epoch_key(7), keys.parse_epoch_key, 7),
        (keys.commit_key(2**63 - 1), keys.parse_commit_key, 2**63 - 1),
        (keys.anchor_key(0), keys.parse_anchor_key, 0),
        (keys.skip_key(9, 5), keys.parse_skip_key, (9, 5)),
        (keys.mark_key(3), keys.parse_mark_key, 3),
        (keys.pin_key("host.1_a-b"), keys.parse_pin_key, "host.1_a-b"),
        (keys.data_key(1, 2, HASH, "file"), keys.parse_data_key, (1, 2, HASH, "file")),
    ],
)
def test_a_key_reads_back_and_is_read_by_nothing_else(key, parse, expected):
    assert parse(key) == expected
    assert is_key(key)
    parsers = [getattr(keys, name) for name in dir(keys) if name.startswith("parse_")]
    assert [other for other in parsers if other(key) is not None] == [parse]
    for wrong in (key + "\n", key.upper(), key[:-1], "x" + key, key.replace("0", "٠") if "0" in key else ""):
        assert parse(wrong) is None


def test_keys_sort_like_the_numbers_in_them():
    numbers = [0, 9, 10, 99, 100, 10**12, 2**63 - 1]
    assert sorted(map(keys.commit_key, numbers)) == [keys.commit_key(number) for number in numbers]


@pytest.mark.parametrize(
    "build", [lambda: keys.commit_key(-1), lambda: keys.epoch_key(10**10), lambda: keys.pin_key("../x"), lambda: keys.pin_key("")]
)
def test_values_that_cannot_be_part_of_a_key_are_refused(build):
    with pytest.raises(ValueError):  # noqa: PT011
        build()


def test_data_keys_have_one_form():
    with pytest.raises(CorruptRecord):
        keys.data_key(1, 2, "short", "safetensors")
    with pytest.raises(CorruptRecord):
        keys.data_key(1, 2, HASH, "pkl")


@pytest.mark.parametrize(("seq", "targets"), [(0, []), (1, []), (2, [0]), (3, []), (4, [2, 0]), (6, [4]), (8, [6, 4, 0]), (12, [10, 8])])
def test_links_reach_back_by_powers_of_two(seq, targets):
    assert link_targets(seq) == targets
