"""The GPU codec gives the same bytes and the same states as the reference, and refuses the same payloads.

On machines without an NVIDIA GPU, such as CI machines, an emulated GPU (`emulator/`) runs the same kernels on fewer and smaller tensors.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from emulator.build import compiler
from old_deltas import encode_old, encode_tensor

import deltawire
from deltawire.codec import using_codec
from deltawire.codec.base import EncodeGroup, ResolveGroup, ResolveJob
from deltawire.codec.reference.codec import ReferenceCodec, resolve_job
from deltawire.dtypes import DTYPES, PAYLOAD_TYPES, dtype_named
from deltawire.errors import BaseMismatch, CorruptDelta, DeltawireError, StateNotWritable

torch = pytest.importorskip("torch", reason="the GPU codec works on torch tensors")
REAL = torch.cuda.is_available()
if not REAL and compiler() is None:
    pytest.skip("needs an NVIDIA GPU, or a C++ compiler to emulate one", allow_module_level=True)

from emulator.gpu import EmulatedGpu, emulated  # noqa: E402

from deltawire.codec.gpu import kernel_table, resolve  # noqa: E402
from deltawire.codec.gpu.codec import GpuCodec  # noqa: E402
from deltawire.tensors.bits import tensor_bits  # noqa: E402
from deltawire.tensors.torch_types import torch_types  # noqa: E402

TILE = 1 << 14
locate_slabs = resolve._Work._locate_slabs
DEVICE = torch.device("cuda", 0) if REAL else torch.device("cpu")
SIZES = [0, 1, 33, 1000, 1024, TILE - 1, TILE, TILE + 5, 12 * TILE + 100] if REAL else [0, 1, 1000, TILE + 5]
DENSITIES = [0.0, 0.001, 0.0108, 0.3, 0.97, 1.0] if REAL else [0.0, 0.0108, 0.97]
only_on_a_gpu = pytest.mark.skipif(not REAL, reason="needs an NVIDIA GPU")


@pytest.fixture(autouse=True)
def gpu():
    """Use the reference codec on the host, so that these tests run in a source tree without the native codec."""
    with using_codec("reference"), contextlib.nullcontext() if REAL else emulated(EmulatedGpu()):
        yield


def content(rng, kind, dtype, size):
    if kind == "zeros":
        return np.zeros(size, dtype.bits)
    if kind == "weights" and dtype.exponent_bits:
        return (rng.standard_normal(size) * (16 if dtype.width == 8 else 0.02)).astype(dtype.numpy).view(dtype.bits)
    return rng.integers(0, 2**dtype.width, size, dtype.bits.type)


def changed(rng, base, dtype, density):
    one, noise = dtype.bits.type(1), rng.integers(0, 2**dtype.width, base.size, dtype.bits.type)
    sign = np.where(rng.random(base.size) < 0.5, one, ~dtype.bits.type(0))
    larger = np.where(rng.random(base.size) < 0.9, 1, rng.integers(2, 90, base.size)).astype(dtype.bits)
    shift = rng.integers(0, dtype.width, base.size).astype(dtype.bits)
    new = [base + sign, base + sign * larger, base ^ dtype.bits.type(1 << (dtype.width - 1)), base + sign * (noise >> shift), noise]
    return np.where(rng.random(base.size) < density, new[rng.integers(len(new))], base)


def pairs(dtype, sizes=SIZES, densities=DENSITIES):
    rng = np.random.default_rng(dtype.code)
    with np.errstate(all="ignore"):
        for size in sizes:
            for kind in ("weights", "noise", "zeros"):
                for density in densities:
                    base = content(rng, kind, dtype, size)
                    yield base, changed(rng, base, dtype, density)


def cuda(bits, dtype, shape=None):
    """Return bits as a CUDA tensor of this type."""
    own = torch_types(torch).dtypes
    flat = torch.from_numpy(bits.view(f"i{bits.itemsize}").copy()).to(DEVICE).view(own[dtype.name])
    return flat if shape is None else flat.reshape(shape)


def host(tensor):
    """Return the bits of a tensor as an array."""
    integers = tensor.detach().cpu().contiguous().view(getattr(torch, f"int{8 * tensor.element_size()}")).numpy()
    return integers.view(f"u{tensor.element_size()}").copy()


def on_host(state):
    """Return a state as arrays, for the codecs of the host."""
    return {name: host(tensor).view(torch_types(torch).elements[tensor.dtype][0].numpy) for name, tensor in state.items()}


DTYPES_IN_TORCH = [dtype for dtype in DTYPES if dtype.name in torch_types(torch).dtypes]
by_dtype = pytest.mark.parametrize("dtype", DTYPES_IN_TORCH, ids=lambda dtype: dtype.name)


def device_bits(bits, dtype):
    return tensor_bits("w", cuda(bits, dtype)).bits


@by_dtype
def test_bytes_and_digests_are_those_of_the_reference(dtype):
    """All tensors are one group. Some of them are added."""
    cases = [*pairs(dtype), *((None, new) for _, new in pairs(dtype, [1, 1000], [0.3]))]
    kind, seeds = PAYLOAD_TYPES[dtype.code], 7 * np.arange(len(cases), dtype=np.uint64)
    bases, news = map(list, zip(*cases, strict=True))
    places = [None if base is None else device_bits(base, dtype) for base in bases], [device_bits(new, dtype) for new in news]
    codec = GpuCodec(DEVICE)
    (got,), (want,) = (
        codec.encode_groups([EncodeGroup(kind, *places, seeds)], 1),
        ReferenceCodec().encode_groups([EncodeGroup(kind, bases, news, seeds)], 1),
    )
    assert b"".join(got.pieces) == b"".join(want.pieces)
    assert (got.changed.tolist(), got.before, got.after) == (want.changed.tolist(), want.before, want.after)
    sums = codec.digest(places[1], seeds, 1)
    assert sums.tolist() == ReferenceCodec().digest(news, seeds, 1).tolist()


@by_dtype
def test_states_go_from_base_to_new_and_patches_say_where(dtype):
    cases = list(pairs(dtype, [0, 1, 1000, 2 * TILE + 17] if REAL else [0, 1000, TILE + 17], [0.0, 0.0108, 0.97]))
    base = {f"t{i}": cuda(b, dtype) for i, (b, _) in enumerate(cases)}
    new = {f"t{i}": cuda(n, dtype) for i, (_, n) in enumerate(cases)}
    arrays = on_host(base)
    delta = deltawire.encode_delta(base, new)
    assert delta == deltawire.encode_delta(arrays, on_host(new))
    assert deltawire.state_digest(base) == deltawire.state_digest(arrays)
    patch = deltawire.resolve_delta(base, delta)
    for name, part in patch.changed.items():
        old, now = host(base[name]), host(new[name])
        assert part.indices.device == DEVICE
        assert np.array_equal(part.indices.cpu().numpy(), np.flatnonzero(old != now))
        assert np.array_equal(host(part.values), now[old != now])
    for write in (lambda state: deltawire.apply_delta(state, delta), patch.apply):
        state = {name: cuda(host(tensor), dtype) for name, tensor in base.items()}
        write(state)
        assert all(np.array_equal(host(state[name]), host(new[name])) for name in new)
    if REAL:  # a patch that was made on a GPU can be applied to a state on the host
        on_cpu = {name: tensor.cpu() for name, tensor in base.items()}
        patch.apply(on_cpu)
        assert all(np.array_equal(host(on_cpu[name]), host(new[name])) for name in new)


@only_on_a_gpu
def test_states_larger_than_blocks_and_slabs_are_exact():
    """The tensors are larger than a block and a slab, and the density of changes jumps from none to all."""
    dtype = dtype_named("BF16")
    parts = [pair for d in (0.0, 0.0108, 1.0, 0.001, 0.3) for pair in pairs(dtype, [(1 << 22) + 100], [d])][::3]
    base, new = (np.concatenate(side) for side in zip(*parts, strict=True))
    kind, seeds = PAYLOAD_TYPES[dtype.code], np.full(1, 3, np.uint64)
    (ours,) = GpuCodec(DEVICE).encode_groups([EncodeGroup(kind, [device_bits(base, dtype)], [device_bits(new, dtype)], seeds)], 1)
    (theirs,) = ReferenceCodec().encode_groups([EncodeGroup(kind, [base], [new], seeds)], 1)
    assert b"".join(ours.pieces) == b"".join(theirs.pieces)
    state = {"w": cuda(base, dtype)}
    deltawire.apply_delta(state, deltawire.encode_delta(state, {"w": cuda(new, dtype)}))
    assert np.array_equal(host(state["w"]), new)


def test_changes_are_located_slab_by_slab(monkeypatch):
    """First come long slabs, whose lists are in the memory of the patch, then short ones. Only the payloads of a slab are on the device."""
    for name, value in {"_SHARE": 0, "_MOST_SLABS": 10**6, "_LEAST_SLAB": 2500, "_KEPT": 0, "_KEPT_SHARE": 0}.items():
        monkeypatch.setattr(resolve, name, value)
    monkeypatch.setattr(kernel_table, "block_tiles", lambda width: 2)  # each tensor has a block, and so a chunk, of its own
    dtype = dtype_named("BF16")
    cases = list(pairs(dtype, [20_000], [0.5]))[:1] * 3 + list(pairs(dtype, [20_000 + 3], [0.45, 0.0, 0.6]))
    base = {f"t{i:02}": cuda(b, dtype) for i, (b, _) in enumerate(cases)}
    new = {f"t{i:02}": cuda(n, dtype) for i, (_, n) in enumerate(cases)}
    located = []
    monkeypatch.setattr(resolve._Work, "_locate_slabs", lambda *arguments: (located.append(len(arguments[2])), locate_slabs(*arguments)))
    deltawire.apply_delta(base, encode_old(on_host(base), on_host(new)))  # its chunks are smaller
    assert all(np.array_equal(host(base[name]), host(new[name])) for name in new)
    assert len(located) == 2, "the test must meet both kinds of slabs"
    assert min(located) >= 2


def test_lists_of_slabs_become_shorter_as_the_patch_fills_up(monkeypatch):
    for name, value in {"_SHARE": 0, "_MOST_SLABS": 10**6, "_LEAST_SLAB": 500, "_KEPT": 0, "_KEPT_SHARE": 0}.items():
        monkeypatch.setattr(resolve, name, value)
    monkeypatch.setattr(kernel_table, "block_tiles", lambda width: 1)  # each tensor has a block, and so a chunk, of its own
    dtype = dtype_named("BF16")
    cases = list(pairs(dtype, [2000], [0.5]))[:1] * 200
    base = {f"t{i:03}": cuda(b, dtype) for i, (b, _) in enumerate(cases)}
    new = {f"t{i:03}": cuda(n, dtype) for i, (_, n) in enumerate(cases)}
    sizes = []
    monkeypatch.setattr(resolve._Work, "_locate_slabs", lambda *arguments: (sizes.append(arguments[3].numel()), locate_slabs(*arguments)))
    deltawire.apply_delta(base, encode_old(on_host(base), on_host(new)))  # its chunks are smaller
    assert all(np.array_equal(host(base[name]), host(new[name])) for name in new)
    assert len(sizes) > 2
    assert sizes == sorted(sizes, reverse=True)


def tied_on_host(state):
    arrays = on_host(state)
    return {**arrays, "tied": arrays["plain"]}


def test_any_layout_and_tied_tensors():
    base = torch.randn(300, 400, device=DEVICE, dtype=torch.bfloat16)
    new = base.clone()
    new[::3, ::5] *= 1.01
    views = lambda w: {"plain": w[:150], "turned": w[150:].t(), "odd": w[150:, 1:].flatten()[1:], "tied": w[:150]}  # noqa: E731
    delta = deltawire.encode_delta(views(base), views(new))
    assert delta == deltawire.encode_delta(tied_on_host(views(base)), tied_on_host(views(new)))
    state = {"a": base[:150], "b": base[150:].t()}
    deltawire.apply_delta(state, deltawire.encode_delta(state, {"a": new[:150], "b": new[150:].t()}))
    assert torch.equal(base.view(torch.int16), new.view(torch.int16))


@only_on_a_gpu
def test_a_snapshot_may_stay_on_the_host():
    new = torch.randn(100_000, device=DEVICE, dtype=torch.bfloat16)
    snapshot = new.cpu().pin_memory()
    new[::50] *= 1.01
    delta = deltawire.encode_delta({"w": snapshot}, {"w": new})
    assert delta == deltawire.encode_delta({"w": snapshot}, {"w": new.cpu()})
    deltawire.apply_delta({"w": snapshot}, delta)
    assert torch.equal(snapshot.view(torch.int16), new.cpu().view(torch.int16))


def test_tensors_are_added_and_removed_on_the_gpu():
    kept = torch.randn(5000, device=DEVICE)
    base = {"kept": kept, "gone": torch.ones(10, device=DEVICE), "empty": torch.empty(0, device=DEVICE)}
    new = {"kept": kept + 1, "came": torch.randn(70_000, device=DEVICE, dtype=torch.float16), "empty": torch.empty(0, device=DEVICE)}
    delta = deltawire.encode_delta(base, new)
    deltawire.apply_delta(base, delta)
    assert base.keys() == new.keys()
    assert all(base[name].device == DEVICE and torch.equal(base[name], new[name]) for name in new)


@pytest.mark.parametrize("name", ["BF16", "F8_E4M3", "F32", "U64"] if REAL else ["BF16", "U64"])
def test_bad_payloads_of_versions_1_and_2_are_refused_as_the_reference_refuses_them(name):
    dtype = dtype_named(name)
    rng = np.random.default_rng(5)
    for base, new in pairs(dtype, [3000, 2 * TILE + 3] if REAL else [3000], [0.02, 0.97]):
        payload = b"".join(encode_tensor(base, new, dtype))
        for i in range(25 if REAL else 8):
            bad = bytearray(payload)
            for _ in range(rng.integers(1, 4)):
                bad[rng.integers(9, min(len(bad), 60 if i % 2 else len(bad)))] ^= 1 << rng.integers(8)
            if i % 7 == 0:
                bad = bad[: -int(rng.integers(1, 9))]
            want: object
            try:
                want = resolve_job(ResolveJob(base, base.size, (0, len(bad)), dtype, 1), bad)[1].tobytes()
            except DeltawireError as error:
                want = type(error)
            target = cuda(base, dtype)
            got: object
            resolution = GpuCodec(DEVICE).resolution(1, 0)
            try:
                resolution.add([ResolveJob(tensor_bits("w", target).bits, base.size, (0, len(bad)), dtype, 1, write=True)], bad)
                assert np.array_equal(host(target), base)
                resolution.settle()
                got = host(target).tobytes()
            except DeltawireError as error:
                got = type(error)
                assert np.array_equal(host(target), base)
            assert got == want


def test_another_base_is_refused_and_does_not_change():
    base = torch.randn(100_000, device=DEVICE, dtype=torch.bfloat16)
    new = base.clone()
    new[::100] *= 1.01
    delta = deltawire.encode_delta({"w": base}, {"w": new})
    other = base.clone()
    other[5] = 1
    kept = other.clone()
    with pytest.raises(BaseMismatch):
        deltawire.apply_delta({"w": other}, delta)
    assert torch.equal(other, kept)
    broken = bytearray(delta)
    broken[-1] ^= 1
    with pytest.raises(CorruptDelta):
        deltawire.apply_delta({"w": base}, bytes(broken))
    with pytest.raises(StateNotWritable):
        deltawire.apply_delta(
            {"w": base, "part": base[:10]}, deltawire.encode_delta({"w": base, "part": base[:10]}, {"w": new, "part": base[:10]})
        )


def test_a_second_exchange_restores_the_old_values():
    base = torch.randn(1_000_000 if REAL else 100_000, device=DEVICE, dtype=torch.bfloat16)
    new = (base.float() * (1 + 1e-3 * torch.randn_like(base, dtype=torch.float32))).to(torch.bfloat16)
    kind, seeds, target = PAYLOAD_TYPES[dtype_named("BF16").code], np.ones(1, np.uint64), [tensor_bits("w", base).bits]
    (encoded,) = GpuCodec(DEVICE).encode_groups([EncodeGroup(kind, target, [tensor_bits("w", new).bits], seeds)], 1)
    payload = b"".join(encoded.pieces)
    resolution = GpuCodec(DEVICE).deferred_resolution(1)
    kept = base.clone()
    resolution.add_groups([ResolveGroup(kind, target, np.array([base.numel()]), seeds, (0, len(payload)), True)], payload)
    for state in (new, kept, new):
        resolution.exchange()
        assert torch.equal(base.view(torch.int16), state.view(torch.int16))


@pytest.mark.parametrize("density", [0.0, 0.01, 0.97])
def test_master_weights_are_rounded_as_they_are_read(density):
    """The weights include halfway cases, infinities and NaNs. Enough of them change to make chunks raw."""
    random = np.random.default_rng(7)
    masters = {}
    base = {}
    for name, size in {"a": 3 * TILE + 77, "b": 1001, "c": 1, "d": 0, "tied": 1001}.items():
        wide = (random.standard_normal(size) * 0.02).astype(np.float32)
        base[name] = torch.from_numpy(wide).to(torch.bfloat16).to(DEVICE)
        noise = random.standard_normal(size).astype(np.float32) * (30 if density > 0.5 else 0.02)
        moved = np.where(random.random(size) < density, noise, wide)
        words = moved.astype(np.float32).view(np.uint32)
        if size > 100 and density:
            words[:8] = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFF800001, 0x7F7FFFFF]
        masters[name] = torch.from_numpy(words.view(np.float32).copy()).to(DEVICE)
    base["tied"], masters["tied"] = base["b"], masters["b"]
    arrays, wide = on_host(base), {name: tensor.cpu().numpy() for name, tensor in masters.items()}
    arrays["tied"], wide["tied"] = arrays["b"], wide["b"]
    delta = deltawire.encode_delta(base, masters, dtype="bfloat16")
    assert delta == deltawire.encode_delta(arrays, wide, dtype="bfloat16")
    deltawire.apply_delta(base, delta)
    for name, tensor in masters.items():
        expected, is_number = tensor.to(torch.bfloat16), ~tensor.isnan()
        assert torch.equal(base[name].view(torch.int16)[is_number], expected.view(torch.int16)[is_number])
        assert base[name][~is_number].isnan().all()


def test_a_delta_can_be_made_during_other_work():
    base = {"w": torch.randn(50_000, device=DEVICE, dtype=torch.bfloat16)}
    new = {"w": base["w"] * 1.01}
    pending = deltawire.start_delta(base, new)
    assert pending.result(60) == deltawire.encode_delta(base, new)
    assert pending.done()
    with pytest.raises(deltawire.DeltawireError):
        deltawire.start_delta({"w": object()}, new).result(60)
