"""Readers refuse hostile and damaged records with a named error, and never use a part of them."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_samples import (
    ANCHOR,
    ANCHOR_2,
    ANCHOR_SHORTCUT,
    ANNOUNCEMENT,
    ATTACHED,
    CHECKPOINT,
    DELTA,
    DELTA_2,
    DELTA_3,
    DIGEST,
    FENCE,
    FENCE_2,
    FIRST,
    HASH,
    ID,
    OTHER,
    RECIPE,
    RECORDS,
    REWIND,
    SKIP,
    data_file,
    refused,
    segment,
    spelled,
)

from deltawire import Digest
from deltawire.errors import CorruptRecord, LimitExceeded, UnsupportedVersion
from deltawire.format.records.canonical import MAX_RECORD_BYTES
from deltawire.format.records.collection_records import Pin
from deltawire.format.records.record_parts import CommitRef, Limits, RecipeRecord
from deltawire.format.records.run_records import Run
from deltawire.format.records.version_records import Commit

ALL = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS.keys())


def places(value, path=()):
    """Yield the paths of all values in a document, beginning with the document itself."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def edited(document, path, change):
    """Return a copy in which `change` was applied to the container of the value at `path`."""
    copy = json.loads(json.dumps(document))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    return copy


@ALL
def test_a_record_reads_back_as_it_was_written(record):
    data = record.to_bytes()
    assert type(record).parse(data) == record
    assert type(record).parse(data).to_bytes() == data
    assert spelled(json.loads(data)) == data


@ALL
def test_every_field_is_needed(record):
    document = json.loads(record.to_bytes())
    for path in places(document):
        if path and isinstance(path[-1], str) and path[0] != "meta" and path[:2] != ("recipe", "options"):
            refused(record, edited(document, path, lambda inner, key: inner.pop(key)))


@ALL
def test_no_field_is_unknown(record):
    document = json.loads(record.to_bytes())
    refused(record, document | {"extra": None})
    for path in places(document):
        inner = document
        for key in path:
            inner = inner[key]
        if isinstance(inner, dict) and path not in (("meta",), ("recipe", "options")):
            refused(record, edited(document, (*path, "extra"), lambda inner, key: inner.update({key: 1})))


@ALL
def test_every_field_has_one_type(record):
    document = json.loads(record.to_bytes())
    wrong = [True, -1, 2**63, 1.5, "x\ud800", [], [None], {"": None}, "\n", 10**400]
    for path in places(document):
        if not path:
            continue
        old = document
        for key in path:
            old = old[key]
        for value in wrong:
            if value == old or (value == [] and isinstance(old, list)):
                continue
            if path == ("run",) and value == "\n":
                continue  # a poor name, but a valid one
            if path[0] == "meta" and len(path) == 2 and value == "\n":
                continue
            if path[:2] == ("recipe", "options") and len(path) == 3 and value in (True, []):
                continue  # readers do not know which options a recipe has
            refused(record, edited(document, path, lambda inner, key, value=value: inner.__setitem__(key, value)))


@ALL
def test_other_spellings_are_refused(record):
    data = record.to_bytes()
    document = json.loads(data)
    backwards = dict(reversed(document.items()))
    spellings = [
        json.dumps(document, sort_keys=True).encode(),
        json.dumps(backwards, separators=(",", ":")).encode(),
        data + b"\n",
        b" " + data,
        b"\xef\xbb\xbf" + data,
        data.replace(b'"version":', b'"version":1.'),
        re.sub(rb'"version":(.)', rb'"version":\1e0', data),
        data.replace(b'"version":', b'"version":-'),
        data.replace(b'"version":', b'"version":0'),
        data.replace(b'"deltawire"', b'"\\u0064eltawire"'),
        data[:-1] + b',"version":1}',
        data[:-1],
        data + data,
        data.decode().encode("utf-16"),
        b"",
        b"null",
        b"[]",
        b"[" * 60_000,
        b"1" * 60_000,
        b'{"a":NaN}',
        b"\x00",
        b"\xff" * 100,
    ]
    for spelling in spellings:
        refused(record, spelling)


