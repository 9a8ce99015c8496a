"""Readers refuse file lists that do not fit their record."""

from __future__ import annotations

import dataclasses

import pytest
from record_samples import (
    CHECKPOINT,
    FENCE_2,
    HASH,
    LISTED,
    LISTED_ANCHOR,
    LISTED_DELTA,
    LISTED_SKIP,
    OTHER,
    data_file,
    refused,
    segment,
    spelled,
)

from deltawire.errors import CorruptRecord, LimitExceeded, UnsupportedVersion
from deltawire.format.records.file_list import MAX_LIST_BYTES, MOST_LISTED, list_bytes, parse_list
from deltawire.format.records.record_parts import FileEntry, Limits
from deltawire.format.records.version_records import Commit


def many_files(count):
    """Return the files of a delta by `count` ranks: one run of tensors, of which each covers a part."""
    folder = LISTED.folder
    hashes = [f"{number:064x}" for number in range(count)]
    return tuple(FileEntry(f"{folder}/{hash_}.safetensors", 50, 1, hash_, None, 0, 4) for hash_ in hashes)


def listing(record, files, **changed):
    """Return a record that has a file list of these files, and the list."""
    data = list_bytes(files)
    told = {"size": len(data), "files": len(files), "bytes": sum(entry.size for entry in files)} | changed
    return dataclasses.replace(record, state_bytes=max(100, len(files)), file_list=dataclasses.replace(LISTED, **told)), data


def test_a_list_of_thousands_of_files_is_read_as_it_was_written():
    files = many_files(4100)
    record, data = listing(LISTED_DELTA, files)
    assert Commit.parse(record.to_bytes()) == record
    assert len(record.to_bytes()) < 4096
    assert len(data) < 100 * len(files)
    assert parse_list(data, record, Limits()) == files
    assert (record.file_count, record.stored_bytes) == (4100, len(data) + 50 * 4100)
    checkpoint = (*CHECKPOINT[:1], data_file("model.safetensors.index.json", raw=0, hash_=OTHER, suffix="file"))
    record, data = listing(LISTED_ANCHOR, checkpoint)
    assert parse_list(data, record, Limits()) == checkpoint


def test_a_record_with_a_list_names_no_files_and_claims_no_more_than_the_limits():
    for record in (LISTED_DELTA, LISTED_ANCHOR, LISTED_SKIP):
        refused(record, record.plain() | {"files": [segment(0, 1).plain()]})
        for change in ({"files": 0}, {"files": MOST_LISTED + 1}, {"size": 0}, {"size": MAX_LIST_BYTES + 1}, {"key": CHECKPOINT[0].key}):
            refused(record, record.plain() | {"list": LISTED.plain() | change})
    refused(LISTED_DELTA, FENCE_2.plain() | {"version": 4, "recipe": None, "list": LISTED.plain()})
    with pytest.raises(LimitExceeded):
        Limits(100, 10, 50).check(dataclasses.replace(LISTED_DELTA, file_list=dataclasses.replace(LISTED, size=1, bytes=10**9)))
    with pytest.raises(LimitExceeded):
        list_bytes(many_files(1) * (MOST_LISTED + 1))


def row_with(**changed):
    return [{**dict(zip(("blake3", "size", "raw", "name", "first", "count"), [HASH, 50, 50, None, 0, 1], strict=True)), **changed}]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        row_with() * 3,
        row_with(blake3="../../x"),
        row_with(blake3=None),
        row_with(size=-1),
        row_with(size=51),
        row_with(raw=1.5),
        row_with(raw=101),
        row_with(name="model.safetensors"),
        row_with(name=7),
        row_with(first=None),
        row_with(count=0),
        row_with(first=3, count=2),
        [{"blake3": HASH}],
        [7],
    ],
)
def test_a_list_that_does_not_fit_its_record_is_refused(rows):
    record, _ = listing(LISTED_DELTA, [segment(0, 1)])
    assert parse_list(list_bytes([segment(0, 1)]), record, Limits())
    plain = [list(row.values()) if isinstance(row, dict) else row for row in rows]
    for document in ({"files": plain}, {"files": plain, "more": 1}, {"files": {}}):
        with pytest.raises(CorruptRecord):
            parse_list(spelled({"deltawire": "files", "version": 1} | document), record, Limits())
    with pytest.raises(LimitExceeded):
        parse_list(list_bytes([segment(0, 1)]), record, Limits(file_bytes=49))
    with pytest.raises(UnsupportedVersion):
        parse_list(list_bytes([segment(0, 1)]).replace(b'"version":1', b'"version":2'), record, Limits())
