"""Addresses at which kernels can read tensors: those of the tensors themselves, or of copies that are made for the kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ..bits import Bits, on_gpu

_MOST_COPIED = 256 << 20
"""The most bytes of tensors that are copied at a time."""


def address_in_place(bits: Bits | None, device: torch.device) -> int | None:
    """Return the address at which kernels on a device can read a tensor as it is.

    The address is 0 if there is nothing to read, and None if kernels need a copy.
    """
    if bits is None:
        return 0
    if on_gpu(bits) and bits.is_kernel_readable and bits.device == device:
        return bits.address
    return None if bits.size else 0


def flat_on(device: torch.device, bits: Bits) -> torch.Tensor:
    """Return the elements in row-major order on a device, as a copy unless the tensor can be read as it is."""
    if on_gpu(bits):
        return bits.flat() if bits.device == device else bits.tensor.to(device).contiguous().view(-1)
    flat = np.ascontiguousarray(bits).reshape(-1).view(f"i{bits.itemsize}")
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy()).to(device, non_blocking=True)


def readable_rows(columns: Sequence[Sequence[Bits | None]], device: torch.device) -> Iterator[tuple[slice, list[list[int]]]]:
    """Yield rows of tensors and, column by column, the addresses at which kernels can read them.

    At most `_MOST_COPIED` bytes are copied at a time, unless a single row has more. Copies live until the next rows are requested.
    """
    addresses = [[address_in_place(bits, device) for bits in column] for column in columns]
    rows = len(columns[0])
    missing = sorted({row for column in addresses if None in column for row, address in enumerate(column) if address is None})
    begin = size = 0
    copies: list[torch.Tensor] = []

    def ready(end: int) -> tuple[slice, list[list[int]]]:
        return slice(begin, end), [[address or 0 for address in column[begin:end]] for column in addresses]

    for row in missing:
        candidates = [(number, column[row]) for number, column in enumerate(columns) if addresses[number][row] is None]
        lacking = [(number, bits) for number, bits in candidates if bits is not None]
        more = sum(_copied_bytes(bits) for _, bits in lacking)
        if size and size + more > _MOST_COPIED:
            yield ready(row)
            begin, size = row, 0
            copies.clear()
        size += more
        for number, bits in lacking:
            copies.append(flat_on(device, bits))
            addresses[number][row] = copies[-1].data_ptr()
    if begin < rows:
        yield ready(rows)


def _copied_bytes(bits: Bits) -> int:
    return int(bits.tensor.nbytes if on_gpu(bits) else bits.nbytes)  # master weights are copied as float32
