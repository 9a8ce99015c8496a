"""§5 What an encoder does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bits import HostBits
from .terms import (
    DIRECT,
    LARGEST_K,
    ONE,
    RUNS,
    SYMBOLS,
    U64,
    UNIT,
    Layout,
    Mask,
    context_count,
    contexts,
    exponents,
    lr_code,
    lr_cost,
    modulo,
    ordered,
)


@dataclass
class BitWriter:
    """A list of bit fields of up to 63 bits, least significant bit first."""

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
    """One way to code the positions or the values of a context: its bits in the header and its bits in the streams."""

    header: BitWriter = field(default_factory=BitWriter)
    stream: BitWriter = field(default_factory=BitWriter)
    mode: int = UNIT

    @property
    def cost(self) -> int:
        return self.header.size + self.stream.size


@dataclass
class ContextCoding:
    n: int
    xors: HostBits
    positions: Coding
    values: Coding


def choose_k(values: U64, largest: int) -> int:
    """Return the parameter k of `LR` for these values (§5.3)."""
    if values.size == 0:
        return 0
    mean = int(np.minimum(values, np.uint64(1 << 47)).sum()) // values.size
    k = min(largest, mean.bit_length())
    while k > 0 and lr_cost(k - 1, values) < lr_cost(k, values):
        k -= 1
    return k


def gaps(marked: Mask) -> U64:
    """Return, for each marked position, the number of unmarked ones between it and the previous marked one, or the start."""
    return (np.diff(np.flatnonzero(marked), prepend=-1) - 1).astype(np.uint64)


def code_positions(changes: Mask) -> Coding:
    """Code which elements of a context's line change (§5.4)."""

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
    return min(plain, coding(True), key=lambda c: c.cost)  # the first one if both cost the same


def code_values(by: HostBits, width: int) -> Coding:
    """Code steps (modulo 2^w) in mode unit, runs or direct (§5.5). The cost leaves out the two bits of the mode."""
    negative = by >> (width - 1)
    magnitude = np.where(negative, np.negative(by), by).astype(np.uint64) & np.uint64(
        (1 << width) - 1
    )  # modulo 2^w, so that 2^(w−1) is its own negative
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
    return min(direct, runs, key=lambda c: c.cost)  # the first one if both cost the same


def code_symbols(xors: HostBits, rank: U64, ks: int, width: int) -> Coding:
    """Code the values of a context in mode symbols. `rank` is the position of each top byte in the table."""
    c = Coding(mode=SYMBOLS)
    codes, lengths = lr_code(ks, rank)
    low = xors.astype(np.uint64) & np.uint64((1 << (width - 8)) - 1)
    c.stream.put_each(np.column_stack([codes, low]), np.column_stack([lengths, np.full_like(low, width - 8)]))
    return c


def switch_to_symbols(parts: list[ContextCoding], width: int) -> BitWriter:
    """Move contexts to mode symbols if that saves bits (§5.6). Return the bit that says whether there is a table, and the table."""
    header = BitWriter()
    considered = [p for p in parts if p.values.cost > p.n * (width - 7)] if width >= 8 else []
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


def encode_coded(base: HostBits, new: HostBits, layout: Layout, top: int) -> bytes:
    """Return the body of a coded chunk (§4), with the choices of §5.3–6."""
    context = contexts(base, layout, top)
    parts = []
    for c in range(context_count(layout)):
        line_base, line_new = base[context == c], new[context == c]
        changes = line_base != line_new
        old, now = line_base[changes], line_new[changes]
        if old.size:
            values = code_values(modulo(ordered(now, layout) - ordered(old, layout), layout), layout.width)
            parts.append(ContextCoding(old.size, old ^ now, code_positions(changes), values))
        else:
            parts.append(ContextCoding(0, old, Coding(), Coding()))

    body = BitWriter()
    body.put(top, 11)
    body.extend(switch_to_symbols(parts, layout.width))
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


def choose_top(base: HostBits, layout: Layout) -> int:
    """Return `top` for the base elements of a block (§5.2)."""
    if not layout.exponent_bits:
        return 0
    sample = np.sort(exponents(base[:: -(-base.size // 1024)], layout))
    return int(sample[sample.size - 1 - sample.size // 64])
