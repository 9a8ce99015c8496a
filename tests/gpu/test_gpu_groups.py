"""Groups of tensors on a GPU get the bytes of the reference, and are resolved as the reference resolves them.

On machines without an NVIDIA GPU, such as CI machines, an emulated GPU (`emulator/`) runs the same kernels on fewer and smaller tensors.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from emulator.build import compiler

from deltawire.codec import using_codec
from deltawire.codec.base import EncodeGroup, ResolveGroup
from deltawire.codec.reference import groups as reference_groups
from deltawire.codec.reference.codec import ReferenceCodec
from deltawire.codec.reference.encoder import encode_coded
from deltawire.codec.reference.groups import elements_of, tensor_of
from deltawire.codec.varints import to_varint
from deltawire.dtypes import F4_E2M1, PAYLOAD_TYPES, U4
from deltawire.errors import CorruptDelta, DeltawireError

torch = pytest.importorskip("torch", reason="the GPU codec works on torch tensors")
REAL = torch.cuda.is_available()
if not REAL and compiler() is None:
    pytest.skip("needs an NVIDIA GPU, or a C++ compiler to emulate one", allow_module_level=True)

from emulator.gpu import EmulatedGpu, emulated  # noqa: E402

from deltawire.codec.bits import DeviceBits, MasterWeightBits  # noqa: E402
from deltawire.codec.gpu import chunk_walk, encode, kernel_addresses, kernel_table  # noqa: E402
from deltawire.codec.gpu.codec import GpuCodec  # noqa: E402

TILE = 1 << 14
DEVICE = torch.device("cuda", 0) if REAL else torch.device("cpu")
TYPES = {payload_type.name: payload_type for payload_type in PAYLOAD_TYPES}
BF16 = TYPES["BF16"]
SIZES = [100, 0, TILE + 5, 1, 5000, 0, 33, TILE, 3000] + ([12 * TILE + 100] if REAL else [])


@pytest.fixture(autouse=True)
def gpu():
    with using_codec("reference"), contextlib.nullcontext() if REAL else emulated(EmulatedGpu()):
        yield


def on_gpu(bits):
    return None if bits is None else DeviceBits(torch.from_numpy(bits.view(f"i{bits.itemsize}").copy()).to(DEVICE))


def host(bits):
    """Return the elements of a tensor on the GPU as an array."""
    integers = bits.tensor.cpu().contiguous().numpy()
    return integers.view(f"u{integers.itemsize}")


def content(rng, payload_type, elements):
    """Return tensors whose elements, or 4-bit codes, are like weights."""
    dtype = payload_type.dtype
    count = -(-elements // payload_type.per_element)
    if payload_type.is_packed or not payload_type.exponent_bits:
        return rng.integers(0, 2**dtype.width, count, dtype.bits.type)
    return (rng.standard_normal(count) * (16 if dtype.width == 8 else 0.02)).astype(dtype.numpy).view(dtype.bits)


def stepped(rng, payload_type, base, density):
    """Return a tensor in which some elements make a step, most of them of one."""
    elements = elements_of(base, payload_type).copy()
    which = rng.random(elements.size) < density
    steps = rng.choice(np.array([-1, 1, -1, 1, 1, 2, -5]), int(which.sum())).astype(elements.dtype)
    elements[which] = (elements[which] + steps) & elements.dtype.type((1 << payload_type.width) - 1)
    return tensor_of(elements, payload_type)


class Case:
    """A group: every fifth tensor is added."""

    def __init__(self, payload_type, density, sizes=SIZES, seed=1):
        rng = np.random.default_rng(seed)
        self.type = payload_type
        self.bases = [content(rng, payload_type, size) for size in sizes]
        self.news = [stepped(rng, payload_type, base, density) for base in self.bases]
        self.bases[4::5] = [None] * len(self.bases[4::5])
        self.seeds = np.arange(1, 1 + len(sizes), dtype=np.uint64) * np.uint64(7919)
        self.counts = np.array([new.size for new in self.news], np.int64)

    def group(self, place=lambda bits: bits):
        return EncodeGroup(self.type, [place(base) for base in self.bases], [place(new) for new in self.news], self.seeds)

    def resolve_group(self, bases, payload, writes=False):
        return ResolveGroup(self.type, bases, self.counts, self.seeds, payload, writes)

    def check_resolved(self, data, payload=None):
        """Resolve on the GPU and by the reference, and compare everything. Return the error if both refuse the payload."""
        payload = payload or (0, len(data))
        expected = ReferenceCodec().resolution(1, 0)
        theirs = [None if base is None else base.copy() for base in self.bases]
        targets = [on_gpu(base) for base in self.bases]
        ours = GpuCodec(DEVICE).resolution(1, 0)
        try:
            (want,) = expected.add_groups([self.resolve_group(theirs, payload, True)], data)
        except DeltawireError as error:
            with pytest.raises(type(error)):
                ours.add_groups([self.resolve_group(targets, payload, True)], data)
            return error
        (got,) = ours.add_groups([self.resolve_group(targets, payload, True)], data)
        assert (got.changed.tolist(), got.before, got.after) == (want.changed.tolist(), want.before, want.after)
        kept = [number for number, base in enumerate(self.bases) if base is not None]
        for (indices, values), (their_indices, their_values) in zip(ours.changes(kept), expected.changes(kept), strict=True):
            assert np.array_equal(indices.cpu().numpy(), their_indices)
            assert np.array_equal(host(values), their_values)
        added = [number for number, base in enumerate(self.bases) if base is None]
        for dense, their_dense in zip(ours.dense(added), expected.dense(added), strict=True):
            assert np.array_equal(host(dense), their_dense)
        assert all(np.array_equal(host(targets[number]), self.bases[number]) for number in kept)
        ours.settle()
        expected.settle()
        assert all(np.array_equal(host(targets[number]), theirs[number]) for number in kept)
        return None


def check_encoded(cases, place=on_gpu):
    """Encode groups on the GPU and by the reference, and return their payloads."""
    payloads = []
    want = ReferenceCodec().encode_groups([case.group() for case in cases], 1)
    for ours, theirs in zip(GpuCodec(DEVICE).encode_groups([case.group(place) for case in cases], 1), want, strict=True):
        assert b"".join(ours.pieces) == b"".join(theirs.pieces)
        assert (ours.changed.tolist(), ours.before, ours.after) == (theirs.changed.tolist(), theirs.before, theirs.after)
        payloads.append(b"".join(theirs.pieces))
    return payloads


@pytest.fixture
def small_blocks(monkeypatch):
    """Let blocks have three tiles, so that a few tensors fill many blocks."""
    monkeypatch.setattr(kernel_table, "block_tiles", lambda width: 3)
    monkeypatch.setattr(reference_groups, "tiles_per_block", lambda payload_type: 3)
    monkeypatch.setattr(encode, "_FIRST_SLAB", 2 * TILE)
    monkeypatch.setattr(encode, "_learnt", {})


@pytest.mark.parametrize("name", ["BF16", "F8_E4M3", "F8_E5M2", "F4_E2M1", "U4", "I8", "F16", "F32", "I64", "F64"])
def test_groups_get_the_bytes_of_the_reference_and_are_resolved(name, small_blocks):
    for density in (0.0005, 0.01, 0.9) if REAL or name in ("BF16", "F4_E2M1") else (0.02,):
        case = Case(TYPES[name], density)
        (payload,) = check_encoded([case])
        case.check_resolved(b"xyz" + payload, (3, 3 + len(payload)))


def test_a_block_has_the_tiles_of_many_tensors():
    """With blocks of their real size, one chunk has the changes of all tensors."""
    case = Case(F4_E2M1, 0.001, [700, 3000, 64, 0, 2, 20_000, 512] * (40 if REAL else 2))
    case.bases = [new if base is None else base for base, new in zip(case.bases, case.news, strict=True)]
    (payload,) = check_encoded([case])
    assert payload[0] == (sum(-(-new.size * 2 // TILE) for new in case.news) << 2 | 1) & 127 | (128 if REAL else 0)
    case.check_resolved(payload)


def test_groups_of_all_widths_are_encoded_and_resolved_in_one_call(small_blocks):
    """The tensors of one group are on the host. One group does not change, and has no payload."""
    cases = [
        Case(TYPES[name], density, [3000, 0, TILE + 9], seed)
        for seed, (name, density) in enumerate([("BF16", 0.02), ("F16", 0.0), ("U4", 0.01), ("U8", 0.3), ("I16", 0.1)])
    ]
    cases[1].bases = list(cases[1].news)
    cases[3].bases[2] = None
    payloads = check_encoded(cases, lambda bits: on_gpu(bits) if bits is None or bits.dtype != np.uint8 else bits)
    assert payloads[1] == b""
    data, ranges = b"".join(payloads), []
    for payload in payloads:
        begin = ranges[-1][1] if ranges else 0
        ranges.append((begin, begin + len(payload)))
    bases = [[base if case.type is TYPES["U8"] else on_gpu(base) for base in case.bases] for case in cases]
    resolution, expected = GpuCodec(DEVICE).deferred_resolution(1), ReferenceCodec().resolution(1, 0)
    ours = resolution.add_groups(
        [
            case.resolve_group(mine, None if number == 1 else ranges[number], [True] * 3)
            for number, (case, mine) in enumerate(zip(cases, bases, strict=True))
        ],
        data,
    )
    theirs = expected.add_groups([case.resolve_group(case.bases, ranges[number]) for number, case in enumerate(cases)], data)
    for got, want in zip(ours, theirs, strict=True):
        assert (got.changed.tolist(), got.before, got.after) == (want.changed.tolist(), want.before, want.after)
    numbers = [number for number, base in enumerate(base for case in cases for base in case.bases) if base is not None][::-1]
    for (indices, values), (their_indices, their_values) in zip(resolution.changes(numbers), expected.changes(numbers), strict=True):
        assert np.array_equal(np.asarray(indices.cpu() if hasattr(indices, "cpu") else indices), their_indices)
        assert np.array_equal(host(values) if isinstance(values, DeviceBits) else values, their_values)
    olds = [[None if base is None else base.copy() for base in case.bases] for case in cases]
    for states in ([case.news for case in cases], olds):
        resolution.exchange()
        for mine, state in zip(bases, states, strict=True):
            assert all(
                np.array_equal(host(a) if isinstance(a, DeviceBits) else a, b) for a, b in zip(mine, state, strict=True) if a is not None
            )


def test_a_list_that_is_too_short_for_one_block_becomes_longer(small_blocks, monkeypatch):
    monkeypatch.setattr(encode, "_LEAST_LIST", 1024)
    monkeypatch.setattr(encode, "_LEAST_BODIES", 64)
    grow, grown = encode._Workspace.grow, []
    monkeypatch.setattr(encode._Workspace, "grow", lambda *arguments: (grown.append(1), grow(*arguments)))
    check_encoded([Case(BF16, 0.7, [TILE, 513, 513, 2 * TILE + 3, 513])])
    assert grown


def test_a_slab_that_does_not_fit_is_done_again_after_another_width_was_started(small_blocks, monkeypatch):
    """Its last block does not fit, and the device has already started the first slab of the next width."""
    monkeypatch.setattr(encode, "_LEAST_LIST", 1024)
    monkeypatch.setattr(encode, "_LEAST_BODIES", 64)
    start, started = encode._Workspace.start, []
    monkeypatch.setattr(encode._Workspace, "start", lambda *arguments: (started.append(arguments[:2]), start(*arguments))[1])
    sizes = [513, TILE + 5, 513]
    check_encoded([Case(TYPES[name], 0.7, sizes, seed) for seed, name in enumerate(("F32", "BF16", "F8_E4M3", "BF16"))])
    firsts = [work for work, first in started if first == 0]
    assert len(firsts) > len(set(map(id, firsts))) == 3, "no slab of a later width was started twice"


def test_tensors_that_kernels_cannot_read_are_copied_a_few_blocks_at_a_time(small_blocks, monkeypatch):
    """Some tensors are strided, some bases are on the host, and large ones are in several blocks."""
    monkeypatch.setattr(kernel_addresses, "_MOST_COPIED", 40_000)
    flat_on, copied = kernel_addresses.flat_on, []
    monkeypatch.setattr(kernel_addresses, "flat_on", lambda *arguments: (copied.append(1), flat_on(*arguments))[1])
    readable, parts = kernel_addresses.readable, []

    def counted(*arguments):
        for part in readable(*arguments):
            parts.append(part[0])
            yield part

    monkeypatch.setattr("deltawire.codec.gpu.codec.readable", counted)
    places = iter([on_gpu, strided, lambda bits: bits] * 100)
    check_encoded(
        [Case(BF16, 0.02, [9000, 20_000, 0, 70_000, 9000, 100, 15_000])], lambda bits: None if bits is None else next(places)(bits)
    )
    assert len(parts) > 2
    assert copied


def strided(bits):
    """Return an array on the GPU, in memory that kernels cannot read without a copy."""
    return DeviceBits(torch.from_numpy(np.repeat(bits, 2).view(f"i{bits.itemsize}")).to(DEVICE)[::2])


def test_master_weights_may_be_in_one_group_with_other_weights(small_blocks):
    rng = np.random.default_rng(3)
    wide = [rng.standard_normal(size, np.float32) for size in (5000, 100, TILE + 4, 64)]
    wide[1][:] = rng.standard_normal(100) * 1e9  # so many large steps that a chunk is raw
    news = [torch.from_numpy(master).bfloat16().view(torch.int16).numpy().view(np.uint16) for master in wide]
    bases = [np.where(rng.random(new.size) < 0.02, new + np.uint16(1), new) for new in news]
    bases[1] = np.zeros_like(news[1])
    seeds = np.arange(4, dtype=np.uint64)
    masters = [MasterWeightBits(torch.from_numpy(master.view(np.int32)).to(DEVICE)) for master in wide]
    mixed = [masters[0], masters[1], on_gpu(news[2]), masters[3]]
    (got,) = GpuCodec(DEVICE).encode_groups([EncodeGroup(BF16, [on_gpu(base) for base in bases], mixed, seeds)], 1)
    (want,) = ReferenceCodec().encode_groups([EncodeGroup(BF16, bases, news, seeds)], 1)
    assert b"".join(got.pieces) == b"".join(want.pieces)
    assert got.after == want.after


@pytest.mark.parametrize("payload_type", [BF16, F4_E2M1], ids=lambda payload_type: payload_type.name)
def test_a_chunk_may_have_another_top_than_our_encoder_chooses(payload_type):
    case = Case(payload_type, 0.05, [3000, 5000])
    case.bases = [content(np.random.default_rng(1), payload_type, size) for size in (3000, 5000)]
    bases, news = (np.concatenate([elements_of(bits, payload_type) for bits in side]) for side in (case.bases, case.news))
    bodies = [encode_coded(bases, news, payload_type, top) for top in range(3)]
    for body in bodies:
        assert case.check_resolved(to_varint(2 << 2 | 1) + to_varint(len(body)) + body) is None


@pytest.mark.parametrize("payload_type", [BF16, F4_E2M1, U4], ids=lambda payload_type: payload_type.name)
def test_bad_payloads_of_groups_are_refused_as_the_reference_refuses_them(payload_type, small_blocks):
    rng = np.random.default_rng(5)
    case = Case(payload_type, 0.02, [3000, 500, 40, 600])
    (payload,) = check_encoded([case])
    errors = 0
    for turn in range(60 if REAL else 12):
        bad = bytearray(payload)
        for _ in range(rng.integers(1, 3)):
            bad[rng.integers(0, min(len(bad), 40 if turn % 2 else len(bad)))] ^= 1 << rng.integers(8)
        errors += case.check_resolved(bytes(bad[: -int(rng.integers(1, 9))] if turn % 7 == 0 else bad)) is not None
    assert errors > 4


BAD_HEADERS = """05 85 85.00.00 04.81 04.80.00 00.00 11.00 04.01.61 07.00 06.01.61 05.09.61 04.00.08.00.04.00 85.80.80.01.00
05.ff.ff.ff.ff.ff.ff.01"""


@pytest.mark.parametrize("header", BAD_HEADERS.split())
def test_a_header_of_a_chunk_that_breaks_a_rule_is_refused(header, small_blocks):
    case = Case(BF16, 0.0, [100, 0, 100, 50])
    assert isinstance(case.check_resolved(bytes.fromhex(header.replace(".", ""))), CorruptDelta)


def test_the_native_codec_finds_the_same_chunks():
    """It helps the GPU codec where it is built."""
    native = pytest.importorskip("deltawire.codec.native", reason="the native codec is not built", exc_type=ImportError)
    case = Case(BF16, 0.3, [100, TILE + 5, 33])
    payload = np.frombuffer(b"".join(ReferenceCodec().encode_groups([case.group()], 1)[0].pieces), np.uint8)
    found = [chunk_walk._headers(payload, 0, payload.size, lambda: None).tolist()]
    for codec in native.instruction_sets()[-1:]:
        with using_codec(codec):
            found.append(chunk_walk._headers(payload, 0, payload.size, lambda: None).tolist())
            for header in BAD_HEADERS.split()[:5]:
                bad = np.frombuffer(bytes.fromhex(header.replace(".", "")), np.uint8)
                with pytest.raises(CorruptDelta):
                    chunk_walk._headers(bad, 0, bad.size, lambda: None)
    assert found[0] == found[1]
