"""Workers of one host read the parts of tensors that they lack from each other's memory. These tests need torch, but not vLLM."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

torch = pytest.importorskip("torch", reason="torch is not installed")

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

from emulator.build import compiler  # noqa: E402
from emulator.gpu import EmulatedGpu, emulated  # noqa: E402
from fake_layout import FakeHop, FakeLayout, FakeWorker, HalfLayout, KeptState  # noqa: E402

from deltawire.dtypes import dtype_of_numpy  # noqa: E402
from deltawire.engines.vllm import ranks  # noqa: E402
from deltawire.engines.vllm.layout.types import TensorLayout  # noqa: E402
from deltawire.engines.vllm.live import live_updates, live_weights, peers  # noqa: E402
from deltawire.engines.vllm.live.kept_bases import KeptBases  # noqa: E402
from deltawire.engines.vllm.live.layout_update import LayoutUpdate  # noqa: E402
from deltawire.engines.vllm.live.live_updates import LiveUpdates  # noqa: E402
from deltawire.engines.vllm.live.live_weights import LiveWeights  # noqa: E402
from deltawire.engines.vllm.live.peer_memory import ProcessMemory, ProcessReader  # noqa: E402
from deltawire.engines.vllm.live.peers import PeerBases  # noqa: E402
from deltawire.errors import PeerUnreadable  # noqa: E402
from deltawire.format.checkpoints.checkpoint import Checkpoint  # noqa: E402
from deltawire.format.records.record_parts import CommitRef, FileEntry  # noqa: E402
from deltawire.subscribe.tensor_table import TensorSpec, TensorTable, write_table  # noqa: E402
from deltawire.tensors.torch_types import to_torch  # noqa: E402

DIVIDED = {"direct", "turned"}
ABSENT = {"nibbles", "scale"}
"""Tensors that only the first worker holds."""


class Nothing:
    """A source of tensors that must not be needed."""

    def __init__(self) -> None:
        self.held: TensorTable = {}

    def hold(self, wanted: TensorTable, absent: TensorTable | None = None, near: Any = ()) -> str | None:
        self.held = {**wanted, **(absent or {})}
        return None

    def writes(self, name: str) -> bool:
        raise AssertionError(name)

    def base(self, name: str) -> Any:
        raise AssertionError(name)

    def settled(self, ref: CommitRef, changes: Mapping[str, Any]) -> None:
        assert not changes

    def close(self) -> None:
        pass


class Spool:
    """A spool with one hop."""

    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker
        self.next: FakeHop | None = None
        self.read: list[FileEntry] = []

    def hop(self, base: CommitRef, seq: int) -> FakeHop | None:
        return self.next

    def open(self, entry: FileEntry) -> bytes:
        self.read.append(entry)
        return self._worker.read(entry)

    def peek(self, entry: FileEntry) -> bytes:
        return self._worker.read(entry)[:73]  # other bytes are not needed


class Workers:
    """Two workers as threads, each with half of the tensors, or `count` workers. `told` has what each of them has told the others last.

    If they are `apart`, they cannot read each other's memory, and keep what they need.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        *,
        layout: Any = HalfLayout,
        count: int = 2,
        apart: bool = False,
        **options: Any,
    ) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=60)
        self._told: dict[int, Any] = {}
        self._rank = threading.local()
        self._pool = ThreadPoolExecutor(count)
        self.waits = [threading.Event() for _ in range(count)]
        """Set when a worker waits for the other one."""
        monkeypatch.setattr(ranks, "_gather", self.gather)
        monkeypatch.setattr(live_updates, "share", self.share)
        self.workers = [FakeWorker(layout=functools.partial(layout, rank=rank), adopt=False, **options) for rank in range(count)]
        self.rest: list[Any] = [Nothing() for _ in range(count)]
        if apart:
            save_file(self.workers[0].state, tmp_path / "start.safetensors")
            start = Checkpoint(tmp_path / "start.safetensors")
            self.rest = [KeptBases(tmp_path / "kept" / "server", lambda: start) for _ in range(count)]
        self.peers = [PeerBases(rest, refusal="they are apart" if apart else None, share=self.share) for rest in self.rest]
        self.spools = [Spool(worker) for worker in self.workers]
        self.updates: list[LiveUpdates] = []
        for worker, source, spool in zip(self.workers, self.peers, self.spools, strict=True):
            worker.weights = LiveWeights(None, lambda _, worker=worker: worker.layout, source=source, threads=1)  # type: ignore[misc]
            self.updates.append(LiveUpdates(worker.weights, spool, source))  # type: ignore[arg-type]
        self._table = tmp_path / "tensors.json"
        write_table(self._table, self.workers[0].table)

    def start(self) -> None:
        self.together(lambda rank: self.updates[rank].learn(self._table))
        self.together(lambda rank: self.updates[rank].adopt(self.workers[rank].version.ref))
        assert all(updates.is_ready for updates in self.updates), [updates.why_not for updates in self.updates]

    def step(self) -> int:
        """Publish a version, and let both workers begin to stage it."""
        for worker, spool in zip(self.workers, self.spools, strict=True):
            spool.next = worker.step()
        seq = int(self.workers[0].version.ref.seq)
        self.together(lambda rank: self.updates[rank].prepare(seq))
        return seq

    def begin(self, work: Callable[[int], Any]) -> list[Any]:
        def run(rank: int) -> Any:
            self._rank.number = rank
            self.waits[rank].clear()
            return work(rank)

        return [self._pool.submit(run, rank) for rank in range(self.count)]

    def together(self, work: Callable[[int], Any]) -> list[Any]:
        return [future.result() for future in self.begin(work)]

    def share(self, value: Any) -> tuple[list[Any], int]:
        rank = self._rank.number
        self._told[rank] = value
        self.waits[rank].set()
        self._barrier.wait()
        found = [self._told[each] for each in range(self.count)]
        self._barrier.wait()
        return found, rank

    def gather(self, numbers: list[int]) -> list[list[int]]:
        return self.share(numbers)[0]

    def close(self) -> None:
        self._barrier.abort()
        for updates in self.updates:
            updates.close()
        for rest in self.rest:
            rest.close()
        self._pool.shutdown()


