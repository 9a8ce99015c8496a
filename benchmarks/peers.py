"""Re-implementations of the delta methods of other systems, as fast as NumPy and zstandard allow on one thread.

These are the *methods*, not the other projects' code. The wire layouts are our own, so that every method gets the same optimizations
(cache-sized slabs, no needless copies, reused zstd contexts) and differs only in what it stores per changed element. Every method is
bit-exact: values are integers, so ±0 and NaN payloads are ordinary values.

A method works on one tensor: flat, contiguous arrays of ``uint16`` (bf16 bits) or ``uint8`` (fp8 bits). A delta stores neither the size
nor the dtype of the tensor, because the base has both.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

Bits: TypeAlias = npt.NDArray[np.uint16] | npt.NDArray[np.uint8]
_Index: TypeAlias = npt.NDArray[np.int64]

_SLAB_BYTES = 1 << 20  # of base and of new each, so that both stay in cache between the comparison and the gather
_GROUP_WORDS = 4
_BLOCK_CHANGES = 1 << 17  # one zstd frame covers at least this many changes (256 KiB of bf16); larger frames save 0.1%
_SCATTER = 1 << 15  # XOR in place reads and then writes the same bytes, so few that they are still in cache
_LEVEL = 1

# One context each for the whole process, so that no tensor pays for setting one up. Not thread-safe.
_compressor = zstandard.ZstdCompressor(level=_LEVEL)
_decompressor = zstandard.ZstdDecompressor()


class Peer(Protocol):
    """A delta method. ``apply(base, encode(base, new))`` leaves ``base`` equal to ``new`` in every bit."""

    @property
    def name(self) -> str: ...

    @property
    def used_by(self) -> str: ...

    def encode(self, base: Bits, new: Bits) -> bytes:
        """Return the delta from `base` to `new`, which have equal dtype and size."""

    def apply(self, base: Bits, delta: bytes) -> None:
        """Turn `base` into `new` in place. The delta is trusted: only NumPy's own checks apply."""


class DenseXor:
    """XOR of the whole tensor, then zstd-1, with one frame per 2 MiB of the tensor, which keeps the XOR in cache.

    The other systems compress whole tensors. Frames of 2 MiB are 1% smaller (22.1 instead of 22.3 bits per change on the recorded trace),
    and faster to encode and to apply. Still smaller frames would need fewer bits (18.7 with 128 KiB), but no system sends those.
    """

    name = "XOR + zstd-1"
    used_by = "slime, SkyRL"

    _HEADER: ClassVar[struct.Struct] = struct.Struct("<I")

    def __init__(self, frame_bytes: int = 2 << 20) -> None:
        self._frame_bytes = frame_bytes

    def encode(self, base: Bits, new: Bits) -> bytes:
        slab = self._frame_bytes // base.itemsize
        scratch = np.empty(min(slab, base.size), base.dtype)
        out = io.BytesIO()
        for start in range(0, base.size, slab):
            old = base[start : start + slab]
            xor = np.bitwise_xor(old, new[start : start + slab], out=scratch[: old.size])
            frame = _compressor.compress(xor.data)
            out.write(self._HEADER.pack(len(frame)))
            out.write(frame)
        return out.getvalue()

    def apply(self, base: Bits, delta: bytes) -> None:
        wire, at, start = memoryview(delta), 0, 0
        while at < len(wire):
            (length,) = self._HEADER.unpack_from(wire, at)
            at += self._HEADER.size
            xor = np.frombuffer(_decompressor.decompress(wire[at : at + length]), base.dtype)
            at += length
            part = base[start : start + xor.size]
            np.bitwise_xor(part, xor, out=part)
            start += xor.size


