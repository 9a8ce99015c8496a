"""docs/format.md §2–5 in NumPy: slow, obvious, and what every other codec is tested against.

What a choice of the encoder costs is found by making the bits and counting them; the decoder reads one code at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..dtypes import DType
from ..errors import CorruptDelta, DtypeMismatch, ShapeMismatch
from .base import Bits, Buffer, Encoded, EncodeJob, Encodings, Lanes, Outcomes, ResolveJob, Sums, sums

U64: TypeAlias = NDArray[np.uint64]
Mask: TypeAlias = NDArray[np.bool_]

BLOCK = 1 << 24
TILE = 1 << 14
MOST_CHANGES = 1 << 15
SAME, CODED, RAW = range(3)
UNIT, RUNS, DIRECT, SYMBOLS = range(4)
LARGEST_K = 24
ONE = np.uint64(1)


# §2 The digest

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LOW32 = np.uint64(0xFFFFFFFF)
DIGEST_PIECE = 1 << 21  # bytes at a time, so that the widened words of a large tensor need little memory


def mix(x: U64) -> U64:
    """The finaliser of SplitMix64 (§2)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def word_factors(lane: int) -> NDArray[np.int64]:
    """T(i, lane) for i = 0 … 255 (§2)."""
    top = mix(GOLDEN * np.arange(256 * lane + 1, 256 * lane + 257, dtype=np.uint64)) >> np.uint64(48)
    return (top | ONE).astype(np.uint16).view(np.int16).astype(np.int64)


