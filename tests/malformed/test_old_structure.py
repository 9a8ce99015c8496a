"""Readers refuse deltas whose lists and payloads contradict the state, each other or the format's limits, and need little memory for it."""

from __future__ import annotations

import copy
import gc
import json
import struct
import tracemalloc

import numpy as np
import pytest
from old_deltas import join_old, split_old
from small_delta import OLD_DELTA as DELTA
from small_delta import base_state, refused
from support import CODECS, run_python

from deltawire.codec import using_codec
from deltawire.dtypes import DTYPES
from deltawire.errors import CorruptDelta, DeltaTooLarge, ShapeMismatch, TensorMissing, TensorUnexpected

SAME, CODED, RAW = range(3)


def with_changes(edit):
    """Return the small delta after an edit of its lists of added, removed and tied tensors."""
    metadata, changes, payloads = split_old(DELTA)
    changes = copy.deepcopy(changes)
    edited = edit(changes)
    return join_old(metadata, changes if edited is None else edited, payloads)


def with_payload(name, payload):
    metadata, changes, payloads = split_old(DELTA)
    return join_old(metadata, changes, dict(sorted((payloads | {name: payload}).items())))


def chunk(elements: int, mode: int, body: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<II", elements | mode << 30, len(body) if length is None else length) + body


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "0",
        "{}",
        "[" * 100_000,
        '{"added":' * 50_000,
        '{"added":{}}',
        '{"removed":[]}',
        '{"aliases":{}}',
        '{"unknown":["gone"]}',
        '{"added":["fresh"]}',
        '{"removed":{"gone":1}}',
        '{"removed":"gone"}',
        '{"removed":[1]}',
        '{"removed":[null]}',
        '{"removed":[["gone"]]}',
        '{"removed":["gone","gone"]}',
        '{"removed":["retyped","gone"]}',
        '{"removed":["gone"],"removed":["gone"]}',
        '{"aliases":["tied"]}',
        '{"aliases":{"tied_too":1}}',
        '{"aliases":{"tied_too":null}}',
        '{"aliases":{"tied_too":["tied"]}}',
        '{"aliases":NaN}',
    ],
    ids=lambda text: text[:40],
)
def test_malformed_lists_of_changes_are_refused(text):
    metadata, _, payloads = split_old(DELTA)
    refused(join_old(metadata, text or " ", payloads), CorruptDelta)


@pytest.mark.parametrize("value", [1, [], {}, None, ["added"], {"removed": ["gone"]}], ids=repr)
def test_lists_of_changes_that_are_not_text_are_refused(value):
    metadata, _, payloads = split_old(DELTA)
    refused(join_old(metadata, "", payloads, lambda header: header["__metadata__"].update(changes=value)))


@pytest.mark.parametrize(
    "facts",
    [
        None,
        "U8",
        [],
        ["U8"],
        ["U8", [7], 1],
        [[7], "U8"],
        ["U8", 7],
        ["U8", "7"],
        ["U8", [7.0]],
        ["U8", [True]],
        ["U8", [-7]],
        ["U8", [None]],
        ["U8", [[7]]],
        ["F9", [7]],
        ["F4", [7]],
        ["C64", [7]],
        ["u8", [7]],
        ["", [7]],
        [1, [7]],
        ["F8_E4M3", [2**62 + 1]],
        ["F8_E4M3", [2**63]],
        ["F8_E4M3", [2**64, 7]],
        ["F8_E4M3", [2**32, 2**32]],
        ["F8_E4M3", [2**62, 2**62, 2**62]],
        ["F8_E4M3", [0, 2**62, 2**62]],
        ["F8_E4M3", [2**62, 2**62, 0]],
        ["F8_E4M3", [2**40, 0, 2**40]],
        ["F8_E4M3", [1] * 33 + [7]],
        ["F8_E4M3", [1] * 10_000 + [7]],
    ],
    ids=lambda facts: repr(facts)[:40],
)
def test_impossible_added_tensors_are_refused(facts):
    refused(with_changes(lambda changes: changes["added"].update(fresh=facts)), CorruptDelta)


@pytest.mark.parametrize("shape", [[2**62], [2**31, 2**31], [2**40], [2**32], [8], [6], [], [0], [2**62, 0], [0, 2**62]])
def test_added_tensors_of_another_size_are_refused(shape):
    refused(with_changes(lambda changes: changes["added"].update(fresh=["F8_E4M3", shape])), (CorruptDelta, DeltaTooLarge))


