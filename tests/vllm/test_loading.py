"""Tensors reach a model in the order of its modules, from files or from the store. These tests need torch, but not vLLM."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from support import bits_of
from toy_chain import ToyChain, first_state

torch = pytest.importorskip("torch", reason="torch is not installed")

from deltawire.chain.reader_options import ReaderOptions  # noqa: E402
from deltawire.chain.routes.remaining_routes import Routes  # noqa: E402
from deltawire.chain.routes.restore import Hop  # noqa: E402
from deltawire.engines.vllm.loading import module_order, stream_anchor, whole_tensors  # noqa: E402
from deltawire.errors import DataDamaged, DataMissing  # noqa: E402
from deltawire.format.checkpoints.checkpoint import Checkpoint  # noqa: E402
from deltawire.store.memory import MemoryStore  # noqa: E402
from deltawire.store.wrapped import WrappedStore  # noqa: E402
from deltawire.subscribe.spool.delta_spool import DeltaSpool  # noqa: E402
from deltawire.subscribe.sync_context import SyncContext  # noqa: E402


def test_the_tensors_of_a_module_follow_each_other() -> None:
    names = [f"layers.{layer}.{part}" for layer in (10, 2, 0) for part in ("mlp.experts.10.up", "mlp.experts.9.up", "attn.q", "mlp.gate")]
    ordered = module_order([*names, "embed", "norm"])
    assert ordered[0] == "embed"
    assert ordered[1:5] == ["layers.0.attn.q", "layers.0.mlp.experts.9.up", "layers.0.mlp.experts.10.up", "layers.0.mlp.gate"]
    assert [name.split(".")[1] for name in ordered[1:-1]] == ["0"] * 4 + ["2"] * 4 + ["10"] * 4
    assert module_order(["a.1", "a.b", "a", "1"]) == module_order(["1", "a", "a.b", "a.1"])  # numbers and words are compared


def bits(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def test_tensors_of_a_checkpoint_are_mapped_and_writing_to_them_changes_no_file(tmp_path: Path) -> None:
    state = {**first_state(), "scalar": np.array(2.5), "empty": np.zeros((0, 2), np.int8), "e5": np.ones(3, ml_dtypes.float8_e5m2)}
    path = tmp_path / "model.safetensors"
    save_file(state, path)
    before = path.read_bytes()
    weights = Checkpoint(path)
    found = dict(whole_tensors(weights, module_order(weights)))
    assert list(found) == module_order(state)
    assert {name: (tuple(tensor.shape), bits(tensor)) for name, tensor in found.items()} == {
        name: (array.shape, array.tobytes()) for name, array in state.items()
    }
    found["c.bias"].zero_()
    assert path.read_bytes() == before
    assert bits_of(Checkpoint(path)) == bits_of(state)


class CountingStore(WrappedStore):
    """Counts how often each object is read."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.reads: list[str] = []

    def read_into(self, key: str, buffer: memoryview, **more: Any) -> None:
        self.reads.append(key)
        super().read_into(key, buffer, **more)


def anchored(shards: int = 4) -> ToyChain:
    chain = ToyChain(CountingStore(MemoryStore()), shards=shards)
    chain.anchor(first_state())
    return chain


def anchor_of(chain: ToyChain) -> tuple[Hop, SyncContext]:
    log = ReaderOptions().open_log(chain.store)
    context = SyncContext(log, Routes(log), patience=0)
    return context.routes.find(None, chain.commits[1])[0], context


def test_workers_that_load_at_the_same_time_get_all_tensors_and_fetch_each_shard_once(tmp_path: Path) -> None:
    chain = anchored()
    order = module_order(chain.state)
    together = threading.Barrier(2, timeout=60)
    found: list[dict[str, bytes]] = []

    def load() -> None:
        hop, context = anchor_of(chain)
        loaded = {}
        for name, tensor in stream_anchor(hop, context, order, spool=DeltaSpool(tmp_path)):
            loaded[name] = bits(tensor)
            together.wait()  # both workers load the same tensor
        found.append(loaded)

    workers = [threading.Thread(target=load) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert found == [{name: array.tobytes() for name, array in chain.state.items()}] * 2
    shards = [entry.key for entry in chain.commits[1].files if str(entry.name).endswith(".safetensors")]
    assert isinstance(chain.store, CountingStore)
    assert sorted(key for key in chain.store.reads if key in shards) == sorted(shards)
    assert not list((tmp_path / "shards").iterdir())


def test_the_tensors_of_a_shard_come_in_the_order_of_modules(tmp_path: Path) -> None:
    chain = anchored(shards=1)
    hop, context = anchor_of(chain)
    order = ["c.bias", "a.weight", "d.norm", "b.weight"]
    assert [name for name, _ in stream_anchor(hop, context, order, spool=DeltaSpool(tmp_path))] == order


def test_a_worker_that_stops_early_leaves_nothing(tmp_path: Path) -> None:
    chain = anchored()
    hop, context = anchor_of(chain)
    stream = stream_anchor(hop, context, module_order(chain.state), spool=DeltaSpool(tmp_path))
    next(stream)
    stream.close()
    assert not list((tmp_path / "shards").iterdir())


def test_damaged_missing_and_wrong_shards_are_refused(tmp_path: Path) -> None:
    chain = anchored()
    hop, context = anchor_of(chain)
    first, second, *rest = hop.files

    def stream(*files: Any) -> None:
        changed = dataclasses.replace(hop, files=files)
        for _ in stream_anchor(changed, context, (), spool=DeltaSpool(tmp_path)):
            pass

    with pytest.raises(DataDamaged, match="has 1 tensors, not 4"):
        stream(first)
    with pytest.raises(DataDamaged, match="does not hold"):
        stream(first, first)
    with pytest.raises(DataDamaged, match="does not hold"):
        stream(dataclasses.replace(first, raw=1))
    text = chain.upload(b"no shard", "safetensors", raw=0, name="model.safetensors")
    with pytest.raises(DataDamaged, match="not a safetensors file"):
        stream(text)
    chain.damage(second)
    with pytest.raises(DataDamaged, match="damaged"):
        stream(first, second, *rest)
    chain.lose(second)
    with pytest.raises(DataMissing):
        stream(first, second, *rest)
    assert not list((tmp_path / "shards").iterdir())