@pytest.fixture(params=["host", "gpu"])
def device(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "gpu" and compiler() is None:
        pytest.skip("needs a C++ compiler to emulate a GPU")
    with emulated(EmulatedGpu()) if request.param == "gpu" else contextlib.nullcontext():
        yield


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Workers]:
    found = Workers(monkeypatch, tmp_path)
    yield found
    found.close()


@pytest.mark.usefixtures("device")
def test_workers_follow_a_chain_without_any_copy_of_divided_tensors(workers: Workers) -> None:
    workers.start()
    assert [rest.held for rest in workers.rest] == [{}, {}]
    assert [source.status()["bases"] for source in workers.peers] == [
        {"peers": len(DIVIDED), "kept": 0},
        {"peers": len(DIVIDED | ABSENT), "kept": 0},
    ]
    assert all(updates.status()["why_no_peers"] is None for updates in workers.updates)
    for _ in range(3):
        seq = workers.step()
        outcomes = workers.together(lambda rank: workers.updates[rank].swap(seq))  # noqa: B023
        assert [found.outcome for found in outcomes] == ["made", "made"], outcomes
        assert all(worker.held() == worker.expected() for worker in workers.workers)


def test_no_worker_writes_while_another_one_reads_its_memory(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 1 is in the middle of a read. Worker 0 is asked to swap, or to make way for code that loads weights."""
    workers.start()
    reading, go_on = threading.Event(), threading.Event()
    read = ProcessMemory.read

    def slow(memory: ProcessMemory, placement: Any) -> Any:
        if memory.address in {each.data_ptr() for each in workers.workers[0].layout.memory.values()}:
            reading.set()
            assert go_on.wait(60)
        return read(memory, placement)

    monkeypatch.setattr(ProcessMemory, "read", slow)
    old = workers.workers[0].held()
    seq = workers.step()
    assert reading.wait(60)
    futures = workers.begin(lambda rank: workers.updates[rank].swap(seq))
    assert workers.waits[0].wait(60)  # worker 0 has staged, and waits for the other one to agree
    assert workers.workers[0].held() == old
    assert not any(future.done() for future in futures)
    go_on.set()
    assert [future.result().outcome for future in futures] == ["made", "made"]
    assert all(worker.held() == worker.expected() for worker in workers.workers)

    reading.clear()
    go_on.clear()
    workers.step()
    assert reading.wait(60)
    futures = workers.begin(lambda rank: workers.updates[rank].wait())
    assert workers.waits[0].wait(60)
    assert not any(future.done() for future in futures)
    go_on.set()
    assert [future.result() for future in futures] == [None, None]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["turned", "direct"])
def test_wrong_memory_is_noticed_before_anything_is_written(workers: Workers, rank: int, name: str) -> None:
    workers.start()
    workers.workers[rank].layout.memory[name][3] ^= 1 << 2
    old = [worker.held() for worker in workers.workers]
    seq = workers.step()
    outcomes = workers.together(lambda rank: workers.updates[rank].swap(seq))
    assert [found.outcome for found in outcomes] == ["refused", "refused"]
    assert any("BaseMismatch" in str(found.error) for found in outcomes), outcomes
    assert [worker.held() for worker in workers.workers] == old


# Files and windows of which a worker holds nothing


def test_files_of_which_a_worker_holds_nothing_are_not_read(workers: Workers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    apart = Workers(monkeypatch, tmp_path, mixed=False)
    apart.start()
    for _ in range(2):
        for spool in apart.spools:
            spool.read.clear()
        seq = apart.step()
        outcomes = apart.together(lambda rank: apart.updates[rank].swap(seq))  # noqa: B023
        assert [found.outcome for found in outcomes] == ["made", "made"], outcomes
        assert all(worker.held() == worker.expected() for worker in apart.workers)
        names = list(apart.workers[0].table)
        read = [{names[entry.first or 0] for entry in spool.read} for spool in apart.spools]
        assert read == [set(names), set(names) - ABSENT]
    apart.close()


class Experts(FakeLayout):
    """One of two workers with many small experts, of which each holds half. The first also holds what has another name."""

    def __init__(self, state: Any, rank: int, tied: Any = None) -> None:
        self._rank = rank
        super().__init__({name: array for name, array in state.items() if self._holds(name)})
        absent = {
            name: TensorLayout(TensorSpec(dtype_of_numpy(a.dtype), a.shape), "absent") for name, a in state.items() if not self._holds(name)
        }
        self.tensors = dict(sorted({**self.tensors, **absent}.items()))

    def blocks(self) -> Any:
        return {name: blocks if self._holds(name) else [] for name, blocks in super().blocks().items()}

    def _holds(self, name: str) -> bool:
        return (name >= "expert.1600" if name.startswith("expert") else False) == bool(self._rank)


@pytest.mark.usefixtures("device")
def test_experts_of_other_workers_are_not_decoded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each small tensor is a tile, and 1,024 tiles are a block. Only the second and the last of four blocks are of both workers."""
    more = {f"expert.{number:04}": (8,) for number in range(3100)}
    workers = Workers(monkeypatch, tmp_path, layout=Experts, more=more, segment_bytes=1 << 30)
    workers.start()
    decoded: list[list[str]] = [[], []]
    add = LayoutUpdate._add_mixed

    def noted(update: Any, plan: Any, bases: Any, **options: Any) -> Any:
        decoded[update._decoders.rank].extend(bases)
        return add(update, plan, bases, **options)

    monkeypatch.setattr(LayoutUpdate, "_add_mixed", noted)
    for damaged in (False, True, False):
        if damaged:
            workers.workers[1].layout.memory["expert.2899"][3] ^= 1
        old = [worker.held() for worker in workers.workers]
        seq = workers.step()
        outcomes = workers.together(lambda rank: workers.updates[rank].swap(seq))  # noqa: B023
        if damaged:  # only worker 1 reads this memory, and only both together know that the sum is wrong
            assert [found.outcome for found in outcomes] == ["refused", "refused"]
            assert all("BaseMismatch" in str(found.error) for found in outcomes)
            assert [worker.held() for worker in workers.workers] == old
            break
        assert [found.outcome for found in outcomes] == ["made", "made"], outcomes
        assert all(worker.held() == worker.expected() for worker in workers.workers)
        assert [source.status()["bases"]["kept"] for source in workers.peers] == [0, 0]
    assert [name in decoded[0] for name in ("expert.0500", "expert.1500", "expert.2500")] == [True, True, False]
    assert [name in decoded[1] for name in ("expert.0500", "expert.1500", "expert.2500")] == [False, True, True]
    workers.close()


# Workers that cannot read each other's memory


class Thirds(Experts):
    """One of three workers with many small experts. The first also holds what has another name."""

    def _holds(self, name: str) -> bool:
        if not name.startswith("expert"):
            return self._rank == 0
        return (name >= "expert.0500") + (name >= "expert.2000") == self._rank


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Workers]:
    """Blocks of 1,024 tensors: the first is of the workers 0 and 1, the next of 1 and 2, then of 2, and the last of 2 and 0."""
    more = {f"expert.{number:04}": (8,) for number in range(3100)}
    found = Workers(monkeypatch, tmp_path, layout=Thirds, count=3, apart=True, more=more, segment_bytes=1 << 30)
    yield found
    found.close()