@ALL
def test_another_version_is_named_as_such(record):
    document = json.loads(record.to_bytes())
    with pytest.raises(UnsupportedVersion):
        type(record).parse(spelled(document | {"version": 9}))


@ALL
def test_another_kind_of_record_is_refused(record):
    for other in RECORDS.values():
        if type(other) is not type(record):
            refused(record, other.to_bytes())


def test_a_recipe_is_in_commits_of_version_3_and_only_there():
    refused(DELTA, DELTA_3.plain() | {"version": 2})
    refused(DELTA, DELTA_2.plain() | {"version": 3})
    refused(DELTA, DELTA_3.plain() | {"recipe": None})
    refused(DELTA, dataclasses.replace(FENCE_2, recipe=RECIPE).plain())
    assert DELTA_2.version == 2


@pytest.mark.parametrize(
    "options", [{"a": {"b": 1}}, {"a": [1]}, {"a": [["b"]]}, {"a": None}, {"A b": 1}, {"a": "\x1b[2J"}, {"a": ["\ud800"]}]
)
def test_options_of_recipes_are_plain_values(options):
    refused(DELTA, dataclasses.replace(DELTA_3, recipe=RecipeRecord("x", 1, options)).plain())


def test_text_beyond_ascii_is_escaped():
    assert b'"gr\\u00f6\\u00dfer"' in DELTA.to_bytes()
    refused(DELTA, DELTA.to_bytes().replace(b"\\u00f6", "ö".encode()))
    refused(DELTA, DELTA.to_bytes().replace(b"\\u00f6", b"\\u00F6"))


def test_records_have_a_size_limit():
    fits = MAX_RECORD_BYTES - len(DELTA.to_bytes())
    longest = dataclasses.replace(DELTA, meta=dict(DELTA.meta) | {"x": "y" * (fits - 7)})
    data = longest.to_bytes()
    assert len(data) == MAX_RECORD_BYTES
    assert Commit.parse(data) == longest
    overlong = dataclasses.replace(DELTA, meta=dict(DELTA.meta) | {"x": "y" * (fits - 6)})
    with pytest.raises(LimitExceeded):
        overlong.to_bytes()
    refused(DELTA, spelled(overlong.plain()))


HOSTILE_NAMES = ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", "C:x", ".hidden", "a\0b", "a\nb", "x" * 256, "é" * 128, "a\u202eb"]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
@pytest.mark.parametrize("record", [ANCHOR, ANCHOR_SHORTCUT], ids=["commit", "shortcut"])
def test_hostile_file_names_are_refused(record, name):
    entry = dataclasses.replace(CHECKPOINT[1], name=name)
    refused(record, dataclasses.replace(record, files=(CHECKPOINT[0], entry)).plain())


HOSTILE_KEYS = [
    "",
    "run.json",
    "HEAD",
    "commit/00000000000000000001.json",
    f"data/0000000003/00000000000000000008/../{HASH}.safetensors",
    f"/data/0000000003/00000000000000000008/{HASH}.safetensors",
    f"data/0000000003/00000000000000000008/{HASH}.safetensors/",
    f"data/0000000003/00000000000000000008/{HASH}.safetensors\n",
    f"data/0000000003/00000000000000000008/{HASH.upper()}.safetensors",
    f"data/0000000003/00000000000000000008/{OTHER}.safetensors",
    f"data/0000000003/00000000000000000008/{HASH}.pkl",
    f"data/0000000003/00000000000000000008/{HASH}.file",
    f"data/3/8/{HASH}.safetensors",
    f"data/٠٠٠٠٠٠٠٠٠٣/00000000000000000008/{HASH}.safetensors",
]


@pytest.mark.parametrize("key", HOSTILE_KEYS)
@pytest.mark.parametrize("record", [DELTA, SKIP, ANCHOR], ids=["delta", "skip", "anchor"])
def test_hostile_keys_are_refused(record, key):
    refused(record, dataclasses.replace(record, files=(dataclasses.replace(record.files[0], key=key), *record.files[1:])).plain())