class _Sparse:
    """Positions and values of the changed elements, in blocks of at least `_BLOCK_CHANGES` changes.

    Block: count, bytes of positions, bytes of values (u32 each), then both sections, each padded to 4 bytes so that
    they can be read in place.
    """

    _HEADER: ClassVar[struct.Struct] = struct.Struct("<III")
    _values_are_xor: ClassVar[bool] = False  # otherwise the new value itself
    _zstd: ClassVar[bool] = False

    def _pack(self, changed: _Index, previous: int) -> tuple[_Index, npt.NDArray[Any]]:
        """The positions whose values are to be stored, and how the positions themselves are stored.

        They are all of `changed`, which is not empty and follows the position `previous`, and any others the method needs.
        """
        raise NotImplementedError

    def _unpack(self, stored: memoryview | bytes, previous: int) -> _Index:
        """Return the positions from the bytes that `_pack` stored for consecutive slabs."""
        raise NotImplementedError

    def encode(self, base: Bits, new: Bits) -> bytes:
        out = io.BytesIO()  # fills one buffer, so that each page of a large delta is touched once
        index: list[npt.NDArray[Any]] = []
        values: list[npt.NDArray[Any]] = []
        count, previous = 0, -1
        for changed in _changed(base, new):
            positions, stored = self._pack(changed, previous)
            index.append(stored)
            value = new.take(positions)
            if self._values_are_xor:
                value ^= base.take(positions)
            values.append(value)
            count += positions.size
            previous = int(positions[-1])
            if count >= _BLOCK_CHANGES:
                self._flush(out, count, index, values)
                index, values, count = [], [], 0
        if count:
            self._flush(out, count, index, values)
        return out.getvalue()

    def _flush(self, out: io.BytesIO, count: int, *streams: list[npt.NDArray[Any]]) -> None:
        sections: list[list[Any]] = [list(parts) for parts in streams]
        if self._zstd:
            sections = [[_compressor.compress(_join(parts))] for parts in streams]
        lengths = [sum(memoryview(part).nbytes for part in section) for section in sections]
        out.write(self._HEADER.pack(count, *lengths))
        for section, length in zip(sections, lengths, strict=True):
            out.writelines(section)
            out.write(bytes(-length % 4))

    def apply(self, base: Bits, delta: bytes) -> None:
        wire, at, previous = memoryview(delta), 0, -1
        while at < len(wire):
            count, index_bytes, value_bytes = self._HEADER.unpack_from(wire, at)
            at += self._HEADER.size
            index: memoryview | bytes = wire[at : at + index_bytes]
            at += index_bytes + -index_bytes % 4
            value: memoryview | bytes = wire[at : at + value_bytes]
            at += value_bytes + -value_bytes % 4
            if self._zstd:
                index, value = _decompressor.decompress(index), _decompressor.decompress(value)
            positions = self._unpack(index, previous)
            values: npt.NDArray[Any] = np.frombuffer(value, base.dtype, count)
            previous = int(positions[-1])
            if not self._values_are_xor:
                base[positions] = values
                continue
            for start in range(0, count, _SCATTER):
                where = positions[start : start + _SCATTER]
                part = base.take(where)
                part ^= values[start : start + _SCATTER]
                base[where] = part


class _Gap16(_Sparse):
    """Positions as uint16: how many elements were skipped since the last stored one.

    A longer gap is bridged by unchanged elements in between, each after skipping 65,535. They are stored with a zero XOR or with the old
    value, so that the format needs no escape code.
    """

    _zstd = True

    def _pack(self, changed: _Index, previous: int) -> tuple[_Index, npt.NDArray[Any]]:
        gaps = _skipped(changed, previous)
        if int(gaps.max()) <= 0xFFFF:
            return changed, gaps.astype(np.uint16)
        bridges = gaps >> 16
        ends = np.cumsum(bridges + 1)
        stored = np.full(int(ends[-1]), 0xFFFF, np.uint16)
        stored[ends - 1] = gaps & 0xFFFF
        return _positions(stored.astype(np.int64), previous), stored

    def _unpack(self, stored: memoryview | bytes, previous: int) -> _Index:
        return _positions(np.frombuffer(stored, np.uint16).astype(np.int64), previous)


