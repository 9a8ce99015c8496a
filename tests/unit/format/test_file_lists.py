"""Records of versions that 2,048 ranks publish: they are written and read, and lists have as many bytes as docs/train.md says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from blake3 import blake3

from deltawire.chain.fetch import Fetcher
from deltawire.chain.records.file_lists import FileLists
from deltawire.errors import CorruptRecord
from deltawire.format.digest import Digest
from deltawire.format.records.record_parts import CommitRef, FileEntry, Limits, link_targets
from deltawire.format.records.version_records import Commit, Shortcut
from deltawire.publish.upload.data_objects import upload_list
from deltawire.store import keys
from deltawire.store.memory import MemoryStore

RANKS = 2_048
SEQ, EPOCH, TENSORS, STATE_BYTES = 1 << 20, 7, 70_000, 1 << 40
ID, HASH = "0" * 32, "ab" * 32


def digest(number: int) -> Digest:
    return Digest.from_hex(f"{number:032x}")


BASE = CommitRef(SEQ - 1, HASH, digest(1))
TARGET = CommitRef(SEQ, HASH, digest(2))


def entry(rank: int, **more: Any) -> FileEntry:
    content = blake3(b"%d" % rank).hexdigest()
    return FileEntry(keys.data_key(EPOCH, SEQ, content, "safetensors"), (1 << 29) + rank, STATE_BYTES // RANKS, content, **more)


def delta_files() -> list[FileEntry]:
    """Return a file of each rank. All are about parts of the same tensors."""
    return [entry(rank, name=None, first=0, count=TENSORS) for rank in range(RANKS)]


def checkpoint_files() -> list[FileEntry]:
    return [entry(rank, name=f"model-{rank + 1:05}-of-{RANKS:05}.safetensors") for rank in range(RANKS)]


def commit(kind: str) -> Commit:
    return Commit(
        ID, SEQ, EPOCH, ID, kind, HASH, tuple((m, HASH) for m in link_targets(SEQ)), None if kind == "anchor" else BASE, SEQ, SEQ,
        TARGET.digest, STATE_BYTES, TENSORS, 0 if kind == "anchor" else 1 << 30, 5, 10**12, (), run="run", attachments=(),
    )  # fmt: skip


def shortcut(base: CommitRef | None) -> Shortcut:
    return Shortcut(ID, EPOCH, ID, 10**12, TARGET, base, STATE_BYTES, TENSORS, ())


CASES = {
    "delta": (commit("delta"), delta_files(), 102),
    "anchor": (commit("anchor"), checkpoint_files(), 134),
    "skip": (shortcut(dataclasses.replace(BASE, seq=SEQ - 64)), delta_files(), 102),
    "anchor that was made later": (shortcut(None), checkpoint_files(), 134),
}
"""The record without its list, its files, and the bytes of the list for each file."""


@pytest.mark.parametrize("kind", CASES)
def test_the_files_of_2048_ranks_are_written_and_read(kind: str) -> None:
    plain, files, row = CASES[kind]
    store = MemoryStore()
    listed = upload_list(store, files)
    assert listed is not None
    record = dataclasses.replace(plain, file_list=listed)
    data = record.to_bytes()
    assert len(data) < 2_500  # most of them are links of the commit
    assert listed.size // RANKS == row
    read = type(record).parse(data)
    assert read == record
    assert (read.file_list.files, read.file_count) == (RANKS, RANKS)
    assert read.file_list.bytes == sum(each.size for each in files)
    limits = Limits()
    assert FileLists().files_of(read, Fetcher(store, limits=limits), limits) == tuple(files)


@pytest.mark.parametrize("kind", CASES)
def test_a_list_of_one_file_fewer_is_refused(kind: str) -> None:
    plain, files, _ = CASES[kind]
    store = MemoryStore()
    listed = upload_list(store, files[:-1])
    assert listed is not None
    limits = Limits()
    record = dataclasses.replace(plain, file_list=dataclasses.replace(listed, files=RANKS))
    with pytest.raises(CorruptRecord, match="it names 2,048 files, but it names 2,047"):
        FileLists().files_of(record, Fetcher(store, limits=limits), limits)
