"""Workers of a server share one copy of the tensors that they cannot read from their memory. These tests need torch, but not vLLM."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from toy_chain import first_state, next_state

torch = pytest.importorskip("torch", reason="torch is not installed")

from deltawire.delta.patch import TensorPatch  # noqa: E402
from deltawire.dtypes import dtype_of_numpy  # noqa: E402
from deltawire.engines.vllm.live import kept_bases  # noqa: E402
from deltawire.engines.vllm.live.kept_bases import KeptBases  # noqa: E402
from deltawire.errors import SpoolError  # noqa: E402
from deltawire.format.checkpoints.checkpoint import Checkpoint  # noqa: E402
from deltawire.format.records.record_parts import CommitRef  # noqa: E402
from deltawire.subscribe.spool.delta_spool import DeltaSpool  # noqa: E402
from deltawire.subscribe.tensor_table import TensorSpec, TensorTable  # noqa: E402
from deltawire.tensors.torch_types import to_torch  # noqa: E402

State = dict[str, Any]
REF = CommitRef(2, "0" * 64, None)


def table_of(state: State, *names: str) -> TensorTable:
    return {name: TensorSpec(dtype_of_numpy(state[name].dtype), state[name].shape) for name in names or sorted(state)}


def saved(path: Path, state: State) -> Checkpoint:
    save_file(state, path)
    return Checkpoint(path)


def changes_of(old: State, new: State, *, parts: int = 1) -> dict[str, list[TensorPatch]]:
    """Return the changes of each tensor as torch tensors, in several patches."""
    found = {}
    for name, array in new.items():
        bits, before = (each.reshape(-1).view(f"u{each.itemsize}") for each in (array, old[name]))
        where = np.array_split(np.flatnonzero(bits != before), parts)
        values = array.reshape(-1)
        found[name] = [TensorPatch(torch.from_numpy(each), to_torch(values[each].copy()), array.shape) for each in where if each.size]
    return found


@pytest.fixture
def state() -> State:
    return {**first_state(), "empty": np.zeros((0, 2), np.int8), "scalar": np.array(3, ml_dtypes.bfloat16)}


@pytest.fixture
def workers(tmp_path: Path, state: State) -> Iterator[Callable[..., KeptBases]]:
    made: list[KeptBases] = []
    checkpoint = saved(tmp_path / "start.safetensors", state)

    def make(**options: Any) -> KeptBases:
        made.append(KeptBases(tmp_path / "kept" / "server", lambda: checkpoint, **options))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


def assert_holds(worker: KeptBases, state: State, names: Any) -> None:
    for name in names:
        found = worker.base(name)
        assert (found.dtype, found.shape, found.tobytes()) == (state[name].dtype, state[name].shape, state[name].tobytes())


def test_each_tensor_exists_once_and_follows_the_swaps_of_all_workers(
    workers: Callable[..., KeptBases], state: State, tmp_path: Path
) -> None:
    one, two = workers(), workers()
    assert one.hold(table_of(state, "a.weight", "c.bias", "empty", "scalar")) is None
    assert two.hold(table_of(state, "a.weight", "b.weight", "d.norm")) is None
    sizes = {name: array.nbytes for name, array in state.items()}
    assert one.nbytes == sum(sizes[name] for name in ("a.weight", "c.bias", "empty", "scalar"))
    assert two.nbytes == sizes["b.weight"] + sizes["d.norm"]
    assert len(list((tmp_path / "kept" / "server").glob("*.bin"))) == len(state)
    needs = {one: ("a.weight", "c.bias", "empty", "scalar"), two: ("a.weight", "b.weight", "d.norm")}
    for number in range(3):
        for worker, names in needs.items():
            assert_holds(worker, state, names)
        new = {**next_state({name: state[name] for name in first_state()}, number), "empty": state["empty"], "scalar": state["scalar"]}
        changes = changes_of(state, new, parts=number + 1)
        for worker, names in needs.items():
            worker.settled(REF, {name: changes[name] for name in names if changes[name]})
        state = new
    for worker, names in needs.items():
        assert_holds(worker, state, names)


def test_a_worker_waits_for_the_one_that_writes(workers: Callable[..., KeptBases], state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, go_on = threading.Event(), threading.Event()
    writer, reader = workers(), workers(sleep=lambda _: (waits.set(), go_on.wait(0.01)))
    for worker in (writer, reader):
        assert worker.hold(table_of(state, "a.weight")) is None
    new = next_state({"a.weight": state["a.weight"]}, 1)
    bits = kept_bases._bits

    def slow(*arguments: Any) -> Any:
        assert go_on.wait(60)
        return bits(*arguments)

    monkeypatch.setattr(kept_bases, "_bits", slow)
    changes = changes_of({"a.weight": state["a.weight"]}, new)
    writer.settled(REF, changes)
    reader.settled(REF, changes)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(reader.base("a.weight").copy()))
    thread.start()
    assert waits.wait(60)
    assert not found
    go_on.set()
    thread.join(60)
    assert found[0].tobytes() == new["a.weight"].tobytes()


def test_a_writer_that_never_comes_is_an_error(workers: Callable[..., KeptBases], state: State, tmp_path: Path) -> None:
    now = [0.0]
    reader = workers(sleep=lambda seconds: now.__setitem__(0, now[0] + 1), clock=lambda: now[0])
    (tmp_path / "kept" / "server").mkdir(parents=True)
    reader._wanted = table_of(state, "a.weight")
    reader._path("a.weight").with_suffix(".claim").touch()
    assert reader.hold(table_of(state, "a.weight")) is None
    with pytest.raises(SpoolError, match="has not done so") as caught:
        reader.base("a.weight")
    assert caught.value.retryable


def test_an_update_of_another_generation_is_not_written(workers: Callable[..., KeptBases], state: State) -> None:
    writer, other = workers(), workers()
    assert writer.hold(table_of(state, "a.weight")) is None
    new = next_state({"a.weight": state["a.weight"]}, 1)
    changes = changes_of({"a.weight": state["a.weight"]}, new)
    writer.settled(REF, changes)
    assert_holds(writer, new, ["a.weight"])
    writer._opened("a.weight").generation = 7
    writer.settled(REF, changes)
    with pytest.raises(SpoolError, match="not the one"):
        writer.base("a.weight")
    del other


def test_a_checkpoint_that_is_loaded_replaces_the_tensors(workers: Callable[..., KeptBases], state: State) -> None:
    one, two = workers(), workers()
    for worker in (one, two):
        assert worker.hold(table_of(state)) is None
    new = {**state, **next_state(first_state(), 6)}
    tensors = [(name, to_torch(array.copy())) for name, array in new.items()]
    one.watch(iter(tensors))  # this worker fails before it takes the first tensor
    list(two.watch(iter(tensors)))
    for worker in (one, two):  # the next attempt
        assert list(worker.watch(iter(tensors))) == tensors
    for worker in (one, two):
        assert_holds(worker, new, new)


def test_a_checkpoint_without_the_tensors_or_too_many_of_them_is_refused(
    workers: Callable[..., KeptBases], state: State, tmp_path: Path
) -> None:
    worker = workers(most_bytes=100)
    assert "is not in the checkpoint" in str(worker.hold({"z": table_of(state)["c.bias"]}))
    assert "is not in the checkpoint" in str(worker.hold({"c.bias": TensorSpec(table_of(state)["c.bias"].dtype, (8,))}))
    assert "bytes that cannot be read" in str(worker.hold(table_of(state)))
    assert worker.hold(table_of(state, "c.bias")) is None
    assert_holds(worker, state, ["c.bias"])
    assert worker.hold(table_of(state, "c.bias")) is None
    assert_holds(worker, state, ["c.bias"])


def test_tensors_are_held_again_after_others_were_wanted(workers: Callable[..., KeptBases], state: State, tmp_path: Path) -> None:
    now = [0.0]
    options: Any = {"sleep": lambda seconds: now.__setitem__(0, now[0] + 1), "clock": lambda: now[0]}
    one, two = workers(**options), workers(**options)
    for names in (("a.weight", "c.bias"), ("c.bias",), ("a.weight", "c.bias")):  # the tables of two chains, by turns
        for worker in (one, two):
            assert worker.hold(table_of(state, *names)) is None
        for worker in (one, two):
            assert_holds(worker, state, names)
    assert "is not in the checkpoint" in str(one.hold({"z": table_of(state)["c.bias"]}))
    assert one.nbytes == 0
    other = {"c.bias": np.arange(5, dtype=np.int16)}
    one._checkpoint = two._checkpoint = lambda: saved(tmp_path / "other.safetensors", other)
    assert two.hold(table_of(other)) is None  # as often as the other worker
    for worker in (one, two):  # the same name with another type and shape
        assert worker.hold(table_of(other)) is None
    for worker in (one, two):
        assert_holds(worker, other, other)


def test_no_directory_is_needed_to_hold_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    worker = KeptBases(tmp_path / "file" / "server", lambda: pytest.fail("no checkpoint is needed"))
    assert worker.hold({}) is None
    worker.close()


def leave(folder: Path) -> Path:
    """Make the folder of a server that was killed."""
    folder.mkdir(parents=True)
    (folder / "alive").touch()
    (folder / "x.bin").write_bytes(bytes(100))
    return folder


def test_folders_of_servers_that_have_ended_are_deleted(workers: Callable[..., KeptBases], state: State, tmp_path: Path) -> None:
    first = leave(tmp_path / "kept" / "first")
    one, two = workers(), workers()
    for worker in (one, two):
        assert worker.hold(table_of(state, "a.weight")) is None
    assert not first.exists()
    second = leave(tmp_path / "kept" / "second")
    DeltaSpool(tmp_path).keep_only(0)
    assert not second.exists()
    one.close()
    assert_holds(two, state, ["a.weight"])
    two.close()
    assert not (tmp_path / "kept" / "server").exists()


def test_a_worker_that_writes_no_tensor_wakes_no_thread_in_a_swap(
    workers: Callable[..., KeptBases], state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = workers()
    assert worker.hold({}) is None
    monkeypatch.setattr(worker._thread, "submit", None)
    worker.settled(REF, {})
    monkeypatch.undo()
    assert worker.hold(table_of(state, "c.bias")) is None
    assert_holds(worker, state, ["c.bias"])


def test_a_worker_that_is_never_closed_leaves_nothing(tmp_path: Path, state: State) -> None:
    checkpoint = saved(tmp_path / "start.safetensors", state)
    worker = KeptBases(tmp_path / "kept" / "server", lambda: checkpoint)
    assert worker.hold(table_of(state)) is None
    assert list((tmp_path / "kept").iterdir())
    del worker
    gc.collect()
    assert not list((tmp_path / "kept").iterdir())
