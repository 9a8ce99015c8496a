"""Test how the names, types and shapes of a chain's tensors are read from the headers of a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save
from toy_chain import ToyChain, first_state

from deltawire.chain.reader_options import ReaderOptions
from deltawire.chain.restore import Hop
from deltawire.chain.routes import Routes
from deltawire.dtypes import dtype_of_numpy
from deltawire.errors import DataDamaged, DataMissing, DeltawireError
from deltawire.format.records.record_parts import FileEntry
from deltawire.store.memory import MemoryStore
from deltawire.store.wrapped import WrappedStore
from deltawire.subscribe.sync_context import SyncContext
from deltawire.subscribe.tensor_table import TensorSpec, read_tensor_table


class CountingStore(WrappedStore):
    """Counts the bytes that are read."""

    read = 0

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, **more: Any) -> None:
        self.read += len(buffer)
        super().read_into(key, buffer, offset=offset, **more)


def context_of(store: Any) -> SyncContext:
    log = ReaderOptions().open_log(store)
    return SyncContext(log, Routes(log), patience=0)


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
