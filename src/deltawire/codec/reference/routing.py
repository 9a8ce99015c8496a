"""Routed experts as docs/format.md §8 defines them, without regard to speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from ...errors import CorruptRollouts
from ..routing import CODE_BITS, GROUP, CodedRows, RoutingRows, join_streams


def encode_rows(rows: RoutingRows, experts: NDArray[np.int16], choose: Callable[[list[int]], list[int]]) -> CodedRows:
    """Return rows as bytes, with codes of the lengths that `choose` returns for the counts of all symbols."""
    symbols: list[list[tuple[int, int]]] = [[] for _ in range(rows.streams)]  # of each stream: table and symbol
    done: dict[tuple[int, int], list[int]] = {}  # the ranks of each row
    rank = np.argsort(rows.order, axis=1)
    for token, layer, reference in _coded(rows):
        row = experts[token, layer]
        if not ((row >= 0) & (row < rows.experts)).all():
            raise CorruptRollouts("routed experts name an expert that is not there.")
        own = set(rank[layer, row].tolist())
        before = done.get((reference, layer))
        kept = [] if before is None else [one for one in before if one in own]
        first = _first_stream(rows, layer)
        if before is not None:
            for mask in range(rows.masks):
                part = before[8 * mask : 8 * mask + 8]
                symbols[first + mask].append((mask, sum(1 << bit for bit, one in enumerate(part) if one in own)))
        new = sorted(own.difference(kept))
        table = rows.masks + (rows.top_k if kept else 0)
        for index, (one, last) in enumerate(zip(new, [-1, *new], strict=False)):
            symbols[first + rows.masks + index].append((table + index, one - last - 1))
        done[token, layer] = kept + new
        _copy(rows, token, layer, done)
    starts = np.cumsum([0, *rows.alphabets])
    counts = np.bincount([starts[table] + symbol for stream in symbols for table, symbol in stream], minlength=starts[-1])
    lengths = choose(counts.tolist())
    codes = [_codes(lengths[start : start + size]) for start, size in zip(starts, rows.alphabets, strict=False)]
    return join_streams(bytes(lengths), [_packed("".join(codes[table][symbol] for table, symbol in stream)) for stream in symbols])


def decode_rows(rows: RoutingRows, coded: CodedRows) -> NDArray[np.int16]:
    """Return the experts by token, layer and position, ascending; −1 where nothing is recorded. Raises `CorruptRollouts`."""
    starts, ends = np.cumsum([0, *rows.alphabets]), coded.ends.tolist()
    if len(ends) != rows.streams or [0, *ends] != sorted([0, *ends]) or ends[-1] != len(coded.data) or len(coded.lengths) != starts[-1]:
        raise CorruptRollouts("the streams of routed experts are not where they should be.")
    tables = [
        {code: symbol for symbol, code in enumerate(_codes(coded.lengths[start : start + size].tolist())) if code}
        for start, size in zip(starts, rows.alphabets, strict=False)
    ]
    streams = [_Stream(coded.data[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    out = np.full((*rows.recorded.shape, rows.top_k), -1, np.int16)
    done: dict[tuple[int, int], list[int]] = {}
    for token, layer, reference in _coded(rows):
        before, first, kept = done.get((reference, layer)), _first_stream(rows, layer), []
        if before is not None:
            for mask in range(rows.masks):
                symbol = streams[first + mask].take(tables[mask])
                kept += [one for bit, one in enumerate(before[8 * mask : 8 * mask + 8]) if symbol >> bit & 1]
        table = rows.masks + (rows.top_k if kept else 0)
        new: list[int] = []
        for index in range(rows.top_k - len(kept)):
            new.append((new[-1] if new else -1) + 1 + streams[first + rows.masks + index].take(tables[table + index]))
        if new and new[-1] >= rows.experts:
            raise CorruptRollouts("routed experts name an expert that is not there.")
        if len({*kept, *new}) != rows.top_k:
            raise CorruptRollouts("routed experts name an expert twice in a row.")
        done[token, layer] = kept + new
        out[token, layer] = np.sort(rows.order[layer, kept + new])
        _copy(rows, token, layer, done)
    for stream in streams:
        stream.check_end()
    for copy in np.flatnonzero(rows.copied >= 0):
        out[copy] = out[rows.copied[copy]]
    return out


def _coded(rows: RoutingRows) -> Iterator[tuple[int, int, int]]:
    """Yield token, layer and reference of each row that is in a stream, in order."""
    for token in range(len(rows.recorded)):
        if rows.copied[token] < 0:
            for layer in np.flatnonzero(rows.recorded[token]):
                yield token, int(layer), int(rows.reference[token])


def _copy(rows: RoutingRows, token: int, layer: int, done: dict[tuple[int, int], list[int]]) -> None:
    """Give a row to the tokens that are copies of its token, and to their copies."""
    waiting = [token]
    while waiting:
        copies = np.flatnonzero(rows.copied == waiting.pop()).tolist()
        done.update({(copy, layer): done[token, layer] for copy in copies})
        waiting += copies


def _first_stream(rows: RoutingRows, layer: int) -> int:
    return layer // GROUP * (rows.masks + rows.top_k)


def _codes(lengths: list[int]) -> list[str]:
    """Return the canonical code of each symbol as bits in the order in which they are written; "" for a symbol without one."""
    used = [length for length in lengths if length]
    if any(length > CODE_BITS for length in used):
        raise CorruptRollouts("a code of routed experts is too long.")
    if used and used != [1] and sum(1 << (CODE_BITS - length) for length in used) != 1 << CODE_BITS:
        raise CorruptRollouts("the codes of routed experts are not complete.")
    codes, code, last = [""] * len(lengths), 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths) if length):
        code <<= length - last
        codes[symbol], last = f"{code:0{length}b}", length
        code += 1
    return codes


def _packed(bits: str) -> bytes:
    return np.packbits(np.frombuffer(bits.encode(), np.uint8) - ord("0"), bitorder="little").tobytes()


class _Stream:
    """Takes codes from a stream, bit by bit."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._bits = "".join(map(str, np.unpackbits(data, bitorder="little").tolist()))
        self._at = 0

    def take(self, table: dict[str, int]) -> int:
        for length in range(1, CODE_BITS + 1):
            found = table.get(self._bits[self._at : self._at + length])
            if found is not None and self._at + length <= len(self._bits):
                self._at += length
                return found
        raise CorruptRollouts("routed experts hold bits that are no code, or are cut short.")

    def check_end(self) -> None:
        if len(self._bits) - self._at > 7 or "1" in self._bits[self._at :]:
            raise CorruptRollouts("a stream of routed experts has more bits than its rows.")
