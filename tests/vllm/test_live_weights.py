"""Updates of a worker's weights where they are: exact in every layout, and complete or undone. These tests need torch, but not vLLM."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

from emulator.build import compiler  # noqa: E402
from emulator.gpu import EmulatedGpu, emulated  # noqa: E402
from fake_layout import FakeHop, FakeLayout, FakeWorker, HalfLayout, KeptState, State, alone  # noqa: E402
from fake_layout import stepped as changed_by_a_bit  # noqa: E402

from deltawire.codec.gpu import resolve  # noqa: E402
from deltawire.codec.gpu.codec import GpuCodec  # noqa: E402
from deltawire.delta.grouped_plan import resolve_together  # noqa: E402
from deltawire.engines.vllm.layout import placements  # noqa: E402
from deltawire.engines.vllm.layout.types import ModuleRule  # noqa: E402
from deltawire.engines.vllm.live import direct_files, layout_update  # noqa: E402
from deltawire.engines.vllm.live.layout_update import LayoutUpdate  # noqa: E402
from deltawire.engines.vllm.live.live_weights import LiveWeights  # noqa: E402
from deltawire.engines.vllm.live.ownership import replicas_agree  # noqa: E402
from deltawire.engines.vllm.live.staging_pace import StagingPace  # noqa: E402
from deltawire.engines.vllm.live.update_types import LiveVersion, SwapOutcome  # noqa: E402
from deltawire.errors import BaseMismatch, CorruptDelta, EngineQuarantined, EngineRefused, ResultMismatch, TensorsTied  # noqa: E402
from deltawire.tensors import columns  # noqa: E402
from deltawire.tensors.bits import named_bits  # noqa: E402


@pytest.fixture(params=["host", "gpu"])
def device(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "gpu" and compiler() is None:
        pytest.skip("needs a C++ compiler to emulate a GPU")
    with emulated(EmulatedGpu()) if request.param == "gpu" else contextlib.nullcontext():
        yield


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker()


def swap(worker: FakeWorker, hop: Any) -> SwapOutcome:
    return worker.weights.swap(worker.weights.stage(hop, worker.read), alone)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("confirm", "mixed"), [("auto", True), ("auto", False), ("written", True), ("everything", True)])
def test_updates_are_exact_in_every_layout(confirm: Any, mixed: bool) -> None:
    worker = FakeWorker(confirm=confirm, mixed=mixed)
    for number in range(2, 5):
        hop = worker.step()
        old = worker.held()
        staged = worker.weights.stage(hop, worker.read)
        assert worker.held() == old  # staging changes nothing
        assert worker.weights.swap(staged, alone).outcome == "made"
        assert worker.held() == worker.expected()
        assert worker.weights.version is not None
        assert worker.weights.version.ref.seq == hop.target.seq
        assert worker.weights.is_unconfirmed == (confirm == "written")
        if confirm == "written":
            worker.weights.check_direct()
        assert worker.weights.digest().owned == hop.target.digest, number


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("confirm", ["auto", "written", "everything"])
def test_a_worker_goes_back_over_the_updates_that_it_keeps(confirm: Any, mixed: bool) -> None:
    worker = FakeWorker(confirm=confirm, mixed=mixed)
    worker.weights.undo.most_bytes = 1 << 30
    held, versions = [worker.held()], [worker.weights.version]
    for _ in range(3):
        assert swap(worker, worker.step()).outcome == "made"
        held.append(worker.held())
        versions.append(worker.weights.version)
    for number in (2, 1):
        go_back(worker, versions[number])
        assert worker.held() == held[number]
    hop = FakeHop(worker.commits[1], worker.commits[2], worker.commits[2].files)
    assert swap(worker, hop).outcome == "made"  # forwards again
    assert worker.held() == held[2]
    for number in (1, 0):
        go_back(worker, versions[number])
        assert worker.held() == held[number]
    assert worker.weights.undo.versions == []
    if confirm == "written":
        worker.weights.check_direct()
    assert worker.weights.digest().owned == worker.commits[0].digest


def go_back(worker: FakeWorker, version: LiveVersion | None) -> None:
    assert version is not None
    assert worker.weights.undo.versions[0] == version
    staged = worker.weights.undo.back_to(version.ref.seq)
    assert staged is not None
    assert worker.weights.swap(staged, alone).outcome == "made"
    assert worker.weights.version == version


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("failing", ["first", "second"])
def test_a_way_back_that_fails_at_any_step_is_undone_and_can_be_tried_again(worker: FakeWorker, failing: str) -> None:
    worker.weights.undo.most_bytes = 1 << 30
    before, version = worker.held(), worker.weights.version
    assert swap(worker, worker.step()).outcome == "made"
    after, latest = worker.held(), worker.weights.version
    staged = worker.weights.undo.back_to(worker.commits[0].seq)
    assert staged is not None
    asked: list[bool] = []

    def fails(failed: bool, claim: Any) -> list[int]:
        """Another worker fails when the workers agree for the first or the second time."""
        asked.append(failed)
        return [1] if len(asked) == (1 if failing == "first" else 2) else alone(failed, claim)

    assert worker.weights.swap(staged, fails).outcome == "refused"
    assert worker.held() == after
    assert worker.weights.version == latest
    go_back(worker, version)
    assert worker.held() == before


def test_a_way_back_finds_weights_that_were_changed_by_other_code(worker: FakeWorker) -> None:
    worker.weights.undo.most_bytes = 1 << 30
    assert swap(worker, worker.step()).outcome == "made"
    worker.layout.memory["direct"].view(-1)[3] ^= 1
    staged = worker.weights.undo.back_to(worker.commits[0].seq)
    assert staged is not None
    assert worker.weights.swap(staged, alone).outcome == "quarantined"
    assert worker.weights.undo.versions == []


def test_updates_are_kept_within_their_memory_and_for_these_weights_only(worker: FakeWorker) -> None:
    assert swap(worker, worker.step()).outcome == "made"
    assert worker.weights.undo.versions == []  # nothing is kept unless it is asked for
    staged = worker.weights.stage(worker.step(), worker.read)
    worker.weights.undo.most_bytes = 2 * staged.nbytes - 1
    assert worker.weights.swap(staged, alone).outcome == "made"
    assert len(worker.weights.undo.versions) == 1
    staged = worker.weights.stage(worker.step(change_one), worker.read)
    assert worker.weights.swap(staged, alone).outcome == "made"
    assert len(worker.weights.undo.versions) == 2
    assert swap(worker, worker.step()).outcome == "made"
    assert len(worker.weights.undo.versions) < 3
    assert worker.weights.undo.nbytes <= worker.weights.undo.most_bytes
    assert worker.weights.undo.back_to(worker.commits[0].seq) is None
    worker.weights.forget()
    assert worker.weights.undo.versions == []


def test_an_update_that_cannot_be_taken_back_ends_the_way_back() -> None:
    worker = FakeWorker(source=KeptState({}))
    worker.weights.undo.most_bytes = 1 << 30
    staged = worker.weights.stage(worker.step(), worker.read)
    assert staged.update is not None
    assert staged.update.can_turn
    staged.update.kept["other"] = []  # the source will have these values, and no worker holds its old ones
    assert worker.weights.swap(staged, alone).outcome == "made"
    assert worker.weights.undo.versions == []


@pytest.mark.usefixtures("device")
def test_temporary_tensors_are_freed_when_their_file_is_decoded(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    gather = worker.layout.gather

    def watched(name: str) -> Any:
        tensor = gather(name)
        alive.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(worker.layout, "gather", watched)
    staged = worker.weights.stage(worker.step(), worker.read)
    assert len(alive) == 3
    assert not [each for each in alive if each() is not None]
    assert worker.weights.swap(staged, alone).outcome == "made"
    assert worker.held() == worker.expected()


@pytest.mark.usefixtures("device")
def test_an_update_does_not_look_at_each_direct_tensor_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would need long for thousands of tensors, and generation would wait for it."""
    worker = FakeWorker(more={f"a{number:02}": (16, 16) for number in range(75)})
    looked: list[str] = []

    def counted(name: str, tensor: Any) -> Any:
        looked.append(name)
        return named_bits(name, tensor)

    monkeypatch.setattr(columns, "named_bits", counted)
    staged = worker.weights.stage(worker.step(), worker.read)
    assert len([name for name in looked if name.startswith("a")]) < 50  # some for each file, and all of a file with other tensors
    looked.clear()
    monkeypatch.setattr(worker.weights._rules, "of", None)  # found out while it was staged
    assert worker.weights.swap(staged, alone).outcome == "made"
    assert len([name for name in looked if name.startswith("a")]) <= 1
    assert worker.held() == worker.expected()


