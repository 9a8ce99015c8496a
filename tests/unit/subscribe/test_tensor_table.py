"""Test how the names, types and shapes of a chain's tensors are read from the headers of a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save
from spooled_chain import context_of
from toy_chain import ToyChain, first_state

from deltawire.chain.routes.restore import Hop
from deltawire.dtypes import dtype_of_numpy
from deltawire.errors import DataDamaged, DataMissing, DeltawireError, SpoolError, UnsupportedVersion
from deltawire.format.records.record_parts import FileEntry
from deltawire.store.memory import MemoryStore
from deltawire.store.wrapped import WrappedStore
from deltawire.subscribe.sync_context import SyncContext
from deltawire.subscribe.tensor_table import TensorSpec, load_table, read_tensor_table, write_table


class CountingStore(WrappedStore):
    """Counts the bytes that are read."""

    read = 0

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, **more: Any) -> None:
        self.read += len(buffer)
        super().read_into(key, buffer, offset=offset, **more)


def anchor_of(context: SyncContext, chain: ToyChain) -> Hop:
    return context.routes.find(None, chain.commits[-1])[0]


def read(chain: ToyChain, **changed: Any) -> object:
    """Read the table of the newest anchor, perhaps with other fields of its hop."""
    context = context_of(chain.store)
    return read_tensor_table(context, dataclasses.replace(anchor_of(context, chain), **changed))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("listed", [False, True])
def test_the_table_has_all_tensors_and_only_headers_are_fetched(shards: int, listed: bool) -> None:
    state = first_state() | {"z.large": np.zeros(1 << 16, np.float32), "empty": np.zeros((0, 3), np.int8), "scalar": np.array(1.5)}
    store = CountingStore(MemoryStore())
    chain = ToyChain(store, shards=shards, listed=listed)
    chain.anchor(state)
    context = context_of(store)
    anchor = anchor_of(context, chain)
    store.read = 0
    table = read_tensor_table(context, anchor)
    assert table == {name: TensorSpec(dtype_of_numpy(array.dtype), array.shape) for name, array in state.items()}
    assert list(table) == sorted(state)
    assert store.read < 4096


def forged(chain: ToyChain, data: bytes, *, like: FileEntry) -> FileEntry:
    """Replace an object without changing its record's hash. Headers have no hash of their own, so a reader cannot notice by it."""
    chain.store.put(like.key, data)
    return dataclasses.replace(like, size=len(data))


def shard(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


BYTE = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "too few"),
        (b"\xff" * 8, "does not begin with the length"),
        ((1 << 20).to_bytes(8, "little") + bytes(100), "ends inside its header"),
        (shard(a=BYTE), "cut short"),
        (shard(a=BYTE | {"dtype": "F3"}) + bytes(1), "F3"),
        (shard(a=BYTE | {"shape": [2**61]}) + bytes(1), "shape"),
        (shard(a={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}), "bytes of weights"),
        (b"\2" + bytes(7) + b"[]", "not an object"),
        ((4 << 20).to_bytes(8, "little") + b"[" * (4 << 20), "too many"),
    ],
)
def test_a_hostile_header_is_refused(data: bytes, why: str) -> None:
    chain = ToyChain(MemoryStore(), shards=1)
    (entry, *_) = chain.anchor(first_state()).files
    with pytest.raises(DataDamaged, match=why):
        read(chain, files=(forged(chain, data, like=entry),))


def test_shards_that_do_not_fit_together_are_refused() -> None:
    state = first_state()
    chain = ToyChain(MemoryStore(), shards=1)
    commit = chain.anchor(state)
    half = save({name: state[name] for name in ("a.weight", "b.weight")})
    other = save({"b.weight": state["b.weight"], "e": state["c.bias"]})
    raw = sum(state[name].nbytes for name in ("a.weight", "b.weight"))
    first = chain.upload(half, "safetensors", raw=raw, name="model-1.safetensors")
    second = chain.upload(other, "safetensors", raw=state["b.weight"].nbytes + state["c.bias"].nbytes, name="model-2.safetensors")
    for files, why in [
        ((first,), "has 2 tensors, not 4"),
        ((first, second), "and in another shard"),
        ((first, *commit.files), "more than the 4 tensors"),
        ((), "has 0 tensors, not 4"),
    ]:
        with pytest.raises(DataDamaged, match=why):
            read(chain, files=files)


def test_a_shard_that_is_missing_is_reported_as_missing() -> None:
    chain = ToyChain(MemoryStore())
    commit = chain.anchor(first_state())
    chain.lose(commit.files[1])
    with pytest.raises(DataMissing) as caught:
        read(chain)
    assert isinstance(caught.value, DeltawireError)
    assert caught.value.retryable


def sample_table() -> dict[str, TensorSpec]:
    state = first_state() | {"scalar": np.array(1.5), "größe": np.zeros((0, 3), np.int8)}
    return {name: TensorSpec(dtype_of_numpy(state[name].dtype), state[name].shape) for name in sorted(state)}


def test_a_table_survives_in_a_file_and_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "spool" / "tensors.json"
    with pytest.raises(SpoolError):
        load_table(path)
    table = sample_table()
    write_table(path, table)
    assert load_table(path) == table
    assert list(load_table(path)) == sorted(table)
    before = path.stat().st_ino
    write_table(path, table)
    assert path.stat().st_ino == before
    del table["scalar"]
    write_table(path, table)
    assert load_table(path) == table
    assert [each.name for each in path.parent.iterdir()] == ["tensors.json"]


def tables(**tensors: Any) -> bytes:
    return json.dumps({"deltawire": "tensors", "version": 1, "tensors": tensors}).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"deltawire": "tensors", "version": "1", "tensors": {}}',
        b'{"deltawire": "commit", "version": 1, "tensors": {}}',
        b'{"deltawire": "tensors", "version": 1, "tensors": []}',
        b'{"deltawire": "tensors", "version": 1, "tensors": {}, "more": 1}',
        b'{"deltawire": "tensors", "version": 1, "tensors": {"a": ["U8", []], "a": ["U8", [1]]}}',
        tables(a=["U8"]),
        tables(a=["F3", [1]]),
        tables(a=[None, [1]]),
        tables(a=["U8", [-1]]),
        tables(a=["U8", [True]]),
        tables(a=["U8", [1.0]]),
        tables(a=["U8", [2**40, 2**40]]),
        tables(a=["U8", [1] * 33]),
        b"[" * (1 << 20),
        b'{"a":' * 100_000,
    ],
    ids=range(17),
)
def test_a_hostile_file_is_no_table(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "tensors.json"
    path.write_bytes(text)
    with pytest.raises(SpoolError, match="damaged") as caught:
        load_table(path)
    assert caught.value.retryable


def test_a_table_of_a_newer_release_says_to_upgrade(tmp_path: Path) -> None:
    path = tmp_path / "tensors.json"
    path.write_bytes(b'{"deltawire": "tensors", "version": 2}')
    with pytest.raises(UnsupportedVersion, match="Upgrade"):
        load_table(path)