class GapXor(_Gap16):
    """uint16 gaps and the XOR of old and new value, each stream through zstd-1."""

    name = "u16 gap + XOR, zstd-1"
    used_by = "NeMo-DCR"

    _values_are_xor = True


class GapValue(_Gap16):
    """uint16 gaps and the new value, each stream through zstd-1."""

    name = "u16 gap + value, zstd-1"
    used_by = "PULSE"


class Leb128Value(_Sparse):
    """LEB128 gaps and the new value, not compressed further."""

    name = "LEB128 gap + value"
    used_by = "SparrowRL"

    def _pack(self, changed: _Index, previous: int) -> tuple[_Index, npt.NDArray[Any]]:
        return changed, leb128_encode(_skipped(changed, previous))

    def _unpack(self, stored: memoryview | bytes, previous: int) -> _Index:
        return _positions(leb128_decode(np.frombuffer(stored, np.uint8)), previous)


class Int32Value(_Sparse):
    """int32 index and the new value, not compressed. Tensors of at most 2^31 elements."""

    name = "i32 index + value"
    used_by = "TRL"

    def encode(self, base: Bits, new: Bits) -> bytes:
        if base.size > 1 << 31:
            raise ValueError(f"{base.size} elements do not fit an int32 index")
        return super().encode(base, new)

    def _pack(self, changed: _Index, previous: int) -> tuple[_Index, npt.NDArray[Any]]:
        return changed, changed.astype(np.int32)

    def _unpack(self, stored: memoryview | bytes, previous: int) -> _Index:
        return np.frombuffer(stored, np.int32).astype(np.int64)


REIMPLEMENTED = (
    "The peers' methods are re-implemented (benchmarks/peers.py) with our own wire layouts. These are not figures of the peers' own code."
)
"""A note for every table that shows a peer."""

PEERS: tuple[Peer, ...] = (DenseXor(), GapXor(), GapValue(), Leb128Value(), Int32Value())


