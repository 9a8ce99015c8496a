"""Readers refuse deltas whose lists contradict the state, each other or the format's limits, and need little memory for it."""

from __future__ import annotations

import copy
import json

import pytest
from small_delta import DELTA, refused
from support import join_delta, run_python, split_delta

from deltawire.errors import BaseMismatch, CorruptDelta, DeltaTooLarge, TensorMissing, TensorUnexpected

SPLIT = split_delta(DELTA)
CHANGES = json.loads(SPLIT.changes)


def with_changes(edit):
    """Return the small delta after an edit of its lists of added, removed and tied tensors."""
    changes = copy.deepcopy(CHANGES)
    edit(changes)
    return join_delta(SPLIT._replace(changes=json.dumps(changes).encode()))


@pytest.mark.parametrize(
    "text",
    [
        b" ",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b"\xff{}",
        b"[" * 100_000,
        b'{"added":' * 50_000,
        b'{"added":{}}',
        b'{"removed":[]}',
        b'{"unknown":["gone"]}',
        b'{"added":["fresh"]}',
        b'{"removed":"gone"}',
        b'{"removed":[1]}',
        b'{"removed":["gone","gone"]}',
        b'{"removed":["retyped","gone"]}',
        b'{"removed":["gone"],"removed":["gone"]}',
        b'{"aliases":{"tied_too":1}}',
        b'{"aliases":{"tied_too":["tied"]}}',
        b'{"aliases":NaN}',
        b'{"added":{"fresh":["F8_E4M3",[-7]]}}',
        b'{"added":{"fresh":["F9",[7]]}}',
        b'{"added":{"":["F8_E4M3",[7]]}}',
        b'{"added":{"__metadata__":["F8_E4M3",[7]]}}',
    ],
    ids=lambda text: repr(text[:40]),
)
def test_malformed_lists_of_changes_are_refused(text):
    refused(join_delta(SPLIT._replace(changes=text)), CorruptDelta)


@pytest.mark.parametrize("shape", [[2**62], [2**40], [2**32], [8], [6], [], [0], [7, 1]])
def test_added_tensors_of_another_size_are_refused(shape):
    refused(with_changes(lambda changes: changes["added"].update(fresh=["F8_E4M3", shape])))


@pytest.mark.parametrize("dtype", ["U8", "F8_E5M2", "BF16", "F64"])
def test_added_tensors_of_another_type_are_refused(dtype):
    refused(with_changes(lambda changes: changes["added"].update(fresh=[dtype, [7]])))


def test_tensors_that_are_there_or_missing_are_named():
    def swap_gone(changes):
        changes["removed"] = ["absent", "retyped"]

    assert "'absent'" in str(refused(with_changes(swap_gone), TensorMissing))
    assert "'kept'" in str(refused(with_changes(lambda changes: changes["added"].update(kept=["F64", [3]])), TensorUnexpected))
    refused(with_changes(lambda changes: changes["added"].update(more=["F64", [3]])), BaseMismatch)
    refused(with_changes(lambda changes: changes["removed"].insert(0, "a")), BaseMismatch)


@pytest.mark.parametrize(
    "aliases",
    [
        {"tied_too": "tied_too"},
        {"tied_too": "tied", "tied": "tied_too"},
        {"tied_too": "a"},
        {"tied_too": "gone"},
        {"tied_too": "fresh"},
        {"gone": "tied"},
        {"fresh": "tied"},
        {"tied_too": "b"},
        {"tied_too": "kept"},
        {"a": "tied"},
        {"tied_too": "tied", "kept": "a"},
    ],
    ids=repr,
)
def test_impossible_ties_are_refused(aliases):
    refused(with_changes(lambda changes: changes.update(aliases=aliases)))


def test_ties_to_names_that_do_not_exist_are_named():
    for aliases in ({"tied_too": "absent"}, {"absent": "tied"}):
        refused(with_changes(lambda changes, aliases=aliases: changes.update(aliases=aliases)), TensorMissing)


def test_an_empty_list_of_ties_leaves_the_payload_of_a_tie_without_a_tensor():
    refused(with_changes(lambda changes: changes.pop("aliases")), CorruptDelta)


BOMB = """
import json, resource, sys
import deltawire
from support import join_delta, split_delta, varint
kind = sys.argv[1]
payload = {"none": b"", "same": varint(1 << 12) + varint(0), "coded": varint(1 << 12 | 1) + varint(40) + bytes(40)}[kind] * 60
split = split_delta(deltawire.encode_delta({}, {}))
changes = {"added": {"bomb": ["U8", [1 << 40]]}}
delta = join_delta(split._replace(tensors=1, changes=json.dumps(changes).encode(), groups={1: payload} if payload else {}))
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


@pytest.mark.parametrize("kind", ["none", "same", "coded"])
def test_an_added_tensor_of_2_to_the_40_elements_is_refused_in_little_memory(kind):
    first, second, grown = run_python(BOMB, kind).split()
    assert first == second == DeltaTooLarge.__name__
    assert int(grown) < 32


def test_a_part_of_the_state_cannot_be_added_or_removed():
    refused(join_delta(SPLIT._replace(parts=bytes(8))), CorruptDelta)