@pytest.mark.usefixtures("device")
def test_large_files_are_decoded_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each small tensor is a tile, and 1,024 tiles are a block."""
    monkeypatch.setattr(layout_update, "_WINDOW_BYTES", 64)
    worker = FakeWorker(more={f"more.{number:04}": (4,) for number in range(2100)}, segment_bytes=1 << 30)
    decoded: list[int] = []
    add = LayoutUpdate._add_mixed

    def noted(update: Any, plan: Any, bases: Any, **options: Any) -> Any:
        decoded.append(len(bases))
        return add(update, plan, bases, **options)

    monkeypatch.setattr(LayoutUpdate, "_add_mixed", noted)
    for _ in range(2):
        assert swap(worker, worker.step()).outcome == "made"
        assert worker.held() == worker.expected()
    assert decoded == [1, 1024, 1024, 55, 1] * 2  # bytes, three blocks of bfloat16, float32
    hop, old = worker.step(), worker.held()
    worker.layout.memory["more.1500"][1] ^= 1
    with pytest.raises(BaseMismatch):
        worker.weights.stage(hop, worker.read)
    worker.layout.memory["more.1500"][1] ^= 1
    assert worker.held() == old


@pytest.mark.parametrize("limit", [None, "_MOST_ELEMENTS", "_MOST_BYTES"])
def test_a_gpu_decodes_files_of_direct_tensors_together(limit: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler() is None:
        pytest.skip("needs a C++ compiler to emulate a GPU")
    together: list[int] = []
    assert direct_files._MOST_ELEMENTS <= resolve._MOST_CHANGES  # all elements may change
    if limit is not None:
        monkeypatch.setattr(direct_files, limit, 100)

    def counted(plans: Any, *arguments: Any) -> Any:
        together.append(len(plans))
        return resolve_together(plans, *arguments)

    monkeypatch.setattr(direct_files, "resolve_together", counted)
    with emulated(EmulatedGpu()):
        worker = FakeWorker(mixed=False)
        assert swap(worker, worker.step()).outcome == "made"
        assert together == ([2] if limit is None else [1, 1])
        assert worker.held() == worker.expected()
        hop, old = worker.step(), worker.held()
        damaged = [entry for entry in hop.files if entry.first == 0]
        with pytest.raises((CorruptDelta, BaseMismatch, ResultMismatch)):
            worker.weights.stage(hop, lambda entry: flip_last(worker.read(entry)) if entry in damaged else worker.read(entry))
        assert worker.held() == old


def test_a_pace_spreads_the_work_of_a_gpu_and_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler() is None:
        pytest.skip("needs a C++ compiler to emulate a GPU")
    monkeypatch.setattr(resolve, "_PART", 1 << 14)  # one tile
    now, slept = [0.0], [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        slept.append(seconds)

    with emulated(EmulatedGpu()):
        pace = StagingPace(0.5, 28.0, clock=lambda: now[0], sleep=sleep)  # a second for each element
        worker = FakeWorker(mixed=False, more={"large": (150, 400), "small": (9,)}, pace=pace)
        elements = sum(worker.state[name].size for name in ("direct", "direct.too", "large", "small"))
        for _ in range(2):
            hop, began = worker.step(), now[0]
            slept.clear()
            staged = worker.weights.stage(hop, worker.read)
            assert now[0] - began == pytest.approx(elements, rel=0.01)
            assert len([seconds for seconds in slept if seconds > 1]) >= 6  # at least four tiles, and the chunks of two types
            assert worker.weights.swap(staged, alone).outcome == "made"
            assert worker.held() == worker.expected()


def flip_last(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def test_only_units_that_change_are_written(worker: FakeWorker) -> None:
    """Two 4-bit units share a byte of the checkpoint. If one of them changes, only this one is listed."""

    def change_low_halves(state: State) -> None:
        state["nibbles"][:, ::2] ^= 3

    staged = worker.weights.stage(worker.step(change_low_halves), worker.read)
    assert staged.update is not None
    assert sum(len(scatter.indices) for scatter in staged.update._scatters) == 16 * 16
    assert worker.weights.swap(staged, alone).outcome == "made"
    assert worker.held() == worker.expected()


@pytest.mark.usefixtures("device")
def test_the_lists_of_one_storage_are_merged() -> None:
    class OneStorage(FakeLayout):
        """Holds "turned" and "another" in one storage."""

        def _hold(self, name: str, array: Any) -> Any:
            layout = super()._hold("turned" if name == "another" else name, array)
            if name in ("another", "turned"):
                part = 0 if name == "another" else 1
                room = self.memory.setdefault("both", torch.zeros(2 * array.size, dtype=torch.int16))
                room[part * array.size :][: array.size] = self.memory.pop("turned")
                (nest,) = layout.placements[0].nests
                moved = dataclasses.replace(nest, target_start=part * array.size)
                layout = dataclasses.replace(layout, placements=(dataclasses.replace(layout.placements[0], nests=(moved,), memory=room),))
            return layout

    worker = FakeWorker(layout=OneStorage, more={"another": (24, 56)})
    staged = worker.weights.stage(worker.step(), worker.read)
    assert staged.update is not None
    assert len([scatter for scatter in staged.update._scatters if scatter.memory is worker.layout.memory["both"]]) == 1
    assert worker.weights.swap(staged, alone).outcome == "made"
    assert worker.held() == worker.expected()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_list_of_the_first_part_of_a_storage_is_merged_with_the_others(order: tuple[int, int]) -> None:
    """The scales of the first expert may be direct: their memory is a view of a storage that those of other experts are written to."""
    from deltawire.engines.vllm.layout.types import Scatter
    from deltawire.engines.vllm.live.scatter_lists import merged, write_values

    whole = torch.zeros(6, dtype=torch.int32)
    lists = [(whole[:3], 2, 7), (whole, 5, 8)]
    scatters = [Scatter(lists[n][0], torch.tensor([lists[n][1]]), torch.tensor([lists[n][2]], dtype=torch.int32)) for n in order]
    for scatter in scatters:
        scatter.old = torch.zeros(1, dtype=torch.int32)
    (one,) = merged(scatters)
    write_values(one, one.new)
    assert whole.tolist() == [0, 0, 7, 0, 0, 8]


def test_a_hop_without_files_only_changes_the_label(worker: FakeWorker) -> None:
    old = worker.held()
    hop = worker.step(lambda state: None)
    assert not hop.files
    assert swap(worker, hop).outcome == "made"
    assert worker.weights.version is not None
    assert worker.weights.version.ref.seq == hop.target.seq
    assert worker.held() == old


def test_weights_of_another_version_are_not_adopted(worker: FakeWorker) -> None:
    version = worker.weights.version
    assert version is not None
    for name in worker.layout.memory:
        worker.layout.memory[name][-1] ^= 1  # also a bit of a float32 that bfloat16 does not have
        with pytest.raises(BaseMismatch):
            worker.weights.adopt(version)
        worker.layout.memory[name][-1] ^= 1
    worker.weights.adopt(version)


@pytest.mark.parametrize("name", ["direct", "direct.too", "turned", "scale", "nibbles"])
def test_foreign_writes_are_noticed_before_anything_is_written(worker: FakeWorker, name: str) -> None:
    hop = worker.step()
    worker.layout.memory[name][-1] ^= 1
    old = worker.held()
    with pytest.raises(BaseMismatch):
        worker.weights.stage(hop, worker.read)
    assert worker.held() == old


def test_damaged_and_foreign_deltas_are_refused(worker: FakeWorker) -> None:
    hop, old = worker.step(), worker.held()
    with pytest.raises(CorruptDelta):
        worker.weights.stage(hop, lambda entry: worker.read(entry)[:-3])
    second = worker.step()
    with pytest.raises(BaseMismatch, match="is relative to version 2"):
        worker.weights.stage(second, worker.read)
    assert worker.held() == old
    staged = worker.weights.stage(hop, worker.read)
    assert swap(worker, hop).outcome == "made"
    assert worker.weights.swap(staged, alone).outcome == "refused"  # it was made for the version before
    assert swap(worker, second).outcome == "made"
    assert worker.held() == worker.expected()


def stepped(state: State) -> None:
    """Change some elements of these tensors only."""
    changed_by_a_bit(state, np.random.default_rng(2))


# Faults in the transaction


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("injected")


def half_written(scatter: Any, values: Any) -> None:
    """Write only the first value, then fail. Old values are written correctly."""
    if values is scatter.old:
        _write(scatter, values)
        return
    scatter.memory[scatter.indices[:1]] ^= 1
    fail()


def not_written(scatter: Any, values: Any) -> None:
    """Write no new values."""
    if values is scatter.old:
        _write(scatter, values)


Fault = Callable[[pytest.MonkeyPatch, FakeWorker], None]
FAULTS: dict[str, Fault] = {
    "the first scatter list fails half-way": lambda patch, worker: patch.setattr(layout_update, "write_values", half_written),
    "the write is incomplete": lambda patch, worker: patch.setattr(layout_update, "write_values", not_written),
    "the check fails": lambda patch, worker: patch.setattr(LayoutUpdate, "check", once(LayoutUpdate.check)),
    "a direct tensor is wrong": lambda patch, worker: patch.setattr(LayoutUpdate, "apply", damage_and_apply(worker)),
    "the patch fails half-way": lambda patch, worker: patch.setattr(LayoutUpdate, "apply", apply_and_fail),
}
_apply, _write = LayoutUpdate.apply, layout_update.write_values


def once(method: Callable[..., None]) -> Callable[..., None]:
    calls = iter([fail])
    return lambda self, **options: next(calls, method)(self, **options)


def apply_and_fail(update: LayoutUpdate, **options: Any) -> None:
    _apply(update, **options)
    fail()


def damage_and_apply(worker: FakeWorker) -> Callable[..., None]:
    """Let another element of a direct tensor change after the update was staged."""

    def damaged(update: LayoutUpdate, **options: Any) -> None:
        worker.layout.memory["direct"][5] ^= 4
        _apply(update, **options)

    return damaged


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("fault", FAULTS)
def test_old_bits_are_back_after_a_fault(worker: FakeWorker, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hop, old = worker.step(), worker.held()
    with monkeypatch.context() as patch:
        FAULTS[fault](patch, worker)
        found = swap(worker, hop)
    if fault == "a direct tensor is wrong":  # an element that the update did not write cannot be restored
        assert found.outcome == "quarantined"
        assert worker.weights.is_quarantined
        assert worker.weights.version is None
        with pytest.raises(BaseMismatch):
            swap(worker, hop)
        return
    assert found.outcome == "refused", found
    assert worker.held() == old
    assert not worker.weights.is_quarantined
    assert swap(worker, hop).outcome == "made"
    assert worker.held() == worker.expected()


@pytest.fixture
def emulated_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Emulate a GPU, even for files that change direct tensors and others."""
    if compiler() is None:
        pytest.skip("needs a C++ compiler to emulate a GPU")
    with emulated(EmulatedGpu()) as gpu:
        monkeypatch.setattr(layout_update, "gpu_of", lambda tensor: gpu.device)
        yield