def leb128_encode(numbers: _Index) -> npt.NDArray[np.uint8]:
    """LEB128 of non-negative numbers, one after the other: 7 bits a byte, low bits first, top bit set on all but the last."""
    width = max(1, -(-int(numbers.max(initial=0)).bit_length() // 7))
    if width == 1:
        return numbers.astype(np.uint8)
    if width > 8:
        raise ValueError("numbers of more than 56 bits")
    # Every number spread over one word that is wide enough for the largest, and a word with a 1 in every byte in use.
    dtype = np.dtype("<u2" if width == 2 else "<u4" if width <= 4 else "<u8")
    rest = numbers.astype(dtype)
    spread, used = np.zeros_like(rest), np.ones_like(rest)
    for column in range(width):
        more = (rest > 0x7F).astype(dtype)
        spread |= ((rest & 0x7F) | (more << 7)) << (8 * column)
        if column + 1 < width:
            used |= more << (8 * column + 8)
            rest >>= 7
    # With most bytes in use flatnonzero is branch-free, and beats indexing by the mask.
    return spread.view(np.uint8).take(np.flatnonzero(used.view(bool)))


def leb128_decode(stream: npt.NDArray[np.uint8]) -> _Index:
    """The numbers of a LEB128 stream that ends with a complete number."""
    last = np.flatnonzero(stream < 0x80)
    first = np.empty_like(last)
    first[:1] = 0
    np.add(last[:-1], 1, out=first[1:])
    low = stream & 0x7F
    numbers = low[first].astype(np.int64)
    longer, shift = np.flatnonzero(last != first), 7
    at = first[longer]
    while longer.size:
        at += 1
        numbers[longer] |= low[at].astype(np.int64) << shift
        still = np.flatnonzero(last[longer] != at)
        longer, at, shift = longer[still], at[still], shift + 7
    return numbers


def _changed(base: Bits, new: Bits) -> Iterator[_Index]:
    """The positions where `base` and `new` differ, ascending, one array per slab that has any."""
    if base.dtype != new.dtype or base.shape != new.shape:
        raise ValueError(f"base is {base.dtype}{base.shape}, new is {new.dtype}{new.shape}")
    slab = _SLAB_BYTES // base.itemsize
    masks = _Masks()
    for start in range(0, base.size, slab):
        old, now = base[start : start + slab], new[start : start + slab]
        whole = old.nbytes // (8 * _GROUP_WORDS) * (8 * _GROUP_WORDS) // old.itemsize
        found = masks.find(old[:whole], now[:whole]) if whole else np.empty(0, np.int64)
        if whole < old.size:
            found = np.concatenate((found, whole + np.flatnonzero(old[whole:] != now[whole:])))
        if found.size:
            found += start
            yield found


class _Masks:
    """Finds the differences of two slabs, coarse to fine.

    np.flatnonzero mispredicts a branch for every hit while hits are rarer than 1 in 10, and is branch-free above that.
    Comparing 64-bit words, and looking at groups of 4 of them first, keeps the masks well filled: a third faster than
    flatnonzero(old != now) where 1% of the elements change, half again as fast at 5%. Above 10% the plain way is the best.
    """

    _PLENTY = 0.1

    def __init__(self) -> None:
        self._word = np.empty(_SLAB_BYTES // 8, bool)
        self._group = np.empty(self._word.size // _GROUP_WORDS, bool)
        self._dense = False  # the next slab is probably like the last one

    def find(self, old: Bits, now: Bits) -> _Index:
        """Positions of the differences. The slabs are a whole number of groups, and no longer than `_SLAB_BYTES`."""
        found = np.flatnonzero(old != now) if self._dense else self._coarse_to_fine(old, now)
        self._dense = found.size > self._PLENTY * old.size
        return found

    def _coarse_to_fine(self, old: Bits, now: Bits) -> _Index:
        old_words, now_words = old.view(np.uint64), now.view(np.uint64)
        word = np.not_equal(old_words, now_words, out=self._word[: old_words.size])
        quads = word.view(np.uint32)
        group = np.not_equal(quads, 0, out=self._group[: quads.size])
        words = _refine(np.flatnonzero(group), quads, np.dtype(bool))
        return _refine_pair(words, old_words, now_words, old.dtype)


def _refine(hits: _Index, coarse: npt.NDArray[Any], fine: np.dtype[Any]) -> _Index:
    """Positions of the nonzero `fine` parts of the elements `hits` of `coarse`."""
    return _parts(hits, np.flatnonzero(coarse.take(hits).view(fine)), coarse.itemsize // fine.itemsize)


def _refine_pair(hits: _Index, old: npt.NDArray[Any], now: npt.NDArray[Any], fine: np.dtype[Any]) -> _Index:
    """Positions of the differing `fine` parts of the elements `hits` of `old` and `now`."""
    return _parts(hits, np.flatnonzero(old.take(hits).view(fine) != now.take(hits).view(fine)), old.itemsize // fine.itemsize)


def _parts(hits: _Index, flat: _Index, ratio: int) -> _Index:
    """Positions of the parts `flat` of the gathered `hits`, `ratio` (a power of two) parts to a hit."""
    shift = ratio.bit_length() - 1
    found = hits.take(flat >> shift)
    found <<= shift
    flat &= ratio - 1
    found |= flat
    return found


def _skipped(positions: _Index, previous: int) -> _Index:
    """The number of elements between each position and the one before it."""
    gaps = np.empty_like(positions)
    gaps[0] = positions[0] - previous
    np.subtract(positions[1:], positions[:-1], out=gaps[1:])
    gaps -= 1
    return gaps


def _positions(gaps: _Index, previous: int) -> _Index:
    """The inverse of `_skipped`, in place."""
    gaps += 1
    gaps[:1] += previous
    return np.cumsum(gaps, out=gaps)


def _join(parts: list[npt.NDArray[Any]]) -> memoryview:
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return whole.data
