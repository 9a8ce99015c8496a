"""Where kernels find tensors: where these are, or in copies that are made for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from .device_bits import DeviceBits

_MOST_COPIED = 256 << 20
"""Bytes of tensors that are brought to the device, or into plain memory there, at a time."""


def in_place(bits: Any, device: torch.device) -> int | None:
    """The address at which kernels on a device can read a tensor as it is; 0 where there is nothing to read, None where it needs a copy."""
    if bits is None:
        return 0
    if isinstance(bits, DeviceBits) and bits.plain and bits.tensor.device == device:
        return bits.address
    return None if bits.size else 0


def copied(bits: Any, device: torch.device) -> torch.Tensor:
    """The elements in a row, on a device, in memory of their own or that of the tensor."""
    if isinstance(bits, DeviceBits):
        return bits.flat() if bits.tensor.device == device else bits.tensor.to(device).contiguous().view(-1)
    flat = np.ascontiguousarray(bits).reshape(-1).view(f"i{bits.itemsize}")
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy()).to(device, non_blocking=True)


def _copied_bytes(bits: Any) -> int:
    return int(bits.tensor.nbytes if isinstance(bits, DeviceBits) else bits.nbytes)  # of master weights, their float32


def within_reach(columns: Sequence[Sequence[Any]], device: torch.device) -> Iterator[tuple[slice, list[list[int]]]]:
    """Rows of tensors (or None) and their addresses, column by column: so many rows at a time that no more than `_MOST_COPIED` bytes
    have to be copied, unless a single row has more. Copies are there until the next rows are asked for."""
    places = [[in_place(bits, device) for bits in column] for column in columns]
    rows = len(columns[0])
    missing = sorted({row for column in places if None in column for row, place in enumerate(column) if place is None})
    begin = size = 0
    copies: list[torch.Tensor] = []

    def ready(end: int) -> tuple[slice, list[list[int]]]:
        return slice(begin, end), [[place or 0 for place in column[begin:end]] for column in places]

    for row in missing:
        lacking = [number for number, column in enumerate(places) if column[row] is None]
        more = sum(_copied_bytes(columns[number][row]) for number in lacking)
        if size and size + more > _MOST_COPIED:
            yield ready(row)
            begin, size = row, 0
            copies.clear()
        size += more
        for number in lacking:
            copies.append(copied(columns[number][row], device))
            places[number][row] = copies[-1].data_ptr()
    if begin < rows:
        yield ready(rows)