def outcomes_of_a_step(workers: Workers) -> list[Any]:
    seq = workers.step()
    return workers.together(lambda rank: workers.updates[rank].swap(seq))


def kept_by(workers: Workers, rank: int) -> set[str]:
    return {name for name in workers.workers[0].table if workers.rest[rank].writes(name)}


def test_workers_that_are_apart_keep_only_what_is_near_their_tensors(apart: Workers, tmp_path: Path) -> None:
    apart.start()
    for _ in range(4):
        outcomes = outcomes_of_a_step(apart)
        assert [found.outcome for found in outcomes] == ["made"] * 3, outcomes
        assert all(worker.held() == worker.expected() for worker in apart.workers)
    experts = [{int(name[7:]) for name in kept_by(apart, rank) if name.startswith("expert")} for rank in range(3)]
    assert experts[0] == {*range(500, 1523)} | {*range(2077, 3100)}
    assert experts[1] == {*range(500), *range(2000, 3023)}
    assert experts[2] == {*range(977, 2000)}
    assert [source.status()["bases"] for source in apart.peers] == [{"peers": 0, "kept": len(kept_by(apart, rank))} for rank in range(3)]
    assert not (tmp_path / "kept").exists()  # nothing is shared


def load_newest(workers: Workers, rank: int) -> None:
    """Load the newest version in full, as `ColdStart` does."""
    worker, updates = workers.workers[rank], workers.updates[rank]
    updates.forget()
    for name, bits in worker.new_layout(worker.state).memory.items():
        worker.layout.memory[name].copy_(bits)
    list(workers.rest[rank].watch((name, to_torch(array.copy())) for name, array in worker.state.items()))
    updates.adopt(worker.version.ref)


