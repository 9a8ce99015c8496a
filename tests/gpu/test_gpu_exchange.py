"""A GPU writes changes and digests the result in one pass. The result and its digest are those of the reference.

On machines without an NVIDIA GPU, such as CI machines, an emulated GPU (`emulator/`) runs the same kernels on fewer and smaller tensors.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from emulator.build import compiler

from deltawire.codec import using_codec
from deltawire.codec.base import EncodeGroup, ResolveGroup
from deltawire.codec.reference.codec import ReferenceCodec
from deltawire.dtypes import PAYLOAD_TYPES

torch = pytest.importorskip("torch", reason="the GPU codec works on torch tensors")
REAL = torch.cuda.is_available()
if not REAL and compiler() is None:
    pytest.skip("needs an NVIDIA GPU, or a C++ compiler to emulate one", allow_module_level=True)

from emulator.gpu import EmulatedGpu, emulated  # noqa: E402

from deltawire.codec.bits import DeviceBits  # noqa: E402
from deltawire.codec.gpu.codec import GpuCodec  # noqa: E402

TILE = 1 << 14
DEVICE = torch.device("cuda", 0) if REAL else torch.device("cpu")
TYPES = {payload_type.name: payload_type for payload_type in PAYLOAD_TYPES}
WIDTHS = ["F4_E2M1", "U8", "BF16", "F32", "I64"]


@pytest.fixture(autouse=True)
def gpu():
    with using_codec("reference"), contextlib.nullcontext() if REAL else emulated(EmulatedGpu()):
        yield


def on_gpu(bits, *, aligned=True):
    """Return an array as a tensor on the GPU. A tensor that is not aligned begins one element after a multiple of 16 bytes."""
    room = torch.zeros(bits.size + 1, dtype=getattr(torch, f"int{8 * bits.itemsize}"), device=DEVICE)
    tensor = room[: bits.size] if aligned else room[1:]
    tensor.copy_(torch.from_numpy(bits.view(f"i{bits.itemsize}").copy()))
    return DeviceBits(tensor)


def host(bits):
    return bits.tensor.cpu().numpy().view(f"u{bits.tensor.element_size()}")


def pair(rng, kind, elements, density):
    """Return random bits, and the same with some bytes changed. A run of 2,000 bytes changes as a whole, unless nothing does."""
    base = rng.integers(0, 256, elements * kind.width // 8, np.uint8)
    which = rng.random(base.size) < density
    which[1000:3000] |= density > 0
    new = base ^ (which * rng.integers(1, 256, base.size, np.uint8)).astype(np.uint8)
    return base.view(kind.dtype.bits), new.view(kind.dtype.bits)


def payload_of(kind, pairs, seeds):
    bases, news = zip(*pairs, strict=True)
    (encoded,) = ReferenceCodec().encode_groups([EncodeGroup(kind, bases, news, seeds)], 1)
    return b"".join(encoded.pieces)


@pytest.mark.parametrize("name", WIDTHS)
def test_exchanges_digest_what_they_write(name):
    """The last tile of a tensor is short, one tensor does not change, and one changes everywhere."""
    kind, rng = TYPES[name], np.random.default_rng(3)
    cases = [(8, 1.0), (0, 0.0), (TILE + 1030, 0.004), (5002, 0.0), (2 * TILE, 1.0), (TILE - 6, 0.1)]
    cases += [(300 * TILE + 2222, 0.01)] if REAL else []
    pairs = [pair(rng, kind, *case) for case in cases]
    seeds = np.arange(1, 1 + len(pairs), dtype=np.uint64) * np.uint64(7919)
    bases, payload = [on_gpu(base) for base, _ in pairs], payload_of(kind, pairs, seeds)
    resolution = GpuCodec(DEVICE).deferred_resolution(1)
    counts = np.array([base.size for base, _ in pairs], np.int64)
    resolution.add_groups([ResolveGroup(kind, bases, counts, seeds, (0, len(payload)), True)], payload)
    exchange = resolution.compact()
    assert exchange.digested.tolist() == [size > 0 for size, _ in cases]
    for turn in range(4):  # new, old, new, old
        expected = [state[(turn + 1) % 2] for state in pairs]
        sums = exchange.exchange_and_digest()()
        assert all(np.array_equal(host(mine), state) for mine, state in zip(bases, expected, strict=True))
        assert sums.tolist() == ReferenceCodec().digest(expected, seeds, 1).tolist()
    resolution.exchange()  # the other kernel finds the same patch
    assert all(np.array_equal(host(mine), new) for mine, (_, new) in zip(bases, pairs, strict=True))


def test_only_tensors_that_are_written_where_they_are_count_as_digested():
    """One tensor is not written, one is written through a copy, and a whole group does not change."""
    rng, seeds = np.random.default_rng(4), np.arange(1, 4, dtype=np.uint64)
    kinds = [TYPES["BF16"], TYPES["F16"], TYPES["U8"]]
    pairs = [[pair(rng, kind, 5000, density) for _ in range(3)] for kind, density in zip(kinds, (0.02, 0.0, 0.02), strict=True)]
    bases = [[on_gpu(base, aligned=(row, number) != (2, 1)) for number, (base, _) in enumerate(each)] for row, each in enumerate(pairs)]
    payloads = [payload_of(kind, each, seeds) for kind, each in zip(kinds, pairs, strict=True)]
    ends = np.cumsum([len(payload) for payload in payloads]).tolist()
    counts = np.full(3, 5000, np.int64)
    groups = [
        ResolveGroup(kind, mine, counts, seeds, (end - len(payload), end) if payload else None, [row > 0, True, True])
        for row, (kind, mine, payload, end) in enumerate(zip(kinds, bases, payloads, ends, strict=True))
    ]
    resolution = GpuCodec(DEVICE).deferred_resolution(1)
    resolution.add_groups(groups, b"".join(payloads))
    exchange = resolution.compact()
    assert exchange.digested.reshape(3, 3).tolist() == [[False, True, True], [False] * 3, [True, False, True]]
    for turn in (1, 0):
        sums = exchange.exchange_and_digest()().reshape(3, 3, 4)
        for row, each in enumerate(pairs):
            expected = [state[turn and (row, number) != (0, 0)] for number, state in enumerate(each)]
            assert all(np.array_equal(host(mine), state) for mine, state in zip(bases[row], expected, strict=True))
            digested = exchange.digested.reshape(3, 3)[row]
            assert (sums[row] * ~digested[:, None] == 0).all()
            assert (sums[row] == ReferenceCodec().digest(expected, seeds, 1))[digested].all()


def test_the_digest_shows_weights_that_other_code_has_changed():
    rng, seeds, kind = np.random.default_rng(5), np.ones(1, np.uint64), TYPES["BF16"]
    states = pair(rng, kind, 20_000, 0.01)
    base, payload = on_gpu(states[0]), payload_of(kind, [states], seeds)
    resolution = GpuCodec(DEVICE).deferred_resolution(1)
    resolution.add_groups([ResolveGroup(kind, [base], np.array([20_000]), seeds, (0, len(payload)), True)], payload)
    exchange = resolution.compact()
    base.tensor[19_999] ^= 1
    found = exchange.exchange_and_digest()()
    assert found.tolist() != ReferenceCodec().digest([states[1]], seeds, 1).tolist()
    assert found.tolist() == ReferenceCodec().digest([host(base)], seeds, 1).tolist()
