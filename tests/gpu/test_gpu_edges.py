"""Test the memory limits of the GPU codec on an emulated GPU. The tests set the limits so low that small tensors reach them."""

from __future__ import annotations

import struct
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from emulator.build import compiler
from old_deltas import encode_tensor

import deltawire
from deltawire.codec import using_codec
from deltawire.codec.base import EncodeGroup, ResolveJob
from deltawire.codec.bits import DeviceBits, MasterWeightBits
from deltawire.codec.reference import groups as reference_groups
from deltawire.codec.reference.codec import ReferenceCodec
from deltawire.delta.prepared import PreparedUpdate
from deltawire.dtypes import PAYLOAD_TYPES, dtype_named
from deltawire.errors import CorruptDelta, UnsupportedTensor

torch = pytest.importorskip("torch", reason="the GPU codec works on torch tensors")
if compiler() is None:
    pytest.skip("needs a C++ compiler to emulate a GPU", allow_module_level=True)

from emulator.gpu import EmulatedGpu, Stream, emulated  # noqa: E402

from deltawire.codec.gpu import device, encode, kernel_addresses, kernel_table, resolve  # noqa: E402
from deltawire.codec.gpu.codec import GpuCodec  # noqa: E402
from deltawire.publish.snapshots import copy_tensors, new_arrays  # noqa: E402
from deltawire.publish.upload.segments import TensorTable  # noqa: E402

TILE = 1 << 14
BF16 = dtype_named("BF16")
DEVICE = torch.device("cpu")


class KeepingGpu(EmulatedGpu):
    """A GPU that records the memory that is kept for the current stream."""

    def __init__(self):
        super().__init__()
        self.kept = set()

    def keep(self, tensor, stream):
        if stream is self.current():
            self.kept.add(tensor.data_ptr())


@pytest.fixture(autouse=True)
def gpu():
    with using_codec("reference"), emulated(KeepingGpu()) as gpu:
        yield gpu


def on_gpu(array):
    return DeviceBits(torch.from_numpy(array.view(np.int16).copy()))


def bits(size, seed=1):
    return np.random.default_rng(seed).integers(0, 2**16, size, np.uint16)


def strided(array):
    """Return an array on the GPU, in memory that kernels cannot read without a copy."""
    return DeviceBits(torch.from_numpy(np.repeat(array, 2).view(np.int16))[::2])


def step(array, every):
    new = array.copy()
    new[::every] += 1
    return new


def test_lists_of_slabs_that_do_not_fit_into_the_patch_are_not_put_there(monkeypatch):
    """A first slab without changes needs no room for changes, but the window for its payload may not fit into the patch."""
    for name, value in {"_SHARE": 0, "_MOST_SLABS": 10**6, "_LEAST_SLAB": 1, "_KEPT": 0, "_KEPT_SHARE": 0}.items():
        monkeypatch.setattr(resolve, name, value)
    base = bits(2 * TILE)
    new = np.append(base[:TILE], step(base[TILE:], 100))
    payload = b"".join(encode_tensor(base[TILE:], new[TILE:], BF16))
    unchanged_first = payload[:1] + struct.pack("<II", TILE, 0) + payload[1:]
    locate_slabs = resolve._Work._locate_slabs

    def checked(work, chunks, slabs, memory):
        assert chunks.lists(slabs, work.itemsize, windows=work.room is None).size <= memory.numel()
        locate_slabs(work, chunks, slabs, memory)

    monkeypatch.setattr(resolve._Work, "_locate_slabs", checked)
    target = on_gpu(base)
    resolution = GpuCodec(DEVICE).resolution(1, 0)
    resolution.add([ResolveJob(target, base.size, (0, len(unchanged_first)), BF16, 1, write=True)], unchanged_first)
    resolution.settle()
    assert np.array_equal(target.tensor.numpy().view(np.uint16), new)


def test_a_tensor_whose_memory_was_freed_is_refused_by_name():
    """Kernels would read it as zeros."""
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedTensor, match="'odd'"):
        deltawire.state_digest({"odd": freed, "empty": torch.ones(0)})