def test_an_update_that_needs_a_tensor_that_was_left_out_is_refused_until_a_full_load(
    apart: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_weights, "near_tensors", lambda specs, is_needed: {name for name in specs if is_needed(name)})
    apart.start()
    assert [kept_by(apart, rank) for rank in range(3)] == [set()] * 3
    old = [worker.held() for worker in apart.workers]
    outcomes = outcomes_of_a_step(apart)
    assert [found.outcome for found in outcomes] == ["refused"] * 3
    assert all("which this worker does not keep" in str(found.error) for found in outcomes)
    assert [worker.held() for worker in apart.workers] == old
    apart.together(lambda rank: load_newest(apart, rank))
    for _ in range(2):
        outcomes = outcomes_of_a_step(apart)
        assert [found.outcome for found in outcomes] == ["made"] * 3, outcomes
        assert all(worker.held() == worker.expected() for worker in apart.workers)
    for rank, worker in enumerate(apart.workers):
        assert kept_by(apart, rank) == {name for name, tensor in worker.layout.tensors.items() if tensor.kind == "absent"}


# A worker in another process


_HOLDER = """
import ctypes, sys
held = []
for line in sys.stdin:
    held.append(ctypes.create_string_buffer(bytes.fromhex(line), len(line) // 2))
    print(ctypes.addressof(held[-1]), flush=True)
"""


class Process:
    """Another process that holds the memory of a worker."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-S", "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.id = self._process.pid

    def hold(self, memory: Any) -> int:
        """Copy some memory there. Returns its address."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(bytes(memory.view(torch.int8).numpy()).hex(), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def other() -> Iterator[Process]:
    process = Process()
    yield process
    process.kill()


