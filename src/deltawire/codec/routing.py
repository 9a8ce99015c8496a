"""Routed experts as bytes: which experts processed which token in which layer (docs/format.md §8).

A row is what one token does in one layer: `top_k` different experts, in no order. The rows of a file are coded token by token. Two facts
make them small. A token mostly goes to the experts to which the last earlier token with the same id went, so a row says which of those it
keeps. And some experts of a layer are used more than others, so experts are counted in the order of their use.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CorruptRollouts
from . import default_codec

MOST_EXPERTS = 1024
MOST_TOP_K = 32
MOST_LAYERS = 1024
CODE_BITS = 11
"""The longest code."""
GROUP = 32
"""This many layers share their streams."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutingRows:
    """The facts about the rows of a file that are not in its streams.

    Parameters
    ----------
    experts
        The number of experts in a layer.
    top_k
        The number of experts that a token goes to.
    copied
        For each token, an earlier token that has the same rows, or −1.
    reference
        For each token, the last earlier token with the same id, or −1.
    recorded
        1 for each token and layer with a row. A token that is copied has the values of the earlier one.
    order
        For each layer, its experts by rank.
    """

    experts: int
    top_k: int
    copied: NDArray[np.int64]
    reference: NDArray[np.int64]
    recorded: NDArray[np.uint8]
    order: NDArray[np.uint16]

    @property
    def layers(self) -> int:
        """The number of layers with experts."""
        return int(self.recorded.shape[1])

    @property
    def masks(self) -> int:
        """The number of symbols that say what a row keeps of its reference."""
        return (self.top_k + 7) // 8

    @property
    def streams(self) -> int:
        """The number of streams."""
        return -(-self.layers // GROUP) * (self.masks + self.top_k)

    @property
    def alphabets(self) -> list[int]:
        """The number of symbols of each table: of masks, of gaps in rows that keep nothing, and of gaps in other rows."""
        return [1 << min(8, self.top_k - 8 * mask) for mask in range(self.masks)] + 2 * self.top_k * [self.experts]


@dataclass(frozen=True, slots=True, eq=False)
class CodedRows:
    """Rows as bytes.

    Parameters
    ----------
    lengths
        The length of the code of each symbol, table by table. 0 for a symbol that does not occur.
    ends
        Where each stream ends in `data`, group by group.
    data
        The streams.
    """

    lengths: NDArray[np.uint8]
    ends: NDArray[np.uint64]
    data: NDArray[np.uint8]


def encode_rows(rows: RoutingRows, experts: NDArray[np.int16]) -> CodedRows:
    """Return rows as bytes. Rows that are recorded hold different experts, in any order.

    Parameters
    ----------
    rows
        The facts about the rows.
    experts
        The experts by token, layer and position. Values where nothing is recorded are not read.
    """
    alphabets = rows.alphabets
    native = _native_codec()
    if native is None:
        from .reference import routing

        return routing.encode_rows(rows, experts, lambda counts: choose_lengths(counts, alphabets))
    ids = np.ascontiguousarray(experts, np.int16).ravel()
    try:
        lengths, streams = native.encode_routing(*_shape(rows), ids, lambda counts: choose_lengths(counts, alphabets))
    except native.Corrupt as error:
        raise CorruptRollouts(str(error)) from None
    return join_streams(lengths, streams)


def decode_rows(rows: RoutingRows, coded: CodedRows, *, threads: int = 1) -> NDArray[np.int16]:
    """Return the experts by token, layer and position, ascending; −1 where nothing is recorded. Raises `CorruptRollouts`.

    Parameters
    ----------
    rows
        The facts about the rows.
    coded
        The rows as bytes. They may say anything.
    threads
        The number of threads. Each decodes some layers.
    """
    native = _native_codec()
    if native is None:
        from .reference import routing

        return routing.decode_rows(rows, coded)
    out = np.empty((*rows.recorded.shape, rows.top_k), np.int16)
    columns = [np.ascontiguousarray(each) for each in (coded.lengths, coded.ends.astype(np.uint64), coded.data)]
    try:
        native.decode_routing(*_shape(rows), *columns, out.reshape(-1), threads, default_codec().name)
    except native.Corrupt as error:
        raise CorruptRollouts(str(error)) from None
    return out


def join_streams(lengths: bytes, streams: list[bytes]) -> CodedRows:
    """Return streams one after the other."""
    ends = np.cumsum([len(stream) for stream in streams], dtype=np.uint64)
    return CodedRows(np.frombuffer(lengths, np.uint8), ends, np.frombuffer(b"".join(streams), np.uint8))


def choose_lengths(counts: list[int], alphabets: list[int]) -> list[int]:
    """Return the length of the code of each symbol, by how often the symbols of each table occur."""
    lengths: list[int] = []
    for size in alphabets:
        lengths += _code_lengths(counts[len(lengths) : len(lengths) + size])
    return lengths


def _code_lengths(counts: list[int]) -> list[int]:
    """Return Huffman's code lengths. Rare symbols count as less rare as long as a code would be too long."""
    used = [symbol for symbol, count in enumerate(counts) if count]
    lengths = [0] * len(counts)
    if len(used) < 2:
        for symbol in used:
            lengths[symbol] = 1
        return lengths
    total, least = sum(counts), 1
    while True:
        heap: list[tuple[int, int, tuple[int, ...]]] = [(max(counts[symbol], least), symbol, (symbol,)) for symbol in used]
        heapq.heapify(heap)
        for symbol in used:
            lengths[symbol] = 0
        while len(heap) > 1:
            first, second = heapq.heappop(heap), heapq.heappop(heap)
            for symbol in (members := first[2] + second[2]):
                lengths[symbol] += 1
            heapq.heappush(heap, (first[0] + second[0], min(first[1], second[1]), members))
        if max(lengths) <= CODE_BITS:
            return lengths
        least = max(2 * least, total >> (CODE_BITS + 4))


def _shape(rows: RoutingRows) -> tuple[int, int, int, NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8], NDArray[np.uint16]]:
    columns = np.ascontiguousarray(rows.copied), np.ascontiguousarray(rows.reference)
    tables = np.ascontiguousarray(rows.recorded).ravel(), np.ascontiguousarray(rows.order).ravel()
    return (rows.layers, rows.top_k, rows.experts, *columns, *tables)


def _native_codec() -> Any:
    """Return the native module. None for the reference codec, and if the module was built before it had these functions."""
    if default_codec().name == "reference":
        return None
    try:
        from .. import _native
    except ImportError:
        return None
    return _native if hasattr(_native, "decode_routing") else None