def check_encoded(pairs, monkeypatch):
    """Encode tensors in blocks of one tile, so that each tensor has chunks of its own. Compare the bytes with those of the reference."""
    monkeypatch.setattr(kernel_table, "block_tiles", lambda width: 1)
    monkeypatch.setattr(reference_groups, "tiles_per_block", lambda payload_type: 1)
    monkeypatch.setattr(encode, "_learnt", {})
    kind, seeds = PAYLOAD_TYPES[BF16.code], np.arange(len(pairs), dtype=np.uint64)
    bases, news = map(list, zip(*pairs, strict=True))
    places = [None if base is None else on_gpu(base) for base in bases], [on_gpu(new) for new in news]
    (got,) = GpuCodec(DEVICE).encode_groups([EncodeGroup(kind, *places, seeds)], 1)
    (want,) = ReferenceCodec().encode_groups([EncodeGroup(kind, bases, news, seeds)], 1)
    assert b"".join(got.pieces) == b"".join(want.pieces)
    assert (got.changed.tolist(), got.before, got.after) == (want.changed.tolist(), want.before, want.after)


def test_many_small_tensors_whose_elements_all_change_are_encoded(monkeypatch):
    """Each tensor takes twice its size of the list, so fewer elements may fit than the list has room for."""
    monkeypatch.setattr(encode, "_LEAST_LIST", TILE)
    start, started = encode._Workspace.start, []

    def counted(*arguments):
        started.append(arguments[1:3])
        assert len(started) < 100, "the encoder starts the same slab again and again"
        return start(*arguments)

    monkeypatch.setattr(encode._Workspace, "start", counted)
    check_encoded([(base, step(base, 1)) for base in (bits(513, seed) for seed in range(40))], monkeypatch)
    assert len(started) > 2


class MeasuringGpu(EmulatedGpu):
    """A GPU with the processors of an H200 that does no work, and counts the most bytes that are allocated at the same time."""

    processors = 132

    def __init__(self):
        super().__init__()
        self.used = self.most = 0

    def kernels(self, width):
        return _IdleKernels(super().kernels(width))

    def empty(self, size, dtype):
        memory = torch.empty(size, dtype=dtype)
        self.used += memory.nbytes
        self.most = max(self.most, self.used)
        weakref.finalize(memory, self._free, memory.nbytes)
        return memory

    def zeros(self, size, dtype):
        return self.empty(size, dtype).zero_()

    def pinned(self, size, dtype=torch.uint8):
        return torch.zeros(size, dtype=dtype)

    def upload(self, array):
        return self.empty(array.nbytes, torch.uint8)

    def _free(self, nbytes):
        self.used -= nbytes


class _IdleKernels:
    """Kernels that do nothing, so that nothing seems to change."""

    def __init__(self, kernels):
        self.constants, self.resident_blocks = kernels.constants, kernels.resident_blocks

    def launch(self, *arguments): ...


