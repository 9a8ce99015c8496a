"""§4 A coded chunk: reading it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...errors import CorruptDelta
from ..bits import HostBits
from .terms import DIRECT, LARGEST_K, MOST_CHANGES, RUNS, SYMBOLS, UNIT, Layout, Mask, context_count, contexts, modulo, ordered, unordered


class BitReader:
    """Reads the bits of a coded chunk's body."""

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
        """Read `marked` codes as positions on a line of `size`: the inverse of `gaps`."""
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
    """The header of one context of a coded chunk. `u` is None if the context is not inverted."""

    n: int
    u: int | None = None
    k: int = 0
    mode: int = UNIT
    x: int = 0
    kr: int = 0
    kv: int = 0


def read_table(reader: BitReader, width: int) -> tuple[list[int], int]:
    """Read the symbol table and ks. The table is empty if the chunk has none."""
    if not reader.take(1):
        return [], 0
    if width < 8:
        raise CorruptDelta("a coded chunk of 4-bit elements has a symbol table.")
    size = reader.take(8) + 1
    ks = reader.take(3)
    table = [reader.take(8) for _ in range(size)]
    if len(set(table)) != size:
        raise CorruptDelta("a symbol occurs twice in the table of a coded chunk.")
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
    """Read stream 1 of a context with `size` elements: which of them change."""
    if h.u is None:
        return reader.marks(h.k, h.n, size, "a position")
    if h.n + h.u != size:
        raise CorruptDelta(f"an inverted context counts {h.n} + {h.u} elements, but has {size}.")
    return ~reader.marks(h.k, h.u, size, "a position")


def read_steps(reader: BitReader, h: ContextHeader, width: int) -> list[int]:
    """Read stream 2 of a context in mode unit, runs or direct: its steps modulo 2^w."""
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
    """Read stream 2 of a context in mode symbols: new XOR base of its changing elements."""
    xors = []
    for _ in range(n):
        r = reader.lr(ks)
        if r >= len(table):
            raise CorruptDelta(f"a code refers to symbol {r}, but the table has {len(table)}.")
        y = table[r] << (width - 8) | reader.take(width - 8)
        if y == 0:
            raise CorruptDelta("an element is listed as changing, but does not change.")
        xors.append(y)
    return xors


def decode_coded(body: bytes, base: HostBits, layout: Layout) -> HostBits:
    """Return the new elements of a coded chunk."""
    reader = BitReader(body)
    top = reader.at_most((1 << layout.exponent_bits) - 1, 11, "top")
    table, ks = read_table(reader, layout.width)
    headers: list[ContextHeader] = []
    for _ in range(context_count(layout)):
        left = MOST_CHANGES - sum(h.n for h in headers)
        headers.append(read_context_header(reader, layout.width, bool(table), left))
    if not any(h.n for h in headers):
        raise CorruptDelta("a coded chunk changes nothing.")

    new = base.copy()
    context = contexts(base, layout, top)
    for c, h in enumerate(headers):
        if not h.n:
            continue
        line = np.flatnonzero(context == c)
        positions = line[read_positions(reader, h, line.size)]
        if h.mode == SYMBOLS:
            new[positions] ^= np.array(read_xors(reader, h.n, table, ks, layout.width), base.dtype)
        else:
            by = np.array(read_steps(reader, h, layout.width), base.dtype)
            new[positions] = unordered(modulo(ordered(base[positions], layout) + by, layout), layout)
    reader.finish()
    return new