@pytest.mark.parametrize("reader", ["", ".", ".x", "a/b", "a b", "x" * 65, "ä", "a\n"])
def test_hostile_reader_names_are_refused(reader):
    refused(RECORDS["pin"], Pin(ID, reader, 1, 1).plain())


@pytest.mark.parametrize("files", [(segment(0, 0),), (segment(0, 5),), (segment(2, 1), segment(0, 1)), (segment(0, 2), segment(1, 1)),
                                   (segment(0, 1, 60), segment(1, 1, 60)), (data_file("model.safetensors"),), (data_file(),),
                                   (segment(2**63 - 1, 2**63 - 1),), (segment(0, 2, 10), segment(0, 1, 10)),
                                   (segment(0, 2, 10), segment(0, 3, 10)),
                                   (segment(0, 2, 10), segment(2, 1, 10), segment(0, 2, 10))])  # fmt: skip
def test_delta_files_must_cover_tensors_in_order(files):
    refused(DELTA, dataclasses.replace(DELTA, files=files).plain())
    refused(SKIP, dataclasses.replace(SKIP, files=files).plain())


def test_delta_files_may_cover_parts_of_the_same_tensors():
    files = (segment(0, 2, 20), segment(0, 2, 20), segment(2, 1, 20), segment(2, 1, 20))
    for record in (DELTA, SKIP):
        parted = dataclasses.replace(record, files=files)
        assert type(record).parse(parted.to_bytes()) == parted


@pytest.mark.parametrize(
    "files",
    [
        (),
        CHECKPOINT[:1] * 2,
        CHECKPOINT[1:],
        (dataclasses.replace(CHECKPOINT[0], raw=99), CHECKPOINT[1]),
        (dataclasses.replace(CHECKPOINT[0], first=0, count=4),),
        (CHECKPOINT[0], dataclasses.replace(CHECKPOINT[1], raw=1)),
        (CHECKPOINT[0], CHECKPOINT[1], dataclasses.replace(CHECKPOINT[1], name="CONFIG.json")),
        (segment(0, 4, 100),),
    ],
)
def test_checkpoint_files_must_be_a_checkpoint(files):
    refused(ANCHOR, dataclasses.replace(ANCHOR, files=files).plain())
    refused(ANCHOR_SHORTCUT, dataclasses.replace(ANCHOR_SHORTCUT, files=files).plain())


@pytest.mark.parametrize(
    "attached",
    [
        ATTACHED[::-1],
        ATTACHED[:1] * 2,
        (dataclasses.replace(ATTACHED[0], name="CONFIG.json"), ATTACHED[0]),
        (dataclasses.replace(ATTACHED[0], name="model-2.SAFETENSORS"),),
        (dataclasses.replace(ATTACHED[0], name="model.safetensors.index.json"),),
        (dataclasses.replace(ATTACHED[0], key=CHECKPOINT[0].key, blake3=HASH),),
        *((dataclasses.replace(ATTACHED[0], name=name),) for name in HOSTILE_NAMES),
        *((dataclasses.replace(ATTACHED[0], key=key),) for key in HOSTILE_KEYS if not key.endswith(".file")),
    ],
)
def test_attachments_must_be_plain_files_in_order(attached):
    refused(DELTA_2, dataclasses.replace(DELTA_2, attachments=attached).plain())


def test_a_record_of_version_2_needs_both_of_its_fields_and_one_of_version_1_has_none():
    for changes in ({"run": None}, {"attachments": None}):
        with pytest.raises(CorruptRecord):
            dataclasses.replace(DELTA_2, **changes).to_bytes()
    refused(DELTA, DELTA.plain() | {"run": "my run"})
    refused(DELTA_2, DELTA_2.plain() | {"version": 1})
    refused(RECORDS["epoch"], RECORDS["epoch"].plain() | {"version": 1})