@pytest.mark.parametrize(
    "kinds",
    [[("F8_E4M3", 1), ("F32", 1 / 16384)], [("F4_E2M1", 1), ("F8_E4M3", 1 / 16), ("F32", 0)], [("BF16", 1)]],
    ids=lambda kinds: kinds[0][0],
)
def test_memory_is_bounded_by_a_share_of_all_tensors(kinds):
    """The tensors are 139 weights of 14,336 × 4,096 as fp8-block, nvfp4 and bfloat16 publish them."""
    groups, published = [], 0
    for name, share in kinds:
        payload = next(payload for payload in PAYLOAD_TYPES if payload.name == name)
        size = max(int(14336 * 4096 * share) // payload.per_element, 1)
        memory = DeviceBits(torch.empty(size, dtype=getattr(torch, f"int{payload.dtype.width}")))
        groups.append(EncodeGroup(payload, [memory] * 139, [memory] * 139, np.arange(139, dtype=np.uint64)))
        published += 139 * memory.tensor.nbytes
    with emulated(MeasuringGpu()) as gpu:
        for _ in range(2):  # the second call has learnt how long slabs may be
            GpuCodec(DEVICE).encode_groups(groups, 1)
    assert gpu.most <= 0.0195 * published


@pytest.mark.parametrize("kinds", ["..cc.a0.e.c0ec.aac..", ".0.", "c", "ee"])
def test_only_chunks_after_the_last_change_are_left_out(kinds, monkeypatch):
    """The bytes of several slabs come in several pieces. Tensors change (c), stay, are added (a), added with zeros (0), or empty (e)."""
    monkeypatch.setattr(encode, "_FIRST_SLAB", 1)
    pairs = []
    for number, kind in enumerate(kinds):
        old = bits(700 + 3 * number, number)
        changed, added, zeros, empty = (old, step(old, 9)), (None, old), (None, np.zeros(5, np.uint16)), (None, bits(0))
        pairs.append({"c": changed, ".": (old, old), "a": added, "0": zeros, "e": empty}[kind])
    check_encoded(pairs, monkeypatch)


def test_tensors_that_need_copies_are_copied_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(kernel_addresses, "_MOST_COPIED", 5000)
    flat_on, alive = kernel_addresses.flat_on, []

    def counted(*arguments):
        made = flat_on(*arguments)
        alive.append(weakref.ref(made.untyped_storage()))
        assert sum(storage() is not None for storage in alive) <= 2, "more copies are alive than fit into 5000 bytes"
        return made

    monkeypatch.setattr(kernel_addresses, "flat_on", counted)
    arrays = [bits(1000, seed) for seed in range(9)]
    seeds = np.arange(len(arrays), dtype=np.uint64)
    places = [strided(array) if number % 3 == 0 else on_gpu(array) for number, array in enumerate(arrays)]
    sums = GpuCodec(DEVICE).digest(places, seeds, 1)
    assert sums.tolist() == ReferenceCodec().digest(arrays, seeds, 1).tolist()
    assert len(alive) == 3


def test_master_weights_that_need_copies_count_with_all_their_bytes(monkeypatch):
    """They are copied as float32, although they are published with half as many bytes."""
    monkeypatch.setattr(kernel_addresses, "_MOST_COPIED", 5000)
    words = [np.random.default_rng(seed).standard_normal(1000, np.float32) for seed in range(3)]
    masters = [MasterWeightBits(torch.from_numpy(np.repeat(word, 2).view(np.int32))[::2]) for word in words]
    column, numbers = kernel_addresses.Column.of(masters, DEVICE), np.arange(3)
    parts = [part for part, _ in kernel_addresses.readable([column], numbers, numbers + 1, DEVICE)]
    assert parts == [slice(0, 1), slice(1, 2), slice(2, 3)]


def test_a_gpu_that_is_too_old_has_no_kernels(monkeypatch):
    """Publishers and engines copy its weights to the host."""
    for number, capability in enumerate([(7, 5), (8, 0), (9, 0)], 90):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert device.has_kernels(torch.device("cuda", number)) == (capability >= (8, 0) and not torch.version.hip)
    assert not device.has_kernels(torch.device("cpu"))


def test_results_of_a_resolution_are_kept_for_the_stream_that_uses_them(gpu):
    """The memory was allocated for the codec's own streams, which would reuse it as soon as the tensor is deleted."""
    base, came = bits(1000), bits(700, seed=2)
    payloads = [b"".join(encode_tensor(old, new, BF16)) for old, new in ((base, step(base, 10)), (np.zeros_like(came), came))]
    resolution = GpuCodec(DEVICE).resolution(1, 0)
    payload_ranges = (0, len(payloads[0])), (len(payloads[0]), len(b"".join(payloads)))
    jobs = [ResolveJob(on_gpu(base), base.size, payload_ranges[0], BF16, 1), ResolveJob(None, came.size, payload_ranges[1], BF16, 1)]
    resolution.add(jobs, b"".join(payloads))
    arrays = {array.data_ptr() for array in resolution.groups[0].patch._arrays}
    gpu.kept.clear()
    resolution.changes([0])
    assert arrays <= gpu.kept
    assert resolution.dense([1])[0].address in gpu.kept


def test_memory_of_a_snapshot_is_kept_for_the_stream_that_copies_into_it(gpu):
    """It may belong to the old baseline, which was allocated for another stream and may be deleted while the copy is running."""
    state = {"a": torch.zeros(300)}
    arrays = new_arrays(TensorTable.of(state), state, "device")
    copy_tensors(state, arrays, wait=False)
    assert arrays["a"].data_ptr() in gpu.kept


def test_after_a_failed_resolution_memory_is_reused_only_after_the_work_of_all_streams(gpu, monkeypatch):
    """Other streams may still copy payloads, or read them, when an error is found."""
    streams, waited = {"decode": Stream(), "copies": Stream(), "codec": Stream()}, []
    monkeypatch.setattr(gpu, "stream", streams.__getitem__)
    monkeypatch.setattr(gpu.current(), "wait_stream", waited.append)
    base = bits(1000)
    payload = b"".join(encode_tensor(base, step(base, 10), BF16))
    job = ResolveJob(on_gpu(base), base.size, (0, len(payload) - 1), BF16, 1)
    with pytest.raises(CorruptDelta):
        GpuCodec(DEVICE).resolution(1, 0).add([job], payload)
    assert {id(streams["decode"]), id(streams["copies"])} <= {id(stream) for stream in waited}


def test_the_digest_rounds_master_weights_one_tensor_at_a_time(monkeypatch):
    """Rounding all of them at once would need a second copy of the model."""
    rounded, live = MasterWeightBits.rounded, []

    def counted(masters):
        assert not any(made() is not None for made in live), "the previous rounded tensor is still in memory"
        made = rounded(masters)
        live.append(weakref.ref(made.tensor.untyped_storage()))
        return made

    words = [np.random.default_rng(seed).standard_normal(700, np.float32) for seed in range(4)]
    halves = [torch.from_numpy(word).bfloat16().view(torch.int16) for word in words]
    seeds = np.full(5, 5, np.uint64)
    expected = GpuCodec(DEVICE).digest([DeviceBits(half) for half in halves], seeds[:4], 1).tolist()
    monkeypatch.setattr(MasterWeightBits, "rounded", counted)
    masters = [MasterWeightBits(torch.from_numpy(word.view(np.int32))) for word in words]
    assert GpuCodec(DEVICE).digest([*masters, on_gpu(bits(9))], seeds, 1)[:-1].tolist() == expected
    assert len(live) == len(words)


def test_threads_that_need_a_stream_at_the_same_time_get_the_same_one(monkeypatch):
    """A call gets its streams more than once, and must get the same ones, or it would wait for the wrong stream."""
    both = threading.Barrier(2)

    class SlowStream:
        def __init__(self, *arguments, **options):
            both.wait(60)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=1))
    monkeypatch.setattr(torch.cuda, "Stream", SlowStream)
    gpu, found = device.Gpu(DEVICE), []
    threads = [threading.Thread(target=lambda: found.append(gpu.stream("decode"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0] is found[1] is gpu.stream("decode")


def test_an_update_without_memory_for_its_write_writes_nothing(gpu, monkeypatch):
    """Two widths need two launches. All memory is allocated before the first one."""
    state = {"a": torch.zeros(300, dtype=torch.bfloat16), "b": torch.zeros(300, dtype=torch.float32)}
    new = {name: tensor + 1 for name, tensor in state.items()}
    update = PreparedUpdate()
    update.add(state, deltawire.encode_delta(state, new))
    upload, asked = gpu.upload, []

    def fails_the_second_time(array):
        asked.append(array.nbytes)
        if len(asked) == 2:
            raise MemoryError
        return upload(array)

    monkeypatch.setattr(gpu, "upload", fails_the_second_time)
    with pytest.raises(MemoryError):
        update.apply()
    assert not update.is_applied
    assert all((tensor == 0).all() for tensor in state.values())
    update.apply()
    assert all(torch.equal(state[name], new[name]) for name in new)
    monkeypatch.delattr(EmulatedGpu, "upload")
    monkeypatch.delattr(gpu, "upload")
    update.revert()
    assert all((tensor == 0).all() for tensor in state.values())