def connected(other: Process, change: Callable[[Any], Any] = lambda offer: offer) -> tuple[FakeWorker, PeerBases]:
    """Return worker 1, whose peer is a process that holds what worker 0 would hold."""
    first, second = (FakeWorker(layout=functools.partial(HalfLayout, rank=rank), adopt=False) for rank in range(2))
    reader = ProcessReader()
    offer = peers._offer(first.layout, reader, [1])
    memories = {memory.data_ptr(): memory for memory in first.layout.memory.values()}
    there = [replace(each, handle=(other.id, other.hold(memories[each.handle[1]]))) for each in offer.memories[1]]
    told: list[Any] = [peers._Worker(peers.host_identity(), reader.identity, None), replace(offer, memories={1: there})]

    def share(value: Any) -> tuple[list[Any], int]:
        return [change(told.pop(0)), value], 1

    source = PeerBases(KeptState(second.state), share=share)
    source.connect(second.layout)
    second.weights = LiveWeights(None, lambda _: second.layout, source=source, threads=1)
    second.weights.learn(second.table, alone=False)
    second.weights.own([first.layout.blocks(), second.layout.blocks()], 1)
    second.weights.label(second.version)
    return second, source


def test_the_memory_of_another_process_is_read_until_that_process_ends(other: Process) -> None:
    worker, source = connected(other)
    assert source.status() == {"bases": {"peers": 4, "kept": 0}, "why_no_peers": None}
    for name in DIVIDED | ABSENT:
        assert source.base(name).reshape(-1).view(torch.int8).numpy().tobytes() == worker.state[name].tobytes()
    hop, old = worker.step(), worker.held()
    staged = worker.weights.stage(hop, worker.read)
    other.kill()
    with pytest.raises(PeerUnreadable, match="another worker of the server") as caught:
        worker.weights.stage(hop, worker.read)
    assert caught.value.retryable
    assert worker.held() == old
    assert staged.nbytes


def other_host(told: Any) -> Any:
    return replace(told, host="elsewhere") if isinstance(told, peers._Worker) else told


def other_device(told: Any) -> Any:
    return replace(told, device="GPU-1") if isinstance(told, peers._Worker) else told


def refusing(told: Any) -> Any:
    return replace(told, reason="it refuses") if isinstance(told, peers._Worker) else told


def wrong_address(told: Any) -> Any:
    if isinstance(told, peers._Worker):
        return told
    return replace(told, memories={1: [replace(each, handle=(each.handle[0], 64)) for each in told.memories[1]]})


def wrong_contents(told: Any) -> Any:
    if isinstance(told, peers._Worker):
        return told
    return replace(told, memories={1: [replace(each, probe=bytes(len(each.probe))) for each in told.memories[1]]})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_host, "other hosts"),
        (other_device, "another kind of device"),
        (refusing, "it refuses"),
        (wrong_address, "cannot be read"),
        (wrong_contents, "other contents"),
    ],
)
def test_memory_that_cannot_be_read_leaves_the_tensors_to_the_kept_copy(other: Process, change: Any, reason: str) -> None:
    worker, source = connected(other, change)
    assert source.status()["bases"] == {"peers": 0, "kept": 4}
    assert reason in source.status()["why_no_peers"]
    assert worker.weights.stage(worker.step(), worker.read).nbytes


@pytest.mark.parametrize("how", ["variable", "configuration"])
def test_sharing_of_memory_can_be_switched_off(other: Process, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "variable":
        monkeypatch.setenv("DELTAWIRE_PEERS", "0")
    told: list[Any] = []

    def share(value: Any) -> tuple[list[Any], int]:
        told.append(value)
        return [value, value], 1

    worker = FakeWorker(layout=functools.partial(HalfLayout, rank=1), adopt=False)
    source = PeerBases(KeptState(worker.state), refusal=None if how == "variable" else "the server may sleep", share=share)
    source.connect(worker.layout)
    assert source.hold({name: worker.table[name] for name in DIVIDED | ABSENT}) is None
    assert source.status()["bases"] == {"peers": 0, "kept": 4}
    assert source.status()["why_no_peers"] == ("DELTAWIRE_PEERS is 0" if how == "variable" else "the server may sleep")
    assert len(told) == 2  # other workers wait for both messages


def test_an_element_that_no_worker_of_the_host_holds_is_left_to_the_kept_copy(other: Process) -> None:
    def without_turned(told: Any) -> Any:
        if isinstance(told, peers._Worker):
            return told
        return replace(told, placements={name: each for name, each in told.placements.items() if name != "turned"})

    worker, source = connected(other, without_turned)
    assert source.status()["bases"] == {"peers": 3, "kept": 1}
    assert source.writes("turned")
    assert not source.writes("direct")
    assert worker.weights.stage(worker.step(), worker.read).nbytes
