"""Readers refuse damaged and dishonest delta files with a named error, and leave the state unchanged, bit for bit."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from old_deltas import build_header as build_delta_header
from old_deltas import encode_old, join_old, join_text, split_old
from safetensors.numpy import save
from small_delta import NEW, OLD_HEADER_BYTES, base_state, flipped, never_wrong, refused
from small_delta import OLD_DELTA as DELTA
from support import CODECS, bits_of

import deltawire
from deltawire.codec import using_codec
from deltawire.delta.inspect import inspect_delta
from deltawire.delta.prepared import PreparedUpdate
from deltawire.dtypes import dtype_named
from deltawire.errors import CorruptDelta, UnsupportedVersion
from deltawire.format import delta_file, safetensors_header
from deltawire.format.safetensors_header import TensorEntry, build_header, parse_header


def test_the_sound_delta_is_accepted_by_every_codec():
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
        refused(flipped(DELTA, bit))


def test_flipped_data_is_refused_by_its_checksum():
    for bit in range(8 * OLD_HEADER_BYTES, 8 * len(DELTA)):
        with pytest.raises(CorruptDelta, match="BLAKE3"):
            inspect_delta(flipped(DELTA, bit))


@pytest.mark.parametrize("codec", CODECS)
def test_no_flipped_bit_of_a_payload_leads_to_a_wrong_state_even_with_a_true_checksum(codec):
    metadata, changes, payloads = split_old(DELTA)
    step = 3 if codec == "reference" else 1  # the reference takes five times as long
    with using_codec(codec):
        for name, payload in payloads.items():
            kept = [
                bit
                for bit in range(0, 8 * len(payload), step)
                if not never_wrong(join_old(metadata, changes, payloads | {name: flipped(payload, bit)}))
            ]
            assert len(kept) <= 1


@pytest.mark.parametrize("codec", CODECS)
def test_every_truncation_of_a_payload_is_refused_even_with_a_true_checksum(codec):
    metadata, changes, payloads = split_old(DELTA)
    with using_codec(codec):
        for name, payload in payloads.items():
            for length in range(len(payload)):
                refused(join_old(metadata, changes, payloads | {name: payload[:length]}))
            refused(join_old(metadata, changes, payloads | {name: payload + b"\0"}))


def test_swapped_payloads_are_refused():
    metadata, changes, payloads = split_old(DELTA)
    for one in payloads:
        for other in payloads:
            if payloads[one] != payloads[other]:
                refused(join_old(metadata, changes, payloads | {one: payloads[other], other: payloads[one]}))


# Headers with wrong entries


def entry(key, value):
    """Edit one field of the entry of tensor b."""

    def edit(header):
        header["b"][key] = value

    return edit


NUMBERS = [-1, 1.0, 1.5, True, None, "1", [1], {}, 2**62 + 1, 2**63, 2**64, 2**70, -(2**63), 1e300]


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
@pytest.mark.parametrize("field", ["shape", "begin", "end"])
def test_sizes_and_offsets_that_are_no_sizes_are_refused(field, number):
    parts = split_old(DELTA)
    offsets = [len(parts[2]["a"]), len(parts[2]["a"]) + len(parts[2]["b"])]
    value = {"shape": [number], "begin": [number, offsets[1]], "end": [offsets[0], number]}[field]
    refused(join_old(*parts, entry("shape" if field == "shape" else "data_offsets", value)), CorruptDelta)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "I8"),
        ("dtype", "BF16"),
        ("dtype", None),
        ("dtype", ["U8"]),
        ("shape", []),
        ("shape", [1, 1]),
        ("shape", "10"),
        ("shape", None),
        ("data_offsets", []),
        ("data_offsets", [0]),
        ("data_offsets", [0, 1, 2]),
        ("data_offsets", {"0": 1}),
        ("unknown", 1),
    ],
)
def test_malformed_entries_are_refused(key, value):
    refused(join_old(*split_old(DELTA), entry(key, value)), CorruptDelta)


@pytest.mark.parametrize("value", [None, [], "U8", 5, {}, {"dtype": "U8"}])
def test_entries_of_another_kind_are_refused(value):
    refused(join_old(*split_old(DELTA), lambda header: header.update(b=value)), CorruptDelta)


def test_overlaps_holes_and_disorder_are_refused():
    metadata, changes, payloads = split_old(DELTA)
    first, second = len(payloads["a"]), len(payloads["b"])

    def shifted(by, grow=0):
        return entry("data_offsets", [first + by, first + by + second + grow])

    for edit in (
        shifted(-1),
        shifted(1),
        shifted(0, 1),
        shifted(0, -1),
        entry("shape", [second - 1]),
        entry("data_offsets", [first + second, first]),
    ):
        refused(join_old(metadata, changes, payloads, edit), CorruptDelta)
    backwards = dict(reversed(payloads.items()))
    refused(join_old(metadata, changes, backwards), CorruptDelta)
    swapped = {name: payloads[name] for name in ["b", "a", *list(payloads)[2:]]}
    refused(join_old(metadata, changes, swapped), CorruptDelta)
    refused(DELTA + b"\0", CorruptDelta)
    refused(DELTA + DELTA, CorruptDelta)


@pytest.mark.parametrize("key", ["deltawire", "before", "after", "blake3"])
@pytest.mark.parametrize("value", [None, "", "0", 0, ["delta/1"], {}, "g" * 32, "0" * 31, "0" * 33, "0" * 64, "A" * 32, " " * 32])
def test_malformed_metadata_is_refused(key, value):
    parts = split_old(DELTA)
    refused(join_old(*parts, lambda header: header["__metadata__"].update({key: value})))
    refused(join_old(*parts, lambda header: header["__metadata__"].pop(key) and None), CorruptDelta)


def test_other_metadata_is_refused():
    parts = split_old(DELTA)
    refused(join_old(*parts, lambda header: header["__metadata__"].update(format="pt")), CorruptDelta)
    refused(join_old(*parts, lambda header: header.update(__metadata__=None)), CorruptDelta)
    refused(join_old(*parts, lambda header: header.update(__metadata__=["deltawire"])), CorruptDelta)
    refused(join_old(*parts, lambda header: header.update(__metadata__="deltawire")), CorruptDelta)
    refused(join_old(*parts, lambda header: header.pop("__metadata__") and None), CorruptDelta)


@pytest.mark.parametrize("version", ["delta/3", "delta/0", "delta/10", "delta/1 ", "Delta/1", "delta/1.0"])
def test_other_versions_are_named(version):
    for extra in ({}, {"new key": "x"}):
        parts = split_old(DELTA)
        error = refused(
            join_old(*parts, lambda header, extra=extra: header["__metadata__"].update(extra, deltawire=version)), UnsupportedVersion
        )
        assert repr(version) in str(error)


def test_duplicate_keys_are_refused_at_every_depth():
    length = int.from_bytes(DELTA[:8], "little")
    text, data = DELTA[8 : 8 + length].decode(), DELTA[8 + length :]
    assert refused(join_text(text, data[:-1]), CorruptDelta)
    for key in ('"a":{', '"dtype":"U8",', '"deltawire":"delta/1",', '\\"retyped\\":[\\"I32\\",[6]]'):
        assert key in text, text
    for old, new in [
        ('"dtype":"U8",', '"dtype":"U8","dtype":"U8",'),
        ('"deltawire":"delta/1",', '"deltawire":"delta/1","deltawire":"delta/1",'),
        ('"__metadata__":', '"__metadata__":{},"__metadata__":'),
        ('\\"retyped\\":[\\"I32\\",[6]]', '\\"retyped\\":[\\"I32\\",[6]],\\"retyped\\":[\\"I32\\",[6]]'),
    ]:
        assert refused(join_text(text.replace(old, new, 1), data), CorruptDelta)
    whole = json.loads(text)["a"]
    again = f'"a":{json.dumps(whole, separators=(",", ":"))},'
    assert again in text
    refused(join_text(text.replace(again, again * 2, 1), data), CorruptDelta)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"delta/1"',
        b"{}",
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b"{'a': 1}",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a":' + b"9" * 10_000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"__metadata__":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    ],
    ids=lambda text: repr(text[:20]),
)
def test_headers_that_are_no_header_are_refused(text):
    refused(join_text(text, b""), CorruptDelta)
    refused(join_text(text, b"\0" * 100), CorruptDelta)


@pytest.mark.parametrize(
    "length", [0, 1, len(DELTA) - 8, len(DELTA) - 7, 99_999_999, 100_000_000, 100_000_001, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
)
def test_other_header_lengths_are_refused(length):
    refused(length.to_bytes(8, "little") + DELTA[8:], CorruptDelta)


def test_headers_over_the_limit_are_refused_unread():
    long = (100_000_001).to_bytes(8, "little") + bytes(100_000_001)
    with pytest.raises(CorruptDelta, match="100,000,001"):
        inspect_delta(long)


@pytest.mark.parametrize("seed", range(20))
def test_garbage_is_refused(seed):
    rng = np.random.default_rng(seed)
    refused(rng.bytes(int(rng.integers(0, 2000))), CorruptDelta)
    refused(rng.integers(0, 2, 64, np.uint8).tobytes() + rng.bytes(64), CorruptDelta)


def test_other_files_are_refused():
    refused(b"", CorruptDelta)
    refused(bytes(8), CorruptDelta)
    refused(bytes(1000), CorruptDelta)
    refused(save({"a": np.zeros(60, np.uint8)}), CorruptDelta)
    refused(save({"a": np.zeros(60, np.uint8)}, {"format": "pt"}), CorruptDelta)
    refused(save({}), CorruptDelta)
    assert "not a delta" in str(refused(save({"a": np.zeros(60, np.float32)}), CorruptDelta))


def test_escapes_in_a_header_do_not_have_it_held_twice():
    def peak(name):
        text = f'{{"{name}":[{",".join(["[]"] * 200_000)}]}}'
        tracemalloc.start()
        try:
            refused(join_text(text, b""), CorruptDelta)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak("\\u0061") < 1.5 * peak("a")


BOMBS = {
    "lists": '{"a":[' + "[]," * 200_000 + "1]}",
    "objects": '{"a":[' + "{}," * 200_000 + "1]}",
    "strings": '{"a":[' + '"ab",' * 200_000 + "1]}",
    "keys": "{" + ",".join(f'"{number}":0' for number in range(200_000)) + "}",
    "escaped": '{"\\u0061":[' + "[]," * 200_000 + "1]}",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_header_that_would_take_many_times_its_size_is_refused_before_it_is_read(bomb, monkeypatch):
    """Python would need 2.7 GB for the objects of a 99 MB header like this one."""
    metadata, _, _ = split_old(DELTA)
    monkeypatch.setattr(safetensors_header, "_SPARE", 1 << 10)
    parts = join_old(metadata | {"deltawire": "delta/2", "parts": BOMBS[bomb]}, {}, {})
    read = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text, **options: (read.append(len(text)), loads(text, **options))[1])
    with pytest.raises(CorruptDelta, match="too many"):
        inspect_delta(join_text(BOMBS[bomb], b""))
    assert not read
    with pytest.raises(CorruptDelta, match="parts is malformed"):
        inspect_delta(parts)
    assert set(read) == {int.from_bytes(parts[:8], "little")}  # only the header was parsed, where the parts are one string


def test_brackets_and_colons_in_names_count_for_nothing():
    names = [f"{{'params':['layer[{number}]']:}}" for number in range(20_000)]
    entries = [(name, TensorEntry(dtype_named("U8"), (0,), 0, 0)) for name in names]
    data = build_header(entries, None)
    assert list(parse_header(data[8:], len(data), most_tensors=len(names)).plain_entries) == names


def test_a_header_longer_than_the_tensors_of_the_state_need_is_refused_before_it_is_read(monkeypatch):
    state, new = {"a.weight": np.zeros(600, np.float32)}, {"a.weight": np.ones(600, np.float32)}
    delta = encode_old(state, new)
    metadata, changes, payloads = split_old(delta)
    longer = join_old(metadata, changes, payloads, lambda header: header | {"b": header["a.weight"] | {"comment": "x" * 70_000}})
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(CorruptDelta, match="at most"):
        PreparedUpdate().add(state, longer)


@pytest.mark.parametrize("parted", [False, True])
@pytest.mark.parametrize("short", [False, True])
def test_the_longest_header_that_an_encoder_writes_is_accepted(short, parted):
    """Each byte of these names takes six bytes in JSON, and seven in JSON inside JSON. All are tied to the first, and in parts."""
    names = ["\x01" * 500 + str(number) for number in range(400)]
    if short:
        names[1:] = [f"b{number}" for number in range(399)]
    old, new = np.zeros(600, np.float32), np.ones(600, np.float32)
    state = dict.fromkeys(names, old)
    delta = encode_old(state, dict.fromkeys(names, new))
    if parted:
        file = delta_file.parse(delta)
        sizes = [(name, end - begin) for name, (begin, end) in file.payloads.items()]
        blake = split_old(delta)[0]["blake3"]
        head = build_delta_header(file.before, file.after, blake, sizes, file.structure, dict.fromkeys(names, (0, 600)))
        delta = head + bytes(file.data)
    delta_file.parse(delta, names=names)