@pytest.mark.parametrize(
    ("record", "changes"),
    [
        (FENCE_2, {"attachments": ATTACHED}),
        (ANCHOR_2, {"files": CHECKPOINT}),
        (DELTA, {"kind": "merge"}),
        (DELTA, {"parent": None}),
        (DELTA, {"links": DELTA.links[:1]}),
        (DELTA, {"links": DELTA.links[::-1]}),
        (DELTA, {"links": ()}),
        (DELTA, {"base": None}),
        (DELTA, {"base": CommitRef(8, HASH, DIGEST)}),
        (DELTA, {"base": CommitRef(7, HASH, None)}),
        (DELTA, {"state_seq": 7}),
        (DELTA, {"state_seq": None}),
        (DELTA, {"updates": 0}),
        (DELTA, {"updates": 9}),
        (DELTA, {"digest": None}),
        (DELTA, {"epoch": 10**10}),
        (ANCHOR, {"base": DELTA.base}),
        (ANCHOR, {"changed": 1}),
        (FENCE, {"files": DELTA.files}),
        (FENCE, {"changed": 1}),
        (FENCE, {"state_seq": 8}),
        (FENCE, {"state_seq": None}),
        (FENCE, {"base": None}),
        (FENCE, {"digest": Digest()}),
        (REWIND, {"files": DELTA.files}),
        (REWIND, {"base": None}),
        (REWIND, {"digest": Digest()}),
        (REWIND, {"state_seq": 2}),
        (FIRST, {"kind": "anchor"}),
        (FIRST, {"state_bytes": 1}),
        (FIRST, {"tensors": 1}),
        (FIRST, {"updates": 1}),
        (FIRST, {"parent": HASH}),
        (FIRST, {"state_seq": 0}),
        (FIRST, {"digest": DIGEST}),
        (SKIP, {"base": CommitRef(8, HASH, DIGEST)}),
        (SKIP, {"base": CommitRef(4, HASH, None)}),
        (SKIP, {"target": CommitRef(8, HASH, None)}),
    ],
)
def test_fields_must_agree_with_each_other(record, changes):
    wrong = dataclasses.replace(record, **changes)
    refused(record, wrong.plain())
    with pytest.raises(CorruptRecord):
        wrong.to_bytes()


def test_anchor_and_skip_are_told_apart_by_their_base():
    refused(SKIP, SKIP.plain() | {"deltawire": "anchor"})
    refused(ANCHOR_SHORTCUT, ANCHOR_SHORTCUT.plain() | {"deltawire": "skip"})


@pytest.mark.parametrize("name", ["", "x" * 201])
def test_a_run_has_a_name_of_some_length(name):
    refused(RECORDS["run"], Run(name, ID, 1, Limits()).plain())
    refused(DELTA_2, dataclasses.replace(DELTA_2, run=name).plain())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(RECORDS)), st.data())
def test_a_mutated_record_is_refused_or_is_a_canonical_record(name, data):
    record = RECORDS[name]
    document = json.loads(record.to_bytes())
    path = data.draw(st.sampled_from([path for path in places(document) if path]))
    value = data.draw(JSON)
    changed = spelled(edited(document, path, lambda inner, key: inner.__setitem__(key, value)))
    never_misread(record, changed)


@given(st.sampled_from(sorted(RECORDS)), st.data())
def test_damaged_bytes_are_refused_or_are_a_canonical_record(name, data):
    record = RECORDS[name]
    raw = bytearray(record.to_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    never_misread(record, bytes(raw))


@given(st.binary(max_size=200))
def test_noise_is_refused(noise):
    for record in RECORDS.values():
        refused(record, noise)


def never_misread(record, changed):
    try:
        found = type(record).parse(changed)
    except (CorruptRecord, UnsupportedVersion):
        return
    assert found.to_bytes() == changed


@pytest.mark.parametrize(
    "change",
    [
        {"base": CommitRef(8, OTHER, Digest())},
        {"base": CommitRef(7, OTHER, None)},
        {"seq": 9},
        {"epoch": 4},
        {"files": (data_file("model.safetensors"),)},
        {"files": (segment(2, 2), segment(0, 1))},
        {"files": (segment(0, 2), segment(1, 2))},
        {"files": (segment(0, 0),)},
    ],
)
def test_an_announcement_names_delta_files_of_its_own_epoch_and_number(change):
    with pytest.raises(CorruptRecord):
        dataclasses.replace(ANNOUNCEMENT, **change).to_bytes()