def block_factors(first: int, count: int, lane: int, seed: int) -> U64:
    """M(b, lane) for b = first … first + count − 1 (§2)."""
    b = np.arange(first, first + count, dtype=np.uint64)
    z = mix(np.uint64(seed) + GOLDEN * (b + b + np.uint64(1 + lane // 2)))
    return (z & LOW32 if lane % 2 == 0 else z >> np.uint64(32)) | ONE


def word_sums(bits: Bits, seed: int) -> Lanes:
    """The digest of a tensor less its tag (§2)."""
    flat = np.ascontiguousarray(bits).reshape(-1)
    data = flat.astype(flat.dtype.newbyteorder("<"), copy=False).view(np.uint8)
    lanes = [0, 0, 0, 0]
    for start in range(0, data.size, DIGEST_PIECE):
        piece = data[start : start + DIGEST_PIECE]
        padded = np.pad(piece, (0, -piece.size % 512))  # zero words add nothing
        words = padded.view("<i2").astype(np.int64).reshape(-1, 256)
        for j in range(4):
            inner = (words @ word_factors(j)).astype(np.uint64) & LOW32
            lanes[j] += int((inner * block_factors(start // 512, len(words), j, seed)).sum())
    return (lanes[0] % 2**32, lanes[1] % 2**32, lanes[2] % 2**32, lanes[3] % 2**32)


# §4 Terms


def ordered(x: Bits, dtype: DType) -> Bits:
    top = x.dtype.type(1 << (dtype.width - 1))
    return np.where(x & top, ~x, x ^ top) if dtype.exponent_bits else x


def unordered(x: Bits, dtype: DType) -> Bits:
    """The inverse of `ordered`."""
    top = x.dtype.type(1 << (dtype.width - 1))
    return np.where(x & top, x ^ top, ~x) if dtype.exponent_bits else x


def exponents(x: Bits, dtype: DType) -> NDArray[np.int64]:
    return ((x >> dtype.exponent_shift) & ((1 << dtype.exponent_bits) - 1)).astype(np.int64)


def context_count(dtype: DType) -> int:
    return 16 if dtype.exponent_bits else 1


def contexts(base: Bits, dtype: DType, top: int) -> NDArray[np.int64]:
    return np.clip(top - exponents(base, dtype), 0, context_count(dtype) - 1)


def floor_log2(x: U64) -> U64:
    """⌊log₂ x⌋ of positive integers, exact where a float would round up to the next power of two."""
    result = np.zeros_like(x)
    for shift in (32, 16, 8, 4, 2, 1):
        reaches = (x >> np.uint64(shift)) > 0
        x = np.where(reaches, x >> np.uint64(shift), x)
        result += np.where(reaches, np.uint64(shift), np.uint64(0))
    return result


def lr_code(k: int, v: U64) -> tuple[U64, U64]:
    """LR(k, v) of each v as three bit fields: prefix, low bits of x, low bits of v. Two arrays: the fields and their lengths."""
    q = v >> np.uint64(k)
    escaped = q >= 16
    x = np.where(escaped, q - np.uint64(15), ONE)
    b = floor_log2(x)
    prefix = np.where(escaped, b << np.uint64(16), ONE << np.minimum(q, np.uint64(15)))
    prefix_length = np.where(escaped, np.uint64(16 + 6), q + ONE)
    low = v & np.uint64((1 << k) - 1)
    return np.stack([prefix, x ^ (ONE << b), low], axis=1), np.stack([prefix_length, b, np.full_like(v, k)], axis=1)


def lr_cost(k: int, v: U64) -> int:
    return int(lr_code(k, v)[1].sum())


# §5 Encoding


@dataclass
class BitWriter:
    """Bit fields of up to 63 bits, least significant bit first."""

    values: list[U64] = field(default_factory=list)
    lengths: list[U64] = field(default_factory=list)
    size: int = 0

    def put_each(self, values: NDArray[Any], lengths: U64) -> None:
        self.values.append(values.astype(np.uint64).reshape(-1))
        self.lengths.append(lengths.reshape(-1))
        self.size += int(lengths.sum())

    def put(self, value: int, length: int) -> None:
        self.put_each(np.array([value]), np.array([length], np.uint64))

    def put_count(self, n: int) -> None:
        length = n.bit_length()
        self.put(length, 5)
        if n:
            self.put(n - (1 << (length - 1)), length - 1)

    def put_lr(self, k: int, values: U64) -> None:
        self.put_each(*lr_code(k, values))

    def extend(self, other: BitWriter) -> None:
        self.values += other.values
        self.lengths += other.lengths
        self.size += other.size

    def to_bytes(self) -> bytes:
        lengths = np.concatenate(self.lengths).astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        shifts = np.arange(self.size) - np.repeat(starts, lengths)
        bits = (np.repeat(np.concatenate(self.values), lengths) >> shifts.astype(np.uint64)) & ONE
        return np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()


@dataclass
class Coding:
    """One way to code something of a context: what goes to the header and what to the streams."""

    header: BitWriter = field(default_factory=BitWriter)
    stream: BitWriter = field(default_factory=BitWriter)
    mode: int = UNIT

    @property
    def cost(self) -> int:
        return self.header.size + self.stream.size


@dataclass
class ContextCoding:
    n: int
    xors: Bits
    positions: Coding
    values: Coding


def choose_k(values: U64, largest: int) -> int:
    """§5.3"""
    if values.size == 0:
        return 0
    mean = int(np.minimum(values, np.uint64(1 << 47)).sum()) // values.size
    k = min(largest, mean.bit_length())
    while k > 0 and lr_cost(k - 1, values) < lr_cost(k, values):
        k -= 1
    return k


def gaps(marked: Mask) -> U64:
    """For each marked place, the number of unmarked ones between it and the last marked one, or the start."""
    return (np.diff(np.flatnonzero(marked), prepend=-1) - 1).astype(np.uint64)


def code_positions(changes: Mask) -> Coding:
    """§5.4: which elements of a context's line change."""

    def coding(inverted: bool) -> Coding:
        c = Coding()
        c.header.put(inverted, 1)
        if inverted:
            c.header.put_count(int(np.count_nonzero(~changes)))
        values = gaps(~changes if inverted else changes)
        k = choose_k(values, LARGEST_K)
        c.header.put(k, 5)
        c.stream.put_lr(k, values)
        return c

    plain = coding(False)
    if 2 * np.count_nonzero(changes) <= changes.size:
        return plain
    return min(plain, coding(True), key=lambda c: c.cost)  # the first among equals


def code_values(by: Bits, width: int) -> Coding:
    """§5.5: steps (modulo 2^w) in mode unit, runs or direct. The mode's own two bits, the same for all, are not in the cost."""
    negative = by >> (width - 1)
    magnitude = np.where(negative, np.negative(by), by).astype(np.uint64)  # modulo 2^w, so that 2^(w−1) is its own negative
    unit, runs, direct = Coding(mode=UNIT), Coding(mode=RUNS), Coding(mode=DIRECT)
    for c in (unit, runs, direct):
        c.stream.put_each(negative, np.ones(by.size, np.uint64))
    larger = magnitude > 1
    if not larger.any():
        return unit

    kv = choose_k(magnitude - ONE, width - 1)
    direct.header.put(kv, 6)
    direct.stream.put_lr(kv, magnitude - ONE)

    between, above = gaps(larger), magnitude[larger] - np.uint64(2)
    kr, kv = choose_k(between, LARGEST_K), choose_k(above, width - 1)
    runs.header.put_count(above.size)
    runs.header.put(kr, 5)
    runs.header.put(kv, 6)
    runs.stream.put_lr(kr, between)
    runs.stream.put_lr(kv, above)
    return min(direct, runs, key=lambda c: c.cost)  # the first among equals


def code_symbols(xors: Bits, rank: U64, ks: int, width: int) -> Coding:
    """A context's values in mode symbols; `rank` is the place of each top byte in the table."""
    c = Coding(mode=SYMBOLS)
    codes, lengths = lr_code(ks, rank)
    low = xors.astype(np.uint64) & np.uint64((1 << (width - 8)) - 1)
    c.stream.put_each(np.column_stack([codes, low]), np.column_stack([lengths, np.full_like(low, width - 8)]))
    return c


def switch_to_symbols(parts: list[ContextCoding], width: int) -> BitWriter:
    """§5.6: move contexts to mode symbols where that pays. Returns the bits that say whether there is a table, and the table."""
    header = BitWriter()
    considered = [p for p in parts if p.values.cost > p.n * (width - 7)]
    if considered:
        tops = [(p.xors >> (width - 8)).astype(np.int64) for p in considered]
        frequency = np.bincount(np.concatenate(tops), minlength=256)
        table = [s for s in sorted(range(256), key=lambda s: (-frequency[s], s)) if frequency[s]]
        rank = np.zeros(256, np.uint64)
        rank[table] = np.arange(len(table))
        ks = choose_k(rank[np.concatenate(tops)], 7)
        codings = [code_symbols(p.xors, rank[t], ks, width) for p, t in zip(considered, tops, strict=True)]
        switching = [(p, c) for p, c in zip(considered, codings, strict=True) if c.cost < p.values.cost]
        if sum(p.values.cost - c.cost for p, c in switching) > 11 + 8 * len(table):
            for part, symbols in switching:
                part.values = symbols
            for value, length in [(1, 1), (len(table) - 1, 8), (ks, 3), *((s, 8) for s in table)]:
                header.put(value, length)
            return header
    header.put(0, 1)
    return header


def encode_coded(base: Bits, new: Bits, dtype: DType, top: int) -> bytes:
    """The body of a coded chunk (§4), by the choices of §5.3–6."""
    context = contexts(base, dtype, top)
    parts = []
    for c in range(context_count(dtype)):
        line_base, line_new = base[context == c], new[context == c]
        changes = line_base != line_new
        old, now = line_base[changes], line_new[changes]
        if old.size:
            values = code_values(ordered(now, dtype) - ordered(old, dtype), dtype.width)
            parts.append(ContextCoding(old.size, old ^ now, code_positions(changes), values))
        else:
            parts.append(ContextCoding(0, old, Coding(), Coding()))

    body = BitWriter()
    body.put(top, 11)
    body.extend(switch_to_symbols(parts, dtype.width))
    for part in parts:
        body.put_count(part.n)
        if part.n:
            body.extend(part.positions.header)
            body.put(part.values.mode, 2)
            body.extend(part.values.header)
    for part in parts:
        body.extend(part.positions.stream)
        body.extend(part.values.stream)
    return body.to_bytes()


def choose_top(base: Bits, dtype: DType) -> int:
    """§5.2, of the base elements of a block."""
    if not dtype.exponent_bits:
        return 0
    sample = np.sort(exponents(base[:: -(-base.size // 1024)], dtype))
    return int(sample[sample.size - 1 - sample.size // 64])


def cut(changes: Mask) -> Iterator[slice]:
    """§5.1: the chunks of a block."""
    start = pending = 0
    for tile in range(0, changes.size, TILE):
        end = min(tile + TILE, changes.size)
        pending += int(np.count_nonzero(changes[tile:end]))
        if pending >= TILE or end == changes.size:
            yield slice(start, end)
            start, pending = end, 0


def encode_chunk(base: Bits, new: Bits, dtype: DType, top: int) -> bytes:
    """§5.7: header and body of one chunk."""
    if np.array_equal(base, new):
        mode, body = SAME, b""
    else:
        mode, body = CODED, encode_coded(base, new, dtype, top)
        if len(body) >= new.nbytes:
            mode, body = RAW, new.astype(new.dtype.newbyteorder("<")).tobytes()
    return struct.pack("<II", new.size | mode << 30, len(body)) + body


def encode_tensor(base: Bits, new: Bits, dtype: DType) -> list[bytes]:
    """The pieces of a payload (§3): the element type, then the chunks."""
    pieces = [bytes([dtype.code])]
    for start in range(0, new.size, BLOCK):
        b, n = base[start : start + BLOCK], new[start : start + BLOCK]
        top = choose_top(b, dtype)
        pieces += [encode_chunk(b[chunk], n[chunk], dtype, top) for chunk in cut(b != n)]
    return pieces


# §3–4 Decoding


class BitReader:
    """Reads the body of a coded chunk."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.at = 0

    def take(self, length: int) -> int:
        if self.at + length > 8 * len(self.body):
            raise CorruptDelta("a coded chunk ends too early.")
        start, self.at = self.at, self.at + length
        covering = int.from_bytes(self.body[start >> 3 : (self.at + 7) >> 3], "little")
        return (covering >> (start & 7)) & ((1 << length) - 1)

    def at_most(self, limit: int, length: int, what: str) -> int:
        value = self.take(length)
        if value > limit:
            raise CorruptDelta(f"{what} is {value}, more than {limit}.")
        return value

    def count(self, least: int, most: int, what: str) -> int:
        length = self.at_most(MOST_CHANGES.bit_length(), 5, f"the bit length of {what}")
        value = (1 << (length - 1)) + self.take(length - 1) if length else 0
        if not least <= value <= most:
            raise CorruptDelta(f"{what} is {value}, not in {least} … {most}.")
        return value

    def lr(self, k: int) -> int:
        q = 0
        while q < 16 and not self.take(1):
            q += 1
        if q == 16:
            b = self.take(6)
            q = 15 + ((1 << b) + self.take(b))
        return (q << k) + self.take(k)

    def marks(self, k: int, marked: int, size: int, what: str) -> Mask:
        """The inverse of `gaps`: `marked` codes, on a line of `size`."""
        result = np.zeros(size, np.bool_)
        at = -1
        for _ in range(marked):
            at += 1 + self.lr(k)
            if at >= size:
                raise CorruptDelta(f"{what} falls outside the chunk.")
            result[at] = True
        return result

    def finish(self) -> None:
        left = 8 * len(self.body) - self.at
        if left > 7 or self.take(left):
            raise CorruptDelta("a coded chunk has bits left over.")


@dataclass
class ContextHeader:
    """What a coded chunk's header says of one context; `u` is None where it is not inverted."""

    n: int
    u: int | None = None
    k: int = 0
    mode: int = UNIT
    x: int = 0
    kr: int = 0
    kv: int = 0


def read_table(reader: BitReader) -> tuple[list[int], int]:
    """The symbol table and ks; no symbols where there is no table."""
    if not reader.take(1):
        return [], 0
    size = reader.take(8) + 1
    ks = reader.take(3)
    table = [reader.take(8) for _ in range(size)]
    if len(set(table)) != size:
        raise CorruptDelta("a symbol stands twice in the table of a coded chunk.")
    return table, ks


def read_context_header(reader: BitReader, width: int, has_table: bool, most: int) -> ContextHeader:
    h = ContextHeader(reader.count(0, most, "the number of changing elements"))
    if h.n:
        if reader.take(1):
            h.u = reader.count(0, h.n, "the number of unchanged elements")
        h.k = reader.at_most(LARGEST_K, 5, "k")
        h.mode = reader.take(2)
        if h.mode == RUNS:
            h.x = reader.count(1, h.n, "the number of runs")
            h.kr = reader.at_most(LARGEST_K, 5, "kr")
        if h.mode in (RUNS, DIRECT):
            h.kv = reader.at_most(width - 1, 6, "kv")
        if h.mode == SYMBOLS and not has_table:
            raise CorruptDelta("a context uses symbols, but its chunk has no table.")
    return h


def read_positions(reader: BitReader, h: ContextHeader, size: int) -> Mask:
    """Stream 1 of a context with `size` elements: which of them change."""
    if h.u is None:
        return reader.marks(h.k, h.n, size, "a position")
    if h.n + h.u != size:
        raise CorruptDelta(f"an inverted context counts {h.n} + {h.u} elements, but has {size}.")
    return ~reader.marks(h.k, h.u, size, "a position")


def read_steps(reader: BitReader, h: ContextHeader, width: int) -> list[int]:
    """Stream 2 of a context in mode unit, runs or direct: its steps modulo 2^w."""
    negative = [reader.take(1) for _ in range(h.n)]
    magnitude = [1] * h.n
    if h.mode == RUNS:
        for i in np.flatnonzero(reader.marks(h.kr, h.x, h.n, "a run of values")):
            magnitude[i] = reader.lr(h.kv) + 2
    elif h.mode == DIRECT:
        magnitude = [reader.lr(h.kv) + 1 for _ in range(h.n)]
    if max(magnitude) > 1 << (width - 1):
        raise CorruptDelta(f"the magnitude of a step exceeds 2^{width - 1}.")
    return [(-m if s else m) % (1 << width) for s, m in zip(negative, magnitude, strict=True)]


def read_xors(reader: BitReader, n: int, table: list[int], ks: int, width: int) -> list[int]:
    """Stream 2 of a context in mode symbols: new XOR base of its changing elements."""
    xors = []
    for _ in range(n):
        r = reader.lr(ks)
        if r >= len(table):
            raise CorruptDelta(f"symbol {r} is asked for, of a table of {len(table)}.")
        y = table[r] << (width - 8) | reader.take(width - 8)
        if y == 0:
            raise CorruptDelta("an element is listed as changing, but does not change.")
        xors.append(y)
    return xors


def decode_coded(body: bytes, base: Bits, dtype: DType) -> Bits:
    """The new elements of a coded chunk (§4)."""
    reader = BitReader(body)
    top = reader.at_most((1 << dtype.exponent_bits) - 1, 11, "top")
    table, ks = read_table(reader)
    headers: list[ContextHeader] = []
    for _ in range(context_count(dtype)):
        left = MOST_CHANGES - sum(h.n for h in headers)
        headers.append(read_context_header(reader, dtype.width, bool(table), left))
    if not any(h.n for h in headers):
        raise CorruptDelta("a coded chunk changes nothing.")

    new = base.copy()
    context = contexts(base, dtype, top)
    for c, h in enumerate(headers):
        if not h.n:
            continue
        line = np.flatnonzero(context == c)
        places = line[read_positions(reader, h, line.size)]
        if h.mode == SYMBOLS:
            new[places] ^= np.array(read_xors(reader, h.n, table, ks, dtype.width), base.dtype)
        else:
            by = np.array(read_steps(reader, h, dtype.width), base.dtype)
            new[places] = unordered(ordered(base[places], dtype) + by, dtype)
    reader.finish()
    return new


def read_chunks(payload: bytes, dtype: DType) -> list[tuple[int, int, bytes]]:
    """The elements, mode and unread body of each chunk of a payload (§3)."""
    if not payload:
        raise CorruptDelta("a payload is empty.")
    if payload[0] != dtype.code:
        raise DtypeMismatch(f"the payload has element type {payload[0]}, the tensor {dtype.code} ({dtype.name}).")
    chunks = []
    at = 1
    while at < len(payload):
        if len(payload) - at < 8:
            raise CorruptDelta("the header of a chunk is cut off.")
        word, length = struct.unpack_from("<II", payload, at)
        elements, mode, body = word % (1 << 30), word >> 30, payload[at + 8 : at + 8 + length]
        at += 8 + length
        if mode > RAW:
            raise CorruptDelta(f"a chunk has the unknown mode {mode}.")
        if not 1 <= elements <= BLOCK:
            raise CorruptDelta(f"a chunk has {elements} elements, not 1 … 2^24.")
        if len(body) != length:
            raise CorruptDelta("the body of a chunk is cut off.")
        if mode == SAME and length:
            raise CorruptDelta("a chunk that changes nothing has a body.")
        if mode == RAW and length != elements * dtype.itemsize:
            raise CorruptDelta(f"a raw chunk of {elements} elements has {length} bytes.")
        if at < len(payload) and elements % TILE:
            raise CorruptDelta(f"a chunk before the last has {elements} elements, not a multiple of 2^14.")
        chunks.append((elements, mode, body))
    return chunks


class ReferenceCodec:
    """The codec that defines the format. Needs memory of the order of the tensors, and one thread."""

    name = "reference"
    takes_all = False

    def encode(self, jobs: Sequence[EncodeJob], threads: int) -> Encodings:
        return Encodings.of([encode_job(job) for job in jobs])

    def resolution(self, threads: int, budget: int) -> ReferenceResolution:
        return ReferenceResolution()

    def deferred_resolution(self, threads: int) -> ReferenceResolution:
        return ReferenceResolution()

    def digest(self, arrays: Sequence[tuple[Bits, int]], threads: int) -> Sums:
        return sums([word_sums(bits, seed) for bits, seed in arrays])

    def write_elements(self, bits: Bits, indices: NDArray[np.int64], values: Bits) -> None:
        if indices.size and not 0 <= indices.min() <= indices.max() < bits.size:
            raise IndexError("index")
        bits.flat[indices] = values


class ReferenceResolution:
    """Keeps every tensor's old and new elements whole, and writes at the end."""

    def __init__(self) -> None:
        self.tensors: list[tuple[Bits | None, Bits, Bits]] = []  # where to write, old and new elements, flat

    def add(self, jobs: Sequence[ResolveJob], data: Buffer) -> Outcomes:
        resolved = [resolve_job(job, data) for job in jobs]
        self.tensors += [(job.base if job.write else None, base, new) for job, (base, new) in zip(jobs, resolved, strict=True)]
        before = sums([word_sums(base, job.seed) for job, (base, _) in zip(jobs, resolved, strict=True)])
        after = sums([word_sums(new, job.seed) for job, (_, new) in zip(jobs, resolved, strict=True)])
        return Outcomes(np.array([np.count_nonzero(new != base) for base, new in resolved], np.int64), before, after)

    def changes(self, tensors: Sequence[int]) -> Sequence[tuple[NDArray[np.int64], Bits]]:
        return [self._changes(*self.tensors[tensor][1:]) for tensor in tensors]

    def _changes(self, base: Bits, new: Bits) -> tuple[NDArray[np.int64], Bits]:
        indices = np.flatnonzero(new != base).astype(np.int64)
        return indices, new[indices]

    def dense(self, tensors: Sequence[int]) -> Sequence[Bits]:
        return [self.tensors[tensor][2] for tensor in tensors]

    def settle(self) -> None:
        for target, _, new in self.tensors:
            if target is not None:
                target[...] = new.reshape(target.shape)

    def revert(self) -> None:
        """Nothing has been written yet."""

    def exchange(self) -> None:
        for index, (target, _, new) in enumerate(self.tensors):
            if target is not None:
                old = target.flatten()  # a copy, unlike the base, which may be the target itself
                target[...] = new.reshape(target.shape)
                self.tensors[index] = target, new, old

    def compact(self) -> None:
        """What it keeps is what it needs."""


def encode_job(job: EncodeJob) -> Encoded:
    new = np.ascontiguousarray(job.new).reshape(-1)
    base = np.zeros_like(new) if job.base is None else np.ascontiguousarray(job.base).reshape(-1)
    changed = int(np.count_nonzero(base != new))
    payload = encode_tensor(base, new, job.dtype) if changed or job.base is None else []
    return Encoded(payload, changed, word_sums(base, job.seed), word_sums(new, job.seed))


def resolve_job(job: ResolveJob, data: Buffer) -> tuple[Bits, Bits]:
    """The old and the new elements of a tensor, flat."""
    chunks = []
    if job.payload is not None:
        payload = bytes(data[slice(*job.payload)])
        chunks = read_chunks(payload, job.dtype)
        covered = sum(elements for elements, _, _ in chunks)
        if covered != job.count:  # before anything of that size is made
            raise ShapeMismatch(f"the delta is for {covered} elements, the tensor has {job.count}.")
    base = np.zeros(job.count, job.dtype.bits) if job.base is None else np.ascontiguousarray(job.base).reshape(-1)
    new = base.copy()
    at = 0
    for elements, mode, body in chunks:
        part = slice(at, at + elements)
        at += elements
        if mode == CODED:
            new[part] = decode_coded(body, base[part], job.dtype)
        elif mode == RAW:
            new[part] = np.frombuffer(body, job.dtype.bits.newbyteorder("<"))
    return base, new