@pytest.mark.usefixtures("emulated_gpu")
@pytest.mark.parametrize("mixed", [True, False])
def test_a_gpu_digests_weights_while_it_writes_them(mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tensors that no file of the update covers are read again."""
    worker = FakeWorker(mixed=mixed)
    digested: list[int] = []
    digest = GpuCodec.digest
    monkeypatch.setattr(GpuCodec, "digest", lambda codec, bits, *rest: (digested.append(len(bits)), digest(codec, bits, *rest))[1])
    for change, read_again in ((None, []), (lambda state: stepped({"direct": state["direct"]}), [1])):
        staged = worker.weights.stage(worker.step(change), worker.read)
        digested.clear()
        assert worker.weights.swap(staged, alone).outcome == "made"
        assert [count for count in digested if count] == read_again
        assert worker.held() == worker.expected()
    staged = worker.weights.stage(worker.step(lambda state: stepped({"direct": state["direct"]})), worker.read)
    worker.layout.memory["direct.too"][7] ^= 1
    assert worker.weights.swap(staged, alone).outcome == "quarantined"


@pytest.mark.usefixtures("emulated_gpu")
@pytest.mark.parametrize("mixed", [True, False])
def test_a_wrong_value_in_a_patch_is_noticed_and_undone(mixed: bool) -> None:
    worker = FakeWorker(mixed=mixed)
    hop, old = worker.step(), worker.held()
    staged = worker.weights.stage(hop, worker.read)
    assert staged.update is not None
    (resolution, _), *_ = staged.update._patches._patches
    resolution.groups[0].patch.values[3] ^= 1  # type: ignore[attr-defined]
    found = worker.weights.swap(staged, alone)
    assert found.outcome == "refused"
    assert found.error is not None
    assert "checkpoint layout have digest" in found.error
    assert worker.held() == old
    assert swap(worker, hop).outcome == "made"


@pytest.mark.usefixtures("device")
def test_values_that_memory_has_lost_are_noticed_when_the_next_update_is_staged(worker: FakeWorker) -> None:
    assert swap(worker, worker.step()).outcome == "made"
    worker.layout.memory["direct"][5] ^= 4
    with pytest.raises(BaseMismatch):
        worker.weights.stage(worker.step(), worker.read)


def test_a_failed_revert_quarantines(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    hop = worker.step()
    monkeypatch.setattr(LayoutUpdate, "apply", apply_and_fail)
    monkeypatch.setattr(LayoutUpdate, "revert", fail)
    found = swap(worker, hop)
    assert found.outcome == "quarantined"
    assert found.error is not None
    assert "injected" in found.error


def test_a_revert_that_does_nothing_is_noticed(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    hop = worker.step()
    monkeypatch.setattr(LayoutUpdate, "apply", apply_and_fail)
    monkeypatch.setattr(LayoutUpdate, "revert", lambda update: None)
    assert swap(worker, hop).outcome == "quarantined"


def test_moved_memory_is_refused(worker: FakeWorker) -> None:
    hop, old = worker.step(), worker.held()
    staged = worker.weights.stage(hop, worker.read)
    worker.layout.is_valid = False
    found = worker.weights.swap(staged, alone)
    assert found.outcome == "refused"
    assert found.error is not None
    assert "has moved" in found.error
    assert worker.held() == old
    with pytest.raises(EngineRefused, match="has moved"):
        worker.weights.stage(hop, worker.read)


def test_a_digest_that_is_wrong_afterwards_quarantines(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker(confirm="written")
    hop = worker.step()
    monkeypatch.setattr(LayoutUpdate, "apply", damage_and_apply(worker))
    assert swap(worker, hop).outcome == "made"
    with pytest.raises(EngineQuarantined):
        worker.weights.check_direct()
    assert worker.weights.is_quarantined
    assert worker.weights.version is None


# Several workers


class Ranks:
    """Lets threads agree as workers do. `expected` is the sum that the digests must have."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._failed: dict[int, bool] = {}
        self.outcomes: dict[int, SwapOutcome] = {}

    def agree(self, rank: int) -> Callable[[bool, Any], list[int]]:
        def ask(failed: bool, digests: Any) -> list[int]:
            self._failed[rank] = failed
            self._barrier.wait()
            found = sorted(rank for rank, failed in self._failed.items() if failed)
            self._barrier.wait()
            return found

        return ask

    def swap(self, workers: list[FakeWorker], staged: list[Any]) -> list[str]:
        def run(rank: int) -> None:
            self.outcomes[rank] = workers[rank].weights.swap(staged[rank], self.agree(rank))

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(workers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [self.outcomes[rank].outcome for rank in range(len(workers))]


@pytest.mark.parametrize("step", ["ready", "write", "check", "revert"])
def test_all_workers_undo_a_swap_that_one_of_them_fails(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [FakeWorker(), FakeWorker(), FakeWorker()]
    hops = [worker.step() for worker in workers]
    old = [worker.held() for worker in workers]
    staged = [worker.weights.stage(hop, worker.read) for worker, hop in zip(workers, hops, strict=True)]
    with monkeypatch.context() as patch:
        update = staged[1].update
        assert update is not None
        if step == "ready":
            patch.setattr(workers[1].layout, "is_valid", False)
        else:
            name = "apply" if step == "write" else "check"
            patch.setattr(update, name, once(getattr(LayoutUpdate, name)).__get__(update))
        if step == "revert":
            patch.setattr(update, "revert", fail)
        outcomes = Ranks(3).swap(workers, staged)
    assert outcomes == ["quarantined" if step == "revert" else "refused"] * 3
    for number, worker in enumerate(workers):
        if step != "revert" or number != 1:
            assert worker.held() == old[number]
    if step != "revert":
        again = [worker.weights.stage(hop, worker.read) for worker, hop in zip(workers, hops, strict=True)]
        assert Ranks(3).swap(workers, again) == ["made"] * 3
        assert all(worker.held() == worker.expected() for worker in workers)


def test_two_workers_with_halves_of_tensors_follow_a_chain() -> None:
    workers = [FakeWorker(layout=functools.partial(HalfLayout, rank=rank), adopt=False) for rank in range(2)]
    kept = [KeptState(worker.state) for worker in workers]
    held = [worker.layout.blocks() for worker in workers]
    for rank, worker in enumerate(workers):
        worker.weights = LiveWeights(None, lambda _, worker=worker: worker.layout, source=kept[rank], threads=1)  # type: ignore[misc]
        worker.weights.learn(worker.table)
        worker.weights.own(held, rank)
    for name in ("direct.too", "turned"):  # a wrong element is noticed, also in a copy of what another worker owns
        workers[1].layout.memory[name][3] ^= 1
        found = [worker.weights.digest() for worker in workers]
        assert (found[0].owned + found[1].owned == workers[0].version.digest) == (name == "direct.too")
        assert replicas_agree([each.replicated for each in found]) == (name == "turned")
        workers[1].layout.memory[name][3] ^= 1
    assert replicas_agree([worker.weights.digest().replicated for worker in workers])
    assert workers[0].weights.digest().owned + workers[1].weights.digest().owned == workers[0].version.digest
    for worker in workers:
        worker.weights.label(worker.version)
    for _ in range(3):
        hops = [worker.step() for worker in workers]
        staged = [worker.weights.stage(hop, worker.read) for worker, hop in zip(workers, hops, strict=True)]
        assert Ranks(2).swap(workers, staged) == ["made"] * 2
        assert all(worker.held() == worker.expected() for worker in workers)
        assert workers[0].weights.digest().owned + workers[1].weights.digest().owned == workers[0].version.digest


# Names that share memory, and modules


TIED = {"tied.direct": "direct", "tied.turned": "turned"}


def change_one(state: State, name: str = "direct") -> None:
    state[name].view("u2")[0, 0] ^= 1


def change_both(state: State) -> None:
    for name in ("direct", "turned"):
        for tied in (name, f"tied.{name}"):
            state[tied].view("u2")[3, 5:9] ^= 1


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", ["tied.turned", "direct"])
def test_tied_tensors_must_change_together(name: str) -> None:
    worker = FakeWorker(tied=TIED)
    assert swap(worker, worker.step(change_both)).outcome == "made"
    assert worker.held() == worker.expected()
    hop, old = worker.step(lambda state: change_one(state, name)), worker.held()
    with pytest.raises(TensorsTied, match=f"changes only '{name}'"):
        worker.weights.stage(hop, worker.read)
    assert worker.held() == old


class SecondPlace(FakeLayout):
    """Holds "turned.again" in the memory of "turned", and also in memory of its own, as some draft models do."""

    def _hold(self, name: str, array: Any) -> Any:
        layout = super()._hold("turned" if name == "turned.again" else name, array)
        if name == "turned.again":
            self.memory[name] = self.memory.pop("turned")
            layout = dataclasses.replace(layout, placements=(dataclasses.replace(layout.placements[0], memory=self.memory[name]),))
        return layout

    def __init__(self, state: State, **options: Any) -> None:
        super().__init__(state, **options)
        turned, another = (self.tensors[name] for name in ("turned", "turned.again"))
        both = dataclasses.replace(another, placements=(*turned.placements, *another.placements))
        self.tensors = {**self.tensors, "turned.again": both}

    def gather(self, name: str, *, owned_only: bool = False) -> Any:
        return super().gather("turned" if name == "turned.again" else name)

    def locate(self, name: str, indices: Any, values: Any) -> Any:
        if name != "turned.again":
            return super().locate(name, indices, values)
        layout = self.tensors[name]
        return [scatter for each in layout.placements for scatter in placements.scatters(each, layout.spec.dtype, indices, values)]


@pytest.mark.usefixtures("device")
def test_a_tied_tensor_with_another_place_is_written_there_too() -> None:
    worker = FakeWorker(layout=SecondPlace, more={"turned.again": (24, 56)}, adopt=False)
    worker.state["turned.again"][:] = worker.state["turned"]
    worker.step(lambda state: None)
    worker.layout = worker.new_layout(worker.state)
    worker.weights.learn(worker.table)
    worker.weights.adopt(worker.version)

    def change(state: State) -> None:
        for name in ("turned.again", "turned"):
            state[name].view("u2")[3, 5:9] ^= 1

    assert swap(worker, worker.step(change)).outcome == "made"
    assert worker.held() == worker.expected()
    with pytest.raises(TensorsTied):
        worker.weights.stage(worker.step(lambda state: change_one(state, "turned.again")), worker.read)


def with_rule(how: Any) -> Callable[..., FakeLayout]:
    return functools.partial(FakeLayout, modules={"norm": ModuleRule("norm", how, ("turned",), "it is computed from it")})


def test_modules_of_changed_tensors_are_recomputed() -> None:
    computed: list[list[str]] = []
    worker = FakeWorker(layout=with_rule("recompute"), recompute=lambda rules: computed.append([rule.name for rule in rules]))
    assert swap(worker, worker.step(change_one)).outcome == "made"
    assert computed == []
    assert swap(worker, worker.step()).outcome == "made"
    assert computed == [["norm"]]


def test_an_update_that_needs_a_module_loaded_anew_is_refused() -> None:
    worker = FakeWorker(layout=with_rule("load_anew"))
    assert swap(worker, worker.step(change_one)).outcome == "made"
    hop, old = worker.step(), worker.held()
    with pytest.raises(EngineRefused, match="all weights must be loaded anew, because of module 'norm': it is computed from it"):
        worker.weights.stage(hop, worker.read)
    assert worker.held() == old


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_between_the_steps_of_a_swap_quarantines(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker()
    staged = worker.weights.stage(worker.step(), worker.read)

    def fail_at_once(*_: object, **__: object) -> None:
        raise error("injected")

    monkeypatch.setattr("deltawire.engines.vllm.live.swap_transaction._ask", fail_at_once)
    if error is RuntimeError:
        found = worker.weights.swap(staged, alone)
        assert found.outcome == "quarantined"
        assert "injected" in (found.error or "")
    else:
        with pytest.raises(KeyboardInterrupt):
            worker.weights.swap(staged, alone)
    assert worker.weights.is_quarantined


def test_a_source_that_cannot_follow_a_swap_quarantines(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker(source=KeptState({}))
    staged = worker.weights.stage(worker.step(), worker.read)
    monkeypatch.setattr(KeptState, "settled", fail)  # such as a thread that cannot be started
    found = worker.weights.swap(staged, alone)
    assert found.outcome == "quarantined"
    assert "injected" in (found.error or "")
    assert worker.weights.is_quarantined
