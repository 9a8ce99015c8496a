"""§3 Groups of tensors: the tiles of their tensors, the chunks of their payload, and what an encoder does with them (§5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...dtypes import PayloadType
from ...errors import CorruptDelta
from ..bits import HostBits
from ..varints import read_varint, to_varint
from .decoder import decode_coded
from .encoder import choose_top, encode_coded
from .payload import CODED, RAW, SAME, TILE


class Tile(NamedTuple):
    """Up to 2^14 elements of one tensor."""

    tensor: int
    start: int
    stop: int


def tiles_per_block(payload_type: PayloadType) -> int:
    return {4: 1 << 12, 8: 1 << 11}.get(payload_type.width, 1 << 10)


def blocks_of(counts: Sequence[int], payload_type: PayloadType) -> Iterator[list[Tile]]:
    """Yield the tiles of a group in blocks. `counts` are the elements of its tensors."""
    tiles = [Tile(tensor, at, min(at + TILE, count)) for tensor, count in enumerate(counts) for at in range(0, count, TILE)]
    size = tiles_per_block(payload_type)
    for start in range(0, len(tiles), size):
        yield tiles[start : start + size]


def elements_of(bits: HostBits, payload_type: PayloadType) -> HostBits:
    """Return the elements of a tensor, flat, as the payload type counts them."""
    flat = np.ascontiguousarray(bits).reshape(-1)
    if not payload_type.is_packed:
        return flat
    data = flat.astype(flat.dtype.newbyteorder("<"), copy=False).view(np.uint8)
    return np.stack([data & 15, data >> 4], axis=1).reshape(-1)


def tensor_of(elements: HostBits, payload_type: PayloadType) -> HostBits:
    """Return the inverse of `elements_of`."""
    if not payload_type.is_packed:
        return elements
    packed = (elements[0::2] | elements[1::2] << 4).astype(np.uint8)
    return packed.view(payload_type.dtype.bits.newbyteorder("<")).astype(payload_type.dtype.bits)


def gather(tensors: Sequence[HostBits], tiles: Sequence[Tile], payload_type: PayloadType) -> HostBits:
    """Return the elements of tiles one after the other."""
    return np.concatenate([np.zeros(0, payload_type.bits), *(tensors[tile.tensor][tile.start : tile.stop] for tile in tiles)])


def encode_group(bases: Sequence[HostBits], news: Sequence[HostBits], payload_type: PayloadType) -> bytes:
    """Return the payload of a group. `bases` and `news` are elements as `elements_of` returns them."""
    pieces: list[bytes] = []
    written = 0  # pieces up to the last chunk that changes something
    for tiles in blocks_of([new.size for new in news], payload_type):
        top = choose_top(gather(bases, tiles, payload_type), payload_type)
        for chunk in cut_block(bases, news, tiles):
            base, new = gather(bases, chunk, payload_type), gather(news, chunk, payload_type)
            pieces.append(encode_chunk(base, new, len(chunk), payload_type, top))
            if not np.array_equal(base, new):
                written = len(pieces)
    return b"".join(pieces[:written])


def cut_block(bases: Sequence[HostBits], news: Sequence[HostBits], tiles: Sequence[Tile]) -> Iterator[Sequence[Tile]]:
    """Yield the chunks of a block (§5.1)."""
    start = pending = 0
    for end, (tensor, first, last) in enumerate(tiles, 1):
        pending += int(np.count_nonzero(bases[tensor][first:last] != news[tensor][first:last]))
        if pending >= TILE or end == len(tiles):
            yield tiles[start:end]
            start, pending = end, 0


def encode_chunk(base: HostBits, new: HostBits, tiles: int, payload_type: PayloadType, top: int) -> bytes:
    """Return the header and the body of one chunk (§5.7)."""
    mode, body = SAME, b""
    if not np.array_equal(base, new):
        own = tensor_of(new, payload_type)
        mode, body = CODED, encode_coded(base, new, payload_type, top)
        if len(body) >= own.nbytes:
            mode, body = RAW, own.astype(own.dtype.newbyteorder("<")).tobytes()
    return to_varint(tiles << 2 | mode) + to_varint(len(body)) + body


def decode_group(payload: bytes, bases: Sequence[HostBits], payload_type: PayloadType) -> list[HostBits]:
    """Return the new elements of a group's tensors. Raise `CorruptDelta` unless the payload is valid for them."""
    news = [base.copy() for base in bases]
    blocks = list(blocks_of([base.size for base in bases], payload_type))
    for tiles, mode, body in read_chunks(payload, blocks):
        base = gather(bases, tiles, payload_type)
        if mode == SAME:
            continue
        new = decode_coded(body, base, payload_type) if mode == CODED else _raw(body, base.size, payload_type)
        at = 0
        for tensor, start, stop in tiles:
            news[tensor][start:stop] = new[at : at + stop - start]
            at += stop - start
    return news


def read_chunks(payload: bytes, blocks: Sequence[Sequence[Tile]]) -> Iterator[tuple[Sequence[Tile], int, bytes]]:
    """Yield the tiles, the mode and the unread body of each chunk."""
    at = 0
    left = [list(tiles) for tiles in reversed(blocks)]
    while at < len(payload):
        word, at = read_varint(payload, at)
        length, at = read_varint(payload, at)
        count, mode, body = word >> 2, word & 3, payload[at : at + length]
        at += length
        if mode > RAW:
            raise CorruptDelta(f"a chunk has the unknown mode {mode}.")
        if len(body) != length:
            raise CorruptDelta("the body of a chunk is cut off.")
        if mode == SAME and length:
            raise CorruptDelta("a chunk that changes nothing has a body.")
        if not left:
            raise CorruptDelta("a chunk comes after the last tile of its group.")
        if not 1 <= count <= len(left[-1]):
            raise CorruptDelta(f"a chunk has {count} tiles, its block has {len(left[-1])} left.")
        yield left[-1][:count], mode, body
        del left[-1][:count]
        if not left[-1]:
            left.pop()


def _raw(body: bytes, elements: int, payload_type: PayloadType) -> HostBits:
    if 8 * len(body) != elements * payload_type.width:
        raise CorruptDelta(f"a raw chunk of {elements} elements has {len(body)} bytes.")
    own = payload_type.dtype.bits if not payload_type.is_packed else np.dtype(np.uint8)
    return elements_of(np.frombuffer(body, own.newbyteorder("<")).astype(own), payload_type)
