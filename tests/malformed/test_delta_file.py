"""Readers refuse damaged and dishonest delta files with a named error, and leave the state unchanged, bit for bit."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from small_delta import DELTA, NEW, base_state, flipped, never_wrong, refused
from support import CODECS, bits_of, join_body, join_delta, split_delta, varint

import deltawire
from deltawire.codec import using_codec
from deltawire.delta.inspect import inspect_delta
from deltawire.delta.prepared import PreparedUpdate
from deltawire.dtypes import PAYLOAD_TYPES
from deltawire.errors import BaseMismatch, CorruptDelta, UnsupportedVersion
from deltawire.format.delta_files.grouped import hash_of_names

SPLIT = split_delta(DELTA)


def test_the_sound_delta_is_accepted_by_every_codec():
    assert join_delta(SPLIT) == DELTA
    for codec in CODECS:
        with using_codec(codec):
            state = base_state()
            deltawire.apply_delta(state, DELTA)
            assert bits_of(state) == bits_of(NEW)


def test_every_truncation_is_refused():
    for length in range(len(DELTA)):
        refused(DELTA[:length], CorruptDelta)


def test_every_flipped_bit_is_refused():
    for bit in range(8 * len(DELTA)):
        refused(flipped(DELTA, bit), (CorruptDelta, UnsupportedVersion))
        if bit >= 64:
            with pytest.raises(CorruptDelta, match="BLAKE3"):
                inspect_delta(flipped(DELTA, bit))


def test_later_versions_are_named():
    for version in (b"4", b"9", b"z"):
        refused(b"dwdelta" + version + DELTA[8:], UnsupportedVersion)
    refused(b"dwdelta2" + DELTA[8:], CorruptDelta)


def payloads_with(group, payload):
    return join_delta(SPLIT._replace(groups=SPLIT.groups | {group: payload}))


@pytest.mark.parametrize("codec", CODECS)
def test_no_flipped_bit_of_a_payload_leads_to_a_wrong_state_even_with_a_true_checksum(codec):
    with using_codec(codec):
        step = 3 if codec == "reference" else 1  # the reference takes five times as long
        for group, payload in SPLIT.groups.items():
            kept = [bit for bit in range(0, 8 * len(payload), step) if not never_wrong(payloads_with(group, flipped(payload, bit)))]
            assert len(kept) <= 1


@pytest.mark.parametrize("codec", CODECS)
def test_every_truncation_of_a_payload_is_refused_even_with_a_true_checksum(codec):
    with using_codec(codec):
        for group, payload in SPLIT.groups.items():
            for length in range(len(payload)):
                refused(payloads_with(group, payload[:length]))
            refused(payloads_with(group, payload + b"\0"))
            refused(payloads_with(group, payload + payload))


def test_tiles_after_the_last_chunk_may_be_said_to_stay_the_same():
    state = {"x": np.zeros(5), "y": np.zeros(5)}
    new = {"x": np.ones(5), "y": np.zeros(5)}
    split = split_delta(deltawire.encode_delta(state, new))
    ((group, payload),) = split.groups.items()
    assert payload[0] >> 2 == 2  # both tiles are in its only chunk
    third = split_delta(deltawire.encode_delta({"x": np.zeros(5)}, {"x": np.ones(5)})).groups[group]
    for codec in CODECS:
        with using_codec(codec):
            for other in (third, third + bytes([1 << 2, 0])):
                there = {name: array.copy() for name, array in state.items()}
                deltawire.apply_delta(there, join_delta(split._replace(groups={group: other})))
                assert bits_of(there) == bits_of(new)


def test_swapped_and_moved_payloads_are_refused():
    for one, payload in SPLIT.groups.items():
        for other in SPLIT.groups:
            if one != other:
                refused(join_delta(SPLIT._replace(groups=SPLIT.groups | {one: SPLIT.groups[other], other: payload})))
        rest = {group: data for group, data in SPLIT.groups.items() if group != one}
        refused(join_delta(SPLIT._replace(groups=rest)))
        for group in (0, 5, 17, 18, 31, 32, 40, 64 + 9, 2**39):
            if group not in SPLIT.groups:
                refused(join_delta(SPLIT._replace(groups=dict(sorted((rest | {group: payload}).items())))))


def test_groups_that_are_out_of_order_empty_or_repeated_are_refused():
    body = varint(SPLIT.tensors) + varint(len(SPLIT.changes)) + SPLIT.changes + varint(0)
    groups = [varint(group) + varint(len(payload)) + payload for group, payload in SPLIT.groups.items()]
    assert join_body(SPLIT, body + b"".join(groups)) == DELTA
    for wrong in (groups[::-1], [*groups, groups[-1]], [groups[0], *groups], [*groups, varint(100) + varint(0)], [*groups, varint(100)]):
        refused(join_body(SPLIT, body + b"".join(wrong)), CorruptDelta)


@pytest.mark.parametrize("tensors", [0, 1, 6, 8, 127, 2**39])
def test_another_number_of_tensors_is_refused(tensors):
    assert f"{tensors:,} tensors" in str(refused(join_delta(SPLIT._replace(tensors=tensors)), BaseMismatch))


@pytest.mark.parametrize(
    "body",
    [
        b"\x80",
        b"\x87\x00",
        b"\x87\x80\x00",
        b"\xff" * 5 + b"\x7f",
        b"\xff" * 20,
        b"\x07",
        b"\x07\x01",
        b"\x07\x00\x05abcd",
        b"\x07\xff\xff\x7f",
        b"\x07\x00\x80\x80\x80\x80\x10",
    ],
    ids=repr,
)
def test_malformed_bodies_are_refused(body):
    refused(join_body(SPLIT, body), CorruptDelta)


def test_digests_are_covered_by_the_hash_and_checked():
    refused(DELTA[:8] + bytes(16) + DELTA[24:], CorruptDelta)
    refused(join_delta(SPLIT._replace(before=bytes(16))), BaseMismatch)
    refused(join_delta(SPLIT._replace(after=bytes(16))))


@pytest.mark.parametrize("seed", range(20))
def test_garbage_is_refused(seed):
    rng = np.random.default_rng(seed)
    refused(DELTA[:40] + rng.bytes(int(rng.integers(0, 2000))), CorruptDelta)
    refused(join_body(SPLIT, rng.bytes(int(rng.integers(1, 300)))))


@pytest.mark.parametrize("kind", PAYLOAD_TYPES, ids=lambda kind: kind.name)
def test_random_chunks_are_refused_by_every_codec_alike(kind):
    name = "x.weight_packed" if kind.is_packed else "x"
    base = {name: np.zeros(600, kind.dtype.numpy)}
    split = split_delta(deltawire.encode_delta(base, base))
    rng = np.random.default_rng(kind.code)
    for _ in range(40):
        body = rng.bytes(int(rng.integers(1, 40)))
        payload = bytes([1 << 2 | int(rng.integers(0, 4)), len(body)]) + body
        delta = join_delta(split._replace(groups={kind.code: payload}))
        found = set()
        for codec in CODECS:
            with using_codec(codec), pytest.raises(deltawire.DeltawireError) as caught:
                deltawire.apply_delta(base, delta, threads=1)
            found.add(type(caught.value))
        assert len(found) == 1
        assert not base[name].view(np.uint8).any()


def test_a_list_of_changes_longer_than_the_tensors_need_is_refused_before_it_is_read(monkeypatch):
    state, new = {"a.weight": np.zeros(600, np.float32)}, {"a.weight": np.ones(600, np.float32)}
    split = split_delta(deltawire.encode_delta(state, new))
    delta = join_delta(split._replace(changes=b'{"removed":["' + b"x" * 70_000 + b'"]}'))
    monkeypatch.setattr("json.loads", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(CorruptDelta, match="longer than"):
        PreparedUpdate().add(state, delta)


def test_a_list_of_changes_that_would_take_many_times_its_size_is_refused():
    changes = b'{"removed":[' + b"[]," * 2_000_000 + b"1]}"
    tracemalloc.start()
    try:
        refused(join_delta(SPLIT._replace(changes=changes)), CorruptDelta)
        assert tracemalloc.get_traced_memory()[1] < 12 * len(changes)
    finally:
        tracemalloc.stop()


def test_lists_of_many_groups_or_parts_take_no_more_memory_than_the_file():
    state = {"a": np.zeros(600, np.float32), "b": np.zeros(600, np.float32)}
    split = split_delta(deltawire.encode_delta(state, state))
    names_hash = hash_of_names(sorted(state))
    groups = b"".join(varint(32 * number + 12) + b"\1\0" for number in range(1, 50_000))
    files = [
        join_body(split, varint(2) + varint(0) + varint(0) + groups),
        join_delta(split._replace(parts=names_hash + varint(0) + varint(0) + varint(600) + b"\0\0\1" * 50_000)),
    ]
    for file in files:
        tracemalloc.start()
        try:
            with pytest.raises((CorruptDelta, BaseMismatch)):
                deltawire.apply_delta(state, file)
            assert tracemalloc.get_traced_memory()[1] < len(file)
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("parts", [b"", b"\x80\x00", b"\0\0", b"\0\0\0"], ids=repr)
def test_errors_in_lists_of_parts_are_explained_once(parts):
    state = {"a": np.zeros(600, np.float32)}
    split = split_delta(deltawire.encode_delta(state, state))
    listed = hash_of_names(state) + parts if parts else b"short"
    with pytest.raises(CorruptDelta) as caught:
        deltawire.apply_delta(state, join_delta(split._replace(parts=listed)))
    assert str(caught.value).count("cannot be used as a delta") == str(caught.value).count(CorruptDelta.hint) == 1