@pytest.mark.parametrize("shape", [[7, 1], [1, 7], [1, 1, 7, 1], [1] * 31 + [7]])
def test_added_tensors_of_another_shape_are_refused(shape):
    refused(with_changes(lambda changes: changes["added"].update(fresh=["F8_E4M3", shape])))


@pytest.mark.parametrize("dtype", [dtype.name for dtype in DTYPES if dtype.name != "F8_E4M3"])
def test_added_tensors_of_another_type_are_refused(dtype):
    refused(with_changes(lambda changes: changes["added"].update(fresh=[dtype, [7]])), CorruptDelta)


def test_an_added_tensor_needs_an_entry():
    refused(with_changes(lambda changes: changes["added"].update(other=["U8", [1]])), CorruptDelta)
    metadata, changes, payloads = split_old(DELTA)
    del payloads["fresh"]
    refused(join_old(metadata, changes, payloads), CorruptDelta)


def test_names_that_cannot_be_encoded_are_refused():
    metadata, changes, payloads = split_old(DELTA)
    for name in ("\ud800", "fresh\udfff"):
        payloads = dict(sorted((payloads | {name: payloads["fresh"]}).items()))
        changes["added"][name] = changes["added"]["fresh"]
        refused(join_old(metadata, json.dumps(changes), payloads), CorruptDelta)
        refused(join_old(metadata, json.dumps(changes | {"removed": ["gone", "retyped", name]}), payloads), CorruptDelta)
    metadata, changes, payloads = split_old(DELTA)
    refused(join_old(metadata, changes, {"": payloads["fresh"]} | payloads), CorruptDelta)


def test_an_entry_needs_a_tensor():
    metadata, changes, payloads = split_old(DELTA)
    refused(join_old(metadata, changes, dict(sorted((payloads | {"nowhere": payloads["a"]}).items()))), TensorMissing)
    refused(with_changes(lambda changes: changes["added"].pop("fresh") and None), TensorMissing)


def test_a_removed_tensor_has_no_entry():
    metadata, changes, payloads = split_old(DELTA)
    refused(join_old(metadata, changes, dict(sorted((payloads | {"gone": payloads["a"]}).items()))), CorruptDelta)


def test_removed_tensors_must_be_there():
    refused(with_changes(lambda changes: changes.update(removed=["gone", "nowhere", "retyped"])), TensorMissing)
    refused(with_changes(lambda changes: changes.update(removed=["gone", "kept", "retyped"])))
    refused(with_changes(lambda changes: changes.update(removed=["retyped"])))


def test_added_tensors_must_not_be_there():
    refused(with_changes(lambda changes: changes.update(removed=["gone"])), TensorUnexpected)

    def with_fresh():
        return base_state() | {"fresh": np.zeros(7, np.uint8)}

    refused(DELTA, TensorUnexpected, with_fresh)


@pytest.mark.parametrize(
    "aliases",
    [
        {"tied_too": "nowhere"},
        {"tied_too": "kept"},
        {"tied_too": "tied_too"},
        {"tied_too": "tied", "tied": "tied_too"},
        {"tied_too": "tied", "kept": "tied_too"},
        {"tied": "a"},
        {"gone": "tied"},
        {"retyped": "tied"},
        {"fresh": "tied"},
        {"tied_too": "gone"},
    ],
    ids=str,
)
def test_impossible_aliases_are_refused(aliases):
    refused(with_changes(lambda changes: changes.update(aliases=aliases)), CorruptDelta)


@pytest.mark.parametrize(
    "aliases", [{"nowhere": "tied"}, {"kept": "tied"}, {"tied_too": "a"}, {"tied_too": "tied", "kept": "b"}, {"\ud800": "tied"}], ids=ascii
)
def test_aliases_that_do_not_fit_the_state_are_refused(aliases):
    metadata, changes, payloads = split_old(DELTA)
    refused(join_old(metadata, json.dumps(changes | {"aliases": aliases}), payloads))


def test_tied_tensors_must_be_listed():
    refused(with_changes(lambda changes: changes.pop("aliases") and None))


# Payloads of the tensor b: 15 elements of F32


