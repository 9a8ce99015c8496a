"""Where the chunks of payloads are. The host finds them, because the header of a chunk comes after the body of the one before it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ...errors import CorruptDelta, DtypeMismatch, ShapeMismatch
from .. import default_codec
from .codec_stream import host_codec_works
from .kernel_table import OLD_BLOCK_TILES, RUN, TILE, KernelTable, Numbers, TensorRows
from .payloads import Payloads

SAME, CODED, RAW = range(3)

_LONGEST_BODY = 1 << 21
"""The most bytes of a coded body. 2¹⁵ changes with the longest codes take less."""

_LOOK = 1024
"""How often, in chunks, the host looks whether more of the payloads can be copied to the device."""


_NO_BLOCK = 2**32 - 1
"""The block of a chunk that has tiles of two blocks. Versions 1 and 2 allow this, though no encoder of this project writes it."""


def walk_groups(
    table: KernelTable, tensors: TensorRows, block_starts: Numbers, groups: Numbers, payloads: Payloads, look: Callable[[], None]
) -> NDArray[np.void]:
    """Return `RUN` of all chunks of groups (docs/format.md §3), without `top` and `start`. Raise `CorruptDelta` if a header breaks a rule.

    The number i of `groups` is the group that payload i belongs to. Every tile of these groups is in a chunk: after the last one of a
    payload nothing changes. `look` is called now and then.
    """
    headers = [_headers(payloads.data, at, end, look) for at, end in zip(payloads.begins.tolist(), payloads.ends.tolist(), strict=True)]
    if not headers:
        return np.zeros(0, RUN)
    counts = np.array([found.shape[1] for found in headers], np.int64)
    (body, word, length), payload = np.concatenate(headers, axis=1), np.repeat(np.arange(counts.size), counts)
    tiles, mode = word >> 2, word & 3
    _check_modes(mode, length)
    first_tile, end_tile = tensors.tiles[table.group_starts[groups]], tensors.tiles[table.group_ends[groups]]
    upto = np.append(0, np.cumsum(tiles))
    chunk_ends = np.cumsum(counts)
    before = upto[chunk_ends - counts]
    ends = upto[1:] + (first_tile - before)[payload]
    starts = ends - tiles
    if (tiles == 0).any() or (ends > end_tile[payload]).any():
        raise CorruptDelta("a chunk has no tiles, or more than its group has left.")
    block = (starts - first_tile[payload]) // table.group_tiles
    if (block != (ends - 1 - first_tile[payload]) // table.group_tiles).any():
        raise CorruptDelta("a chunk has more tiles than its block has left.")
    covered = first_tile + upto[chunk_ends] - before
    has_rest = covered < end_tile  # after the last chunk of a payload nothing changes
    rests = np.cumsum(has_rest)
    runs, owner = np.zeros(payload.size + int(rests[-1]), RUN), np.zeros(payload.size + int(rests[-1]), np.int64)
    chunk, rest = np.arange(payload.size) + (rests - has_rest)[payload], (chunk_ends + rests - 1)[has_rest]
    to_image = payloads.offsets - payloads.begins
    runs["body"][chunk], runs["body"][rest] = body + to_image[payload], (payloads.ends + to_image)[has_rest]
    runs["tile0"][chunk], runs["tile0"][rest] = starts, covered[has_rest]
    runs["tiles"][chunk], runs["tiles"][rest] = tiles, (end_tile - covered)[has_rest]
    runs["mode"][chunk], runs["bytes"][chunk], runs["block"][chunk] = mode, length, block_starts[groups][payload] + block
    owner[chunk], owner[rest] = groups[payload], groups[has_rest]
    return _finished(table, tensors, runs, owner)


def _headers(data: NDArray[np.uint8], at: int, end: int, look: Callable[[], None]) -> NDArray[np.int64]:
    """Return, for all chunks between two positions, where bodies begin, the first numbers of headers, and the bytes of bodies."""
    if host_codec_works() and default_codec().name != "reference":
        from ..native import find_chunks

        rows = find_chunks(data[at:end])
        if rows is not None:
            rows[:, 0] += at
            return rows.T
    lists: tuple[list[int], list[int], list[int]] = ([], [], [])
    while at < end:
        at = _walk(data.data, at, end, *lists)
        look()
    return np.array(lists, np.int64)


def _walk(data: memoryview, at: int, end: int, bodies: list[int], words: list[int], lengths: list[int]) -> int:
    """Read the headers of at most `_LOOK` chunks. Return where the next one begins.

    This loop runs for every chunk of a delta, some thousands of times for a large model, so it is written for speed.
    """
    add_body, add_word, add_length = bodies.append, words.append, lengths.append
    try:
        for _ in range(_LOOK):
            if at >= end:
                break
            word = data[at]
            at += 1
            if word >= 128:
                byte = data[at]
                at += 1
                word += (byte << 7) - 128
                if byte >= 128:
                    byte = data[at]
                    at += 1
                    word += (byte << 14) - (1 << 14)
                if not 0 < byte < 128:
                    raise CorruptDelta("the header of a chunk has a number that is too large, or longer than it needs to be.")
            length = data[at]
            at += 1
            if length >= 128:
                length -= 128
                shift = 7
                while True:
                    byte = data[at]
                    at += 1
                    if byte < 128:
                        break
                    length |= (byte & 127) << shift
                    shift += 7
                    if shift > 35:
                        break
                if not 0 < byte < 128:
                    raise CorruptDelta("the header of a chunk has a number that is too large, or longer than it needs to be.")
                length |= byte << shift
            add_body(at)
            add_word(word)
            add_length(length)
            at += length
            if at > end:
                raise CorruptDelta("a chunk's header or body is cut short.")
    except IndexError:
        raise CorruptDelta("a chunk's header is cut short.") from None
    return at


def _finished(table: KernelTable, tensors: TensorRows, runs: NDArray[np.void], group: Numbers) -> NDArray[np.void]:
    """Set the numbers of elements, and check the sizes of raw chunks."""
    tensors.set_elements(runs)
    table.set_coding(runs, group)
    raw = runs[runs["mode"] == RAW]
    if (8 * raw["bytes"].astype(np.int64) != raw["elements"].astype(np.int64) * table.width).any():
        raise CorruptDelta("a raw chunk has another size than its elements.")
    return runs


def _check_modes(mode: Numbers, length: Numbers) -> None:
    if (mode > RAW).any():
        raise CorruptDelta("a chunk has an unknown mode.")
    if (length[mode == SAME] != 0).any():
        raise CorruptDelta("a chunk that changes nothing has a body.")
    if (length[mode == CODED] > _LONGEST_BODY).any():
        raise CorruptDelta("a chunk's body is longer than its streams.")


def walk_tensors(table: KernelTable, tensors: TensorRows, block_starts: Numbers, numbers: Numbers, payloads: Payloads) -> NDArray[np.void]:
    """Return `RUN` of all chunks of tensors that each have a payload (versions 1 and 2). Each step finds one more chunk of every tensor.

    Raises `CorruptDelta`, `DtypeMismatch` or `ShapeMismatch`.
    """
    data, at, ends = payloads.data, payloads.begins.copy(), payloads.ends
    if (at == ends).any():
        raise CorruptDelta("a payload is empty.")
    if (data[at] != table.group_codes[numbers]).any():
        raise DtypeMismatch("a tensor has another element type than its delta.")
    at += 1
    counts = table.count[numbers]
    covered = np.zeros(numbers.size, np.int64)
    steps: list[tuple[Numbers, ...]] = []
    active = np.flatnonzero(at < ends)
    while active.size:
        here = at[active]
        if (ends[active] - here < 8).any():
            raise CorruptDelta("a chunk's header is cut short.")
        header = data[here[:, None] + np.arange(8)].view("<u4").astype(np.int64)
        elements, mode, length = header[:, 0] & 0x3FFFFFFF, header[:, 0] >> 30, header[:, 1]
        _check_modes(mode, length)
        if (length > ends[active] - here - 8).any():
            raise CorruptDelta("a chunk's body is cut short.")
        if ((elements == 0) | (elements > OLD_BLOCK_TILES * TILE)).any():
            raise CorruptDelta("a chunk has an impossible number of elements.")
        if (8 * length != elements * table.width)[mode == RAW].any():
            raise CorruptDelta("a raw chunk has another size than its elements.")
        if (covered[active] % TILE != 0).any():
            raise CorruptDelta("a chunk before the last is not a multiple of 16384 elements.")
        steps.append((active, covered[active], here + 8, elements, mode, length))
        covered[active] += elements
        at[active] = here + 8 + length
        active = active[at[active] < ends[active]]
    wrong = np.flatnonzero(covered != counts)
    if wrong.size:
        raise ShapeMismatch(f"the delta is for {covered[wrong[0]]} elements, the tensor has {counts[wrong[0]]}.")
    if not steps:
        return np.zeros(0, RUN)
    payload, first, body, elements, mode, length = (np.concatenate(column) for column in zip(*steps, strict=True))
    order = np.lexsort((first, payload))
    payload, first = payload[order], first[order]
    runs = np.zeros(order.size, RUN)
    tensor = numbers[payload]
    runs["body"] = body[order] + (payloads.offsets - payloads.begins)[payload]
    runs["tile0"] = tensors.tiles[tensor] + first // TILE
    runs["tiles"] = -(-elements[order] // TILE)
    runs["mode"], runs["bytes"] = mode[order], length[order]
    in_block, last_block = (tile // OLD_BLOCK_TILES for tile in (first // TILE, first // TILE + runs["tiles"] - 1))
    runs["block"] = np.where(in_block == last_block, block_starts[tensor] + in_block, _NO_BLOCK)
    return _finished(table, tensors, runs, tensor)