F32 = bytes([12])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "payload",
    [
        b"",
        F32,
        F32 + chunk(15, SAME),
        F32 + chunk(0, SAME),
        F32 + chunk(0, RAW),
        F32 + chunk(2**14, SAME),
        F32 + chunk(2**24, SAME),
        F32 + chunk(2**24, RAW),
        F32 + chunk(2**24, CODED, b"\0" * 8),
        F32 + chunk(2**24 + 2**14, SAME),
        F32 + chunk(2**30 - 1, SAME),
        F32 + chunk(2**24, RAW, length=2**26),
        F32 + chunk(15, RAW, length=60),
        F32 + chunk(15, RAW, bytes(59)),
        F32 + chunk(15, RAW, bytes(61)),
        F32 + chunk(15, RAW, bytes(60)),
        F32 + chunk(15, CODED),
        F32 + chunk(15, CODED, length=2**32 - 1),
        F32 + chunk(15, CODED, bytes(1000)),
        F32 + chunk(15, CODED, b"\xff" * 1000),
        F32 + chunk(15, 3, bytes(60)),
        F32 + chunk(8, SAME) + chunk(7, SAME),
        F32 + chunk(2**14, SAME) * 3,
        F32 + chunk(15, RAW, bytes(60)) + chunk(15, RAW, bytes(60)),
        F32 + chunk(15, RAW, bytes(60)) + b"\0" * 7,
        bytes([11]) + chunk(15, RAW, bytes(60)),
        bytes([16]) + chunk(15, RAW, bytes(60)),
        bytes([255]) + chunk(15, RAW, bytes(60)),
    ],
    ids=lambda payload: f"{payload[:9].hex()}+{max(len(payload) - 9, 0)}",
)
def test_chunks_with_false_headers_are_refused(codec, payload):
    with using_codec(codec):
        refused(with_payload("b", payload))


@pytest.mark.parametrize("codec", CODECS)
def test_random_bodies_are_refused(codec):
    rng = np.random.default_rng(7)
    with using_codec(codec):
        for _ in range(100):
            refused(with_payload("b", F32 + chunk(15, CODED, rng.bytes(int(rng.integers(0, 60))))))
            refused(with_payload("b", F32 + chunk(15, CODED, b"\x7f" + rng.bytes(int(rng.integers(0, 60))))))


def test_a_chunk_for_another_count_names_the_shape():
    refused(with_payload("b", F32 + chunk(14, RAW, bytes(56))), ShapeMismatch)
    refused(with_payload("b", F32 + chunk(16, RAW, bytes(64))), ShapeMismatch)


# Small payloads that would expand to much memory


BOMB = """
import resource, sys
import numpy as np
import deltawire
from deltawire.format.delta_file import Structure
from old_deltas import build_header
from deltawire.format.digest import Digest
from deltawire.dtypes import dtype_named
from blake3 import blake3

kind = sys.argv[1]
dtype = dtype_named("F64")
chunk = lambda elements, mode, body=b"": (elements | mode << 30).to_bytes(4, "little") + len(body).to_bytes(4, "little") + body
payload = bytes([dtype.code]) + {
    "tiny": chunk(7, 0),
    "one": chunk(2**24, 0),
    "coded": chunk(2**24, 1, bytes(20)),
    "same": chunk(2**24, 0) * 2**16,
}[kind]
structure = Structure({"bomb": (dtype, (2**20, 2**20))})
delta = build_header(Digest(), Digest(), blake3(payload).hexdigest(), [("bomb", len(payload))], structure) + payload
state = {}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for read in (deltawire.resolve_delta, deltawire.apply_delta):
    try:
        read(state, delta)
    except deltawire.DeltawireError as error:
        print(type(error).__name__)
    assert state == {}
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize("kind", ["tiny", "one", "coded", "same"])
def test_an_added_tensor_of_2_to_the_40_elements_is_refused_in_little_memory(kind):
    first, second, grown = run_python(BOMB, kind).split()
    assert first == second
    assert int(grown) < 32


def test_long_names_of_added_tensors_do_not_stay_in_memory():
    metadata, _, _ = split_old(DELTA)
    tracemalloc.start()
    try:
        name = "z" * (8 << 20)
        refused(join_old(metadata, {"added": {name: ["U8", [8]]}}, {name: b"\1"}))
        del name
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 4 << 20
    finally:
        tracemalloc.stop()
